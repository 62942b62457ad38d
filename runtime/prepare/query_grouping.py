"""Grouping of query blocks with similar lists into tiles that share loads."""

from __future__ import annotations

import torch

_WEIGHT_BYTES = 1 << 28  # bytes of the matrices of a group of heads, with 4 bytes per pair of query blocks
_TAKEN = -1.0


def find_query_order(kv_indices: torch.Tensor, key_blocks: int, tile_blocks: int) -> torch.Tensor:
    """Order query blocks so that each ``tile_blocks`` consecutive ones have many listed KV blocks in common.

    Two lists form a pair if neither has more in common with another unmatched list. The pairs form a greedy matching
    (locally dominant edges: R. Preis, "Linear time 1/2-approximation algorithm for maximum weighted matching in general
    graphs", STACS 1999), computed for all heads at once. For tiles of three blocks, the best third of the pairs are
    then matched with one more list each in the same way. The result depends only on the lists.

    Args:
        kv_indices: integers (batch, heads, query_blocks, k): lists in any order. Repeated entries count once; entries
            out of range are ignored.
        key_blocks: number of KV blocks.
        tile_blocks: query blocks of a tile, 2 or 3.

    The matrices of a head take about 20 bytes per pair of query blocks: 5 GB for a million queries in blocks of 64.

    Returns:
        int32 (batch, heads, query_blocks): a permutation of the query blocks in each row.
    """
    *lead, rows, _ = kv_indices.shape
    lists = kv_indices.reshape(-1, *kv_indices.shape[2:]).long()
    together = max(1, _WEIGHT_BYTES // (4 * max(rows, key_blocks + 1) * max(rows, 1)))
    orders = [_order(group, key_blocks, tile_blocks) for group in lists.split(together)]
    return torch.cat(orders).reshape(*lead, rows).to(torch.int32)


def _order(lists: torch.Tensor, key_blocks: int, tile_blocks: int) -> torch.Tensor:
    """Order of the query blocks of some heads, (heads, query_blocks)."""
    heads, rows, _ = lists.shape
    known = (lists >= 0) & (lists < key_blocks)
    # fp16 uses tensor cores, and sums of up to 2048 ones are exact in it.
    dtype = torch.float16 if lists.is_cuda else torch.float32
    listed = torch.zeros((heads, rows, key_blocks + 1), dtype=dtype, device=lists.device)
    listed.scatter_(2, lists.where(known, key_blocks), 1.0)
    listed = listed[:, :, :key_blocks]
    number = torch.arange(rows, device=lists.device).expand(heads, rows)

    common = _untied(listed @ listed.mT)
    common.diagonal(dim1=1, dim2=2).fill_(_TAKEN)
    kept = common.clone() if tile_blocks == 3 else common
    mate = _match(common)
    # The first block of a tile identifies it. Unmatched blocks come last.
    tile = torch.where(mate < 0, rows, torch.minimum(number, mate))
    if tile_blocks == 3:
        tiles = rows // 3
        weight = kept.gather(2, mate.clamp(min=0)[:, :, None])[:, :, 0].masked_fill(mate <= number, _TAKEN)
        best = weight.argsort(dim=1, descending=True, stable=True)[:, :tiles]  # first blocks of the best pairs
        both = torch.stack([best, mate.gather(1, best).clamp(min=0)], 2)
        in_pair = torch.zeros_like(number, dtype=torch.bool).scatter_(1, both.flatten(1), True)
        union = torch.maximum(*(_rows_of(listed, both[:, :, i]) for i in range(2)))
        third = _match(_untied(union @ listed.mT).masked_fill_(in_pair[:, None], _TAKEN))
        tile = torch.full_like(number, rows).scatter_(1, both.flatten(1), best.repeat_interleave(2, 1))
        # A missing third block (-1) is written after the last block and dropped.
        tile = torch.nn.functional.pad(tile, (0, 1)).scatter_(1, third.where(third >= 0, rows), best)[:, :rows]
    return tile.argsort(dim=1, stable=True)


def _rows_of(listed: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    return listed.gather(1, numbers[:, :, None].expand(-1, -1, listed.shape[2]))


def _untied(common: torch.Tensor) -> torch.Tensor:
    """Numbers of common blocks, float32, each plus a distinct fraction that is equal for (i, j) and (j, i).

    With ties, all rows would choose the same column, and most of them would have to choose again.
    """
    height, width = common.shape[1:]
    # int32 and in place, because the matrices of long sequences are large. Overflowing products are fine.
    i = torch.arange(height, dtype=torch.int32, device=common.device)[:, None]
    j = torch.arange(width, dtype=torch.int32, device=common.device)
    mixed = (i * j).mul_(30011).add_(i * 40503).add_(j * 40503)  # arbitrary numbers without a pattern
    return mixed.remainder_(65521).float().div_(65536).add(common)


def _match(weights: torch.Tensor) -> torch.Tensor:
    """Column of each row in a greedy matching, or -1, for each matrix of (heads, rows, columns). Negative weights
    forbid a pair; ``weights`` is overwritten."""
    found = torch.full(weights.shape[:2], -1, dtype=torch.int64, device=weights.device)
    if weights.numel() == 0:
        return found
    while True:
        (weight, column), (most, row) = weights.max(2), weights.max(1)
        rows = torch.arange(weights.shape[1], device=weights.device)
        columns = torch.arange(weights.shape[2], device=weights.device)
        chosen = (row.gather(1, column) == rows) & (weight >= 0)
        if not bool(chosen.any()):
            return found
        found = torch.where(chosen, column, found)
        weights.masked_fill_(chosen[:, :, None], _TAKEN)
        weights.masked_fill_(((column.gather(1, row) == columns) & (most >= 0))[:, None], _TAKEN)
