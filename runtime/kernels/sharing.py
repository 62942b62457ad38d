"""Copies and pickles of kernel objects."""

from __future__ import annotations

from typing import NoReturn, Self

from codegen.errors import CodegenError
from runtime.compile.compiler import Compiled


class KernelPickleError(CodegenError):
    """A kernel object was pickled, but it holds code that is loaded only in this process.

    Attributes:
        kernel: name of the kernel.
    """

    def __init__(self, kernel: str) -> None:
        self.kernel = kernel
        remedy = "pass the spec and call sparse_kernel_codegen.load_kernel there"
        super().__init__(f"{kernel}: a kernel object cannot be pickled: its code belongs to this process; {remedy}")

    def __reduce__(self) -> tuple[type[KernelPickleError], tuple[str]]:
        """Constructor and argument of the error, for another process."""
        return type(self), (self.kernel,)


class SharedKernel:
    """A kernel object that is its own copy, also when a module that holds it is copied.

    Its code does not change, and its cache of calls serves every holder.
    """

    compiled: Compiled

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise KernelPickleError(self.compiled.named.stem)
