"""Conversion from and to the lists and counts of cuDNN's block-sparse attention."""

from __future__ import annotations

from typing import NamedTuple

import torch

from runtime.block_maps import ascending, is_listed, shortage
from runtime.convert.bits import bits_of, numbers_of
from runtime.convert.blocks import whole_lists
from runtime.convert.checks import INTEGERS, Shape, check_block, check_shape, check_tensor, check_width
from runtime.errors import ArgumentError
from runtime.patterns import BlockLists, TopK


class Q2K(NamedTuple):
    """Lists of key blocks in cuDNN's format.

    Attributes:
        q2k_block_index: int32 (batch, heads, query_blocks, width), ascending, padded with 0.
        q2k_block_nums: int32 (batch, heads, query_blocks), blocks in each list.
    """

    q2k_block_index: torch.Tensor
    q2k_block_nums: torch.Tensor


def from_q2k(
    q2k_block_index: torch.Tensor,
    q2k_block_nums: torch.Tensor,
    block_sizes: torch.Tensor | None = None,
    *,
    block: Shape,
    max_partial_blocks: int | None = None,
) -> TopK | BlockLists:
    """Convert the lists of cuDNN's block-sparse attention.

    Args:
        q2k_block_index: int32 or int64 (batch or 1, heads or 1, query_blocks, width), the key blocks of each query
            block, in any order, without duplicates.
        q2k_block_nums: int32 or int64 (batch or 1, heads or 1, query_blocks), valid entries of each list.
        block_sizes: int32 or int64 (key_blocks,), (batch or 1, key_blocks) or (batch or 1, heads or 1, key_blocks):
            number of visible keys at the start of each key block. None if all keys are visible.
        block: queries and keys per block.
        max_partial_blocks: entries per list of blocks that ``block_sizes`` shortens. Default: the lists' width.

    Returns:
        ``TopK``. With ``block_sizes``, ``BlockLists``: short blocks in the partial list, with mask bits (block queries
        * block keys / 8 bytes per entry), others in the full list. A block with 0 visible keys is in neither.

    Raises:
        ArgumentError: naming the argument.
    """
    check_tensor("q2k_block_index", q2k_block_index, INTEGERS, (4,))
    check_tensor("q2k_block_nums", q2k_block_nums, INTEGERS, (3,), q2k_block_index.device)
    lists = zip(("batch", "heads", "query_blocks"), q2k_block_index.shape, strict=False)
    check_shape("q2k_block_nums", q2k_block_nums, *lists)
    check_block("block", block, has_bits=block_sizes is not None)
    check_width(None, max_partial_blocks)
    listed = is_listed(q2k_block_nums, q2k_block_index)
    if block_sizes is None:
        if max_partial_blocks is not None:
            raise ArgumentError("max_partial_blocks", "is given, but block_sizes is not: no block is short")
        return TopK(ascending(q2k_block_index, listed).indices, block=block)
    return _with_sizes(q2k_block_index, listed, block_sizes, block, max_partial_blocks)


def to_q2k(pattern: TopK | BlockLists) -> Q2K:
    """Convert lists without a mask to cuDNN's format.

    Args:
        pattern: ``TopK``, or ``BlockLists`` with ``mask="none"``.

    Returns:
        (q2k_block_index, q2k_block_nums), int32.

    Raises:
        ArgumentError: if the pattern hides some pairs of a block, or has no lists.
    """
    lists = whole_lists(pattern, "a q2k list")
    return Q2K(lists.indices.clamp(min=0), lists.counts)


def _with_sizes(
    index: torch.Tensor, listed: torch.Tensor, block_sizes: torch.Tensor, block: Shape, most: int | None
) -> BlockLists:
    """Lists of short blocks, with mask bits, and of the other blocks."""
    check_tensor("block_sizes", block_sizes, INTEGERS, (1, 2, 3), index.device)
    of_blocks = block_sizes[(None,) * (3 - block_sizes.dim())] if block_sizes.dim() != 2 else block_sizes[:, None]
    key_blocks = of_blocks.shape[2]
    for name, there, size in zip(("batch", "heads"), index.shape, of_blocks.shape, strict=False):
        if 1 not in (there, size) and there != size:
            raise ArgumentError(
                "block_sizes", f"has shape {tuple(block_sizes.shape)}: {name} is {size}, expected {there}"
            )
    batch, heads = (max(pair) for pair in zip(index.shape[:2], of_blocks.shape[:2], strict=True))
    index, listed = (tensor.expand(batch, heads, *tensor.shape[2:]) for tensor in (index, listed))
    of_blocks = of_blocks.expand(batch, heads, key_blocks)
    known = listed & (index >= 0) & (index < key_blocks)
    sizes = of_blocks[:, :, None].expand(*index.shape[:3], -1).gather(3, index.clamp(0, key_blocks - 1).long())
    short = ascending(index, known & (sizes > 0) & (sizes < block[1]))
    # Invalid block indices stay, so that validation finds them.
    whole = ascending(index, listed & (~known | (sizes >= block[1])))
    width = index.shape[3] if most is None else min(most, index.shape[3])
    entries = short.indices[..., :width].contiguous()

    def visible(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        del queries
        return keys % block[1] < of_blocks[*numbers_of(of_blocks), keys // block[1]]

    lengths = index.shape[2] * block[0], key_blocks * block[1]
    return BlockLists(
        short.counts.clamp(max=width),
        entries,
        whole.counts,
        whole.indices,
        block=block,
        mask="bits",
        mask_bits=bits_of(entries, block, *lengths, visible),
        overflow=shortage(short.counts, width) if width < index.shape[3] else None,
    )
