"""Lists of the visible blocks of ``Strided``, so that ranks move only these blocks."""

from __future__ import annotations

import torch

from runtime.distributed.layout import Layout
from runtime.distributed.lists import blocks_of
from runtime.errors import ArgumentError
from runtime.kept import made_once
from runtime.patterns import BlockLists, Strided, TopK


def strided_lists(
    pattern: Strided, layout: Layout, rank: int, lengths: tuple[int, int], device: torch.device
) -> TopK | BlockLists:
    """The lists of a rank's queries.

    Args:
        pattern: the pattern.
        layout: assignment of rows to ranks.
        rank: the rank.
        lengths: queries and keys of the whole sequence.
        device: device of the lists.

    Raises:
        ArgumentError: if the chunks are not a multiple of the block size.
    """
    numbers = pattern.stride, pattern.local, pattern.block, pattern.causal
    return _lists(numbers, layout, rank, lengths, device)


@made_once(64)
def _lists(
    numbers: tuple[int, int, int, bool], layout: Layout, rank: int, lengths: tuple[int, int], device: torch.device
) -> TopK | BlockLists:
    stride, local, block, causal = numbers
    chunks = [layout.chunk_size(length) for length in lengths]
    if any(size % block for size in chunks):
        raise ArgumentError(
            "pattern", f"has blocks of {block}, expected divisors of the chunks {chunks[0]} and {chunks[1]}"
        )
    shift = (lengths[1] - lengths[0]) // block
    own = blocks_of(layout, rank, lengths[0], block, device)[:, None] + shift
    key = torch.arange(lengths[1] // block, device=device)
    seen = ((own - key).abs() <= local) | (key % stride == 0)
    widest = min(len(key), (1 if causal else 2) * local + 1 + -(-len(key) // stride))
    if not causal:
        return TopK(_listed(seen, widest)[1], block=(block, block))
    counts, full = _listed(seen & (key < own), widest)
    diagonal = own.to(torch.int32)[None, None]
    partial = ((diagonal >= 0) & (diagonal < len(key))).to(torch.int32)[..., 0]
    return BlockLists(partial.contiguous(), diagonal.contiguous(), counts, full, block=(block, block), mask="causal")


def _listed(seen: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Counts and lists (1, 1, query blocks, width) of the visible blocks; lists are padded with -1."""
    counts = seen.sum(1)
    order = seen.to(torch.uint8).argsort(dim=1, descending=True, stable=True)[:, :width]
    lists = torch.where(torch.arange(width, device=seen.device) < counts[:, None], order, -1)
    return counts.to(torch.int32)[None, None], lists.to(torch.int32)[None, None].contiguous()
