"""Lists of selected blocks under a causal mask: full blocks apart from the blocks on the diagonal."""

from __future__ import annotations

import torch

from runtime.block_maps import ceil_div, is_listed
from runtime.convert.checks import Shape, check_block, check_count, check_shape, check_tensor
from runtime.errors import ArgumentError
from runtime.patterns import BlockLists


def from_causal_lists(kv_indices: torch.Tensor, *, q_len: int, kv_len: int, block: Shape = (128, 128)) -> BlockLists:
    """Convert ascending lists of key blocks to a pattern with a causal mask.

    ``select_topk_blocks(..., causal=True)`` returns such lists. The causal mask is aligned bottom right, as in
    ``Causal``.

    Args:
        kv_indices: int32 (batch or 1, list heads, ceil(q_len / block[0]), k), each list ascending and padded with -1.
            Lists in another order lose blocks.
        q_len: queries per head.
        kv_len: keys per head, at least q_len.
        block: queries and keys of a block.

    Returns:
        Lists with ``mask="causal"``: full blocks in lists of k entries, and blocks on the diagonal in partial lists of
        ceil(block[0] / block[1]) + 1 entries. Blocks after the diagonal are dropped.

    Raises:
        ArgumentError: naming the argument.
    """
    check_tensor("kv_indices", kv_indices, (torch.int32,), (4,))
    check_block("block", block)
    check_count("q_len", q_len)
    check_count("kv_len", kv_len)
    if kv_len < q_len:
        raise ArgumentError("kv_len", f"is {kv_len}, less than q_len {q_len}: the first queries would see no key")
    queries, keys = block
    rows = ceil_div(q_len, queries)
    check_shape("kv_indices", kv_indices, ("batch", None), ("heads", None), ("query_blocks", rows), ("k", None))
    first = torch.arange(rows, device=kv_indices.device) * queries + (kv_len - q_len)
    last = (first + queries - 1).clamp(max=kv_len - 1)
    begins = kv_indices.long() * keys
    ends = (begins + keys).clamp(max=kv_len)
    seen = (kv_indices >= 0) & (begins <= last[:, None])
    full = (seen & (ends - 1 <= first[:, None])).sum(-1, dtype=torch.int32)
    partial = seen.sum(-1, dtype=torch.int32) - full
    # Ascending: full blocks come first, then the few on the diagonal.
    width = min(ceil_div(queries, keys) + 1, kv_indices.shape[3])
    place = full[..., None].long() + torch.arange(width, device=kv_indices.device)
    on_diagonal = kv_indices.gather(3, place.clamp(max=kv_indices.shape[3] - 1))
    on_diagonal = torch.where(place < (full + partial)[..., None], on_diagonal, -1)
    before = torch.where(is_listed(full, kv_indices), kv_indices, -1)
    return BlockLists(partial, on_diagonal, full, before, block=(queries, keys), mask="causal")
