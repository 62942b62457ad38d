"""Conversion between block maps (one boolean per block) and block lists (block indices).

A map takes 1 byte per block, and 12 more during its conversion to lists. Nothing here synchronizes, and shapes do not
depend on tensor values.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F


class Lists(NamedTuple):
    """Lists of key blocks.

    Attributes:
        counts: int32 (..., query_blocks), blocks in each list.
        indices: int32 (..., query_blocks, width), ascending, padded with -1.
        overflow: int32 (1,), blocks of the longest list beyond ``width``, 0 if all lists fit; None if all lists fit by
            construction.
    """

    counts: torch.Tensor
    indices: torch.Tensor
    overflow: torch.Tensor | None


def ceil_div(a: int, b: int) -> int:
    """Return a / b, rounded up."""
    return -(-a // b)


def lists_of(blocks: torch.Tensor, max_blocks: int | None) -> Lists:
    """The blocks of a map as lists.

    Args:
        blocks: bool (..., query_blocks, key_blocks).
        max_blocks: upper bound of the entries per list; None for the number of key blocks.
    """
    key_blocks = blocks.shape[-1]
    width = key_blocks if max_blocks is None else min(max_blocks, key_blocks)
    place = blocks.cumsum(-1, dtype=torch.int32)
    counts = place[..., -1]
    # Blocks that do not fit, and hidden blocks, are written to an extra entry at the end.
    place = torch.where(blocks & (place <= width), place - 1, width)
    numbers = torch.arange(key_blocks, dtype=torch.int32, device=blocks.device)
    indices = torch.full((*blocks.shape[:-1], width + 1), -1, dtype=torch.int32, device=blocks.device)
    indices = indices.scatter(-1, place.long(), numbers.expand(blocks.shape))[..., :width].contiguous()
    if width == key_blocks:
        return Lists(counts.contiguous(), indices, None)
    return Lists(counts.clamp(max=width), indices, shortage(counts, width))


def shortage(counts: torch.Tensor, width: int) -> torch.Tensor:
    """Entries of the longest list that do not fit: int32 (1,)."""
    return (counts.amax() - width).clamp(min=0).to(torch.int32).reshape(1)


def map_of(counts: torch.Tensor, indices: torch.Tensor, key_blocks: int) -> torch.Tensor:
    """Lists as a map, bool (..., query_blocks, key_blocks). Entries that are not a block index are ignored."""
    listed = is_listed(counts, indices) & (indices >= 0) & (indices < key_blocks)
    place = torch.where(listed, indices, key_blocks).long()
    shape = (*indices.shape[:-1], key_blocks + 1)
    blocks = torch.zeros(shape, dtype=torch.bool, device=indices.device)
    return blocks.scatter(-1, place, True)[..., :key_blocks]


def is_listed(counts: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Mask of the entries that counts cover: bool, the shape of the lists."""
    return torch.arange(indices.shape[-1], device=indices.device) < counts.unsqueeze(-1)


def ascending(indices: torch.Tensor, listed: torch.Tensor | None = None) -> Lists:
    """Lists in ascending order, without entries that are negative or not listed.

    Args:
        indices: int32 or int64 (..., query_blocks, width).
        listed: bool, the shape of the lists; None if every non-negative entry counts.
    """
    last = torch.iinfo(torch.int32).max
    counts = indices >= 0 if listed is None else listed & (indices >= 0)
    numbers = torch.where(counts, indices, last).to(torch.int32).sort(-1).values
    return Lists(counts.sum(-1, dtype=torch.int32), torch.where(numbers == last, -1, numbers), None)


def any_in_blocks(x: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    """Whether any element of each block is True, along the last dimension (-1) or the one before it (-2)."""
    missing = -x.shape[dim] % size
    whole = F.pad(x, (0, 0) * (-dim - 1) + (0, missing)) if missing else x
    found: torch.Tensor = whole.unflatten(dim, (-1, size)).any(dim)
    return found
