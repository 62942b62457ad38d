"""torch's operators of products with block-sparse matrices, with fakes and gradients.

They are registered when this module is imported. A matrix is its values, which have gradients, and its indices.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from runtime.errors import ArgumentError
from runtime.ops.bsr_checks import check_added, check_matrix, check_operand
from runtime.ops.bsr_gradients import Kind, gradients_of_matmul, product_or_operator
from runtime.ops.bsr_launches import product, sampled
from runtime.ops.bsr_layout import ALIGNED
from runtime.ops.operators import NAMESPACE, STRIDES, gradients_once
from runtime.prepare.bsr_matrix import BsrMatrix
from runtime.receipts.mode import entered, mode

_MATMUL = (
    "bsr_matmul(Tensor values, Tensor crow_indices, Tensor col_indices, Tensor b, Tensor? bias, Tensor? c, "
    "Tensor[] order, Tensor[] index, SymInt columns, str how, *, float beta=1.0, str activation='', "
    "bool transpose_a=False, bool arrange=False, bool validate=False) -> Tensor"
)
_SDDMM = (
    "bsr_sddmm(Tensor a, Tensor b, Tensor crow_indices, Tensor col_indices, Tensor[] order, Tensor[] index, "
    "SymInt columns, SymInt block_rows, SymInt block_cols, str how, *, bool arrange=False, bool validate=False) "
    "-> Tensor"
)
_DEFAULTS = {"beta": 1.0, "activation": "", "transpose_a": False, "arrange": False, "validate": False}
_DEFAULTS_OF_SDDMM = {"arrange": False, "validate": False}


def _matrix(values: Any, *parts: Any) -> BsrMatrix:
    crow, col, order, index, columns, how = parts
    return BsrMatrix(values, crow, col, columns, tuple(order), tuple(index), how)


def _pattern(arguments: tuple[Any, ...]) -> BsrMatrix:
    """Return the matrix of a sampled product, whose values have no memory: an expanded element."""
    a, _, crow, col, order, index, columns, rows, cols, how = arguments
    values = a.new_empty((1,)).expand(col.shape[0], rows, cols)
    return _matrix(values, crow, col, order, index, columns, how)


def _run_matmul(*arguments: Any, **options: Any) -> torch.Tensor:
    """Compute the operator."""
    values, crow, col, b, bias, c, order, index, columns, how = arguments
    matrix = _matrix(values.detach(), crow, col, order, index, columns, how)
    return product(matrix, b, bias=bias, c=c, **{**_DEFAULTS, **options})


def _run_sddmm(*arguments: Any, **options: Any) -> torch.Tensor:
    """Compute the operator."""
    a, b, *_ = arguments
    return sampled(a, b, _pattern(arguments), **{**_DEFAULTS_OF_SDDMM, **options})


def _fake_matmul(*arguments: Any, transpose_a: bool = False, **_: Any) -> torch.Tensor:
    """Return a tensor like the result, without values: its rows are padded to a multiple of 16 bytes."""
    values, crow, col, b, bias, c, order, index, columns, how = arguments
    matrix = _matrix(values, crow, col, order, index, columns, how)
    check_matrix("a", matrix)
    check_operand(matrix, b, transpose_a=transpose_a)
    check_added(matrix, b, bias, c, transpose_a=transpose_a)
    rows, width = (columns if transpose_a else matrix.shape[0]), b.shape[-1]
    step = (width + ALIGNED - 1) // ALIGNED * ALIGNED
    batch = b.shape[:-2]  # whose matrices lie side by side
    strides = (step, batch[0] * step, 1) if batch else (step, 1)
    found: torch.Tensor = b.new_empty_strided((*batch, rows, width), strides)
    return found


def _fake_sddmm(*arguments: Any, **_: Any) -> torch.Tensor:
    """Return a tensor like the result, without values."""
    pattern = _pattern(arguments)
    check_matrix("pattern", pattern)
    for name, tensor in zip("ab", arguments, strict=False):
        check_operand(pattern, tensor, depth=False, name=name, matrix="pattern")
    return torch.empty_like(pattern.values, memory_format=torch.contiguous_format)


def _save_matmul(ctx: Any, inputs: Any, keyword_only_inputs: dict[str, Any], output: torch.Tensor) -> None:
    """Keep the operands, and what the gradient of an activation reads."""
    values, crow, col, b, bias, c, order, index, columns, how = inputs
    given = {name: keyword_only_inputs[name] for name in ("activation", "beta", "transpose_a")}
    given |= {"bias": bias is not None, "c": c is not None}
    ctx.kind, ctx.mode = Kind(columns, how, len(order), len(index), **given), mode()
    ctx.save_for_backward(crow, col, values, *order, *index, b, *ctx.kind.kept(bias, c, output))


def _backward_matmul(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    """Return the gradients of the operator's arguments."""
    needs = ctx.needs_input_grad
    values, b, bias, c = gradients_of_matmul(ctx, grad, (needs[0], *needs[3:6]))
    return values, None, None, b, bias, c, [None] * ctx.kind.orders, [None] * ctx.kind.indexes, None, None


def _save_sddmm(ctx: Any, inputs: Any, keyword_only_inputs: dict[str, Any], output: torch.Tensor) -> None:
    """Keep the operands."""
    a, b, crow, col, order, index, columns, *_, how = inputs
    ctx.places, ctx.mode = (len(order), columns, how), mode()
    ctx.save_for_backward(a, b, crow, col, *order, *index)


def _backward_sddmm(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    """Return the gradients of a and b: products with the gradient of C, which is as sparse as C."""
    a, b, crow, col, *lists = ctx.saved_tensors
    orders, columns, how = ctx.places
    order, index = lists[:orders], lists[orders:]

    def gradient(place: int, other: torch.Tensor, transpose_a: bool) -> Any:
        if not ctx.needs_input_grad[place]:
            return None
        matrix = _matrix(grad.contiguous(), crow, col, order, index, columns, how)
        return product_or_operator(matrix, other, transpose_a=transpose_a)

    def compute() -> tuple[Any, ...]:
        with entered(ctx.mode):
            return gradient(0, b, False), gradient(1, a, True)

    found = gradients_once("bsr_sddmm", compute, (grad, a, b))
    return (*found, None, None, [None] * len(order), [None] * len(index), None, None, None, None)


def _refuse_vmap(*_: Any) -> NoReturn:
    reason = "is mapped by torch.vmap: pass a batch of b as a dimension, (batch, K, N)"
    raise ArgumentError("a, b, bias and c", f"one of them {reason}")


_library = torch.library.Library(NAMESPACE, "FRAGMENT")
for _schema, _run, _fake, _save, _backward in (
    (_MATMUL, _run_matmul, _fake_matmul, _save_matmul, _backward_matmul),
    (_SDDMM, _run_sddmm, _fake_sddmm, _save_sddmm, _backward_sddmm),
):
    _name = _schema.partition("(")[0]
    _library.define(_schema, tags=(torch.Tag.pt2_compliant_tag, STRIDES))
    _library.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{_name}", _fake, lib=_library)
    torch.library.register_autograd(f"{NAMESPACE}::{_name}", _backward, setup_context=_save, lib=_library)
    torch.library.register_vmap(f"{NAMESPACE}::{_name}", _refuse_vmap, lib=_library)


def matmul(
    a: BsrMatrix,
    b: torch.Tensor,
    *,
    bias: torch.Tensor | None,
    c: torch.Tensor | None,
    **options: Any,
) -> torch.Tensor:
    """Call the operator of ``bsr_matmul``."""
    parts = a.values, a.crow_indices, a.col_indices
    found: torch.Tensor = torch.ops.sparse_kernel_codegen.bsr_matmul(
        *parts, b, bias, c, list(a.order), list(a.index), a.columns, a.how, **options
    )
    return found


def sddmm(a: torch.Tensor, b: torch.Tensor, pattern: BsrMatrix, **options: Any) -> torch.Tensor:
    """Call the operator of ``bsr_sddmm``; return the values."""
    parts = pattern.crow_indices, pattern.col_indices, list(pattern.order), list(pattern.index), pattern.columns
    block = pattern.values.shape[1:]
    found: torch.Tensor = torch.ops.sparse_kernel_codegen.bsr_sddmm(a, b, *parts, *block, pattern.how, **options)
    return found
