"""The stored blocks of a BSR matrix by block column, for kernels that multiply by its transpose."""

from __future__ import annotations

from typing import NamedTuple

import torch


class TransposedIndex(NamedTuple):
    """The stored blocks of a BSR matrix by block column.

    Attributes:
        column_starts: int32 (block columns + 1,): first entry of each block column, and the number of entries.
        entries: int32 (stored blocks, 2): index of a block in the values, and its block row.
    """

    column_starts: torch.Tensor
    entries: torch.Tensor


def transposed_index(a: torch.Tensor) -> TransposedIndex:
    """Compute the index of a BSR matrix, on its device and without a synchronization."""
    crow, col = a.crow_indices(), a.col_indices()
    block_columns = a.shape[1] // a.values().shape[2]
    numbers = torch.arange(crow.shape[0] - 1, device=a.device)
    rows = numbers.repeat_interleave(crow.diff(), output_size=col.shape[0])
    order = col.argsort(stable=True)
    # A column out of range comes before the first one or after the last.
    wanted = torch.arange(block_columns + 1, device=a.device, dtype=col.dtype)
    starts = torch.searchsorted(col[order], wanted, out_int32=True)
    return TransposedIndex(starts, torch.stack([order, rows[order]], 1).to(torch.int32))
