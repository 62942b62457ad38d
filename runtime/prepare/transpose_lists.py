"""Lists of query blocks of each key block, the transpose of lists of key blocks: made on the device, without a wait."""

from __future__ import annotations

from typing import NamedTuple

import torch


class TransposedLists(NamedTuple):
    """Which query blocks list each key block, and how often.

    Attributes:
        offsets: int32 (batch|1, heads|1, key_blocks + 1), where the entries of each key block begin, and their end.
        entries: int32 (batch|1, heads|1, any), twice a query block, plus 1 if the key block is a partial one of it.
    """

    offsets: torch.Tensor
    entries: torch.Tensor


def transpose_lists(
    key_blocks: int,
    kv_indices: torch.Tensor,
    kv_num_blocks: torch.Tensor | None = None,
    full_kv_indices: torch.Tensor | None = None,
    full_kv_num_blocks: torch.Tensor | None = None,
) -> TransposedLists:
    """Transpose lists of key blocks.

    The order is that of the lists: partial blocks before full ones, query blocks ascending, each as often as it is
    listed. Entries that name no block, and those beyond a count, are left out. Can be captured in a CUDA graph.

    Args:
        key_blocks: key blocks that there are.
        kv_indices: int32 (batch|1, heads|1, query_blocks, any), lists of key blocks; partial ones, if there are counts.
        kv_num_blocks: int32 (batch|1, heads|1, query_blocks), how many entries of each list count; None: all.
        full_kv_indices: lists of full blocks, likewise; None without.
        full_kv_num_blocks: their counts.

    Returns:
        The lists of the key blocks.
    """
    parts = [_part(key_blocks, kv_indices, kv_num_blocks, partial=kv_num_blocks is not None)]
    if full_kv_indices is not None:
        parts.append(_part(key_blocks, full_kv_indices, full_kv_num_blocks, partial=False))
    lead = torch.broadcast_shapes(*(blocks.shape[:2] for blocks, _ in parts))
    blocks, codes = (torch.cat([tensor.expand(*lead, -1) for tensor in of], -1) for of in zip(*parts, strict=True))
    ordered = blocks.sort(dim=-1, stable=True)
    each = torch.arange(key_blocks + 1, dtype=torch.int32, device=blocks.device).expand(*lead, -1).contiguous()
    offsets = torch.searchsorted(ordered.values, each, out_int32=True)
    return TransposedLists(offsets, codes.gather(-1, ordered.indices))


def _part(
    key_blocks: int, lists: torch.Tensor, counts: torch.Tensor | None, *, partial: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the key block of each entry, ``key_blocks`` for none, and what it becomes, flat for each head."""
    rows, length = lists.shape[2:]
    known = (lists >= 0) & (lists < key_blocks)
    if counts is not None:
        known &= torch.arange(length, dtype=torch.int32, device=lists.device) < counts[..., None]
    codes = 2 * torch.arange(rows, dtype=torch.int32, device=lists.device)[:, None] + int(partial)
    blocks = torch.where(known, lists, key_blocks).flatten(2)
    return blocks, codes.expand(*blocks.shape[:2], rows, length).flatten(2)
