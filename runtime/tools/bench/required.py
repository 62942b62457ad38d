"""Error of commands that need a GPU."""

from __future__ import annotations

from runtime.errors import DeviceError, torch_needed


def require_gpu(verb: str, undone: str) -> None:
    """Raise an error without a GPU. ``undone`` names the work that was not done."""
    with torch_needed(verb):
        import torch  # noqa: PLC0415
    if not torch.cuda.is_available():
        raise DeviceError(f"{verb} needs a GPU, and torch sees none; nothing was {undone}")
