"""Conversion of key ranges, one contiguous range per query, such as documents of a sequence."""

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
    """Convert key ranges, one per query, to lists.

    Args:
        starts: int32 or int64 (batch or 1, heads or 1, q_len), the first visible key of each query.
        stops: the last visible key of each query plus 1, same shape as ``starts``. If it is not greater than
            ``starts``, the query sees no key.
        kv_len: keys per head; ranges are clipped to it.
        block: queries and keys per block.
        max_blocks: entries per list. Default: the number of key blocks. ``overflow`` has the number of blocks that the
            longest list lacks.
        max_partial_blocks: entries per list of partial blocks. Default: ``max_blocks``.

    Returns:
        Lists of partial blocks, with mask bits (block queries * block keys / 8 bytes per entry: 2 KiB with 128 x 128),
        and of full blocks. During the conversion, one byte per query and key block.

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
    """Convert the boundaries of documents packed in one sequence to lists. A query sees the keys of its own document.

    Args:
        cu_seqlens: int32 or int64 (documents + 1,), start of each document, then the end of the last one;
            nondecreasing. Tokens outside all documents see no key.
        total: tokens of the sequence, which is q_len and kv_len.
        causal: hide keys after the query.
        block: queries and keys per block.
        max_blocks: entries per list. Default: the number of key blocks. ``overflow`` has the number of blocks that the
            longest list lacks.
        max_partial_blocks: entries per list of partial blocks. Default: ``max_blocks``. If documents have at least l
            tokens, a block of q queries meets at most q / l + 2 documents, each with partial blocks at both ends.

    Returns:
        Lists with one batch and one head, which all batches and heads share: see :func:`from_key_ranges`.

    Raises:
        ArgumentError: naming the argument.
    """
    check_tensor("cu_seqlens", cu_seqlens, INTEGERS, (1,))
    check_count("cu_seqlens: its length", cu_seqlens.shape[0], 2)
    check_count("total", total)
    check_flag("causal", causal)
    tokens = torch.arange(total, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    # Index of the first boundary after a token. Before the first document, a range ends where it starts, or earlier.
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
