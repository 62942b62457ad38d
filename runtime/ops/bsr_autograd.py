"""Products with gradients, past torch's dispatcher: where no mode, transform or subclass takes part in a call.

The dispatcher and the Python that torch puts around an operator with gradients take longer than all else of a call.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch._functorch.utils import unwrap_dead_wrappers

from runtime.checks import check_dense
from runtime.kernels.launches import Launch, is_wrapped
from runtime.kernels.product_launch import ProductLaunch
from runtime.ops.bsr_gradients import OF_PRODUCT, Kind, gradients_of_matmul, kind_of, of_operands
from runtime.ops.bsr_launches import Place, bound_product, launches, product
from runtime.ops.modes import PLAIN
from runtime.ops.operators import gradients_once
from runtime.prepare.bsr_matrix import BsrMatrix
from runtime.receipts.mode import mode

_OF_LAYER: dict[str, Any] = {**OF_PRODUCT, "transpose_a": False}


class _MatmulFunction(torch.autograd.Function):  # type: ignore[misc, unused-ignore]
    """The operator ``bsr_matmul`` with its gradients."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> torch.Tensor:
        _, _, bias, c, call, tensors = arguments
        found: torch.Tensor | None = None if call.launch is None else call.launch(tensors)
        kind = ctx.kind = call.kind
        ctx.mode = mode()
        if found is None:
            found = call.checked(tensors, bias, c)
        if kind.activation or kind.bias or kind.c:
            ctx.save_for_backward(*kind.operands(tensors), *kind.kept(bias, c, found))
        else:
            ctx.save_for_backward(*tensors)
        return found

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        return (*gradients_of_matmul(ctx, grad, ctx.needs_input_grad[:4]), None, None)


class _LinearFunction(torch.autograd.Function):  # type: ignore[misc, unused-ignore]
    """x W^T + bias, whose x is read where it is."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> torch.Tensor:
        x, values, bias, call, tensors = arguments
        found: torch.Tensor | None = None if call.launch is None else call.launch(tensors)
        if found is None:
            found = call.checked(tensors, bias)
        ctx.kind, ctx.mode = call.kind, mode()
        # Not saved, as autograd would refuse the backward pass of what was written to: DDP writes the same numbers into
        # buffers before each forward pass. A layer that loads other places beside old values makes new buffers.
        ctx.places = tensors[:2], tensors[3 if bias is None else 4 : -1]
        ctx.save_for_backward(x, values)
        return found

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        x, values = ctx.saved_tensors
        places, prepared = ctx.places
        of_x, of_values, of_bias, *_ = ctx.needs_input_grad
        given = ctx.kind, (*places, values, *prepared, x), grad, (of_values, of_x), ctx.mode

        def compute() -> tuple[Any, ...]:
            found = of_operands(*given)
            return *found, grad.reshape(-1, grad.shape[-1]).mT.sum(-1) if of_bias else None

        found = gradients_once("bsr_matmul", compute, (grad, x, values))
        return found[1], found[0], found[2], None, None


# Without the Python that torch puts before a function for transforms of torch.func, which are refused, and for tensors
# that one has left behind, which a first call unwraps and later ones do not have.
_apply_matmul: Any = super(torch.autograd.Function, _MatmulFunction).apply
_apply_linear: Any = super(torch.autograd.Function, _LinearFunction).apply


@dataclass(slots=True)
class _Matmul:
    """A product with gradients, and the launch of calls like an earlier one.

    Attributes:
        kind: of its gradients.
        arrange: of the operator.
        validate: of the operator.
        launch: of the product; None: each call is checked.
    """

    kind: Kind
    arrange: bool
    validate: bool = False
    launch: Launch | None = None

    def __call__(self, tensors: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Compute the product of tensors in the order of ``Place.tensors``."""
        has_bias, has_c = self.kind.bias, self.kind.c
        found: torch.Tensor = _apply_matmul(
            tensors[3 if has_bias else 2],
            tensors[-2 if has_c else -1],
            tensors[2] if has_bias else None,
            tensors[-1] if has_c else None,
            self,
            tensors,
        )
        return found

    def checked(self, tensors: tuple[torch.Tensor, ...], bias: Any, c: Any) -> torch.Tensor:
        """The product of tensors in that order, without gradients."""
        kind, operands = self.kind, self.kind.operands(tensors)
        options: dict[str, Any] = {"beta": kind.beta, "activation": kind.activation, "transpose_a": kind.transpose_a}
        options |= {"arrange": self.arrange, "validate": self.validate}
        return product(kind.matrix(operands), operands[-1], bias=bias, c=c, **options)


@dataclass(slots=True)
class _Linear:
    """A call of a layer with gradients, and the launch of calls like an earlier one.

    Attributes:
        kind: of its gradients.
        launch: of the product; None: each call is checked.
    """

    kind: Kind
    launch: Launch | None = None

    def __call__(self, tensors: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Compute the layer of tensors in the order of ``Place.tensors``."""
        has_bias = self.kind.bias
        found: torch.Tensor = _apply_linear(
            tensors[-1], tensors[3 if has_bias else 2], tensors[2] if has_bias else None, self, tensors
        )
        return found

    def checked(self, tensors: tuple[torch.Tensor, ...], bias: Any) -> torch.Tensor:
        """The result of tensors in that order, without gradients."""
        x, matrix = tensors[-1], self.kind.matrix(self.kind.operands(tensors))
        found = product(matrix, x.view(-1, self.kind.columns).mT, bias=bias, c=None, **_OF_LAYER)
        like = found.mT.view(*x.shape[:-1], found.shape[0])
        # In place, as what is no view may be written to behind a custom function of autograd.
        return found.as_strided_(like.shape, like.stride())


def matmul_with_gradients(
    a: BsrMatrix, b: torch.Tensor, *, bias: Any, c: Any, arrange: bool, validate: bool = False, **options: Any
) -> torch.Tensor:
    """Compute what the operator of ``bsr_matmul`` does, of plain tensors."""
    kind = kind_of(a, bias=bias is not None, c=c is not None, **options)
    given = () if bias is None else (bias,), () if c is None else (c,)
    tensors = (a.crow_indices, a.col_indices, *given[0], a.values, *a.order, *a.index, b, *given[1])
    return _Matmul(kind, arrange, validate)(unwrap_dead_wrappers(tensors))


def keep_matmul(place: Place, b: torch.Tensor, *, bias: Any, c: Any, **options: Any) -> None:
    """Keep the launch of a product with gradients that was computed just before; the arguments are those of it."""
    launch = bound_product(place, b, bias=bias, c=c, given=None, **options)
    arrange = options.pop("arrange")
    kind = kind_of(place.matrix, bias=bias is not None, c=c is not None, **options)
    launches.keep(place.key, place.tensors, _Matmul(kind, arrange, launch=launch))


def linear_with_gradients(place: Place) -> torch.Tensor | None:
    """Compute a call of a ``BlockSparseLinear`` of plain tensors with a gradient.

    Args:
        place: of the call.

    Returns:
        The result; None where the input must be copied first, or no gradient is recorded.
    """
    matrix, tensors = place.matrix, unwrap_dead_wrappers(place.tensors)
    x, has_bias = tensors[-1], _has_bias(place)
    differentiated = any(each.requires_grad for each in (x, matrix.values, *(tensors[2:3] if has_bias else ())))
    plain = PLAIN.issuperset(map(type, tensors)) and not matrix.values.is_meta
    if not (torch.is_grad_enabled() and differentiated and plain):
        return None
    if has_bias:
        check_dense("bias", tensors[2])
    if x.reshape(-1, matrix.columns).data_ptr() != x.data_ptr():
        return None
    kind = kind_of(matrix, bias=has_bias, layer=True)
    return _Linear(kind)(tensors)


def _has_bias(place: Place) -> bool:
    """Whether a layer has a bias, by what is kept of its call."""
    return len(place.tensors) > 4 + len(place.matrix.order) + len(place.matrix.index)


def keep_linear(place: Place, y: torch.Tensor) -> None:
    """Keep the launch of a call of a ``BlockSparseLinear`` that was made just before.

    Args:
        place: where.
        y: what the call returned.
    """
    *others, x = place.tensors
    if is_wrapped(x):
        return
    matrix, has_bias = place.matrix, _has_bias(place)
    launch: Launch | None = None
    b = x.detach().reshape(-1, matrix.columns).mT
    if b.data_ptr() == x.data_ptr():  # else x is copied
        bias = others[2] if has_bias else None
        found = bound_product(Place(place.key, (*others, b), matrix), b, bias=bias, c=None, given=None, **_OF_LAYER)
        launch = found.returning(y) if isinstance(found, ProductLaunch) else None
        if y.requires_grad:
            launch = _Linear(kind_of(matrix, bias=has_bias, layer=True), launch)
    launches.keep(place.key, place.tensors, launch)
