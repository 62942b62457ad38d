"""Lists of key blocks across ranks: the blocks that a rank needs, their senders, and their indices in its buffer.

All functions are torch operations on the device of the lists. A plan fixes their shapes, so they never synchronize.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from codegen.scored_pattern import ScoredPattern
from runtime.distributed.layout import Layout
from runtime.kept import made_once
from runtime.ops.block_sizes import Tensors

_LISTS = {"topk": ((None, 0),), "block_lists": ((0, 1), (2, 3))}
"""Positions of counts and lists among the tensors, by kind of lists."""


class Names(NamedTuple):
    """Indices of key blocks in the buffer of ``listed_steps``.

    Attributes:
        table: int32 (batch or 1, heads or 1, blocks + 1), index in the buffer by index in the whole sequence; -1 for
            blocks that are not in the buffer, and for the last entry, which stands for invalid indices.
        missing: bool (), whether the caps leave no room for a needed block.
    """

    table: torch.Tensor
    missing: torch.Tensor


def key_block(scored: ScoredPattern) -> int:
    """Keys per block of lists."""
    assert scored.block is not None
    return scored.block.kv


def places_of(scored: ScoredPattern) -> tuple[tuple[int | None, int], ...]:
    """Positions of the counts and lists of a pattern among its tensors."""
    return _LISTS[scored.pattern.kind]


def wanted_blocks(
    scored: ScoredPattern, tensors: Tensors, kv_heads: int, blocks: int, *, together: bool = False
) -> torch.Tensor:
    """Listed key blocks: bool (batch or 1, kv_heads or 1, blocks), by index in the whole sequence.

    Args:
        scored: the pattern.
        tensors: its index tensors.
        kv_heads: number of heads of k.
        blocks: number of key blocks of the whole sequence.
        together: give all batches and heads the same blocks. A mask that depends on key positions needs this, because
            heads share one table of positions.
    """
    found = None
    for counts_at, lists_at in places_of(scored):
        lists = tensors[lists_at] if lists_at < len(tensors) else None
        if lists is None:
            continue
        counts = None if counts_at is None else tensors[counts_at]
        seen = _listed(lists, counts, blocks)
        if seen.shape[1] > 1:
            seen = seen.unflatten(1, (kv_heads, -1)).any(2)
        found = seen if found is None else found | seen
    assert found is not None
    return found.any(0, keepdim=True).any(1, keepdim=True) if together else found


def _listed(lists: torch.Tensor, counts: torch.Tensor | None, blocks: int) -> torch.Tensor:
    """Blocks listed by any query block: bool (batch or 1, list heads, blocks)."""
    named = (lists >= 0) & (lists < blocks)
    if counts is not None:
        named = named & (torch.arange(lists.shape[3], device=lists.device) < counts.unsqueeze(3))
    named, lists = torch.broadcast_tensors(named, lists)
    seen = torch.zeros((*lists.shape[:2], blocks + 1), dtype=torch.bool, device=lists.device)
    return seen.scatter_(2, torch.where(named, lists, blocks).flatten(2).long(), True)[..., :-1]


@made_once(64)
def blocks_of(layout: Layout, rank: int, length: int, block: int, device: torch.device) -> torch.Tensor:
    """Indices of a rank's blocks in the whole sequence: int64 (blocks per rank,), read-only.

    Chunks are a multiple of the block size.
    """
    spans = layout.spans(rank, length)
    return torch.cat([torch.arange(span.start // block, span.stop // block, device=device) for span in spans])


def chosen(wanted: torch.Tensor, cap: int) -> torch.Tensor:
    """Blocks that an owner sends: int64 (batch or 1, heads or 1, cap), the needed ones first, ascending.

    The list is padded with other blocks, which are not read. All indices are distinct.

    Args:
        wanted: bool (batch or 1, heads or 1, blocks), the owner's blocks that the other rank needs.
        cap: number of blocks sent.
    """
    return wanted.to(torch.uint8).argsort(dim=-1, descending=True, stable=True)[..., :cap]


def names_of(
    wanted: torch.Tensor, layout: Layout, rank: int, kv_len: int, *, block: int, caps: Sequence[Sequence[int]]
) -> Names:
    """Indices of key blocks in a rank's buffer: its own blocks first, then those that each other rank sends.

    Args:
        wanted: the rank's ``wanted_blocks``.
        layout: assignment of keys to ranks.
        rank: the rank.
        kv_len: keys of the whole sequence.
        block: keys per block.
        caps: upper bound of the blocks that each rank sends to each other rank.
    """
    table = wanted.new_full((*wanted.shape[:2], wanted.shape[2] + 1), -1, dtype=torch.int32)
    missing = wanted.new_zeros(())
    first = 0
    for source in (rank, *(other for other in range(layout.ranks) if other != rank)):
        theirs = blocks_of(layout, source, kv_len, block, wanted.device)
        asked = wanted[..., theirs]
        if source == rank:
            table[..., theirs] = torch.arange(len(theirs), dtype=torch.int32, device=wanted.device)
            first = len(theirs)
            continue
        place = asked.cumsum(-1) - 1
        there = asked & (place < caps[source][rank])
        table[..., theirs] = torch.where(there, place + first, -1).to(torch.int32)
        missing = missing | (asked & ~there).any()
        first += caps[source][rank]
    return Names(table, missing)


def relabeled(scored: ScoredPattern, tensors: Tensors, names: torch.Tensor) -> Tensors:
    """Index tensors with block indices replaced by ``names``. Counts are expanded to the heads of their lists."""
    found = list(tensors)
    blocks = names.shape[2] - 1
    for counts_at, lists_at in places_of(scored):
        lists = tensors[lists_at] if lists_at < len(tensors) else None
        if lists is None:
            continue
        heads = max(lists.shape[1], names.shape[1])
        table = names.repeat_interleave(heads // names.shape[1], 1)
        batch = max(lists.shape[0], names.shape[0])
        index = torch.where((lists >= 0) & (lists < blocks), lists, blocks).long()
        index = index.expand(batch, heads, *lists.shape[2:])
        found[lists_at] = table.expand(batch, heads, -1).gather(2, index.flatten(2)).view(index.shape)
        counts = None if counts_at is None else tensors[counts_at]
        if counts_at is not None and counts is not None:
            found[counts_at] = counts.expand(-1, heads, -1) if counts.shape[1] == 1 else counts
    return tuple(found)
