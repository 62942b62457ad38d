"""Scales of FP8 operands that are known before: what is given for them, as views, and those of a tensor by torch."""

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
    """Return the scale of a tensor, or of each of its heads, as ``quantize_attention`` takes it.

    It is the largest finite magnitude over the largest code, in float32; 1 for zeros (below 2^-100). torch finds it, in
    a pass over x of its own: a second one, beside the kernel's. Nothing waits for the GPU. Scales of what
    ``smooth_k`` or ``hadamard`` leave of k and q are those of another tensor: take the largest ones of a call without
    given scales, ``quantize_attention(...).k_scale.amax()``, or ``.amax((0, 2))`` of heads.

    Args:
        x: fp16, bf16 or float32, on any device; for scales of heads (batch, heads, length, head_dim).
        per: ``tensor``, or ``head``, over all batches.
        dtype: of the codes.

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
        largest = torch.full_like(amax, LARGEST[dtype])  # torch divides by a number by multiplying by its inverse
        return torch.where(amax >= LEAST_AMAX, amax / largest, torch.ones_like(amax))


def spread(name: str, scale: Any, shape: tuple[int, int, int], device: torch.device, *, last: bool) -> torch.Tensor:
    """Return scales that are given as a view of one for each head and block, or column.

    Args:
        name: the argument.
        scale: a number or a tensor of the whole, a tensor of heads, or of batches and heads.
        shape: of the result: batches, heads, and blocks or columns.
        device: of the result.
        last: whether there may be one for each block or column.

    Raises:
        ArgumentError: naming the argument; for numbers out of range, but not for values of tensors.
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
    found: torch.Tensor = scale[..., None] if scale.dim() in (1, 2) else scale  # of heads
    return found.expand(shape)


def check_values(name: str, scale: torch.Tensor) -> None:
    """Check the values of scales that are given (synchronizes).

    Raises:
        ArgumentError: with the first one that is out of range.
    """
    if scale.is_meta:
        return
    wrong = scale[~((scale >= LEAST_SCALE) & (scale <= LARGEST_SCALE))].tolist()
    if wrong:
        raise ArgumentError(name, f"has {wrong[0]}, expected positive numbers from 2^-120 to 2^120")
