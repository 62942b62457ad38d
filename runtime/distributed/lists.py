"""Lists of key blocks across ranks: which blocks a rank's queries want, who sends them, and what they are called then.

All of it is torch on the device of the lists, of shapes that a plan fixes: no wait, whatever lists hold.
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
"""Of each kind of lists: where counts and lists are among its tensors."""


class Names(NamedTuple):
    """What key blocks are called in the buffer of ``listed_steps``.

    Attributes:
        table: int32 (batch or 1, heads or 1, blocks + 1), by number in the whole sequence; -1 for what is not there,
            and for the last one, which stands for what names no block.
        missing: bool (), whether a block is wanted for which the caps leave no room.
    """

    table: torch.Tensor
    missing: torch.Tensor


def key_block(scored: ScoredPattern) -> int:
    """Keys of a block of lists."""
    assert scored.block is not None
    return scored.block.kv


def places_of(scored: ScoredPattern) -> tuple[tuple[int | None, int], ...]:
    """Return where the counts and the lists of a pattern are among its tensors."""
    return _LISTS[scored.pattern.kind]


def wanted_blocks(
    scored: ScoredPattern, tensors: Tensors, kv_heads: int, blocks: int, *, together: bool = False
) -> torch.Tensor:
    """Listed key blocks: bool (batch or 1, kv_heads or 1, blocks), by number in the whole sequence.

    Args:
        scored: the pattern.
        tensors: its index tensors.
        kv_heads: heads of k.
        blocks: key blocks of the whole sequence.
        together: whether all batches and heads get the same blocks. A mask that asks where a key is needs that: heads
            share one table of positions.
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
    """Blocks that any query block lists: bool (batch or 1, list heads, blocks)."""
    named = (lists >= 0) & (lists < blocks)
    if counts is not None:
        named = named & (torch.arange(lists.shape[3], device=lists.device) < counts.unsqueeze(3))
    named, lists = torch.broadcast_tensors(named, lists)
    seen = torch.zeros((*lists.shape[:2], blocks + 1), dtype=torch.bool, device=lists.device)
    return seen.scatter_(2, torch.where(named, lists, blocks).flatten(2).long(), True)[..., :-1]


@made_once(64)
def blocks_of(layout: Layout, rank: int, length: int, block: int, device: torch.device) -> torch.Tensor:
    """Return the numbers, in the whole sequence, of a rank's blocks: int64 (blocks of a rank,), not to be written to.

    A rank's blocks are whole ones of its chunks.
    """
    spans = layout.spans(rank, length)
    return torch.cat([torch.arange(span.start // block, span.stop // block, device=device) for span in spans])


def chosen(wanted: torch.Tensor, cap: int) -> torch.Tensor:
    """Blocks that an owner sends: int64 (batch or 1, heads or 1, cap), the wanted ones first, ascending.

    They are filled up with others, which are not read. No number occurs twice.

    Args:
        wanted: bool (batch or 1, heads or 1, blocks), of the owner's blocks those that the other rank wants.
        cap: how many are sent.
    """
    return wanted.to(torch.uint8).argsort(dim=-1, descending=True, stable=True)[..., :cap]


def names_of(
    wanted: torch.Tensor, layout: Layout, rank: int, kv_len: int, *, block: int, caps: Sequence[Sequence[int]]
) -> Names:
    """Numbers of key blocks on a rank: its own blocks first, then those that each other rank sends.

    Args:
        wanted: of ``wanted_blocks``, the rank's own.
        layout: keys of each rank.
        rank: whose names.
        kv_len: keys of the whole sequence.
        block: keys of a block.
        caps: of each rank, how many blocks at most it sends to each.
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
    """Return index tensors whose lists have other names for blocks; heads of counts follow those of their lists."""
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
