"""Rows of a gradient of attention: the checks of what has one value, or one vector, for each query and key."""

from __future__ import annotations

import math
from typing import Any

import torch

from runtime.errors import ArgumentError
from runtime.kernels.arguments import check_head_dim, check_shape, check_strides, check_tensor

LOG2_E = math.log2(math.e)


def check_operands(operands: dict[str, Any], dtype: torch.dtype, head_dim: int) -> None:
    """Check q, k, v, out and dout against each other.

    Args:
        operands: those five by name, in this order.
        dtype: of the kernel.
        head_dim: of the kernel.

    Raises:
        ArgumentError: for the first thing that is wrong.
    """
    q, k = operands["q"], operands["k"]
    for name, tensor in operands.items():
        check_tensor(name, tensor, dtype, 4, None if tensor is q else q.device)
    check_head_dim(q.shape, head_dim, padded=True)
    batch, heads, _, d = q.shape
    check_shape("k", k.shape, [("batch", (batch,)), ("kv_heads", None), ("kv_len", None), ("head_dim", (d,))])
    names = ("batch", "heads", "q_len", "head_dim")
    for name, like in (("v", k), ("out", q), ("dout", q)):
        expected = [(axis, (size,)) for axis, size in zip(names, like.shape, strict=True)]
        check_shape(name, operands[name].shape, expected)
    if heads % k.shape[1]:
        raise ArgumentError("k", f"has {k.shape[1]} heads, q has {heads}: not a multiple")
    for name, tensor in operands.items():
        check_strides(name, tensor)


def check_lse(q: torch.Tensor, lse: Any, dlse: Any, stats: Any) -> None:
    """Check what is float32: the log-sum-exp, its gradient and the statistics, if they are given.

    Raises:
        ArgumentError: for the first thing that is wrong.
    """
    names = ("batch", "heads", "q_len")
    for name, tensor in (("lse", lse), ("dlse", dlse)):
        if name == "lse" or tensor is not None:
            check_tensor(name, tensor, torch.float32, 3, q.device)
            check_shape(name, tensor.shape, [(axis, (size,)) for axis, size in zip(names, q.shape, strict=False)])
    for name, tensor in (("lse", lse), ("stats", stats)):
        if tensor is not None and not tensor.is_contiguous():
            raise ArgumentError(name, f"has strides {tensor.stride()}, expected a contiguous tensor")


def fill_statistics(
    stats: torch.Tensor, out: torch.Tensor, dout: torch.Tensor, lse: torch.Tensor, dlse: torch.Tensor
) -> None:
    """Write what the kernel's prologue would, less the gradient of the log-sum-exp: dS = P (dP - delta + dlse).

    Rows without keys, and those that fill a head's queries up, have infinity and 0, which make their weights 0.

    Args:
        stats: float32 (batch, heads, rows, 2), to write into: log-sum-exp times log2(e), and delta.
        out: (batch, heads, q_len, d), the result of the forward.
        dout: its gradient.
        lse: float32 (batch, heads, q_len), the forward's log-sum-exp.
        dlse: its gradient.
    """
    seen = lse > -torch.inf
    delta = (out.float() * dout.float()).sum(-1) - dlse
    stats[..., 0], stats[..., 1] = torch.inf, 0.0
    rows = stats[:, :, : lse.shape[2]]
    rows[..., 0] = torch.where(seen, lse * LOG2_E, torch.inf)
    rows[..., 1] = torch.where(seen, delta, 0.0)
