"""The exceptions of the runtime."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from codegen.errors import MOST_OF_MESSAGE, CodegenError
from codegen.installation import install_command
from codegen.wording import one_line


class ToolchainError(CodegenError):
    """NVRTC, a CUDA header or a CUDA tool is missing, does not fit or failed; the message says what mends it."""


class SpillError(ToolchainError):
    """A compiler makes code of a shipped kernel that spills registers, which that of its receipt does not.

    Attributes:
        kernel: its name.
        compiler: the package of the compiler.
        spill_bytes: bytes of spill stores and loads.
        expected: the package of the compiler of the receipt.
        remedy: the command that installs that one.
    """

    def __init__(self, kernel: str, compiler: str, spill_bytes: int, expected: str, remedy: str) -> None:
        self.kernel, self.compiler, self.spill_bytes = kernel, compiler, spill_bytes
        self.expected, self.remedy = expected, remedy
        super().__init__(
            f"{kernel} is refused with {compiler}, whose code spills {spill_bytes} bytes; that of {expected}, the "
            f"compiler of its receipt, does not: {remedy}"
        )

    def __reduce__(self) -> tuple[type[SpillError], tuple[str, str, int, str, str]]:
        """The constructor and its arguments, for another process."""
        return type(self), (self.kernel, self.compiler, self.spill_bytes, self.expected, self.remedy)


class CompileError(CodegenError):
    """NVRTC refused a source.

    Attributes:
        name: file name of the source.
        log: the whole compiler log; its lines begin with the generated file's name and line.
    """

    def __init__(self, name: str, log: str) -> None:
        self.name = name
        self.log = log
        super().__init__(f"{name} does not compile:\n{log}")

    def __reduce__(self) -> tuple[type[CompileError], tuple[str, str]]:
        """The constructor and its arguments, for another process."""
        return type(self), (self.name, self.log)


class NoJitError(CodegenError):
    """Something would have to be compiled, and CODEGEN_NO_JIT=1 forbids it; nothing was.

    Attributes:
        kernel: its name.
        spec_hash: SHA-256 of its spec's canonical JSON; "" for what has no spec.
        reason: what is missing, and where it was looked for.
        remedy: what makes it; "" for nothing.
    """

    def __init__(self, kernel: str, spec_hash: str, reason: str, remedy: str = "") -> None:
        self.kernel, self.spec_hash, self.reason, self.remedy = kernel, spec_hash, reason, remedy
        of_spec = f" (spec hash {spec_hash})" if spec_hash else ""
        told = f"{kernel}{of_spec}: {reason}, and CODEGEN_NO_JIT=1 forbids to compile"
        super().__init__(one_line(told + (f"; {remedy}" if remedy else ""), MOST_OF_MESSAGE))

    def __reduce__(self) -> tuple[type[NoJitError], tuple[str, str, str, str]]:
        """The constructor and its arguments, for another process."""
        return type(self), (self.kernel, self.spec_hash, self.reason, self.remedy)


class UnverifiedError(CodegenError):
    """A kernel has no receipt of its source as it is today, and ``verified_only`` refuses it; nothing ran.

    Attributes:
        kernel: its name.
        spec_hash: SHA-256 of its spec's canonical JSON.
        reason: what its receipt says; "no receipt" if there is none.
        sibling: the nearest shipped kernel, and what differs; "" without one.
        remedy: the command that makes a receipt.
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
    """The kernel cache cannot be used, is not to be trusted, or is held by another process for too long.

    Its message is one line of bounded length, whatever folders and files are called.
    """

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message, MOST_OF_MESSAGE))


class DeviceError(CodegenError):
    """There is no GPU, or not the one a kernel was made for."""


class CollectiveError(CodegenError):
    """A rank is late or failed, and what all ranks do together cannot go on.

    Attributes:
        collective: what they were doing.
        ranks: those that it was not done with, numbered as in the group.
        reason: what is known of why.
    """

    def __init__(self, collective: str, ranks: tuple[int, ...], reason: str) -> None:
        self.collective, self.ranks, self.reason = collective, ranks, reason
        which = f"rank{'s' * (len(ranks) != 1)} {', '.join(map(str, ranks))}"
        super().__init__(one_line(f"{collective}: {which}: {reason}", MOST_OF_MESSAGE))

    def __reduce__(self) -> tuple[type[CollectiveError], tuple[str, tuple[int, ...], str]]:
        """The constructor and its arguments, for another process."""
        return type(self), (self.collective, self.ranks, self.reason)


class ArgumentError(CodegenError, ValueError):
    """A kernel was called with something that it cannot take; nothing was launched.

    Attributes:
        argument: its name.
        reason: what it was and what is allowed.
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
    """A context in which torch is imported for the sake of a function, class or module.

    Args:
        name: what needs torch.

    Raises:
        ToolchainError: if torch is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ToolchainError(f"{name} needs torch, which is not installed: {install_command('torch')}") from None
