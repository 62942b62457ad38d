"""The exceptions of the runtime."""

from __future__ import annotations

from codegen.errors import CodegenError


class ToolchainError(CodegenError):
    """NVRTC, a CUDA header or a CUDA tool is missing; the message holds the line that installs it."""


class CompileError(CodegenError):
    """NVRTC refused a source.

    Attributes:
        log: the whole compiler log; its lines begin with the generated file's name and line.
    """

    def __init__(self, name: str, log: str) -> None:
        self.log = log
        super().__init__(f"{name} does not compile:\n{log}")


class CacheError(CodegenError):
    """The kernel cache cannot be written."""


class DeviceError(CodegenError):
    """There is no GPU, or not the one a kernel was made for."""


class ArgumentError(CodegenError, ValueError):
    """A kernel was called with something that it cannot take; nothing was launched."""

    def __init__(self, argument: str, reason: str) -> None:
        self.argument = argument
        super().__init__(f"{argument}: {reason}")
