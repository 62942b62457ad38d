"""merge_attention: combines attention results over two disjoint sets of keys."""

from __future__ import annotations

import torch

from runtime.checks import check_dense
from runtime.errors import ArgumentError
from runtime.kernels.attention import AttentionResult


def merge_attention(out1: torch.Tensor, lse1: torch.Tensor, out2: torch.Tensor, lse2: torch.Tensor) -> AttentionResult:
    """Merge the attention results over two disjoint sets of keys, as in ring attention or split-KV.

    Each result is weighted by exp(lse). A side without keys (lse -inf) has weight 0, whatever its ``out`` holds, and
    its gradients are 0. Pass a ``sink`` to only one of the two calls.

    Args:
        out1: (batch, heads, q_len, head_dim), or any (..., head_dim); floating point.
        lse1: float32 (batch, heads, q_len), natural log-sum-exp, as returned with ``return_lse=True``.
        out2: as ``out1``.
        lse2: as ``lse1``.

    Returns:
        (out, lse): out has the dtype of ``out1`` and is computed in float32; lse is float32. If neither side has keys,
        out is 0 and lse is -inf.

    Raises:
        ArgumentError: if an argument is not a dense floating-point tensor, or if shapes, dtypes or devices differ.
    """
    for name, tensor in (("out1", out1), ("lse1", lse1), ("out2", out2), ("lse2", lse2)):
        check_dense(name, tensor)
        if not tensor.is_floating_point():
            raise ArgumentError(name, f"is {tensor.dtype}, expected a floating-point type")
    for name, tensor, other in (("out2", out2, out1), ("lse2", lse2, lse1)):
        if (tensor.shape, tensor.dtype, tensor.device) != (other.shape, other.dtype, other.device):
            first = f"{name[:-1]}1 is {tuple(other.shape)} {other.dtype} on {other.device}"
            raise ArgumentError(name, f"is {tuple(tensor.shape)} {tensor.dtype} on {tensor.device}, {first}")
    if out1.dim() == 0 or lse1.shape != out1.shape[:-1] or lse1.dtype != torch.float32:
        reason = f"is {tuple(lse1.shape)} {lse1.dtype}, expected {tuple(out1.shape[:-1])} torch.float32"
        raise ArgumentError("lse1", reason)
    if lse1.device != out1.device:
        raise ArgumentError("lse1", f"is on {lse1.device}, out1 is on {out1.device}")
    empty = lse1 == -torch.inf, lse2 == -torch.inf
    neither = empty[0] & empty[1]
    # Replace infinities before the subtraction, and NaN before the multiplication: a torch.where afterwards would still
    # let them reach the gradients as 0 * NaN.
    largest = torch.maximum(lse1, lse2).masked_fill(neither, 0.0).detach()
    weights = [(lse - largest).exp() for lse in (lse1, lse2)]
    total = (weights[0] + weights[1]).masked_fill(neither, 1.0)
    parts = [
        (weight / total).unsqueeze(-1) * out.float().masked_fill(none.unsqueeze(-1), 0.0)
        for weight, out, none in zip(weights, (out1, out2), empty, strict=True)
    ]
    lse = (largest + total.log()).masked_fill(neither, -torch.inf)
    return AttentionResult((parts[0] + parts[1]).to(out1.dtype), lse)
