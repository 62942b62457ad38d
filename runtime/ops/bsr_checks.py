"""Checks of what products with block-sparse matrices are called with, of tensors whose sizes may not be known."""

from __future__ import annotations

from typing import Any

import torch

from codegen.wording import shown
from runtime.checks import check_dense
from runtime.errors import ArgumentError
from runtime.kernels.arguments import check_number
from runtime.ops.attention_choice import DTYPES
from runtime.ops.bsr_choice import ACTIVATIONS
from runtime.prepare.bsr_matrix import BsrMatrix

INDICES = (torch.int32, torch.int64)
BLOCK_RANK = 3  # of values
_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})
OPERANDS = (2, 3)  # dimensions of a dense operand: a matrix, or a batch of them


def check_tensor(name: str, tensor: Any) -> None:
    """Check that an argument is a dense tensor of a type that kernels have.

    Raises:
        ArgumentError: with its type.
    """
    check_dense(name, tensor)
    if tensor.dtype not in DTYPES:
        raise ArgumentError(name, f"is {tensor.dtype}, expected {' or '.join(map(str, DTYPES))}")


def check_parts(name: str, a: BsrMatrix) -> None:
    """Check the types and ranks of the parts of a sparse matrix: a caller may construct one of anything.

    Raises:
        ArgumentError: for the first one that is not.
    """
    values, crow, col, order, index = a.values, a.crow_indices, a.col_indices, a.order, a.index
    known = type(order) is tuple and type(index) is tuple
    if (
        not (known and _TENSORS.issuperset(map(type, (values, crow, col, *order, *index))))
        or not values.layout is crow.layout is col.layout is torch.strided
        or (values.dim(), crow.dim(), col.dim()) != (BLOCK_RANK, 1, 1)
        or values.is_nested
    ):
        _check_each(name, a)
    if type(a.columns) is not int and not isinstance(a.columns, torch.SymInt):
        raise ArgumentError(f"{name}.columns", f"is {shown(a.columns)}, expected a whole number")
    if type(a.how) is not str:
        raise ArgumentError(f"{name}.how", f"is {shown(a.how)}, expected the text that prepare_bsr writes")


def _check_each(name: str, a: BsrMatrix) -> None:
    """Check the tensors of a sparse matrix, one by one.

    Raises:
        ArgumentError: for the first that is none, or of another rank.
    """
    for part, tensor, rank in (
        ("values", a.values, BLOCK_RANK),
        ("crow_indices", a.crow_indices, 1),
        ("col_indices", a.col_indices, 1),
    ):
        check_dense(f"{name}.{part}", tensor)
        if tensor.dim() != rank:
            raise ArgumentError(f"{name}.{part}", f"has {tensor.dim()} dimensions, expected {rank}")
    for part, tensors in (("order", a.order), ("index", a.index)):
        if type(tensors) is not tuple or not all(isinstance(tensor, torch.Tensor) for tensor in tensors):
            raise ArgumentError(f"{name}.{part}", f"is {shown(tensors)}, expected a tuple of tensors")


def check_matrix(name: str, a: BsrMatrix) -> None:
    """Check the parts of a sparse matrix; their values are not looked at.

    Raises:
        ArgumentError: for the first thing that is wrong.
    """
    values, crow, col = a.values, a.crow_indices, a.col_indices
    check_tensor(f"{name}.values()", values)
    if values.dim() != BLOCK_RANK:
        raise ArgumentError(f"{name}.values()", f"has {values.dim()} dimensions, expected (stored blocks, rows, cols)")
    for part, tensor in (("crow_indices", crow), ("col_indices", col)):
        check_dense(f"{name}.{part}()", tensor)
        if tensor.dtype not in INDICES or tensor.dim() != 1:
            what = f"is {tensor.dtype} {tuple(tensor.shape)}, expected torch.int32 or torch.int64 with one dimension"
            raise ArgumentError(f"{name}.{part}()", what)
    for part, tensors in (("indices", (crow, col)), ("order", a.order), ("index", a.index)):
        for tensor in tensors:
            if tensor.device != values.device:
                raise ArgumentError(f"{name}.{part}", f"is on {tensor.device}, its values are on {values.device}")


def check_operand(
    a: BsrMatrix, b: Any, *, transpose_a: bool = False, depth: bool = True, name: str = "b", matrix: str = "a"
) -> None:
    """Check a dense operand beside the matrix.

    Args:
        a: the matrix, checked.
        b: the operand.
        transpose_a: whether the product is with A^T.
        depth: whether it is one of ``bsr_matmul``: its rows meet the columns of the matrix, and it has its type.
        name: of the operand.
        matrix: name of the matrix.

    Raises:
        ArgumentError: for the first thing that is wrong.
    """
    check_tensor(name, b)
    if b.device != a.values.device:
        raise ArgumentError(name, f"is on {b.device}, {matrix} is on {a.values.device}")
    if not depth:
        if b.dim() != 2:
            raise ArgumentError(name, f"has {b.dim()} dimensions {tuple(b.shape)}, expected 2")
        return
    if b.dtype != a.values.dtype:
        raise ArgumentError(name, f"is {b.dtype}, {matrix} is {a.values.dtype}: pass one type")
    if b.dim() not in OPERANDS:
        raise ArgumentError(name, f"has {b.dim()} dimensions {tuple(b.shape)}, expected 2, or 3 with a batch")
    side, size = ("M", a.shape[0]) if transpose_a else ("K", a.columns)
    if b.shape[-2] != size:
        reason = (
            f"has shape {tuple(b.shape)}, expected ({side} {shown(size)}, N), as {matrix} is {shown(tuple(a.shape))}"
        )
        raise ArgumentError(name, reason)


def check_added(a: BsrMatrix, b: torch.Tensor, bias: Any, c: Any, *, transpose_a: bool = False) -> None:
    """Check what is added to a product.

    Raises:
        ArgumentError: for the first thing that is wrong.
    """
    rows = a.columns if transpose_a else a.shape[0]
    wanted = {"bias": (bias, (rows,), "(M,)"), "c": (c, (*b.shape[:-2], rows, b.shape[-1]), "as the result")}
    for name, (tensor, shape, words) in wanted.items():
        if tensor is None:
            continue
        check_tensor(name, tensor)
        if tensor.dtype != b.dtype:
            raise ArgumentError(name, f"is {tensor.dtype}, b is {b.dtype}: pass one type")
        if tensor.device != b.device:
            raise ArgumentError(name, f"is on {tensor.device}, b is on {b.device}")
        if tuple(tensor.shape) != shape:
            raise ArgumentError(name, f"has shape {tuple(tensor.shape)}, expected {shape}, {words}")


def check_options(c: Any, beta: Any, activation: Any) -> tuple[float, str]:
    """Return beta and activation as operators take them.

    Raises:
        ArgumentError: for the first thing that is wrong.
    """
    if activation is not None and (not isinstance(activation, str) or activation not in ACTIVATIONS):
        raise ArgumentError("activation", f"is {shown(activation)}; allowed: None, {', '.join(ACTIVATIONS)}")
    if beta is None:
        return 1.0, activation or ""
    number = check_number("beta", beta)
    if c is None:
        raise ArgumentError("beta", f"is {shown(beta)}, but there is no c that it is multiplied with")
    return number, activation or ""


def check_place(name: str, tensor: torch.Tensor) -> None:
    """Check that there may be a kernel for the place of a tensor.

    Raises:
        ArgumentError: for a tensor that is on no GPU.
    """
    if tensor.device.type != "cuda":
        raise ArgumentError(name, f"is on {tensor.device}, expected a CUDA device")
