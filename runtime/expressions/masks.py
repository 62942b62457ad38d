"""Masks that users write, as a spec has them: a text, what its tensors are, and the tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from codegen.expressions.nodes import MOST_DIMS, Aux, ExpressionError, check_size
from codegen.expressions.parse import parse_aux, parse_expression
from codegen.expressions.text import text_of
from codegen.wording import shown
from runtime.errors import ArgumentError
from runtime.expressions.captured import settled
from runtime.expressions.dtypes import NAMES
from runtime.expressions.trace import trace_mask


@dataclass(frozen=True)
class Mask:
    """A mask as a spec has it.

    Attributes:
        text: the expression in one spelling.
        declared: its tensors by name, in the order of their names: "int32[batch, q_len]".
        tensors: the tensors, likewise.
    """

    text: str
    declared: dict[str, str]
    tensors: dict[str, torch.Tensor]


def mask_of(mask: str | Callable[..., Any], aux: Mapping[str, torch.Tensor] | None) -> Mask:
    """Return what a text with its tensors, or a function as FlexAttention has it, is to a spec.

    Args:
        mask: an expression (docs/expressions.md), or ``mask_mod(b, h, q_idx, kv_idx)``.
        aux: the tensors that a text names; a function has its own.

    Raises:
        ArgumentError: naming ``mask`` or ``aux``.
    """
    if not isinstance(mask, str):
        if aux:
            raise ArgumentError("aux", "is given, and mask is a function, which brings its own tensors")
        traced = trace_mask(mask)
        return _made(traced.node, traced.aux, traced.tensors)
    try:
        tensors = {} if aux is None else dict(aux)
        given = {name: _declared(name, tensor) for name, tensor in tensors.items()}
        parse_aux({name: str(each) for name, each in given.items()})
        node = parse_expression(mask, given, score=False)
        check_size(node)
        return _made(*settled(node, tensors, {}))
    except ExpressionError as error:
        raise ArgumentError("mask", f"is {shown(mask)}: {error}") from None


def _declared(name: str, tensor: Any) -> Aux:
    """Return a tensor with the numbers of its shape as sizes."""
    where = f"aux[{name!r}]"
    if not isinstance(tensor, torch.Tensor):
        raise ArgumentError(where, f"is {type(tensor).__name__}, expected a torch.Tensor")
    if tensor.dtype not in NAMES:
        raise ArgumentError(where, f"is {tensor.dtype}, expected one of {', '.join(map(str, NAMES))}")
    if tensor.dim() > MOST_DIMS or tensor.numel() == 0:
        shape = tuple(tensor.shape)
        raise ArgumentError(where, f"has shape {shape}, expected {MOST_DIMS} dimensions at most, none of size 0")
    return Aux(name, NAMES[tensor.dtype], tuple(tensor.shape))


def _made(node: Any, aux: Mapping[str, Aux], tensors: Mapping[str, torch.Tensor]) -> Mask:
    declared = {name: str(aux[name]) for name in sorted(aux)}
    return Mask(text_of(node), declared, {name: tensors[name] for name in declared})
