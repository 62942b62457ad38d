"""Conversion from and to boolean block masks, as in XAttention, SpargeAttn and flex-block-attn."""

from __future__ import annotations

import torch

from runtime.block_maps import ceil_div, map_of
from runtime.convert.blocks import whole_lists
from runtime.convert.checks import BOOLEANS, Shape, check_count, check_pair, check_shape, check_tensor
from runtime.convert.regrid import BlockMaps
from runtime.patterns import BlockLists, TopK


def from_bool_blocks(
    mask: torch.Tensor,
    *,
    block: Shape,
    target: Shape | None = None,
    q_len: int | None = None,
    kv_len: int | None = None,
    max_blocks: int | None = None,
    max_partial_blocks: int | None = None,
) -> BlockLists:
    """Convert a boolean block mask to lists.

    Args:
        mask: bool or integers (query_blocks, key_blocks) or (batch or 1, heads or 1, query_blocks, key_blocks):
            True if a query block sees a key block; every non-zero value is True.
        block: queries and keys per block of ``mask``, of any size.
        target: queries and keys per block of the lists, 16 to 128. Default: ``block`` or the largest equal parts of it;
            if there are none, blocks are merged, and partially visible blocks get mask bits. Kernels of sm_90a support
            blocks of 64 and 128 keys.
        q_len: queries per head. Default: the length that ``mask`` covers.
        kv_len: keys per head. Default: the length that ``mask`` covers.
        max_blocks: entries per list. Default: the number of key blocks. ``overflow`` has the number of blocks that the
            longest list lacks.
        max_partial_blocks: entries per list of partial blocks, if blocks are merged. Default: ``max_blocks``.

    Returns:
        Lists with ``mask="none"``, or with mask bits if blocks are merged. Memory: 4 bytes per entry; with mask bits,
        block queries * block keys / 8 more (2 KiB with 128 x 128); during the conversion, 13 bytes per block of the
        mask.

    Raises:
        ArgumentError: naming the argument.
    """
    check_tensor("mask", mask, BOOLEANS, (2, 4))
    check_pair("block", block)
    blocks = (mask != 0)[None, None] if mask.dim() == 2 else mask != 0
    q_len = blocks.shape[2] * block[0] if q_len is None else q_len
    kv_len = blocks.shape[3] * block[1] if kv_len is None else kv_len
    check_count("q_len", q_len)
    check_count("kv_len", kv_len)
    sizes = ("query_blocks", ceil_div(q_len, block[0])), ("key_blocks", ceil_div(kv_len, block[1]))
    check_shape("mask", mask, *(("batch", None), ("heads", None))[: mask.dim() - 2], *sizes)
    return BlockMaps(blocks, (block[0], block[1]), q_len, kv_len).lists(target, max_blocks, max_partial_blocks)


def to_bool_blocks(pattern: TopK | BlockLists, *, kv_len: int) -> torch.Tensor:
    """Convert lists without a mask to a boolean block mask.

    Args:
        pattern: ``TopK``, or ``BlockLists`` with ``mask="none"``.
        kv_len: keys per head.

    Returns:
        bool (batch or 1, heads or 1, query_blocks, key_blocks).

    Raises:
        ArgumentError: if the pattern hides some pairs of a block, or has no lists.
    """
    check_count("kv_len", kv_len)
    lists = whole_lists(pattern, "a boolean block mask")
    return map_of(lists.counts, lists.indices, ceil_div(kv_len, pattern.block[1]))
