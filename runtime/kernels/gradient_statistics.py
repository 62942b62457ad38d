"""Row statistics of gradients of attention that no kernel makes, and the gradient of the sinks, made of statistics."""

from __future__ import annotations

import math

import torch

LOG2_E = math.log2(math.e)


def fill_statistics(
    stats: torch.Tensor, out: torch.Tensor, dout: torch.Tensor, lse: torch.Tensor, dlse: torch.Tensor | None
) -> None:
    """Write what the kernel's prologue would, less the gradient of the log-sum-exp: dS = P (dP - delta + dlse).

    Rows without keys, and those that fill a head's queries up, have infinity and 0, which make their weights 0.

    Args:
        stats: float32 (batch, heads, rows, 2), to write into: log-sum-exp times log2(e), and delta.
        out: (batch, heads, q_len, d), the result of the forward.
        dout: its gradient.
        lse: float32 (batch, heads, q_len), the forward's log-sum-exp.
        dlse: its gradient; None: the loss does not depend on it.
    """
    seen = lse > -torch.inf
    delta = (out.float() * dout.float()).sum(-1) - (0.0 if dlse is None else dlse)
    stats[..., 0], stats[..., 1] = torch.inf, 0.0
    rows = stats[:, :, : lse.shape[2]]
    rows[..., 0] = torch.where(seen, lse * LOG2_E, torch.inf)
    rows[..., 1] = torch.where(seen, delta, 0.0)


def sink_gradient(sink: torch.Tensor, lse: torch.Tensor, stats: torch.Tensor) -> torch.Tensor:
    """Return the gradient of the sinks: of each head the sum of -exp(sink - lse) * delta over its rows.

    The sink is a key whose value is 0: its weight in a row is exp(sink - lse), and its dP is 0. torch sums in the same
    order in every call.

    Args:
        sink: float32 (heads,).
        lse: float32 (batch, heads, q_len), the forward's log-sum-exp, which has the sink.
        stats: float32 (batch, heads, rows, 2) of these rows, the others behind them: log-sum-exp times log2(e), and
            delta, less the gradient of lse.

    Returns:
        float32 (heads,).
    """
    delta = stats[:, :, : lse.shape[2], 1]
    return -((sink[:, None] - lse).exp() * delta).sum((0, 2))
