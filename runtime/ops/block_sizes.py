"""Conversion of lists with an unsupported block size to one that a kernel supports: exact, on the device, asynchronous.

Large blocks are split: (256, 64) becomes the same list for two blocks of 128 queries, (128, 192) three blocks of 64
keys. Small blocks are merged: a block of 64 keys is listed if any of its blocks of 16 is, with one bit per pair.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from codegen.block_sizes import common_key_sizes, key_sizes, query_sizes
from codegen.patterns.block_lists import NAMED_MASKS, BlockLists
from codegen.scored_pattern import ScoredPattern
from runtime.errors import ArgumentError

Tensors = tuple[torch.Tensor | None, ...]

_UNIT = 16  # keys: half a word of the bits
_WORD = 32  # keys
_HALF_WORD = (0xFFFF, -0x10000)  # int32 masks of the first and second half of a word


@dataclass(frozen=True)
class BlockFit:
    """The conversion of lists from one block size to another.

    Attributes:
        block: (queries, keys) of the caller's blocks.
        split: (queries, keys) after large blocks are split.
        merged: (queries, keys) after small blocks are merged: the kernel's block size.
        mask: the mask of partial blocks, for ``block_lists``; None for ``topk``.
    """

    block: tuple[int, int]
    split: tuple[int, int]
    merged: tuple[int, int]
    mask: str | None

    @property
    def merges(self) -> bool:
        """Whether blocks are merged; merged blocks have mask bits."""
        return self.merged != self.split

    def fitted(self, scored: ScoredPattern) -> ScoredPattern:
        """The kernel's pattern, and the caller's score."""
        block = dict(zip(("q", "kv"), self.merged, strict=True))
        if self.merges:
            return scored.with_pattern(kind="block_lists", mask="bits", block=block)
        return scored.with_pattern(block=block)

    def __str__(self) -> str:
        """The steps in words."""
        steps = [
            f"blocks of {before[0]} x {before[1]} are {word} blocks of {after[0]} x {after[1]}"
            for word, before, after in (
                ("split into", self.block, self.split),
                ("merged into", self.split, self.merged),
            )
            if before != after
        ]
        return ", ".join(steps) + ", in each call"

    def apply(self, tensors: Tensors, q_len: int, kv_len: int) -> Tensors:
        """The index tensors of a call, in the kernel's block size."""
        counted = self.mask is not None
        if self.split != self.block:
            tensors = _split(tensors, self.block, self.split, counted=counted, lengths=(q_len, kv_len))
        if self.merges:
            tensors = _merged(tensors, self.split, self.merged, mask=self.mask, lengths=(q_len, kv_len))
        return tensors


def block_fit(scored: ScoredPattern, arch: str, pack_gqa: int) -> BlockFit | None:
    """The conversion of a pattern's lists to those of a kernel; None if they are the same.

    Raises:
        ArgumentError: if the block size cannot be converted, with the sizes that can.
    """
    if scored.block is None:
        return None
    block = scored.block.q, scored.block.kv
    allowed = query_sizes(pack_gqa), key_sizes(arch)
    sizes = [_kernel_size(size, legal) for size, legal in zip(block, allowed, strict=True)]
    if None in sizes or block[1] % _UNIT:
        raise ArgumentError("block", f"is {block}; {_allowed(allowed)}")
    q, kv = (size for size in sizes if size is not None)
    if (q, kv) == block:
        return None
    split = min(q, block[0]), min(kv, block[1])
    if (q, kv) != split:  # merged blocks have bits, in words
        kv = min(size for size in allowed[1] if size % kv == 0 and size % _WORD == 0)
    mask = scored.pattern.mask if isinstance(scored.pattern, BlockLists) else None
    fit = BlockFit(block, split, (q, kv), mask)
    if fit.merges and fit.mask not in (None, *NAMED_MASKS):
        reason = f"is {block}, but partial blocks with an expression are not merged; {_allowed(allowed)}"
        raise ArgumentError("block", reason)
    if fit.mask == "bits" and (block[1] % _WORD or split[1] % _WORD):
        reason = f"is {block}, expected a multiple of {_WORD} keys, the keys of a word of mask_bits"
        raise ArgumentError("block", reason)
    return fit


def _kernel_size(size: int, legal: Sequence[int]) -> int | None:
    """The supported size that a block size is split or merged into; None if there is none."""
    if size in legal:
        return size
    parts = [each for each in legal if size % each == 0]
    wholes = [each for each in legal if each % size == 0]
    return max(parts) if parts else min(wholes, default=None)


def _allowed(sizes: tuple[tuple[int, ...], tuple[int, ...]]) -> str:
    """Legal sizes, in words."""
    queries, keys = sizes
    return (
        f"allowed are {queries[0]} queries, {keys[0]} keys and multiples of them; smaller blocks where these divide by "
        f"them, of {_UNIT} keys or more"
    )


def mask_block(block: tuple[int, int]) -> tuple[int, int]:
    """The block size of lists made from a mask of any block size; kernels of every device support it.

    Args:
        block: (queries, keys) of the mask's blocks.
    """
    sizes = query_sizes(1), common_key_sizes()
    q, kv = (_kernel_size(size, legal) or legal[-1] for size, legal in zip(block, sizes, strict=True))
    return q, kv


def _split(
    tensors: Tensors, block: tuple[int, int], split: tuple[int, int], *, counted: bool, lengths: tuple[int, int]
) -> Tensors:
    """The index tensors, with each block split into equal parts."""
    rows, parts = block[0] // split[0], block[1] // split[1]
    blocks, needed = -(-lengths[1] // block[1]), -(-lengths[0] // split[0])

    def of_rows(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.repeat_interleave(rows, 2)[:, :, :needed] if rows > 1 else tensor

    def of_list(lists: torch.Tensor) -> torch.Tensor:
        if parts > 1:  # -1 stays negative
            part = torch.arange(parts, dtype=torch.int32, device=lists.device)
            lists = (lists.clamp(-1, blocks).unsqueeze(-1) * parts + part).clamp(min=-1).flatten(-2)
        return of_rows(lists)

    def of_bits(bits: torch.Tensor) -> torch.Tensor:
        words: torch.Tensor = bits.unflatten(-1, (rows, split[0], parts, split[1] // _WORD))
        words = words.permute(0, 1, 2, 4, 3, 6, 5, 7)  # batch, head, block, rows, entry, parts, query, word
        return words.flatten(6).flatten(4, 5).flatten(2, 3)[:, :, :needed]

    if not counted:
        return tuple(None if lists is None else of_list(lists) for lists in tensors)
    found = [None if t is None else (of_list(t) if i % 2 else of_rows(t * parts)) for i, t in enumerate(tensors[:4])]
    return (*found, *(None if bits is None else of_bits(bits) for bits in tensors[4:]))


def _merged(
    tensors: Tensors, block: tuple[int, int], merged: tuple[int, int], *, mask: str | None, lengths: tuple[int, int]
) -> Tensors:
    """Counts, lists, empty full lists, and bits of larger blocks. A block repeated in a list counts once."""
    q_len, kv_len = lengths
    blocks = -(-kv_len // block[1])
    if mask is None:
        tensors = (None, *tensors)
    seen = [
        _listed(tensors[i + 1], tensors[i], blocks, rows=merged[0] // block[0], keys=merged[1] // block[1])
        for i in (0, 2)
        if i + 1 < len(tensors) and tensors[i + 1] is not None
    ]
    every = seen[0] if len(seen) == 1 else seen[0] | seen[1]
    visible = every.any(5).any(3)  # batch, head, query block, key block
    longest = merged[0] // block[0] * sum(lists.shape[3] for lists in tensors[1:4:2] if lists is not None)
    order = visible.to(torch.uint8).argsort(dim=-1, descending=True, stable=True)[..., :longest]
    if mask == "bits":
        bits = _bits_of_entries(tensors, order, seen[0].shape, block)
    elif mask == "causal":
        bits = _words(seen[0], order, block) & _causal_words(order, merged, kv_len - q_len)
    else:
        bits = _words(seen[0], order, block)
    for full in seen[1:]:
        bits = bits | _words(full, order, block)
    counts = visible.sum(-1, dtype=torch.int32)
    return counts, order.to(torch.int32), None, None, bits.flatten(-2)


def _listed(
    lists: torch.Tensor | None, counts: torch.Tensor | None, blocks: int, *, rows: int, keys: int
) -> torch.Tensor:
    """Mask of the listed blocks: (batch, heads, query blocks, rows, key blocks, keys), bool, of larger blocks."""
    assert lists is not None
    named = (lists >= 0) & (lists < blocks)
    if counts is not None:
        named = named & (torch.arange(lists.shape[3], device=lists.device) < counts.unsqueeze(3))
    named, lists = torch.broadcast_tensors(named, lists)
    surplus = -blocks % keys
    seen = torch.zeros((*lists.shape[:3], blocks + surplus + 1), dtype=torch.bool, device=lists.device)
    seen.scatter_(3, torch.where(named, lists, blocks + surplus).long(), True)
    seen = torch.nn.functional.pad(seen[..., :-1], (0, 0, 0, -lists.shape[2] % rows))
    groups: torch.Tensor = seen.unflatten(3, (-1, keys)).unflatten(2, (-1, rows))
    return groups


def _words(seen: torch.Tensor, order: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """Bits of listed blocks: (batch, heads, query blocks, entries, queries, words)."""
    chosen = seen.transpose(3, 4).take_along_dim(order[..., None, None], 3)
    halves: torch.Tensor = chosen.repeat_interleave(block[1] // _UNIT, 5).unflatten(5, (-1, 2)).to(torch.int32)
    words = halves[..., 0] * _HALF_WORD[0] + halves[..., 1] * _HALF_WORD[1]
    return words.repeat_interleave(block[0], 4)


def _bits_of_entries(tensors: Tensors, order: torch.Tensor, groups: torch.Size, block: tuple[int, int]) -> torch.Tensor:
    """The caller's bits in larger blocks: (batch, heads, query blocks, entries, queries, words).

    Args:
        tensors: counts, lists, full counts, full lists, bits.
        order: the larger blocks that are listed.
        groups: (batch, heads, query blocks, rows, key blocks, keys) of larger blocks.
        block: (queries, keys) of the caller's blocks.
    """
    counts, lists, bits = tensors[0], tensors[1], tensors[4]
    assert counts is not None and lists is not None and bits is not None
    rows, keys, blocks = groups[3], groups[5], groups[4] * groups[5]
    entry = torch.arange(lists.shape[3], device=lists.device)
    named = (lists >= 0) & (lists < blocks) & (entry < counts.unsqueeze(3))
    named, lists = torch.broadcast_tensors(named, lists)
    found = torch.full((*lists.shape[:3], blocks + 1), -1, device=lists.device)
    found.scatter_reduce_(3, torch.where(named, lists, blocks).long(), torch.where(named, entry, -1), "amax")
    surplus = -lists.shape[2] % rows
    found = torch.nn.functional.pad(found[..., :-1], (0, 0, 0, surplus), value=-1)
    found = found.unflatten(3, (-1, keys)).unflatten(2, (-1, rows)).transpose(3, 4)
    found = found.take_along_dim(order[..., None, None], 3).transpose(3, 4).flatten(4)  # of each row, entries x keys
    words = torch.nn.functional.pad(bits, (0, 0, 0, 0, 0, surplus)).unflatten(2, (-1, rows))
    words = words.take_along_dim(found.clamp(0, bits.shape[3] - 1).unsqueeze(5), 4)
    words = torch.where(found.unsqueeze(5) >= 0, words, 0).unflatten(5, (block[0], block[1] // _WORD))
    words = words.unflatten(4, (-1, keys)).permute(0, 1, 2, 4, 3, 6, 5, 7)  # ..., entry, row, query, key, word
    joined: torch.Tensor = words.flatten(6).flatten(4, 5)
    return joined


def _causal_words(order: torch.Tensor, merged: tuple[int, int], shift: int) -> torch.Tensor:
    """Bits of the keys up to each query's position, of listed blocks."""
    first_query = merged[0] * torch.arange(order.shape[2], device=order.device)
    query = first_query[:, None] + torch.arange(merged[0], device=order.device)
    word = _WORD * torch.arange(merged[1] // _WORD, device=order.device)
    before = query[:, None, :, None] + (shift + 1) - (order * merged[1])[..., None, None] - word
    keys = before.clamp(0, _WORD).to(torch.int32)
    return torch.where(keys < _WORD, (1 << keys.clamp(max=_WORD - 1)) - 1, -1)
