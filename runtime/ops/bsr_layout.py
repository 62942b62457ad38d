"""How a dense operand is stored: by rows or by columns, and whether kernels can read it so."""

from __future__ import annotations

import torch

from runtime.kernels.bsr_arguments import STORE
from runtime.kernels.bsr_batch import BATCH_RANK, column_step, matrices_at_once

ALIGNED = STORE
"""Elements of 16 bytes: rows, or columns, begin at a multiple of them."""


def is_by_columns(b: torch.Tensor) -> bool:
    """Whether a kernel must read a dense operand by columns, as its rows are not contiguous and aligned."""
    rows, columns = b.shape[-2:]
    row, column = b.stride()[-2:]
    by_rows_too = (column == 1 or columns == 1) and (row % ALIGNED == 0 or rows == 1)
    return not by_rows_too and (row == 1 or rows == 1) and (column % ALIGNED == 0 or columns == 1)


def is_read_by_columns(t: torch.Tensor) -> bool:
    """Whether a matrix is to be read by columns, if a kernel can, so that it is not copied."""
    return is_by_columns(t) and _starts_aligned(t)


def _starts_aligned(t: torch.Tensor) -> bool:
    """Whether the first element is aligned to 16 bytes."""
    return bool(t.data_ptr() % (ALIGNED * t.element_size()) == 0)


def is_by_rows(t: torch.Tensor) -> bool:
    """Whether the rows of a matrix, or of a batch, are contiguous and aligned, as kernels need them."""
    starts = all(stride % ALIGNED == 0 or size == 1 for size, stride in zip(t.shape[:-1], t.stride()[:-1], strict=True))
    return starts and (t.stride(-1) == 1 or t.shape[-1] == 1)


def by_rows(t: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose rows kernels can read: itself, or a copy with padded rows."""
    if is_by_rows(t) and _starts_aligned(t):
        return t
    columns = t.shape[-1]
    padded = -(-columns // ALIGNED) * ALIGNED
    if t.dim() == BATCH_RANK:  # side by side, as a launch takes many of them
        batch, rows, _ = t.shape
        return t.new_empty((rows, batch, padded)).transpose(0, 1)[..., :columns].copy_(t)
    return t.new_empty((*t.shape[:-1], padded))[..., :columns].copy_(t)


def readable(b: torch.Tensor) -> torch.Tensor:
    """Return a dense operand that kernels can read by rows or by columns: itself, or a copy with padded rows."""
    aligned = b.dim() == 2 or b.stride(0) % ALIGNED == 0 or b.shape[0] == 1
    return b if aligned and _starts_aligned(b) and is_by_columns(b) else by_rows(b)


def width_of(b: torch.Tensor, c: torch.Tensor | None) -> int:
    """Return the columns of a launch: of the operand, or of the matrices of a batch that one launch multiplies with."""
    return int(b.shape[-1]) if b.dim() != BATCH_RANK else matrices_at_once(b, c) * column_step(b)
