"""Boolean block masks: XAttention, SpargeAttn, flex-block-attn."""

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
    """Return the lists of a boolean block mask.

    Args:
        mask: bool or integers (query_blocks, key_blocks) or (batch or 1, heads or 1, query_blocks, key_blocks):
            whether the queries of a block see the keys of another; anything but 0 is True.
        block: queries and keys of a block of ``mask``, of any size.
        target: those of a block of the lists; by default 16 to 128, those of ``block`` or equal parts of them; where
            there are none, blocks are merged, and those that are visible in part get bits. Kernels of sm_90a have
            blocks of 64 and 128 keys.
        q_len: queries of a head; by default as many as ``mask`` covers.
        kv_len: keys of a head; by default as many as ``mask`` covers.
        max_blocks: entries of a list; by default all key blocks. What the longest is short of is in ``overflow``.
        max_partial_blocks: entries of the list of partial blocks, where blocks are merged; by default ``max_blocks``.

    Returns:
        Lists with ``mask="none"``, or with bits if blocks are merged. Memory: 4 bytes an entry; with bits, block
        queries * block keys / 8 more (2 KiB with 128 x 128); while they are made, 13 bytes for each block of the mask.

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
    """Return the boolean block mask of lists without a mask.

    Args:
        pattern: ``TopK``, or ``BlockLists`` with ``mask="none"``.
        kv_len: keys of a head.

    Returns:
        bool (batch or 1, heads or 1, query_blocks, key_blocks).

    Raises:
        ArgumentError: if the pattern hides some pairs of a block, or has no lists.
    """
    check_count("kv_len", kv_len)
    lists = whole_lists(pattern, "a boolean block mask")
    return map_of(lists.counts, lists.indices, ceil_div(kv_len, pattern.block[1]))
