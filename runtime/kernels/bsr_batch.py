"""A batch of dense operands of one sparse matrix, as the columns of one operand: one launch for many matrices.

A matrix of a batch is a range of columns. Results are stored so, and operands that are stored so are not copied: what
one product returns the next one takes as it is.
"""

from __future__ import annotations

from typing import Any

import torch

from runtime.kernels.arguments import MAX_EXTENT, TMA_ALIGNMENT
from runtime.kernels.bsr_arguments import STORE

BATCH_RANK = 3  # of a batch of matrices
ALONE_BYTES = 1 << 23
"""Bytes of a matrix above which a launch of its own costs less than a copy, which reads and writes them.

On an H200, 30% of 4096 x 4096 in blocks of 64 times 8 matrices in fp16, alone and copied: 234 and 137 us with 4 MiB
each, 240 and 250 us with 8 MiB, 317 and 479 us with 16 MiB.
"""
COPIED_BYTES = 1 << 28
"""Bytes of the copies that a launch takes, at most; a quarter of it is as fast."""


def column_step(t: torch.Tensor) -> int:
    """Return the columns from one matrix of a batch to the next, where rows are copied 16 bytes at a time."""
    align = max(STORE, TMA_ALIGNMENT // t.element_size())
    return int(-(-t.shape[-1] // align) * align)


def beside(t: torch.Tensor, *, exact: bool = False) -> torch.Tensor | None:
    """Return a batch (batch, rows, columns) as a view (rows, batch * step) with ``step`` of ``column_step``.

    Returns None where its matrices do not lie side by side. What is between them may be anything; with ``exact`` there
    is nothing between them.
    """
    batch, rows, columns = t.shape
    step = column_step(t)
    row, column = t.stride()[1:]
    if t.stride(0) != step * column or (exact and columns != step):
        return None
    end = t.storage_offset() + (rows - 1) * row + (batch * step - 1) * column + 1
    if end * t.element_size() > t.untyped_storage().nbytes():
        return None
    return t.as_strided((rows, batch * step), (row, column))


def copied(t: torch.Tensor, step: int, *, by_columns: bool = False) -> torch.Tensor:
    """Return a batch (batch, rows, columns) as a copy (rows, batch * step), with zeros between its matrices."""
    batch, rows, columns = t.shape
    shape = (batch, step, rows) if by_columns else (rows, batch, step)
    wide = t.new_empty(shape)
    of_matrices = wide.mT if by_columns else wide.transpose(0, 1)
    of_matrices[..., :columns].copy_(t)
    if step != columns:
        of_matrices[..., columns:].zero_()
    return wide.flatten(0, 1).mT if by_columns else wide.flatten(1)


def scales_beside(scale: torch.Tensor, step: int) -> torch.Tensor:
    """Return scales of a batch, float32 (batch, N, K / 128), as those of the columns of one operand, a copy."""
    batch, columns, depths = scale.shape
    wide = scale.new_zeros((depths, batch, step))
    wide[..., :columns].copy_(scale.permute(2, 0, 1))
    return wide.flatten(1).mT


def matrices_at_once(b: torch.Tensor, c: Any = None, out: Any = None, widest: int = MAX_EXTENT) -> int:
    """Number of matrices of a batch that a launch multiplies with.

    Args:
        b: (batch, K, N).
        c: what is added, or None.
        out: of the caller, or None.
        widest: columns of a launch, at most.
    """
    given = [t for t in (b, c) if isinstance(t, torch.Tensor)]
    copies = [t for t in given if beside(t) is None]
    if isinstance(out, torch.Tensor) and beside(out, exact=True) is None:
        copies.append(out)
    step = column_step(b)
    sizes = [t.shape[1] * step * t.element_size() for t in copies]
    if any(size > ALONE_BYTES for size in sizes):
        return 1
    most = min(int(b.shape[0]), widest // step)
    return max(1, min(most, COPIED_BYTES // sum(sizes)) if sizes else most)
