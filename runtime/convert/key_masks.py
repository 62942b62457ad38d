"""Key padding masks: lengths of the keys where padding is on the right, and lists for any mask of the keys."""

from __future__ import annotations

import torch

from runtime.block_maps import any_in_blocks, ceil_div
from runtime.convert.bits import numbers_of, partial_and_full
from runtime.convert.checks import BOOLEANS, Shape, check_block, check_count, check_tensor, check_width
from runtime.patterns import BlockLists


def kv_lengths_from_mask(mask: torch.Tensor) -> torch.Tensor:
    """Return the lengths of the keys, for ``kv_lengths`` of a call, if padding is on the right.

    Args:
        mask: bool or integers (batch, kv_len), which keys are visible.

    Returns:
        int32 (batch,). Where a visible key follows a hidden one (padding on the left, a hole) it is -1: a call with
        ``validate=True`` refuses that, another one takes it for 0: the batch sees no key. :func:`from_key_mask` takes
        any mask.

    Raises:
        ArgumentError: naming the argument.
    """
    check_tensor("mask", mask, BOOLEANS, (2,))
    visible = mask != 0
    lengths = visible.sum(1, dtype=torch.int32)
    returns = (visible[:, 1:] & ~visible[:, :-1]).any(1)
    return torch.where(returns, -1, lengths)


def mask_from_kv_lengths(kv_lengths: torch.Tensor, kv_len: int) -> torch.Tensor:
    """Return the key padding mask of lengths.

    Args:
        kv_lengths: int32 or int64 (batch,).
        kv_len: keys of a head.

    Returns:
        bool (batch, kv_len), which keys are visible.

    Raises:
        ArgumentError: naming the argument.
    """
    check_tensor("kv_lengths", kv_lengths, (torch.int32, torch.int64), (1,))
    check_count("kv_len", kv_len)
    return torch.arange(kv_len, device=kv_lengths.device) < kv_lengths[:, None]


def from_key_mask(
    mask: torch.Tensor,
    *,
    q_len: int,
    block: Shape = (128, 128),
    max_blocks: int | None = None,
    max_partial_blocks: int | None = None,
) -> BlockLists:
    """Return the lists of a mask of the keys, which is the same for all queries: any padding, any holes.

    Args:
        mask: bool or integers (batch or 1, kv_len), which keys are visible.
        q_len: queries of a head.
        block: queries and keys of a block.
        max_blocks: entries of a list; by default all key blocks. What the longest is short of is in ``overflow``.
        max_partial_blocks: entries of the list of partial blocks; by default as ``max_blocks``.

    Returns:
        Lists of partial blocks, with bits (block queries * block keys / 8 bytes an entry: 2 KiB with 128 x 128), and of
        full ones, in memory once for each batch: all heads and query blocks share them.

    Raises:
        ArgumentError: naming the argument.
    """
    check_tensor("mask", mask, BOOLEANS, (2,))
    check_count("q_len", q_len)
    check_block("block", block, has_bits=True)
    check_width(max_blocks, max_partial_blocks)
    keys = mask != 0
    listed = any_in_blocks(keys, -1, block[1])[:, None, None]
    full = ~any_in_blocks(~keys, -1, block[1])[:, None, None]
    batches, _ = numbers_of(listed)
    lists = partial_and_full(
        listed & ~full,
        full,
        lambda q, k: keys[batches, k].expand(*k.shape[:4], q.shape[2], k.shape[5]),
        block=block,
        lengths=(block[0], mask.shape[1]),
        max_blocks=max_blocks,
        max_partial_blocks=max_partial_blocks,
    )
    rows = ceil_div(q_len, block[0])
    shared = [
        None if tensor is None else tensor.expand(-1, -1, rows, *tensor.shape[3:])
        for tensor in (lists.kv_num_blocks, lists.kv_indices, lists.full_kv_num_blocks, lists.full_kv_indices)
    ]
    assert lists.mask_bits is not None and shared[0] is not None and shared[1] is not None
    return BlockLists(
        shared[0],
        shared[1],
        *shared[2:],
        block=block,
        mask="bits",
        mask_bits=lists.mask_bits.expand(-1, -1, rows, -1, -1),
        overflow=lists.overflow,
    )
