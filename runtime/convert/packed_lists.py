"""Lists of blocks in packed sequences, from those of each sequence."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from runtime.errors import ArgumentError
from runtime.packed_rows import packed_list_rows
from runtime.patterns import BlockLists, TopK


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
    if not lists or len(lists) != len(lengths):
        raise ArgumentError("lists", f"has {len(lists)} patterns, lengths has {len(lengths)}: pass one for each length")
    first = lists[0]
    for number, each in enumerate(lists):
        same = type(each) is type(first) and isinstance(each, BlockLists | TopK) and each.block == first.block
        if not same or getattr(each, "mask", "") != getattr(first, "mask", ""):
            raise ArgumentError("lists", f"number {number} is {each}, the first one is {first}: expected one kind")
    device = first.kv_indices.device
    bounds = torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0).int()
    sequence, block = (t.tolist() for t in packed_list_rows(bounds, int(bounds[-1]), first.block[0]))

    def packed(parts: list[torch.Tensor], name: str) -> torch.Tensor:
        width = max(part.shape[3] for part in parts) if parts[0].dim() == 4 else 0
        heads = max(part.shape[1] for part in parts)
        shape = (1, heads, len(sequence), *([width] if parts[0].dim() == 4 else []))
        made = torch.full(shape, -1 if width or parts[0].dim() == 4 else 0, dtype=torch.int32, device=device)
        for number, (part, length) in enumerate(zip(parts, lengths, strict=True)):
            rows = -(-length // first.block[0])
            if part.shape[0] != 1 or part.shape[1] not in (1, heads) or part.shape[2] != rows:
                what = f"of sequence {number} has shape {tuple(part.shape)}"
                raise ArgumentError(name, f"{what}, expected (1, 1 or {heads}, {rows}, ...)")
            if rows:
                at = sequence.index(number)
                assert block[at] == 0
                made[:, :, at : at + rows, *([slice(part.shape[3])] if part.dim() == 4 else [])] = part
        return made

    if isinstance(first, TopK):
        indices = packed([each.kv_indices for each in lists], "kv_indices")
        counts = (indices >= 0).int().cumprod(3).sum(3, dtype=torch.int32)
        return BlockLists(counts, indices, block=first.block)
    names = ["kv_num_blocks", "kv_indices"]
    if any(each.full_kv_indices is not None for each in lists):  # type: ignore[union-attr]
        names += ["full_kv_num_blocks", "full_kv_indices"]
    found = {}
    for name in names:
        parts = [getattr(each, name) for each in lists]
        if any(part is None for part in parts):
            raise ArgumentError(name, "is missing in some lists: pass it in all or in none")
        found[name] = packed(parts, name)
    return BlockLists(**found, block=first.block, mask=first.mask)  # type: ignore[union-attr]
