"""CSR of the block matrix (indptr and indices, as FlashInfer and SciPy have it), both ways."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from runtime.block_maps import ascending, ceil_div, is_listed, shortage
from runtime.convert.blocks import whole_lists
from runtime.convert.checks import INTEGERS, Shape, check_block, check_count, check_shape, check_tensor, check_width
from runtime.patterns import BlockLists, TopK


class Csr(NamedTuple):
    """Block rows of a block-sparse attention matrix.

    Attributes:
        indptr: int32 (batch or 1, heads or 1, query_blocks + 1), where the blocks of each query block begin.
        indices: int32 (batch or 1, heads or 1, room), key blocks, ascending in each query block; -1 behind the last
            one: there is room for as many as the lists had entries.
    """

    indptr: torch.Tensor
    indices: torch.Tensor


def from_csr(
    indptr: torch.Tensor, indices: torch.Tensor, *, block: Shape, kv_len: int, max_blocks: int | None = None
) -> BlockLists:
    """Return the lists of block rows.

    Args:
        indptr: int32 or int64 (query_blocks + 1,) or (batch or 1, heads or 1, query_blocks + 1), where the blocks of
            each query block begin among ``indices``.
        indices: int32 or int64 (blocks,) or (batch or 1, heads or 1, blocks), key blocks, in any order within a query
            block, each once.
        block: queries and keys of a block.
        kv_len: keys of a head.
        max_blocks: entries of a list; by default all key blocks, or all ``indices`` if there are fewer. What the
            longest is short of is in ``overflow``.

    Returns:
        Lists with ``mask="none"``. Memory: 4 bytes an entry; 40 while they are made.

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
    numbers = F.pad(numbers, (0, 1), value=-1)  # one at least
    found = numbers.gather(2, place.clamp(0, room).long().flatten(2)).view(place.shape)
    lists = ascending(found, is_listed(counts, found))
    return BlockLists(counts.clamp(0, width), lists.indices, block=block, overflow=shortage(counts, width))


def to_csr(pattern: TopK | BlockLists) -> Csr:
    """Return the block rows of lists without a mask.

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
    # What a list does not have goes to a place behind them all.
    place = torch.where(is_listed(lists.counts, lists.indices), place, room).flatten(2)
    empty = torch.full((*ends.shape[:2], room + 1), -1, dtype=torch.int32, device=ends.device)
    return Csr(indptr, empty.scatter(2, place.long(), lists.indices.flatten(2))[..., :room].contiguous())
