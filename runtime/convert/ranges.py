"""Queries that see a run of keys each: documents of one sequence, and ranges in general."""

from __future__ import annotations

import torch

from runtime.block_maps import any_in_blocks, ceil_div
from runtime.checks import check_flag
from runtime.convert.bits import numbers_of, partial_and_full
from runtime.convert.checks import (
    INTEGERS,
    Shape,
    check_block,
    check_count,
    check_shape,
    check_tensor,
    check_width,
)
from runtime.patterns import BlockLists


def from_key_ranges(
    starts: torch.Tensor,
    stops: torch.Tensor,
    *,
    kv_len: int,
    block: Shape = (128, 128),
    max_blocks: int | None = None,
    max_partial_blocks: int | None = None,
) -> BlockLists:
    """Return the lists of queries that see a run of keys each.

    Args:
        starts: int32 or int64 (batch or 1, heads or 1, q_len), the first key that each query sees.
        stops: the same, one more than the last one; where it is not more than ``starts``, a query sees none.
        kv_len: keys of a head; keys out of range are not seen.
        block: queries and keys of a block.
        max_blocks: entries of a list; by default all key blocks. What the longest is short of is in ``overflow``.
        max_partial_blocks: entries of the list of partial blocks; by default as ``max_blocks``.

    Returns:
        Lists of partial blocks, with bits (block queries * block keys / 8 bytes an entry: 2 KiB with 128 x 128), and of
        full ones. While they are made, a byte for each query and key block.

    Raises:
        ArgumentError: naming the argument.
    """
    check_tensor("starts", starts, INTEGERS, (3,))
    check_tensor("stops", stops, INTEGERS, (3,), starts.device)
    check_shape("stops", stops, *zip(("batch", "heads", "q_len"), starts.shape, strict=True))
    check_count("kv_len", kv_len)
    check_block("block", block, has_bits=True)
    check_width(max_blocks, max_partial_blocks)
    queries, keys = block
    first = torch.arange(ceil_div(kv_len, keys), device=starts.device) * keys
    last = (first + keys).clamp(max=kv_len)
    low, high = starts.unsqueeze(-1), stops.unsqueeze(-1)
    listed = any_in_blocks((low < last) & (high > first) & (low < high), -2, queries)
    full = ~any_in_blocks((low > first) | (high < last), -2, queries)
    place = numbers_of(starts)

    def visible(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return (k >= starts[*place, q]) & (k < stops[*place, q])

    return partial_and_full(
        listed & ~full,
        full,
        visible,
        block=block,
        lengths=(starts.shape[2], kv_len),
        max_blocks=max_blocks,
        max_partial_blocks=max_partial_blocks,
    )


def from_cu_seqlens(
    cu_seqlens: torch.Tensor,
    *,
    total: int,
    causal: bool,
    block: Shape = (128, 128),
    max_blocks: int | None = None,
    max_partial_blocks: int | None = None,
) -> BlockLists:
    """Return the lists of documents that lie one after the other in one sequence: a query sees the keys of its own.

    Args:
        cu_seqlens: int32 or int64 (documents + 1,), where each document begins and, last, where the last one ends; not
            falling. Tokens outside of them see none.
        total: tokens of the sequence: queries and keys of a head.
        causal: whether a query does not see later keys.
        block: queries and keys of a block.
        max_blocks: entries of a list; by default all key blocks. What the longest is short of is in ``overflow``.
        max_partial_blocks: entries of the list of partial blocks; by default as ``max_blocks``. Of documents of l
            tokens or more a query block of q meets at most q / l + 2, and of each, some blocks at both ends.

    Returns:
        Lists for one batch and one head, which all share: see :func:`from_key_ranges`.

    Raises:
        ArgumentError: naming the argument.
    """
    check_tensor("cu_seqlens", cu_seqlens, INTEGERS, (1,))
    check_count("cu_seqlens: its length", cu_seqlens.shape[0], 2)
    check_count("total", total)
    check_flag("causal", causal)
    tokens = torch.arange(total, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    # Number of the first boundary behind a token. Before the first document a run ends where it starts, or earlier.
    behind = torch.searchsorted(cu_seqlens, tokens, right=True)
    last = cu_seqlens.shape[0] - 1
    starts = cu_seqlens[(behind - 1).clamp(min=0)]
    ends = tokens + 1 if causal else cu_seqlens[behind.clamp(max=last)]
    stops = torch.where(behind <= last, ends, 0)
    return from_key_ranges(
        starts[None, None],
        stops[None, None],
        kv_len=total,
        block=block,
        max_blocks=max_blocks,
        max_partial_blocks=max_partial_blocks,
    )
