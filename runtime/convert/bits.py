"""``mask_bits``: one bit per pair of the partial blocks, set if the pair is visible."""

from __future__ import annotations

from collections.abc import Callable

import torch

from runtime.block_maps import lists_of
from runtime.convert.blocks import most_short
from runtime.convert.checks import WORD, Shape
from runtime.patterns import BlockLists
from runtime.prepare.mask_bits import pack_mask_bits

PAIRS_AT_ONCE = 1 << 24
"""Pairs evaluated at a time: 16 MiB as booleans, 128 MiB as 64-bit positions."""
Visible = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Visibility of pairs: bool, broadcastable to (batch, heads, rows, entries, block queries, block keys).

The arguments are indices of queries, int64 (rows, 1, block queries, 1), and of keys, int64 (batch, heads, rows,
entries, 1, block keys), all within the sequence.
"""


def unpack(mask_bits: torch.Tensor, block: Shape) -> torch.Tensor:
    """The bits of words as booleans (..., block queries, block keys)."""
    places = torch.arange(WORD, dtype=torch.int32, device=mask_bits.device)
    pairs = (mask_bits.unsqueeze(-1) >> places & 1).to(torch.bool)
    return pairs.reshape(*mask_bits.shape[:-1], *block)


def bits_of(indices: torch.Tensor, block: Shape, q_len: int, kv_len: int, visible: Visible) -> torch.Tensor:
    """Mask bits of the listed blocks. Bits of pairs outside the sequence, and of entries of -1, are 0.

    Args:
        indices: int32 (batch, heads, query_blocks, entries).
        block: queries and keys per block.
        q_len: queries per head.
        kv_len: keys per head.
        visible: visibility of pairs.

    Returns:
        int32 (batch, heads, query_blocks, entries, block queries * block keys / 32).
    """
    queries, keys = block
    batch, heads, rows, entries = indices.shape
    device = indices.device
    of_runs = []  # concatenated, not written into one tensor: a tensor allocated here is not mapped by torch.vmap
    of_entry = max(1, batch * heads * queries * keys)
    most_entries = max(1, min(entries, PAIRS_AT_ONCE // of_entry))
    most_rows = max(1, PAIRS_AT_ONCE // (of_entry * most_entries))
    for row in range(0, rows, most_rows):
        of_rows = slice(row, min(row + most_rows, rows))
        q = torch.arange(of_rows.start * queries, of_rows.stop * queries, device=device).view(-1, 1, queries, 1)
        parts = []
        for entry in range(0, entries, most_entries):
            some = indices[:, :, of_rows, entry : entry + most_entries, None, None].long()
            k = some.clamp(min=0) * keys + torch.arange(keys, device=device)
            inside = (some >= 0) & (k < kv_len) & (q < q_len)
            seen = visible(q.clamp(max=q_len - 1), k.clamp(max=kv_len - 1)) & inside
            parts.append(pack_mask_bits(seen))
        if parts:
            of_runs.append(_joined(parts, 3))
    if not of_runs:
        return torch.empty((*indices.shape, queries * keys // WORD), dtype=torch.int32, device=device)
    return _joined(of_runs, 2)


def _joined(parts: list[torch.Tensor], dim: int) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def numbers_of(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices of a tensor's batches and heads, shaped to broadcast with indices of queries and keys."""
    batches, heads = (torch.arange(size, device=tensor.device) for size in tensor.shape[:2])
    return batches.view(-1, 1, 1, 1, 1, 1), heads.view(-1, 1, 1, 1, 1)


def partial_and_full(
    partial: torch.Tensor,
    full: torch.Tensor,
    visible: Visible,
    *,
    block: Shape,
    lengths: tuple[int, int],
    max_blocks: int | None,
    max_partial_blocks: int | None,
) -> BlockLists:
    """Lists of partial and full blocks from two maps, with mask bits of the partial blocks.

    Args:
        partial: bool (batch, heads, query_blocks, key_blocks).
        full: bool, the same shape; no block is both partial and full.
        visible: visibility of the pairs of partial blocks.
        block: queries and keys per block.
        lengths: queries and keys per head.
        max_blocks: upper bound of the entries per list.
        max_partial_blocks: upper bound of the entries per list of partial blocks; None for ``max_blocks``.
    """
    most = max_blocks if max_partial_blocks is None else max_partial_blocks
    some, whole = lists_of(partial, most), lists_of(full, max_blocks)
    return BlockLists(
        some.counts,
        some.indices,
        whole.counts,
        whole.indices,
        block=block,
        mask="bits",
        mask_bits=bits_of(some.indices, block, *lengths, visible),
        overflow=most_short(some.overflow, whole.overflow),
    )
