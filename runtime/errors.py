"""The exceptions of the runtime."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from codegen.errors import MOST_OF_MESSAGE, CodegenError
from codegen.installation import install_command
from codegen.wording import one_line


class ToolchainError(CodegenError):
    """NVRTC, a CUDA header or a CUDA tool is missing, incompatible or failed; the message has the remedy."""


class SpillError(ToolchainError):
    """The compiler's code for a shipped kernel spills registers, and the code of its receipt does not.

    Attributes:
        kernel: name of the kernel.
        compiler: package of the compiler.
        spill_bytes: bytes of spill stores and loads.
        expected: package of the receipt's compiler.
        remedy: command that installs the receipt's compiler.
    """

    def __init__(self, kernel: str, compiler: str, spill_bytes: int, expected: str, remedy: str) -> None:
        self.kernel, self.compiler, self.spill_bytes = kernel, compiler, spill_bytes
        self.expected, self.remedy = expected, remedy
        super().__init__(
            f"{kernel} is refused with {compiler}, whose code spills {spill_bytes} bytes; the code of {expected}, the "
            f"compiler of its receipt, does not: {remedy}"
        )

    def __reduce__(self) -> tuple[type[SpillError], tuple[str, str, int, str, str]]:
        """The constructor and its arguments, for another process."""
        return type(self), (self.kernel, self.compiler, self.spill_bytes, self.expected, self.remedy)


class CompileError(CodegenError):
    """NVRTC refused a source.

    Attributes:
        name: file name of the source.
        log: the whole compiler log, whose lines begin with the generated file's name and line.
    """

    def __init__(self, name: str, log: str) -> None:
        self.name = name
        self.log = log
        super().__init__(f"{name} does not compile:\n{log}")

    def __reduce__(self) -> tuple[type[CompileError], tuple[str, str]]:
        """The constructor and its arguments, for another process."""
        return type(self), (self.name, self.log)


class NoJitError(CodegenError):
    """A kernel needs compilation, and CODEGEN_NO_JIT=1 forbids it; nothing was compiled.

    Attributes:
        kernel: name of the kernel.
        spec_hash: SHA-256 of its spec's canonical JSON; "" without a spec.
        reason: the missing code and the places that were searched.
        remedy: commands that provide the code; "" without any.
    """

    def __init__(self, kernel: str, spec_hash: str, reason: str, remedy: str = "") -> None:
        self.kernel, self.spec_hash, self.reason, self.remedy = kernel, spec_hash, reason, remedy
        of_spec = f" (spec hash {spec_hash})" if spec_hash else ""
        told = f"{kernel}{of_spec}: {reason}, and CODEGEN_NO_JIT=1 forbids compilation"
        super().__init__(one_line(told + (f"; {remedy}" if remedy else ""), MOST_OF_MESSAGE))

    def __reduce__(self) -> tuple[type[NoJitError], tuple[str, str, str, str]]:
        """The constructor and its arguments, for another process."""
        return type(self), (self.kernel, self.spec_hash, self.reason, self.remedy)


class UnverifiedError(CodegenError):
    """A kernel has no receipt of its current source, and ``verified_only`` refuses it; nothing ran.

    Attributes:
        kernel: name of the kernel.
        spec_hash: SHA-256 of its spec's canonical JSON.
        reason: state of its receipt; "no receipt" without one.
        sibling: the nearest shipped kernel and the differences; "" without one.
        remedy: command that makes a receipt.
    """

    def __init__(self, kernel: str, spec_hash: str, reason: str, sibling: str, remedy: str) -> None:
        self.kernel, self.spec_hash, self.reason = kernel, spec_hash, reason
        self.sibling, self.remedy = sibling, remedy
        told = f"{kernel} (spec hash {spec_hash}) is refused by verified_only (CODEGEN_VERIFIED_ONLY=1): {reason}"
        near = f"; the nearest shipped kernel is {sibling}" if sibling else ""
        super().__init__(one_line(f"{told}{near}; to make a receipt, on a GPU: {remedy}", MOST_OF_MESSAGE))

    def __reduce__(self) -> tuple[type[UnverifiedError], tuple[str, str, str, str, str]]:
        """The constructor and its arguments, for another process."""
        return type(self), (self.kernel, self.spec_hash, self.reason, self.sibling, self.remedy)


class CacheError(CodegenError):
    """The kernel cache is unusable, is not trusted, or was locked by another process for too long.

    The message is one line of bounded length, whatever the names of folders and files.
    """

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message, MOST_OF_MESSAGE))


class DeviceError(CodegenError):
    """There is no GPU, or the kernel was made for another GPU."""


class CollectiveError(CodegenError):
    """A rank is late or failed, so a collective operation cannot complete.

    Attributes:
        collective: the operation.
        ranks: the late or failed ranks, numbered within the group.
        reason: the known reason.
    """

    def __init__(self, collective: str, ranks: tuple[int, ...], reason: str) -> None:
        self.collective, self.ranks, self.reason = collective, ranks, reason
        which = f"rank{'s' * (len(ranks) != 1)} {', '.join(map(str, ranks))}"
        super().__init__(one_line(f"{collective}: {which}: {reason}", MOST_OF_MESSAGE))

    def __reduce__(self) -> tuple[type[CollectiveError], tuple[str, tuple[int, ...], str]]:
        """The constructor and its arguments, for another process."""
        return type(self), (self.collective, self.ranks, self.reason)


class ArgumentError(CodegenError, ValueError):
    """An argument of a call is invalid; nothing was launched.

    Attributes:
        argument: name of the argument.
        reason: its value and the allowed values.
    """

    def __init__(self, argument: str, reason: str) -> None:
        self.argument = argument
        self.reason = reason
        super().__init__(f"{argument}: {reason}")

    def __reduce__(self) -> tuple[type[ArgumentError], tuple[str, str]]:
        """The constructor and its arguments, for another process."""
        return type(self), (self.argument, self.reason)


@contextmanager
def torch_needed(name: str) -> Iterator[None]:
    """Context manager that imports torch for a function, class or module.

    Args:
        name: name of the function, class or module.

    Raises:
        ToolchainError: if torch is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ToolchainError(f"{name} needs torch, which is not installed: {install_command('torch')}") from None
