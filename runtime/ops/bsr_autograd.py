"""Products with gradients, past torch's dispatcher: where no mode, transform or subclass takes part in a call.

The dispatcher and the Python that torch puts around an operator with gradients take longer than all else of a call.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from runtime.kernels.launches import Launch
from runtime.kernels.product_launch import ProductLaunch
from runtime.ops.bsr_launches import Place, bound_product, launches, product
from runtime.ops.bsr_operator import gradients_of_matmul, save_matmul
from runtime.prepare.bsr_matrix import BsrMatrix

_OF_LAYER: dict[str, Any] = {"beta": 1.0, "activation": "", "transpose_a": False, "arrange": True}


class _Call(NamedTuple):
    """What a call needs beside the tensors that may have gradients.

    Attributes:
        parts: of the ``BsrMatrix`` less its values.
        options: those of the operator.
        launch: of an earlier call like it; None: the call is checked.
        tensors: what the launch is called with.
    """

    parts: tuple[Any, ...]
    options: dict[str, Any]
    launch: Launch | None = None
    tensors: tuple[torch.Tensor, ...] = ()


class _Matmul(torch.autograd.Function):  # type: ignore[misc, unused-ignore]
    """The operator ``bsr_matmul`` with its gradients."""

    @staticmethod
    def forward(ctx: Any, values: Any, b: Any, *others: Any) -> torch.Tensor:
        bias, c, call = others
        crow, col, columns, order, index, how = call.parts
        found: torch.Tensor | None = None if call.launch is None else call.launch(call.tensors)
        if found is None:
            matrix = BsrMatrix(values, crow, col, columns, order, index, how)
            found = product(matrix, b, bias=bias, c=c, **call.options)
        save_matmul(ctx, (values, crow, col, b, bias, c, order, index, columns, how), call.options, found)
        return found

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        return (*gradients_of_matmul(ctx, grad, ctx.needs_input_grad[:4]), None)


class _Linear(torch.autograd.Function):  # type: ignore[misc, unused-ignore]
    """x W^T + bias, whose x is read where it is."""

    @staticmethod
    def forward(ctx: Any, x: Any, values: Any, bias: Any, call: _Call) -> torch.Tensor:
        crow, col, columns, order, index, how = call.parts
        b = x.view(-1, columns).mT
        found: torch.Tensor | None = None if call.launch is None else call.launch(call.tensors)
        if found is None:
            found = product(BsrMatrix(values, crow, col, columns, order, index, how), b, bias=bias, c=None, **_OF_LAYER)
            like = found.mT.view(*x.shape[:-1], -1)
            # In place, as what is no view may be written to behind a custom function of autograd.
            found = found.as_strided_(like.shape, like.stride())
        save_matmul(ctx, (values, crow, col, b, bias, None, order, index, columns, how), call.options, found)
        return found

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        of_x, of_values, of_bias, _ = ctx.needs_input_grad
        columns = grad.reshape(-1, grad.shape[-1]).mT
        values, x, bias, _ = gradients_of_matmul(ctx, columns, (of_values, of_x, of_bias, False))
        return None if x is None else x.mT.reshape(*grad.shape[:-1], -1), values, bias, None


@dataclass(slots=True)
class _WithGradients:
    """A launch of products with gradients.

    Attributes:
        launch: of the product; None: each call is checked.
        bias: whether there is one.
        c: likewise.
        orders: tensors of the order.
        columns: of the matrix.
        how: of the matrix.
        options: those of the operator.
    """

    launch: Launch | None
    bias: bool
    c: bool
    orders: int
    columns: int
    how: str
    options: dict[str, Any]

    def __call__(self, tensors: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Compute the product of tensors in the order of ``Place.tensors``."""
        first = 3 if self.bias else 2  # of the values, with what is prepared behind them
        last = len(tensors) - (2 if self.c else 1)  # of b
        middle = first + 1 + self.orders
        parts = (*tensors[:2], self.columns, tensors[first + 1 : middle], tensors[middle:last], self.how)
        found: torch.Tensor = _Matmul.apply(  # type: ignore[no-untyped-call, unused-ignore]
            tensors[first],
            tensors[last],
            tensors[2] if self.bias else None,
            tensors[-1] if self.c else None,
            _Call(parts, self.options, self.launch, tensors),
        )
        return found


@dataclass(slots=True)
class _LinearWithGradients:
    """A launch of calls of a layer with gradients; the attributes are those of ``_WithGradients``."""

    launch: Launch | None
    bias: bool
    orders: int
    columns: int
    how: str

    def __call__(self, tensors: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Compute the layer of tensors in the order of ``Place.tensors``."""
        first = 3 if self.bias else 2
        # As ``BlockSparseLinear.weight`` has them: DDP writes into buffers between the passes.
        crow, col, *prepared = [tensor.data for tensor in (*tensors[:2], *tensors[first + 1 : -1])]
        parts = (crow, col, self.columns, tuple(prepared[: self.orders]), tuple(prepared[self.orders :]), self.how)
        found: torch.Tensor = _Linear.apply(  # type: ignore[no-untyped-call, unused-ignore]
            tensors[-1],
            tensors[first],
            tensors[2] if self.bias else None,
            _Call(parts, _OF_LAYER, self.launch, tensors),
        )
        return found


def matmul_with_gradients(a: BsrMatrix, b: torch.Tensor, *, bias: Any, c: Any, **options: Any) -> torch.Tensor:
    """Compute what the operator of ``bsr_matmul`` does, of plain tensors."""
    parts = (a.crow_indices, a.col_indices, a.columns, a.order, a.index, a.how)
    found: torch.Tensor = _Matmul.apply(  # type: ignore[no-untyped-call, unused-ignore]
        a.values, b, bias, c, _Call(parts, options)
    )
    return found


def keep_matmul(place: Place, b: torch.Tensor, *, bias: Any, c: Any, **options: Any) -> None:
    """Keep the launch of a product with gradients that was computed just before; the arguments are those of it."""
    launch, matrix = bound_product(place, b, bias=bias, c=c, given=None, **options), place.matrix
    given = bias is not None, c is not None, len(matrix.order), matrix.columns, matrix.how
    launches.keep(place.key, place.tensors, _WithGradients(launch, *given, {**options, "validate": False}))


def keep_linear(place: Place, b: torch.Tensor, y: torch.Tensor) -> None:
    """Keep the launch of a call of a ``BlockSparseLinear`` that was made just before.

    Args:
        place: where.
        b: the input as the product took it, (K, N).
        y: what the call returned.
    """
    *others, x = place.tensors
    matrix, has_bias = place.matrix, len(others) > 3 + len(place.matrix.order) + len(place.matrix.index)
    launch: Launch | None = None
    if b.data_ptr() == x.data_ptr():  # else x was copied
        bias = others[2] if has_bias else None
        found = bound_product(Place(place.key, (*others, b), matrix), b, bias=bias, c=None, given=None, **_OF_LAYER)
        launch = found.returning(y) if isinstance(found, ProductLaunch) else None
        if y.requires_grad:
            launch = _LinearWithGradients(launch, has_bias, len(matrix.order), matrix.columns, matrix.how)
    launches.keep(place.key, place.tensors, launch)
