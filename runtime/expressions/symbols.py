"""Arguments for tracing a user's function: tensors that hold a part of a tree instead of numbers."""

from __future__ import annotations

import numbers
from typing import Any

import torch

from codegen.expressions.nodes import ExpressionError, Literal, Node, Type

DTYPES = {Type.BOOL: torch.bool, Type.INT: torch.int64, Type.FLOAT: torch.float32}
"""torch dtypes of node types."""
_LEAST, _MOST = -(1 << 63), (1 << 63) - 1


class Symbol(torch.Tensor):  # type: ignore[misc, unused-ignore]
    """A value, or a row of a captured tensor that still lacks indices.

    It is on torch's meta device: dtype and shape are available, and a computation that escapes tracing finds no number.

    Attributes:
        node: the value; None for a row.
        row: the captured tensor and its indices so far; None for a value.
    """

    node: Node | None
    row: tuple[torch.Tensor, tuple[Node, ...]] | None


def symbol(node: Node) -> Symbol:
    """Symbol of a value."""
    made: Symbol = torch.empty((), dtype=DTYPES[node.type], device="meta").as_subclass(Symbol)
    made.node, made.row = node, None
    return made


def row(of: torch.Tensor, indices: tuple[Node, ...]) -> Symbol:
    """Symbol of a captured tensor with some of its indices."""
    made: Symbol = torch.empty(of.shape[len(indices) :], dtype=of.dtype, device="meta").as_subclass(Symbol)
    made.node, made.row = None, (of, indices)
    return made


def literal(value: Any) -> Literal:
    """Literal node of a number from Python or another library.

    Raises:
        ExpressionError: if an integer does not fit int64.
    """
    if isinstance(value, bool):
        return Literal(value)
    if isinstance(value, numbers.Integral):
        if not _LEAST <= int(value) <= _MOST:
            raise ExpressionError("has an integer of more than 64 bits")
        return Literal(int(value))
    return Literal(float(value))
