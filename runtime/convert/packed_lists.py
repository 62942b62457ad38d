"""Lists of blocks in packed sequences, from those of each sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from codegen.problem import blocks_of
from runtime.errors import ArgumentError
from runtime.key_lists import KeyLists
from runtime.patterns import BlockLists, TopK

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


def to_key_lists(pattern: BlockLists, *, cu_seqlens_q: torch.Tensor, tokens: int) -> KeyLists:
    """A list for each query, as ``paged_attention`` takes them, from a list for each block of queries.

    Query blocks are those of packed sequences: they are counted from the first query of each request, and
    ``packed_list_rows`` has their rows. The last query of a request is at its last key, as in ``paged_attention``.
    Nothing is synchronized.

    Args:
        pattern: lists with ``mask="causal"`` and one batch, for all heads or for each head of k and v. Blocks have 64
            or 128 queries. A listed block that is not partial must lie before its queries.
        cu_seqlens_q: int32 (batch + 1,), first query of each request, then the end of the last one.
        tokens: queries of q.

    Returns:
        ``KeyLists`` of entries of ``block[1]`` keys, partial blocks first; -1 where a list has none.

    Raises:
        ArgumentError: naming the argument.
    """
    if not isinstance(pattern, BlockLists) or pattern.mask != "causal":
        what = f"BlockLists with mask {pattern.mask!r}" if isinstance(pattern, BlockLists) else type(pattern).__name__
        raise ArgumentError("pattern", f"is {what}, expected BlockLists with mask 'causal'")
    block_q, block_kv = pattern.block
    rows = packed_list_rows(cu_seqlens_q, tokens, block_q)[0].shape[0]
    lists = [(pattern.kv_num_blocks, pattern.kv_indices)]
    if pattern.full_kv_num_blocks is not None and pattern.full_kv_indices is not None:
        lists.append((pattern.full_kv_num_blocks, pattern.full_kv_indices))
    heads = max(indices.shape[1] for _, indices in lists)
    for name, indices in zip(("kv_indices", "full_kv_indices"), (each for _, each in lists), strict=False):
        if indices.shape[0] != 1 or indices.shape[1] not in (1, heads) or indices.shape[2] != rows:
            expected = f"(1, 1 or {heads}, {rows}, entries)"
            raise ArgumentError("pattern", f"has {name} of shape {tuple(indices.shape)}, expected {expected}")
        if indices.device != cu_seqlens_q.device:
            raise ArgumentError("pattern", f"is on {indices.device}, cu_seqlens_q on {cu_seqlens_q.device}")
    entries = [
        torch.where(torch.arange(indices.shape[3], device=indices.device) < counts[..., None], indices, -1)
        for counts, indices in lists
    ]
    entries = [each.expand(1, heads, -1, -1) for each in entries]  # a list for all heads beside one for each
    bounds = cu_seqlens_q.clamp(0, tokens).long()
    token = torch.arange(tokens, device=bounds.device)
    sequence = (torch.searchsorted(bounds, token, right=True) - 1).clamp(0, bounds.shape[0] - 2)
    row = bounds[sequence] // block_q + sequence + (token - bounds[sequence]).clamp(min=0) // block_q
    found = torch.cat(entries, 3)[0].index_select(1, row.clamp(max=max(rows - 1, 0)))
    return KeyLists(found.int(), keys=block_kv)


def from_sequence_lists(lists: Sequence[BlockLists | TopK], lengths: Sequence[int]) -> BlockLists:
    """The lists of packed sequences, as ``varlen_attention`` takes them, from the lists of each sequence.

    ``packed_list_rows`` has the layout. With it, lists can also be made on the GPU from lengths that only the GPU
    knows.

    Args:
        lists: of each sequence, for a batch of 1: all ``TopK``, or all ``BlockLists``, of one block, mask and number of
            heads. Those of an empty sequence have no rows.
        lengths: queries of each sequence; the first one begins at token 0.

    Returns:
        ``BlockLists``, filled up with -1. Counts of ``TopK`` are its entries up to the first -1.

    Raises:
        ArgumentError: naming the argument.
    """
    _check_alike(lists, lengths)
    first = lists[0]
    if isinstance(first, TopK):
        indices = _packed("kv_indices", [each.kv_indices for each in lists], lengths, first.block[0])
        counts = (indices >= 0).int().cumprod(3).sum(3, dtype=torch.int32)
        return BlockLists(counts, indices, block=first.block)
    names = ["kv_num_blocks", "kv_indices"]
    if any(getattr(each, "full_kv_indices", None) is not None for each in lists):
        names += ["full_kv_num_blocks", "full_kv_indices"]
    found: dict[str, Any] = {
        name: _packed(name, [getattr(each, name) for each in lists], lengths, first.block[0]) for name in names
    }
    return BlockLists(**found, block=first.block, mask=first.mask)


def _check_alike(lists: Sequence[BlockLists | TopK], lengths: Sequence[int]) -> None:
    """Refuse patterns of different kinds."""
    if not lists or len(lists) != len(lengths):
        raise ArgumentError("lists", f"has {len(lists)} patterns, lengths has {len(lengths)}: pass one for each length")
    first = lists[0]
    for number, each in enumerate(lists):
        same = type(each) is type(first) and isinstance(each, BlockLists | TopK) and each.block == first.block
        if not same or getattr(each, "mask", "") != getattr(first, "mask", ""):
            raise ArgumentError("lists", f"number {number} is {each}, the first one is {first}: expected one kind")


def _packed(name: str, parts: list[torch.Tensor | None], lengths: Sequence[int], block_q: int) -> torch.Tensor:
    """One tensor of the lists of all sequences: counts are filled up with 0, lists with -1."""
    given = [part for part in parts if part is not None]
    if len(given) < len(parts):
        raise ArgumentError(name, "is missing in some lists: pass it in all or in none")
    bounds = torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0).int()
    sequence = packed_list_rows(bounds, int(bounds[-1]), block_q)[0].tolist()
    heads, widths = max(part.shape[1] for part in given), [part.shape[3] for part in given if part.dim() == 4]
    shape = (1, heads, len(sequence), *([max(widths)] if widths else []))
    made = torch.full(shape, -1 if widths else 0, dtype=torch.int32, device=given[0].device)
    for number, (part, length) in enumerate(zip(given, lengths, strict=True)):
        rows = -(-length // block_q)
        if part.shape[0] != 1 or part.shape[1] not in (1, heads) or part.shape[2] != rows:
            what = f"of sequence {number} has shape {tuple(part.shape)}"
            raise ArgumentError(name, f"{what}, expected (1, 1 or {heads}, {rows}, ...)")
        if rows:
            at = sequence.index(number)
            place = made[:, :, at : at + rows]
            (place[..., : widths[number]] if widths else place).copy_(part)
    return made
