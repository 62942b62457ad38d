"""Rows of the lists of blocks in packed sequences."""

from __future__ import annotations

import torch

from codegen.plans.lengths import blocks_of
from runtime.errors import ArgumentError

BLOCKS = (64, 128)
"""Sizes of the blocks of such lists."""


def packed_list_rows(cu_seqlens_q: torch.Tensor, tokens: int, block_q: int = 128) -> tuple[torch.Tensor, torch.Tensor]:
    """The sequence and the query block of each row of lists in packed sequences.

    The lists of sequence s begin at row ``cu_seqlens_q[s] // block_q + s``, and there are ``tokens // block_q +
    sequences`` rows. So a kernel finds the list of a block without a scan of the lengths. Up to one row of a sequence
    has no block. Its list is not read.

    Nothing is synchronized.

    Args:
        cu_seqlens_q: int32 (sequences + 1,), as of ``varlen_attention``.
        tokens: those of q.
        block_q: queries of a block, 64 or 128.

    Returns:
        Two int32 (rows,) tensors on the device of the bounds: the sequence, and the block within it. Both are -1 for a
        row without a block.

    Raises:
        ArgumentError: naming the argument.
    """
    if not isinstance(cu_seqlens_q, torch.Tensor) or cu_seqlens_q.dim() != 1 or cu_seqlens_q.shape[0] < 2:
        has = tuple(cu_seqlens_q.shape) if isinstance(cu_seqlens_q, torch.Tensor) else type(cu_seqlens_q).__name__
        raise ArgumentError("cu_seqlens_q", f"is {has}, expected a tensor (sequences + 1,)")
    if not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 0:
        raise ArgumentError("tokens", f"is {tokens!r}, expected an integer, 0 or more")
    if block_q not in BLOCKS:
        raise ArgumentError("block_q", f"is {block_q!r}; allowed: 64, 128")
    bounds = cu_seqlens_q.clamp(0, tokens).long()
    sequences = bounds.shape[0] - 1
    places = torch.arange(sequences, device=bounds.device)
    firsts = bounds[:-1] // block_q + places
    row = torch.arange(blocks_of(tokens, sequences, block_q), device=bounds.device)
    sequence = torch.searchsorted(firsts, row, right=True) - 1
    at = sequence.clamp(min=0)
    block = row - firsts[at]
    exists = (sequence >= 0) & (block * block_q < bounds[at + 1] - bounds[at])
    return torch.where(exists, sequence, -1).int(), torch.where(exists, block, -1).int()
