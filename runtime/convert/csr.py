"""Conversion from and to CSR of the block matrix (indptr and indices, as in FlashInfer and SciPy)."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from runtime.block_maps import ascending, ceil_div, is_listed, shortage
from runtime.convert.blocks import whole_lists
from runtime.convert.checks import INTEGERS, Shape, check_block, check_count, check_shape, check_tensor, check_width
from runtime.patterns import BlockLists, TopK


class Csr(NamedTuple):
    """CSR of a block-sparse attention matrix.

    Attributes:
        indptr: int32 (batch or 1, heads or 1, query_blocks + 1), the offset of each query block in ``indices``.
        indices: int32 (batch or 1, heads or 1, entries), key blocks, ascending in each query block. It has as many
            entries as the lists, padded with -1.
    """

    indptr: torch.Tensor
    indices: torch.Tensor


def from_csr(
    indptr: torch.Tensor, indices: torch.Tensor, *, block: Shape, kv_len: int, max_blocks: int | None = None
) -> BlockLists:
    """Convert CSR to block lists.

    Args:
        indptr: int32 or int64 (query_blocks + 1,) or (batch or 1, heads or 1, query_blocks + 1), the offset of each
            query block in ``indices``.
        indices: int32 or int64 (blocks,) or (batch or 1, heads or 1, blocks), key blocks, in any order within a query
            block, without duplicates.
        block: queries and keys per block.
        kv_len: keys per head.
        max_blocks: entries per list. Default: the number of key blocks, or of ``indices`` if smaller. ``overflow`` has
            the number of blocks that the longest list lacks.

    Returns:
        Lists with ``mask="none"``. Memory: 4 bytes per entry; 40 during the conversion.

    Raises:
        ArgumentError: naming the argument.
    """
    check_tensor("indptr", indptr, INTEGERS, (1, 3))
    check_tensor("indices", indices, INTEGERS, (indptr.dim(),), indptr.device)
    if indptr.dim() == 3:
        check_shape("indices", indices, ("batch", indptr.shape[0]), ("heads", indptr.shape[1]), ("blocks", None))
    check_block("block", block)
    check_count("kv_len", kv_len)
    check_width(max_blocks)
    check_count("indptr: its length", indptr.shape[-1], 2)
    starts, numbers = (tensor if tensor.dim() == 3 else tensor[None, None] for tensor in (indptr, indices))
    room = numbers.shape[2]
    most = max(1, min(ceil_div(kv_len, block[1]), room))
    width = most if max_blocks is None else min(max_blocks, most)
    counts = starts.diff(dim=-1).to(torch.int32)
    place = starts[..., :-1, None] + torch.arange(width, device=indptr.device)
    numbers = F.pad(numbers, (0, 1), value=-1)  # at least one entry
    found = numbers.gather(2, place.clamp(0, room).long().flatten(2)).view(place.shape)
    lists = ascending(found, is_listed(counts, found))
    return BlockLists(counts.clamp(0, width), lists.indices, block=block, overflow=shortage(counts, width))


def to_csr(pattern: TopK | BlockLists) -> Csr:
    """Convert lists without a mask to CSR.

    Args:
        pattern: ``TopK``, or ``BlockLists`` with ``mask="none"``.

    Returns:
        (indptr, indices), int32.

    Raises:
        ArgumentError: if the pattern hides some pairs of a block, or has no lists.
    """
    lists = whole_lists(pattern, "a CSR matrix")
    ends = lists.counts.cumsum(-1, dtype=torch.int32)
    indptr = F.pad(ends, (1, 0))
    room = lists.indices.shape[2] * lists.indices.shape[3]
    place = indptr[..., :-1, None] + torch.arange(lists.indices.shape[3], device=ends.device)
    # Unused entries are written to an extra place at the end.
    place = torch.where(is_listed(lists.counts, lists.indices), place, room).flatten(2)
    empty = torch.full((*ends.shape[:2], room + 1), -1, dtype=torch.int32, device=ends.device)
    return Csr(indptr, empty.scatter(2, place.long(), lists.indices.flatten(2))[..., :room].contiguous())
