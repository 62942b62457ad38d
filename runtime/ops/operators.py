"""Common parts of the package's torch operators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

from runtime.errors import ArgumentError
from runtime.kernels.arguments import NO_TANGENT, has_tangent

NAMESPACE = "sparse_kernel_codegen"
STRIDES = getattr(torch.Tag, "needs_exact_strides", torch.Tag.needs_fixed_stride_order)
"""Tag of an operator whose inputs must keep the strides they were traced with."""
NO_SECOND = "has no gradient of its gradient (double backward): detach its gradient before differentiating further"
"""Reason of every operator that refuses a second derivative."""


def like(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A new tensor with the strides of ``tensor`` if its memory is dense, else contiguous.

    Its dtype is ``dtype``, by default the tensor's.
    """
    found = torch.empty_like(tensor, dtype=dtype)
    return found if found.stride() == tensor.stride() else tensor.new_empty(tensor.shape, dtype=dtype)


def nothing(tensor: torch.Tensor) -> torch.Tensor:
    """An empty float32 tensor, which operators return for a result that was not requested."""
    return torch.empty((0,), dtype=torch.float32, device=tensor.device)


class _Gradients(torch.autograd.Function):  # type: ignore[misc, unused-ignore]
    """Gradients that are not differentiable themselves: a second derivative raises an error."""

    @staticmethod
    def forward(ctx: Any, name: str, compute: Callable[[], tuple[Any, ...]], *inputs: Any) -> tuple[Any, ...]:
        ctx.name = name
        return compute()

    @staticmethod
    def backward(ctx: Any, *_: Any) -> NoReturn:
        raise ArgumentError(ctx.name, NO_SECOND)


def gradients_once(name: str, compute: Callable[[], tuple[Any, ...]], inputs: Sequence[Any]) -> tuple[Any, ...]:
    """Compute gradients. A second derivative raises an error only when it is requested.

    Args:
        name: name of the operator.
        compute: a function that returns new tensors, or None for a missing gradient.
        inputs: the tensors that the gradients depend on.
    """
    if not torch.is_grad_enabled():  # as in each backward pass without create_graph
        return compute()
    found: tuple[Any, ...] = _Gradients.apply(name, compute, *inputs)  # type: ignore[no-untyped-call, unused-ignore]
    return found


def check_gradients_given(*gradients: Any) -> None:
    """Refuse gradients of results that have tangents.

    Raises:
        ArgumentError: naming ``dout``.
    """
    for gradient in gradients:
        if has_tangent(gradient):
            raise ArgumentError("dout", NO_TANGENT)


def needs(wanted: Sequence[bool]) -> dict[str, bool]:
    """Options of a backward pass for gradients of q, k, v and the sinks that are wanted."""
    of_q, of_k, of_v, of_sink = wanted
    return {"dq": of_q, "dkdv": of_k or of_v, "dsink": of_sink}
