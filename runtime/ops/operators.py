"""Common parts of the package's torch operators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

from runtime.errors import ArgumentError

NAMESPACE = "sparse_kernel_codegen"
STRIDES = getattr(torch.Tag, "needs_exact_strides", torch.Tag.needs_fixed_stride_order)
"""Tag of an operator whose inputs must have the strides that they were traced with."""


def like(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A new tensor with the layout of a result: that of the tensor, where it has no gaps, else contiguous.

    Its type is ``dtype``, or that of the tensor.
    """
    found = torch.empty_like(tensor, dtype=dtype)
    return found if found.stride() == tensor.stride() else tensor.new_empty(tensor.shape, dtype=dtype)


def nothing(tensor: torch.Tensor) -> torch.Tensor:
    """An empty float32 tensor, which operators return in place of a result that the call does not want."""
    return torch.empty((0,), dtype=torch.float32, device=tensor.device)


class _Gradients(torch.autograd.Function):  # type: ignore[misc, unused-ignore]
    """Gradients that may be used, and have no gradients themselves: to ask for one is refused."""

    @staticmethod
    def forward(ctx: Any, name: str, compute: Callable[[], tuple[Any, ...]], *inputs: Any) -> tuple[Any, ...]:
        ctx.name = name
        return compute()

    @staticmethod
    def backward(ctx: Any, *_: Any) -> NoReturn:
        reason = "is to have a gradient of its gradient, which is not written: detach what it returns"
        raise ArgumentError(ctx.name, reason)


def gradients_once(name: str, compute: Callable[[], tuple[Any, ...]], inputs: Sequence[Any]) -> tuple[Any, ...]:
    """Compute gradients; a gradient of one is refused only where it is requested.

    Args:
        name: of the operator.
        compute: returns new tensors, and None.
        inputs: what the gradients depend on.
    """
    if not torch.is_grad_enabled():  # as in each backward pass without create_graph
        return compute()
    found: tuple[Any, ...] = _Gradients.apply(name, compute, *inputs)  # type: ignore[no-untyped-call, unused-ignore]
    return found
