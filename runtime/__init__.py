"""Compiles, caches, loads and calls the kernels that :mod:`codegen` generates."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from codegen.errors import CodegenError, SpecError
from runtime.errors import ArgumentError, CacheError, CompileError, DeviceError, ToolchainError

if TYPE_CHECKING:
    from runtime.kernel import Kernel, load_kernel

__all__ = [
    "ArgumentError",
    "CacheError",
    "CodegenError",
    "CompileError",
    "DeviceError",
    "Kernel",
    "SpecError",
    "ToolchainError",
    "load_kernel",
]


def __getattr__(name: str) -> Any:
    """Import what needs torch only when it is asked for: the command line works without."""
    if name in ("load_kernel", "Kernel"):
        try:
            from runtime import kernel  # noqa: PLC0415
        except ModuleNotFoundError as error:
            if error.name != "torch":
                raise
            raise ToolchainError(
                "load_kernel needs torch, which is not installed: pip install 'sparse-kernel-codegen[torch]'"
            ) from None
        return getattr(kernel, name)
    raise AttributeError(f"module 'runtime' has no attribute {name!r}")
