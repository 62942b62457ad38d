"""Which blocks of a weight are stored."""

from __future__ import annotations

from typing import Any

import torch

from codegen.wording import shown
from runtime.checks import refuse_capture
from runtime.errors import ArgumentError

SIZES = (16, 32, 64, 128)
"""Rows and columns of blocks that kernels are written for; which of them go together, the first call says."""


def checked_block(block: Any, shape: torch.Size | None) -> tuple[int, int]:
    """Return rows and columns of a block.

    Args:
        block: both, or one number for both.
        shape: of the weight they divide; None: not known.

    Raises:
        ArgumentError: for others than kernels take, and where they do not divide the weight.
    """
    pair = (block, block) if isinstance(block, int) else block
    fits = isinstance(pair, tuple | list) and len(pair) == 2 and all(isinstance(size, int) for size in pair)
    if not (fits and all(size in SIZES for size in pair)):
        allowed = ", ".join(map(str, SIZES))
        raise ArgumentError("block", f"is {shown(block)}, expected one or two of {allowed}")
    rows, cols = pair
    if shape is not None and (shape[0] % rows or shape[1] % cols):
        reason = f"is ({rows}, {cols}), which does not divide the weight, {tuple(shape)}"
        raise ArgumentError("block", reason)
    return rows, cols


def largest_blocks(weight: torch.Tensor, block: tuple[int, int], density: Any) -> torch.Tensor:
    """Return a mask of the blocks with the largest sums of squares, in float32; of ties the first.

    Raises:
        ArgumentError: for a density that is not above 0 and at most 1.
    """
    if isinstance(density, bool) or not isinstance(density, int | float) or not 0 < density <= 1:
        raise ArgumentError("density", f"is {shown(density)}, expected a number above 0, at most 1")
    rows, cols = block
    norms = weight.float().square().unflatten(0, (-1, rows)).unflatten(2, (-1, cols)).sum((1, 3))
    kept = max(1, round(density * norms.numel()))
    order = norms.flatten().argsort(descending=True, stable=True)
    mask = torch.zeros(norms.numel(), dtype=torch.bool, device=weight.device)
    mask[order[:kept]] = True
    return mask.view(norms.shape)


def check_places(crow: torch.Tensor, col: torch.Tensor, block_columns: int) -> None:
    """Check the places of the blocks of a weight (synchronizes). The columns of a row may be in any order.

    Args:
        crow: int32 or int64 (block rows + 1,): first block of each block row, and one more.
        col: as crow, (stored blocks,): block column of each block.
        block_columns: of the weight.

    Raises:
        ArgumentError: naming ``crow_indices`` or ``col_indices``.
    """
    stored = col.shape[0]
    lengths = crow.diff()
    if int(crow[0]) != 0 or int(crow[-1]) != stored or bool((lengths < 0).any()):
        raise ArgumentError("crow_indices", f"must rise from 0 to the number of stored blocks, {stored}")
    if stored == 0:
        return
    least, most = int(col.min()), int(col.max())
    if least < 0 or most >= block_columns:
        raise ArgumentError("col_indices", f"ranges from {least} to {most}, allowed: 0 to {block_columns - 1}")
    row = torch.repeat_interleave(torch.arange(lengths.shape[0], device=col.device), lengths)
    places = (row * block_columns + col).sort().values
    twice = places[1:][places.diff() == 0]
    if twice.shape[0]:
        where, column = divmod(int(twice[0]), block_columns)
        raise ArgumentError("col_indices", f"has block column {column} twice in block row {where}, each may come once")


def mask_indices(
    mask: Any, shape: tuple[int, int] | None, device: torch.device | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return row pointers and block columns, int32, of the blocks that a mask says.

    Args:
        mask: bool (block rows, block columns).
        shape: that it must have; None: any.
        device: of the result; None: that of the mask.

    Raises:
        ArgumentError: for what is no such mask.
    """
    if not isinstance(mask, torch.Tensor) or mask.dtype != torch.bool:
        what = mask.dtype if isinstance(mask, torch.Tensor) else type(mask).__name__
        raise ArgumentError("mask", f"is {what}, expected a torch.bool tensor (block rows, block columns)")
    if mask.dim() != 2 or (shape is not None and tuple(mask.shape) != shape):
        expected = "(block rows, block columns)" if shape is None else f"{shape}, a bit for each block"
        raise ArgumentError("mask", f"has shape {tuple(mask.shape)}, expected {expected}")
    if mask.is_meta:
        remedy = "make the mask with device='cpu', and the layer with from_mask(..., device='meta')"
        raise ArgumentError("mask", f"is on meta and has no values: {remedy}")
    refuse_capture("mask", mask.device if device is None else device, "the host reads which blocks it names")
    there = mask if device is None else mask.to(device)
    counts = there.sum(1, dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return torch.nn.functional.pad(counts, (1, 0)), there.nonzero()[:, 1].to(torch.int32)
