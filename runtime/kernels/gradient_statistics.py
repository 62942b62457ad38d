"""Row statistics of a gradient of attention where the log-sum-exp has a gradient too, which no kernel is given."""

from __future__ import annotations

import math

import torch

LOG2_E = math.log2(math.e)


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
