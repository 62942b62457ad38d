"""What torch's operators of this package have in common."""

from __future__ import annotations

import torch

NAMESPACE = "sparse_kernel_codegen"
STRIDES = getattr(torch.Tag, "needs_exact_strides", torch.Tag.needs_fixed_stride_order)
"""Tag of an operator whose inputs must have the strides that they were traced with."""


def like(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return a new tensor with the layout of a result: that of the tensor, where it has no gaps, else contiguous.

    Its type is ``dtype``, or that of the tensor.
    """
    found = torch.empty_like(tensor, dtype=dtype)
    return found if found.stride() == tensor.stride() else tensor.new_empty(tensor.shape, dtype=dtype)


def nothing(tensor: torch.Tensor) -> torch.Tensor:
    """Return what operators return in place of float32 values that were not asked for."""
    return torch.empty((0,), dtype=torch.float32, device=tensor.device)
