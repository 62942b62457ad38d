"""Split-K of the long block rows of a BSR matrix: chunks, longest rows first."""

from __future__ import annotations

from typing import NamedTuple

import torch

from codegen.preparation import RowCut


class RowSplit(NamedTuple):
    """Block rows of a BSR matrix by length, with long rows split into chunks.

    Attributes:
        chunks: int32 (most chunks, 4), for each chunk: its block row, its first stored block, the end of its blocks,
            and the number of its row's first chunk, -1 if it is the only one. The chunks of a row are contiguous.
            Entries after the last chunk are undefined.
        total: int32 (1,): number of chunks.
        limit: blocks of a chunk, at most.
    """

    chunks: torch.Tensor
    total: torch.Tensor
    limit: int


def split_rows(crow_indices: torch.Tensor, cut: RowCut, step: int) -> RowSplit:
    """Split block rows, on their device and without a synchronization.

    Args:
        crow_indices: (block rows + 1,): first block of each block row, and the number of blocks.
        cut: limits of the length and the number of chunks.
        step: stored blocks of a step: all chunks of a row except the last have whole steps.
    """
    lengths = crow_indices.diff()
    order = lengths.argsort(descending=True, stable=True)
    lengths, starts = lengths[order], crow_indices[:-1][order]
    counts = ((lengths + cut.limit - 1) // cut.limit).clamp(min=1)
    ends = counts.cumsum(0)  # numbers of chunks
    numbers = torch.arange(cut.chunks, device=crow_indices.device)
    # The row of each chunk, as its position in the order; entries after the last chunk use the last row.
    row = torch.searchsorted(ends, numbers, right=True).clamp(max=order.shape[0] - 1)
    first_chunk = (ends - counts)[row]
    steps, place = (lengths[row] + step - 1) // step, numbers - first_chunk
    first = steps * place // counts[row] * step
    end = torch.minimum(steps * (place + 1) // counts[row] * step, lengths[row])
    joined = torch.where(counts[row] > 1, first_chunk, -1)
    table = torch.stack([order[row], starts[row] + first, starts[row] + end, joined], 1)
    return RowSplit(table.to(torch.int32), ends[-1:].to(torch.int32), cut.limit)
