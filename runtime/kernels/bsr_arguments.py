"""Checks that the calls on block-sparse matrices share."""

from __future__ import annotations

from typing import Any

import torch

from codegen.spec import BlockShape
from runtime.errors import ArgumentError
from runtime.kernels.arguments import (
    check_output,
    check_shape,
    check_size,
    check_sizes,
    check_strides,
    check_tensor,
    to_quantize,
)
from runtime.prepare.matrix import check_row_pointers

INDEX_WORDS = {torch.int32: 1, torch.int64: 2}
STORE = 8  # columns of one 16-byte store, the least that the kernels write


def check_structure(name: str, matrix: torch.Tensor, block: BlockShape, device: torch.device) -> None:
    """Check rank, device, block shape and the storage of a BSR tensor: torch builds it of parts that need not fit.

    Raises:
        ArgumentError: for the first thing that is wrong.
    """
    values = matrix.values()
    if matrix.dim() != 2:
        raise ArgumentError(name, f"has {matrix.dim()} dimensions {tuple(matrix.shape)}, expected 2")
    if matrix.device != device:
        raise ArgumentError(name, f"is on {matrix.device}, the other arguments are on {device}")
    if tuple(values.shape[1:]) != (block.rows, block.cols):
        reason = f"has blocks of {tuple(values.shape[1:])}, this kernel takes ({block.rows}, {block.cols})"
        raise ArgumentError(name, reason)
    if matrix.shape[0] == 0 or matrix.shape[1] == 0:
        raise ArgumentError(name, f"is empty: {tuple(matrix.shape)}")
    if matrix.shape[0] % block.rows or matrix.shape[1] % block.cols:
        reason = f"has shape {tuple(matrix.shape)}, expected a multiple of its blocks, ({block.rows}, {block.cols})"
        raise ArgumentError(name, reason)
    check_size(name, matrix.shape)
    if values.shape[0] >= 2**31:
        raise ArgumentError(name, f"has {values.shape[0]} stored blocks, 2^31 or more")
    crow, col = matrix.crow_indices(), matrix.col_indices()
    what = {
        "crow_indices": (crow, matrix.shape[0] // block.rows + 1, "one for each block row and one more"),
        "col_indices": (col, values.shape[0], "one for each stored block"),
    }
    for part, (tensor, length, meaning) in what.items():
        if tensor.dtype not in INDEX_WORDS:
            raise ArgumentError(f"{name}.{part}()", f"is {tensor.dtype}, expected torch.int32 or torch.int64")
        if tuple(tensor.shape) != (length,):
            raise ArgumentError(f"{name}.{part}()", f"has shape {tuple(tensor.shape)}, expected ({length},), {meaning}")
        if tensor.device != device:
            raise ArgumentError(f"{name}.{part}()", f"is on {tensor.device}, the other arguments are on {device}")
        if not tensor.is_contiguous():
            raise ArgumentError(f"{name}.{part}()", f"has strides {tensor.stride()}, expected a contiguous tensor")
    if crow.dtype != col.dtype:
        raise ArgumentError(f"{name}.col_indices()", f"is {col.dtype}, {name}.crow_indices() is {crow.dtype}")


def check_values(name: str, matrix: torch.Tensor, dtype: torch.dtype) -> None:
    """Check the values of a BSR tensor that a kernel reads.

    Raises:
        ArgumentError: for another type, strides, or a gradient.
    """
    values = matrix.values()
    if values.dtype != dtype:
        how = to_quantize(values.dtype, dtype, "quantize_matrix")
        raise ArgumentError(name, f"is {values.dtype}, this kernel takes {dtype}{how}")
    if matrix.requires_grad and torch.is_grad_enabled():
        reason = "requires a gradient, but this kernel has no backward; call it under torch.no_grad()"
        raise ArgumentError(name, reason)
    if not values.is_contiguous():
        raise ArgumentError(f"{name}.values()", f"has strides {values.stride()}, expected a contiguous tensor")


def check_indices(name: str, matrix: torch.Tensor, *, rising: bool = False) -> None:
    """Check the row pointers and column numbers of a BSR tensor (synchronizes).

    Args:
        name: of the argument.
        matrix: the tensor.
        rising: the columns of a row must rise, each listed once.

    Raises:
        ArgumentError: with the range of the columns, or the row whose columns do not rise.
    """
    check_row_pointers(name, matrix)
    crow, col = matrix.crow_indices(), matrix.col_indices()
    nnz = col.shape[0]
    block_columns = matrix.shape[1] // matrix.values().shape[2]
    if nnz and (int(col.min()) < 0 or int(col.max()) >= block_columns):
        raise ArgumentError(
            f"{name}.col_indices()",
            f"ranges from {int(col.min())} to {int(col.max())}, allowed: 0 to {block_columns - 1}",
        )
    if not rising:
        return
    rows = torch.repeat_interleave(torch.arange(crow.shape[0] - 1, device=crow.device), crow.diff())
    wrong = (rows.diff() == 0) & (col.diff() <= 0)
    if bool(wrong.any()):
        row = int(rows[:-1][wrong][0])
        raise ArgumentError(
            f"{name}.col_indices()", f"does not rise in block row {row}; the columns of a row must be sorted, each once"
        )


def check_on_gpu(name: str, tensor: torch.Tensor) -> None:
    """Check that a kernel can read a tensor at all.

    Raises:
        ArgumentError: for a tensor of another device.
    """
    if tensor.device.type != "cuda":
        raise ArgumentError(name, f"is on {tensor.device}, expected a CUDA device")


def check_out_values(out: Any, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device) -> None:
    """Check the (stored blocks, rows, cols) values of a BSR result that a caller brings.

    Raises:
        ArgumentError: for the first thing that is wrong.
    """
    if shape[0] == 0 and isinstance(out, torch.Tensor) and (tuple(out.shape), out.dtype) == (shape, dtype):
        return  # nothing is written
    check_tensor("out", out, dtype, 3, device)
    check_shape("out", out.shape, [("stored blocks", shape[:1]), ("rows", shape[1:2]), ("cols", shape[2:])])
    if not out.is_contiguous():
        raise ArgumentError("out", f"has strides {out.stride()}, expected a contiguous tensor")


def check_out(
    out: Any, dtype: torch.dtype, shape: tuple[int, int], device: torch.device, *, strided: bool = False
) -> None:
    """Check a dense (M, N) result that a caller brings; with ``strided`` its elements may lie anywhere.

    Raises:
        ArgumentError: for the first thing that is wrong.
    """
    check_tensor("out", out, dtype, 2, device)
    check_sizes("out", out, "MN", shape)
    if not strided:
        check_strides("out", out)
    check_output("out", out)
    if shape[1] % STORE and not strided:
        raise ArgumentError(
            "out",
            f"has {shape[1]} columns; results are stored {STORE} at a time, so N must be a multiple of {STORE} "
            "to leave what lies beside out alone (without out, padded rows are allocated)",
        )


def check_prepared(
    name: str, given: dict[str, torch.Tensor], shapes: tuple[tuple[int, ...], ...], device: torch.device
) -> None:
    """Check what a caller had made of a matrix beforehand: contiguous int32 tensors of these shapes.

    Raises:
        ArgumentError: for the first that is something else.
    """
    for (part, tensor), shape in zip(given.items(), shapes, strict=True):
        if tuple(tensor.shape) != shape or tensor.dtype != torch.int32 or tensor.device != device:
            raise ArgumentError(
                f"{name}.{part}",
                f"is {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}, expected torch.int32 {shape} on "
                f"{device}: it is not of this matrix",
            )
        if not tensor.is_contiguous():
            raise ArgumentError(f"{name}.{part}", f"has strides {tensor.stride()}, expected a contiguous tensor")
