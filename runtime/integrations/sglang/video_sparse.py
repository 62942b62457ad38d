"""Video sparse attention (VSA) over tiles of 64 tokens: a coarse part over the means of tiles, and a fine part.

The fine part of a tile sees the key tiles with the highest scores of means.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from runtime.ops.attention import block_sparse_attention
from runtime.patterns import BlockLists, Pattern, TopK

TILE = 64
"""Slots of a tile: 4 x 4 x 4."""
_REAL = "real[kv_idx]"


class Coarse(NamedTuple):
    """The coarse part.

    Attributes:
        out: (batch, heads, tiles, head_size), in the type of q.
        selected: int64 (batch, heads, tiles, topk), key tiles of each query tile in ascending order.
    """

    out: torch.Tensor
    selected: torch.Tensor


def coarse(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, sizes: torch.Tensor, topk: int, scale: float
) -> Coarse:
    """Compute the attention of the means of tiles, and select key tiles by its scores.

    Args:
        q, k, v: (batch, heads, tiles * 64, head_size); padding is 0.
        sizes: whole numbers (tiles,), tokens of each tile, which come first in it.
        topk: key tiles of a query tile.
        scale: softmax scale.
    """
    means = [(x.unflatten(2, (-1, TILE)).sum(3, dtype=torch.float32) / sizes[:, None]).to(x.dtype) for x in (q, k, v)]
    scores = means[0] @ means[1].mT * scale
    # Scores rank tiles as their softmax does, which has more ties after rounding.
    return Coarse(scores.softmax(-1) @ means[2], scores.topk(topk).indices.sort(-1).values)


def pattern_of(selected: torch.Tensor, sizes: torch.Tensor | None) -> Pattern:
    """The pattern of selected key tiles, without synchronization.

    Args:
        selected: int64 (batch, heads, tiles, topk), key tiles in ascending order.
        sizes: whole numbers (tiles,), tokens of each tile; None if all are full.
    """
    block = TILE, TILE
    if sizes is None:
        return TopK(selected.int(), block=block)
    is_full = (sizes == TILE)[selected]
    lists = []
    for counted in (~is_full, is_full):
        order = counted.to(torch.int8).argsort(stable=True, dim=-1, descending=True)
        lists += [counted.sum(-1, dtype=torch.int32), selected.gather(-1, order).int()]
    real = torch.arange(TILE, device=sizes.device) < sizes[:, None]
    return BlockLists(*lists, block=block, mask=_REAL, aux={"real": real.flatten()})


def video_sparse_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    gate: torch.Tensor,
    *,
    sizes: torch.Tensor,
    is_full: bool,
    topk: int,
    scale: float,
) -> torch.Tensor:
    """Compute video sparse attention.

    Args:
        q, k, v: (batch, heads, tiles * 64, head_size); padding is 0.
        gate: as q, factors of the coarse part.
        sizes: whole numbers (tiles,), tokens of each tile, which come first in it.
        is_full: whether all tiles are full.
        topk: key tiles of a query tile.
        scale: softmax scale.

    Returns:
        As q; values of padding are meaningless.

    Raises:
        ArgumentError: naming the argument, before the fine part is launched.
    """
    part = coarse(q, k, v, sizes=sizes, topk=topk, scale=scale)
    fine = block_sparse_attention(q, k, v, pattern_of(part.selected, None if is_full else sizes), scale=scale)
    assert isinstance(fine, torch.Tensor)
    return part.out.repeat_interleave(TILE, 2) * gate + fine
