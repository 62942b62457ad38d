"""Conversion of block maps to lists with a supported block size: blocks are split, or merged with mask bits."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from runtime.block_maps import ceil_div, lists_of
from runtime.convert.bits import Visible, numbers_of, partial_and_full
from runtime.convert.checks import KEY_SIZES, QUERY_SIZES, WORD, Shape, check_block, check_pair, check_width
from runtime.patterns import BlockLists

LEAST_SIZE = 16
"""Minimum of queries per block in the lists: kernels support fewer only with packed heads."""


@dataclass(frozen=True)
class BlockMaps:
    """Visible blocks of the attention matrix, in blocks of any size.

    Attributes:
        full: bool (batch or 1, heads or 1, query_blocks, key_blocks): blocks with all pairs visible.
        block: queries and keys per block.
        q_len: queries per head.
        kv_len: keys per head.
        partial: bool, shape of ``full``: partial blocks, described by ``visible``; None without partial blocks.
        visible: visibility of the pairs of partial blocks.
    """

    full: torch.Tensor
    block: Shape
    q_len: int
    kv_len: int
    partial: torch.Tensor | None = None
    visible: Visible | None = None

    def lists(self, target: Shape | None, max_blocks: int | None, max_partial_blocks: int | None) -> BlockLists:
        """Lists in another block size, with mask bits if blocks are partial or merged.

        Args:
            target: queries and keys per block of the lists. Default: :func:`target_of`.
            max_blocks: upper bound of the entries per list.
            max_partial_blocks: upper bound of the entries per list of partial blocks; None for ``max_blocks``.

        Raises:
            ArgumentError: naming the argument.
        """
        check_width(max_blocks, max_partial_blocks)
        if target is not None:
            check_pair("target", target)
        queries, keys = target_of(self.block, has_bits=self.partial is not None) if target is None else target
        merges = bool(self.block[0] % queries or self.block[1] % keys)
        has_bits = merges or self.partial is not None
        check_block("target", (queries, keys), has_bits=has_bits)
        blocks = self.full if self.partial is None else self.full | self.partial
        listed = self._in_blocks(blocks, (queries, keys), whole=False)
        if not has_bits:
            lists = lists_of(listed, max_blocks)
            return BlockLists(lists.counts, lists.indices, block=(queries, keys), overflow=lists.overflow)
        full = self._in_blocks(self.full, (queries, keys), whole=True)
        return partial_and_full(
            listed & ~full,
            full,
            self.visible if self.visible is not None and not merges else self._looked_up,
            block=(queries, keys),
            lengths=(self.q_len, self.kv_len),
            max_blocks=max_blocks,
            max_partial_blocks=max_partial_blocks,
        )

    def _in_blocks(self, blocks: torch.Tensor, block: Shape, *, whole: bool) -> torch.Tensor:
        """A map in another block size: True for blocks that overlap any True block; if ``whole``, only True blocks."""
        for dim, old, new, length in zip((-2, -1), self.block, block, (self.q_len, self.kv_len), strict=True):
            if old != new:
                blocks = regrid(blocks, dim, old, new, length, whole=whole)
        return blocks

    def _looked_up(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Visible pairs according to the maps: bool."""
        batches, heads = numbers_of(self.full)
        place = batches, heads, queries // self.block[0], keys // self.block[1]
        seen = self.full[place]
        if self.partial is None or self.visible is None:
            return seen
        return seen | self.partial[place] & self.visible(queries, keys)


def target_of(block: Shape, *, has_bits: bool) -> Shape:
    """Queries and keys of a supported block size: ``block``, or the largest equal parts of it.

    If no equal parts of 16 or more exist, blocks are merged to 128 queries or keys. A word of mask bits covers 32 keys.
    """
    key_sizes = tuple(size for size in KEY_SIZES if size % WORD == 0 or not has_bits)
    return _size_of(block[0], QUERY_SIZES), _size_of(block[1], key_sizes)


def _size_of(size: int, allowed: tuple[int, ...]) -> int:
    """Supported block size along one dimension."""
    parts = [part for part in allowed if part >= LEAST_SIZE and size % part == 0]
    return max(parts) if parts else max(allowed)


def regrid(blocks: torch.Tensor, dim: int, old: int, new: int, length: int, *, whole: bool) -> torch.Tensor:
    """A map in another block size along one dimension.

    Args:
        blocks: bool, a map.
        dim: the dimension: -2 for queries, -1 for keys.
        old: queries, or keys, per block of ``blocks``.
        new: queries, or keys, per block of the result.
        length: queries, or keys, of the sequence, at which the last block ends.
        whole: a new block is True if all old blocks that it overlaps are; otherwise, if any is.
    """
    numbers = torch.arange(ceil_div(length, new), device=blocks.device)
    first = numbers * new // old
    last = (((numbers + 1) * new).clamp(max=length) - 1) // old
    result = blocks.index_select(dim, first)
    for step in range(1, ceil_div(new - 1, old) + 1):
        other = blocks.index_select(dim, (first + step).minimum(last))
        result = result & other if whole else result | other
    return result
