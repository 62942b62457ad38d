"""merge_attention: the attention over two sets of keys from that over each."""

from __future__ import annotations

import torch

from runtime.errors import ArgumentError
from runtime.kernels.attention import AttentionResult


def merge_attention(out1: torch.Tensor, lse1: torch.Tensor, out2: torch.Tensor, lse2: torch.Tensor) -> AttentionResult:
    """Return the attention over two disjoint sets of keys, of which one has the results: ring attention, split keys.

    A result's weight is exp(lse); a side without keys (lse -inf) has none, whatever its ``out`` holds. A ``sink`` joins
    one of the two calls only.

    Args:
        out1: (batch, heads, q_len, head_dim), or any (..., head_dim); floating point.
        lse1: float32 (batch, heads, q_len), natural logarithms, as ``return_lse`` gives them.
        out2: as ``out1``.
        lse2: as ``lse1``.

    Returns:
        (out, lse): out in the type of ``out1``, computed in float32; lse float32. Where neither side has keys, out is 0
        and lse -inf.

    Raises:
        ArgumentError: where shapes, types or devices differ.
    """
    for name, tensor, other in (("out2", out2, out1), ("lse2", lse2, lse1)):
        if (tensor.shape, tensor.dtype, tensor.device) != (other.shape, other.dtype, other.device):
            first = f"{name[:-1]}1 is {tuple(other.shape)} {other.dtype} on {other.device}"
            raise ArgumentError(name, f"is {tuple(tensor.shape)} {tensor.dtype} on {tensor.device}, {first}")
    if lse1.shape != out1.shape[:-1] or lse1.dtype != torch.float32:
        reason = f"is {tuple(lse1.shape)} {lse1.dtype}, expected {tuple(out1.shape[:-1])} torch.float32"
        raise ArgumentError("lse1", reason)
    lse = torch.logaddexp(lse1, lse2)
    shares = [(one - lse).exp().unsqueeze(-1) for one in (lse1, lse2)]
    parts = [
        torch.where((one == -torch.inf).unsqueeze(-1), 0.0, share * out.float())
        for one, share, out in zip((lse1, lse2), shares, (out1, out2), strict=True)
    ]
    return AttentionResult((parts[0] + parts[1]).to(out1.dtype), lse)
