"""Lists of key blocks in packed sequences: where the lists of a sequence lie, and checks of their tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from codegen.problem import blocks_of
from codegen.scored_pattern import ScoredPattern
from runtime.checks import check_dense
from runtime.convert.packed_lists import BLOCKS, packed_list_rows
from runtime.errors import ArgumentError
from runtime.patterns import BlockLists, Pattern, TopK, operator_text

Lists = tuple[torch.Tensor | None, ...]
"""kv_num_blocks, kv_indices, full_kv_num_blocks and full_kv_indices; empty for a pattern without lists."""
NAMES = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
MASKS = ("none", "causal")


def packed_pattern(pattern: Pattern) -> tuple[str, Lists]:
    """The text and the lists of a pattern of packed sequences.

    Raises:
        ArgumentError: for blocks or a mask that packed sequences do not have.
    """
    if not isinstance(pattern, BlockLists | TopK):
        return operator_text(pattern), ()
    if not set(pattern.block) <= set(BLOCKS):
        raise ArgumentError("block", f"is {pattern.block}; allowed for packed sequences: 64 or 128, for both sizes")
    if isinstance(pattern, TopK):
        q, kv = pattern.block
        text = f'{{"kind": "block_lists", "block": {{"q": {q}, "kv": {kv}}}, "mask": "none"}}'
        return text, (None, pattern.kv_indices, None, None)
    if pattern.mask not in MASKS:
        raise ArgumentError("mask", f"is {pattern.mask!r}; allowed for packed sequences: {', '.join(MASKS)}")
    if pattern.overflow is not None:
        raise ArgumentError("overflow", "is given; lists of packed sequences have none: leave it out")
    lists = (pattern.kv_num_blocks, pattern.kv_indices, pattern.full_kv_num_blocks, pattern.full_kv_indices)
    return operator_text(pattern), lists


def check_lists(q: Any, k: Any, bounds: Any, scored: ScoredPattern, lists: Sequence[Any]) -> None:
    """Check types and shapes of lists.

    Raises:
        ArgumentError: for the first thing that is wrong.
    """
    block = scored.pattern.fixed_block
    if block is None:
        if lists:
            raise ArgumentError("lists", f"{len(lists)} are given; {scored.pattern.kind} has none")
        return
    if len(lists) != len(NAMES):
        raise ArgumentError("lists", f"{len(lists)} are given, expected {', '.join(NAMES)}")
    sequences = bounds.cu_seqlens_q.shape[0] - 1
    rows, heads = blocks_of(q.shape[0], sequences, block.q), q.shape[1]
    of_rows = f"{rows} rows: {q.shape[0]} tokens // {block.q} + {sequences} sequences"
    for name, tensor in zip(NAMES, lists, strict=True):
        if tensor is None:
            continue
        check_dense(name, tensor)
        if tensor.dtype != torch.int32:
            raise ArgumentError(name, f"is {tensor.dtype}, expected torch.int32: pass {name}.to(torch.int32)")
        if tensor.device != q.device:
            raise ArgumentError(name, f"is on {tensor.device}, q is on {q.device}: pass {name}.to(q.device)")
        rank = 4 if name.endswith("indices") else 3
        allowed = tensor.dim() == rank and tensor.shape[0] == 1 and tensor.shape[2] == rows
        if not allowed or tensor.shape[1] not in (1, heads, k.shape[1]):
            sizes = (
                f"(1, 1, {k.shape[1]} or {heads} heads, {of_rows}"
                if k.shape[1] != heads
                else f"(1, 1 or {heads} heads, {of_rows}"
            )
            raise ArgumentError(
                name, f"has shape {tuple(tensor.shape)}, expected {sizes}{', entries' if rank == 4 else ''})"
            )
    counts, indices, full_counts, full = lists
    if indices is None:
        raise ArgumentError("kv_indices", "is missing")
    if counts is None and scored.pattern.masks_pairs:
        raise ArgumentError("kv_num_blocks", "is missing, and mask is 'causal': pass the number of partial blocks")
    if (full_counts is None) != (full is None):
        raise ArgumentError("full_kv_num_blocks and full_kv_indices", "belong together: pass both or neither")


def of_heads(lists: Sequence[torch.Tensor | None], heads: int, kv_heads: int) -> Lists:
    """Lists of query heads, where they are of K/V heads; others stay, and the kernel refuses those of other heads."""
    return tuple(
        t.repeat_interleave(heads // kv_heads, 1) if t is not None and 1 != t.shape[1] == kv_heads != heads else t
        for t in lists
    )


def check_list_values(q: torch.Tensor, bounds: Any, scored: ScoredPattern, lists: Lists) -> None:
    """Check the values of lists of checked shapes (synchronizes). Rows without a block are not checked.

    Raises:
        ArgumentError: naming the first value that is out of range.
    """
    block = scored.pattern.fixed_block
    if block is None:
        return
    sequence, _ = packed_list_rows(bounds.cu_seqlens_q, q.shape[0], block.q)
    keys = bounds.cu_seqlens_k.diff().long()
    limits = torch.where(sequence < 0, 0, -(-keys[sequence.clamp(min=0).long()] // block.kv))
    exists = (sequence >= 0)[None, None]
    for (count_name, name), (counts, indices) in zip((NAMES[:2], NAMES[2:]), (lists[:2], lists[2:]), strict=True):
        if indices is None:
            continue
        entries = indices.shape[3]
        used = exists[..., None].expand(indices.shape)
        if counts is not None:
            _refuse(count_name, counts, exists & ((counts < 0) | (counts > entries)), f"0 to {entries}")
            used = used & (torch.arange(entries, device=q.device) < counts[..., None])
        wrong = used & ((indices < (-1 if counts is None else 0)) | (indices >= limits[:, None]))
        allowed = "a key block of the sequence" + (", or -1" if counts is None else "")
        _refuse(name, indices, wrong, allowed)


def _refuse(name: str, values: torch.Tensor, wrong: torch.Tensor, allowed: str) -> None:
    """Refuse a tensor with wrong values, and name the first one."""
    places = wrong.nonzero()[:1].tolist()
    if places:
        place = tuple(places[0])
        raise ArgumentError(name, f"is {int(values[place])} at {place}, expected {allowed}")
