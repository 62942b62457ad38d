"""Checks of a block-sparse matrix that need no kernel."""

from __future__ import annotations

from typing import Any

import torch

from runtime.checks import refuse_capture
from runtime.errors import ArgumentError


def check_layout(name: str, matrix: Any) -> None:
    """Check that an argument is a torch.sparse_bsr tensor.

    Raises:
        ArgumentError: if it is not, with its layout or type.
    """
    if not isinstance(matrix, torch.Tensor) or matrix.layout != torch.sparse_bsr:
        what = matrix.layout if isinstance(matrix, torch.Tensor) else type(matrix).__name__
        raise ArgumentError(name, f"is {what}, expected a torch.sparse_bsr tensor ({name}.to_sparse_bsr(block))")


def check_row_pointers(name: str, matrix: torch.Tensor) -> None:
    """Check the row pointers of a BSR tensor (synchronizes).

    Raises:
        ArgumentError: if they do not ascend from 0 to the number of stored blocks, or have no values; in a CUDA graph
            capture, which the host's read would break.
    """
    if matrix.is_meta:
        raise ArgumentError(name, "is on meta, where row pointers have no values")
    refuse_capture(name, matrix.device, "the host reads its row pointers")
    crow, nnz = matrix.crow_indices(), matrix.col_indices().shape[0]
    if int(crow[0]) != 0 or int(crow[-1]) != nnz or bool((crow.diff() < 0).any()):
        raise ArgumentError(f"{name}.crow_indices()", f"must ascend from 0 to the number of stored blocks, {nnz}")
