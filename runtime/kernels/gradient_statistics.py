"""Row statistics for gradients of attention that no kernel computes, and the gradient of the sinks."""

from __future__ import annotations

import math

import torch

LOG2_E = math.log2(math.e)


def fill_statistics(
    stats: torch.Tensor, out: torch.Tensor, dout: torch.Tensor, lse: torch.Tensor, dlse: torch.Tensor | None
) -> None:
    """Write the statistics of the kernel's prologue, minus the gradient of the log-sum-exp: dS = P (dP - delta + dlse).

    Rows without keys and padding rows get infinity and 0, which make their weights 0.

    Args:
        stats: float32 (batch, heads, rows, 2), the output: log-sum-exp times log2(e), and delta.
        out: (batch, heads, q_len, d), the forward's result.
        dout: gradient of ``out``.
        lse: float32 (batch, heads, q_len), the forward's log-sum-exp.
        dlse: gradient of ``lse``; None if the loss does not depend on it.
    """
    seen = lse > -torch.inf
    delta = (out.float() * dout.float()).sum(-1) - (0.0 if dlse is None else dlse)
    stats[..., 0], stats[..., 1] = torch.inf, 0.0
    rows = stats[:, :, : lse.shape[2]]
    rows[..., 0] = torch.where(seen, lse * LOG2_E, torch.inf)
    rows[..., 1] = torch.where(seen, delta, 0.0)


def packed_sink_gradient(sink: torch.Tensor, stats: torch.Tensor) -> torch.Tensor:
    """Compute the gradient of the sinks of packed sequences, as ``sink_gradient`` does.

    Args:
        sink: float32 (heads,).
        stats: float32 (1, heads, rows, 2), of a kernel's prologue: rows of no query have infinity and 0.

    Returns:
        float32 (heads,).
    """
    lse, delta = stats[0, ..., 0] / LOG2_E, stats[0, ..., 1]
    return -((sink[:, None] - lse).exp() * delta).sum(1)


def packed_delta(
    cu_seqlens_q: torch.Tensor,
    out: torch.Tensor,
    dout: torch.Tensor,
    lse: torch.Tensor,
    dlse: torch.Tensor | None,
) -> torch.Tensor:
    """Statistics of packed sequences without a kernel, for ``packed_sink_gradient``: (1, heads, tokens, 2).

    Args:
        cu_seqlens_q: int32 (sequences + 1,).
        out: (tokens, heads, d), the forward's result.
        dout: gradient of ``out``.
        lse: float32 (heads, tokens), the forward's log-sum-exp.
        dlse: gradient of ``lse``; None if the loss does not depend on it.
    """
    delta = (out.float() * dout.float()).sum(-1).transpose(0, 1) - (0.0 if dlse is None else dlse)
    token = torch.arange(lse.shape[1], device=lse.device)
    exists = (token >= cu_seqlens_q[0]) & (token < cu_seqlens_q[-1]) & (lse > -torch.inf)
    return torch.stack((torch.where(exists, lse * LOG2_E, torch.inf), torch.where(exists, delta, 0.0)), -1)[None]


def sink_gradient(sink: torch.Tensor, lse: torch.Tensor, stats: torch.Tensor) -> torch.Tensor:
    """Compute the gradient of the sinks: for each head, the sum of -exp(sink - lse) * delta over its rows.

    The sink is a key with the value 0: its weight in a row is exp(sink - lse), and its dP is 0. torch sums in the same
    order in every call.

    Args:
        sink: float32 (heads,).
        lse: float32 (batch, heads, q_len), the forward's log-sum-exp, including the sink.
        stats: float32 (batch, heads, rows, 2), padding rows last: log-sum-exp times log2(e), and delta minus the
            gradient of lse.

    Returns:
        float32 (heads,).
    """
    delta = stats[:, :, : lse.shape[2], 1]
    return -((sink[:, None] - lse).exp() * delta).sum((0, 2))
