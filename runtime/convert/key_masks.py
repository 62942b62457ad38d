"""Conversion of key padding masks: to lengths if padding is on the right, and to lists for any mask of the keys."""

from __future__ import annotations

import torch

from runtime.block_maps import any_in_blocks, ceil_div
from runtime.convert.bits import numbers_of, partial_and_full
from runtime.convert.checks import BOOLEANS, Shape, check_block, check_count, check_tensor, check_width
from runtime.patterns import BlockLists


def kv_lengths_from_mask(mask: torch.Tensor) -> torch.Tensor:
    """Convert a key padding mask with padding on the right to ``kv_lengths`` (``seqused_k``, ``cache_seqlens``).

    Args:
        mask: bool or integers (batch, kv_len), True for visible keys.

    Returns:
        int32 (batch,). The length is -1 if a visible key follows a hidden one (padding on the left, a hole). A call
        with ``validate=True`` refuses -1; other calls treat it as 0, so that the batch sees no key.
        :func:`from_key_mask` takes any mask.

    Raises:
        ArgumentError: naming the argument.
    """
    check_tensor("mask", mask, BOOLEANS, (2,))
    visible = mask != 0
    lengths = visible.sum(1, dtype=torch.int32)
    returns = (visible[:, 1:] & ~visible[:, :-1]).any(1)
    return torch.where(returns, -1, lengths)


def mask_from_kv_lengths(kv_lengths: torch.Tensor, kv_len: int) -> torch.Tensor:
    """Convert lengths to a key padding mask.

    Args:
        kv_lengths: int32 or int64 (batch,).
        kv_len: keys per head.

    Returns:
        bool (batch, kv_len), True for visible keys.

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
    """Convert a mask of the keys, which all queries share, to lists. Padding and holes may be anywhere.

    Args:
        mask: bool or integers (batch or 1, kv_len), True for visible keys.
        q_len: queries per head.
        block: queries and keys per block.
        max_blocks: entries per list. Default: the number of key blocks. ``overflow`` has the number of blocks that the
            longest list lacks.
        max_partial_blocks: entries per list of partial blocks. Default: ``max_blocks``.

    Returns:
        Lists of partial blocks, with mask bits (block queries * block keys / 8 bytes per entry: 2 KiB with 128 x 128),
        and of full blocks. All heads and query blocks of a batch share one copy in memory.

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
