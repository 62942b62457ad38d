"""Static scales of FP8 operands: views of given scales, and scales of a tensor computed by torch."""

from __future__ import annotations

from typing import Any, Literal

import torch

from codegen.dtypes import LARGEST
from codegen.fp8 import LARGEST_SCALE, LEAST_AMAX, LEAST_SCALE
from codegen.wording import shown
from runtime.checks import check_dense, check_word
from runtime.errors import ArgumentError
from runtime.kernels.arguments import refuse_gradient
from runtime.ops.quantize import Dtype, check_dtype

_RANGE = "a positive number from 2^-120 to 2^120"
_PER = ("tensor", "head")
_RANK = 4
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def scales_of(x: torch.Tensor, per: Literal["tensor", "head"] = "tensor", dtype: Dtype = "e4m3") -> torch.Tensor:
    """Return the scale of a tensor, or one scale per head, for ``quantize_attention``.

    The scale is the largest finite magnitude divided by the largest code, in float32, or 1 for zeros (below 2^-100).
    torch computes it in a separate pass over x, without synchronizing. ``smooth_k`` and ``hadamard`` change the tensor
    that is quantized: for them, use the largest scales of a call without given scales,
    ``quantize_attention(...).k_scale.amax()``, or ``.amax((0, 2))`` per head.

    Args:
        x: fp16, bf16 or float32, on any device; with ``per="head"``, (batch, heads, length, head_dim).
        per: "tensor", or "head" for one scale per head over all batches.
        dtype: dtype of the codes.

    Returns:
        float32, () or (heads,).

    Raises:
        ArgumentError: naming the argument.
    """
    check_dtype(dtype)
    check_word("per", per, _PER)
    check_dense("x", x)
    if x.dtype not in _FLOATS:
        raise ArgumentError("x", f"is {x.dtype}, expected {', '.join(map(str, _FLOATS))}")
    if x.numel() == 0 or (per == "head" and x.dim() != _RANK):
        expected = "(batch, heads, length, head_dim), and no 0" if per == "head" else "an element or more"
        raise ArgumentError("x", f"has shape {tuple(x.shape)}, expected {expected}")
    with torch.no_grad():
        magnitudes = torch.where(x.isfinite(), x, torch.zeros_like(x)).abs()
        amax = (magnitudes.amax((0, 2, 3)) if per == "head" else magnitudes.amax()).float()
        largest = torch.full_like(amax, LARGEST[dtype])  # for a Python number, torch would multiply by the inverse
        return torch.where(amax >= LEAST_AMAX, amax / largest, torch.ones_like(amax))


def spread(name: str, scale: Any, shape: tuple[int, int, int], device: torch.device, *, last: bool) -> torch.Tensor:
    """Given scales as a view with one scale per head and block, or per head and column.

    Args:
        name: the argument.
        scale: a number or 0-d tensor for all elements, or a tensor per head, or per batch and head.
        shape: shape of the result: batches, heads, and blocks or columns.
        device: device of the result.
        last: whether ``scale`` may have one element per block or column.

    Raises:
        ArgumentError: naming the argument. Numbers out of range are refused; values of tensors are not checked.
    """
    if isinstance(scale, int | float) and not isinstance(scale, bool):
        if not LEAST_SCALE <= scale <= LARGEST_SCALE:
            raise ArgumentError(name, f"is {shown(scale)}, expected {_RANGE}")
        return torch.full((), float(scale), dtype=torch.float32, device=device).expand(shape)
    if not isinstance(scale, torch.Tensor) or scale.dtype != torch.float32 or scale.device != device:
        what = f"{scale.dtype} on {scale.device}" if isinstance(scale, torch.Tensor) else type(scale).__name__
        raise ArgumentError(name, f"is {what}, expected a number or torch.float32 on {device}")
    check_dense(name, scale)
    shapes = ((), shape[1:2], shape[:2], *((shape,) if last else ()))
    if tuple(scale.shape) not in shapes:
        raise ArgumentError(name, f"has shape {tuple(scale.shape)}, expected one of {', '.join(map(str, shapes))}")
    refuse_gradient(name, scale, "and FP8 has no backward: detach it")
    found: torch.Tensor = scale[..., None] if scale.dim() in (1, 2) else scale  # (heads,) or (batch, heads)
    return found.expand(shape)


def check_values(name: str, scale: torch.Tensor) -> None:
    """Check the values of given scales (synchronizes).

    Raises:
        ArgumentError: with the first value out of range.
    """
    if scale.is_meta:
        return
    wrong = scale[~((scale >= LEAST_SCALE) & (scale <= LARGEST_SCALE))].tolist()
    if wrong:
        raise ArgumentError(name, f"has {wrong[0]}, expected positive numbers from 2^-120 to 2^120")
