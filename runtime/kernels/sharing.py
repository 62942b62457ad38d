"""What copies and pickles of kernel objects are."""

from __future__ import annotations

from typing import NoReturn, Self

from codegen.errors import CodegenError
from runtime.compile.compiler import Compiled


class KernelPickleError(CodegenError):
    """A kernel object was pickled; it holds code that is loaded in this process alone.

    Attributes:
        kernel: its name.
    """

    def __init__(self, kernel: str) -> None:
        self.kernel = kernel
        remedy = "pass the spec and call sparse_kernel_codegen.load_kernel there"
        super().__init__(f"{kernel}: a kernel object cannot be pickled, its code is loaded in this process: {remedy}")

    def __reduce__(self) -> tuple[type[KernelPickleError], tuple[str]]:
        """Constructor and argument of the error, for another process."""
        return type(self), (self.kernel,)


class SharedKernel:
    """A kernel object: copies of it, also those of a module that holds it, are the object itself.

    Its code does not change, and what it remembers of calls serves every holder.
    """

    compiled: Compiled

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise KernelPickleError(self.compiled.named.stem)
