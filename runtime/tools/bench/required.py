"""The refusal of commands that time or verify something, where there is no GPU."""

from __future__ import annotations

from runtime.errors import DeviceError, ToolchainError


def require_gpu(verb: str, undone: str) -> None:
    """Raise an error where there is no GPU; nothing was ``undone`` then."""
    try:
        import torch  # noqa: PLC0415
    except ModuleNotFoundError:
        raise ToolchainError(f"{verb} needs torch: pip install 'sparse-kernel-codegen[torch]'") from None
    if not torch.cuda.is_available():
        raise DeviceError(f"{verb} needs a GPU, and torch sees none; nothing was {undone}")
