"""Gradients of products with block-sparse matrices: two more products with the same kernels.

C = A @ B has dB = A^T @ dC, and dA, sampled where A is stored, dC @ B^T. Both copy operands that kernels cannot read as
they are stored (``arrange``). Their launches are kept together: a backward pass like an earlier one checks its tensors
once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from runtime.kernels.product_launch import New, ProductLaunch, copied_rows
from runtime.ops.bsr_calls import arranged_samples, bound_sample
from runtime.ops.bsr_launches import Place, bound_product, launches, product, sampled
from runtime.ops.modes import PLAIN, is_unwatched
from runtime.ops.operators import gradients_once
from runtime.prepare.bsr_matrix import BsrMatrix
from runtime.receipts.mode import entered

Gradients = tuple[torch.Tensor | None, torch.Tensor | None]
OF_PRODUCT: dict[str, Any] = {"beta": 1.0, "activation": "", "arrange": True}
"""Options of a product that computes a gradient."""
_FIRST = 3  # of the tensors that are prepared, after row pointers, column numbers and values
_grad_enabled = torch.is_grad_enabled


class Kind(NamedTuple):
    """What the gradients of a product need beside tensors.

    Attributes:
        columns: of the matrix.
        how: of the matrix.
        orders: tensors of its order.
        indexes: tensors of its index.
        activation: of the product.
        beta: of the product.
        transpose_a: of the product.
        bias: whether it has one.
        c: whether something is added.
        layer: whether b is the input of a layer, (..., columns), and dC likewise (..., rows).
    """

    columns: int
    how: str
    orders: int
    indexes: int
    activation: str = ""
    beta: float = 1.0
    transpose_a: bool = False
    bias: bool = False
    c: bool = False
    layer: bool = False

    def matrix(self, tensors: tuple[torch.Tensor, ...]) -> BsrMatrix:
        """The matrix of operands: row pointers, column numbers, values, order, index, and others."""
        crow, col, values = tensors[:_FIRST]
        middle = _FIRST + self.orders
        order, index = tensors[_FIRST:middle], tensors[middle : middle + self.indexes]
        return BsrMatrix(values, crow, col, self.columns, order, index, self.how)

    def operands(self, tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """Operands among the tensors of ``Place``: without the bias and c."""
        first = tensors[:2] + tensors[3:] if self.bias else tensors
        return first[:-1] if self.c else first

    def kept(self, bias: Any, c: Any, result: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """What a backward pass reads beside the operands: the result for ReLU, what others need to compute theirs."""
        if self.activation == "relu":
            return (result,)
        return tuple([each for each in (bias, c) if each is not None]) if self.activation else ()


def kind_of(matrix: BsrMatrix, **options: Any) -> Kind:
    """The kind of a product with a matrix; options are the other attributes of ``Kind``."""
    return Kind(matrix.columns, matrix.how, len(matrix.order), len(matrix.index), **options)


def is_plain(*tensors: Any) -> bool:
    """Whether no mode, subclass or second gradient requires torch's operators to compute the gradients."""
    return not _grad_enabled() and is_unwatched() and PLAIN.issuperset(map(type, tensors))


def product_or_operator(matrix: BsrMatrix, b: torch.Tensor, *, bias: Any = None, c: Any = None, **options: Any) -> Any:
    """A product of ``bsr_matmul`` that copies operands if it must."""
    given = {**OF_PRODUCT, "transpose_a": False, "validate": False, **options}
    if is_plain(*_tensors(matrix), b, bias, c):
        return product(matrix, b, bias=bias, c=c, **given)
    parts = matrix.values, matrix.crow_indices, matrix.col_indices
    lists = list(matrix.order), list(matrix.index)
    return torch.ops.sparse_kernel_codegen.bsr_matmul(*parts, b, bias, c, *lists, matrix.columns, matrix.how, **given)


def _tensors(matrix: BsrMatrix) -> tuple[torch.Tensor, ...]:
    return matrix.values, matrix.crow_indices, matrix.col_indices, *matrix.order, *matrix.index


def gradients_of_matmul(ctx: Any, grad: torch.Tensor, needs: tuple[bool, ...]) -> tuple[Any, ...]:
    """Gradients of values, b, bias and c; None unless ``needs`` has True for them.

    Args:
        ctx: of the call, with its ``kind`` and ``mode``, whose saved tensors are the operands and what ``Kind.kept``
            returned.
        grad: of the result.
        needs: four.
    """
    saved = ctx.saved_tensors
    if _grad_enabled():
        return gradients_once("bsr_matmul", lambda: _gradients(ctx, grad, saved, needs), (grad, *saved))
    return _gradients(ctx, grad, saved, needs)


def _gradients(
    ctx: Any, grad: torch.Tensor, saved: tuple[torch.Tensor, ...], needs: tuple[bool, ...]
) -> tuple[Any, ...]:
    kind: Kind = ctx.kind
    inner, operands = grad, saved
    if kind.activation:
        operands = saved[: _FIRST + kind.orders + kind.indexes + 1]
        with entered(ctx.mode):  # a thread of autograd has none of its own
            inner = _before_activation(kind, grad, operands, saved[len(operands) :])
    of_values, of_b = of_operands(kind, operands, inner, needs, ctx.mode)
    of_bias = of_c = None
    if needs[2]:
        of_bias = inner.sum(-1) if inner.dim() == 2 else inner.sum((0, 2))
    if needs[3]:
        of_c = inner * kind.beta
    return of_values, of_b, of_bias, of_c


def _before_activation(kind: Kind, grad: torch.Tensor, operands: tuple[torch.Tensor, ...], kept: Any) -> torch.Tensor:
    """The gradient of what the activation was applied to."""
    if kind.activation == "relu":
        inner: torch.Tensor = torch.ops.aten.threshold_backward(grad, kept[0], 0)
        return inner
    bias, c = kept[0] if kind.bias else None, kept[-1] if kind.c else None
    options = {"beta": kind.beta, "transpose_a": kind.transpose_a}
    before = product_or_operator(kind.matrix(operands), operands[-1], bias=bias, c=c, **options)
    derivative = {"gelu": torch.ops.aten.gelu_backward, "silu": torch.ops.aten.silu_backward}[kind.activation]
    found: torch.Tensor = derivative(grad, before)
    return found


@dataclass(slots=True)
class _Launch:
    """Launches of both products, for operands and a gradient like those of an earlier backward pass.

    Attributes:
        sample: that of dA; None if it is not needed.
        product: that of dB, likewise.
        copies: copies by rows of b and of dC that the first one reads; None for one that is read where it is.
        layer: as of ``Kind``.
    """

    sample: ProductLaunch | None
    product: ProductLaunch | None
    copies: tuple[New | None, New | None]
    layer: bool

    def __call__(self, tensors: tuple[torch.Tensor, ...]) -> Gradients | None:
        """Launch; None, if the call needs checks.

        Args:
            tensors: operands, and the gradient of the result.
        """
        of_values = of_b = None
        if self.sample is not None:
            of_values = self.sample(tensors if self.copies == (None, None) else self._copied(tensors))
            if of_values is None:
                return None
        if self.product is not None:
            of_b = self.product(tensors)
            if of_b is None:
                return None
        return of_values, of_b

    def _copied(self, tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """The tensors, with the copies."""
        last = [
            tensor if copy is None else copy().copy_(_matrix_of(tensor) if self.layer else tensor)
            for tensor, copy in zip(tensors[-2:], self.copies, strict=True)
        ]
        return (*tensors[:-2], *last)


def _matrix_of(features: torch.Tensor) -> torch.Tensor:
    """(n, all others) of (..., n), as a product takes it."""
    return features.reshape(-1, features.shape[-1]).mT


def of_operands(
    kind: Kind, operands: tuple[torch.Tensor, ...], inner: torch.Tensor, needs: tuple[bool, ...], mode: bool | None
) -> Gradients:
    """Gradients of the values and of b.

    Args:
        kind: of the product.
        operands: row pointers, column numbers, values, order, index, and b.
        inner: the gradient of what the activation was applied to.
        needs: whether the first and the second are needed, and more.
        mode: that of the product's call.
    """
    key = launch = None
    tensors = (*operands, inner)
    if not _grad_enabled() and is_unwatched():
        try:
            key = ("gradients", kind, needs[:2], operands[2].shape, inner.shape, mode)
            launch = launches.find(key, tensors)
        except (AttributeError, RuntimeError, TypeError, ValueError):
            key = None
        if launch is not None:
            kept: Gradients | None = launch(tensors)
            if kept is not None:
                return kept
    with entered(mode):  # a thread of autograd has none of its own
        return _computed(kind, tensors, needs, None if launch is not None else key)


def _computed(kind: Kind, tensors: tuple[torch.Tensor, ...], needs: tuple[bool, ...], key: Any) -> Gradients:
    """The gradients of a backward pass that is checked; launches of later ones are kept if there is a key."""
    matrix = kind.matrix(tensors)
    if not tensors[-1].numel():  # no columns: no kernel could address them
        zeros = tensors[2].new_zeros(tensors[2].shape), tensors[-2].new_zeros(tensors[-2].shape)
        return zeros[0] if needs[0] else None, zeros[1] if needs[1] else None
    b, inner = (_matrix_of(tensor) if kind.layer else tensor for tensor in tensors[-2:])
    plain, sampled_from = is_plain(*tensors), (b, inner)
    of_values: Any = None
    of_b: Any = None
    if needs[0]:
        right, left = (t if t.dim() == 2 else t.transpose(0, 1).flatten(1) for t in (b, inner))
        left, right = (right, left) if kind.transpose_a else (left, right)
        if plain:
            left, right = arranged_samples(left, right, matrix)
            sampled_from = (left, right) if kind.transpose_a else (right, left)
            of_values = sampled(left, right, matrix, arrange=False, validate=False)
        else:
            lists, block = (list(matrix.order), list(matrix.index)), matrix.values.shape[1:]
            of_values = torch.ops.sparse_kernel_codegen.bsr_sddmm(
                *(left, right, matrix.crow_indices, matrix.col_indices),
                *(*lists, matrix.columns, *block, matrix.how),
                arrange=True,
            )
    if needs[1]:
        of_b = product_or_operator(matrix, inner, transpose_a=not kind.transpose_a)
        if kind.layer:
            of_b = of_b.mT.reshape(*tensors[-1].shape[:-1], kind.columns)
    if plain and key is not None:
        launch = _bound(kind, tensors, (b, inner), sampled_from, (of_values, of_b)) if inner.dim() == 2 else None
        launches.keep(key, tensors, launch)
    return of_values, of_b


def _bound(
    kind: Kind,
    tensors: tuple[torch.Tensor, ...],
    pair: tuple[torch.Tensor, torch.Tensor],
    sampled_from: tuple[torch.Tensor, torch.Tensor],
    found: Gradients,
) -> _Launch | None:
    """The launches of gradients that were computed just before; None where later passes do more than launch.

    Args:
        kind: of the product.
        tensors: operands, and the gradient of the result.
        pair: b and that gradient as matrices.
        sampled_from: these, or copies by rows.
        found: the gradients.
    """
    if any(given.data_ptr() != tensor.data_ptr() for given, tensor in zip(pair, tensors[-2:], strict=True)):
        return None  # a layer's input or gradient was copied
    matrix, first, (of_values, of_b) = kind.matrix(tensors), tensors[:-2], found
    sample = multiply = None
    if of_values is not None:
        right, left = sampled_from
        left, right = (right, left) if kind.transpose_a else (left, right)
        sample = bound_sample(left, right, matrix, of_values, (*first, *sampled_from))
        if sample is None:
            return None
    if of_b is not None:
        options = {**OF_PRODUCT, "transpose_a": not kind.transpose_a}
        place = Place((), (*first, *pair), matrix)
        multiply = bound_product(place, pair[1], bias=None, c=None, given=None, **options)
        if multiply is None:
            return None
        multiply = multiply.returning(of_b) if kind.layer else multiply
    copies = [None if own is given else copied_rows(own) for own, given in zip(sampled_from, pair, strict=True)]
    return _Launch(sample, multiply, (copies[0], copies[1]), kind.layer)
