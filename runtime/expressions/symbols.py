"""Arguments with which a user's function is traced: tensors that hold a part of a tree, and no numbers."""

from __future__ import annotations

import numbers
from typing import Any

import torch

from codegen.expressions.nodes import ExpressionError, Literal, Node, Type

DTYPES = {Type.BOOL: torch.bool, Type.INT: torch.int64, Type.FLOAT: torch.float32}
"""What torch calls the types of values."""
_LEAST, _MOST = -(1 << 63), (1 << 63) - 1


class Symbol(torch.Tensor):  # type: ignore[misc, unused-ignore]
    """A value, or a row of a captured tensor that has too few indices yet.

    On torch's meta device: dtype and shape are there to be asked, and a computation that slips through finds no number.

    Attributes:
        node: the value; None for a row.
        row: the captured tensor, and the indices that it has; None for a value.
    """

    node: Node | None
    row: tuple[torch.Tensor, tuple[Node, ...]] | None


def symbol(node: Node) -> Symbol:
    """Return a value."""
    made: Symbol = torch.empty((), dtype=DTYPES[node.type], device="meta").as_subclass(Symbol)
    made.node, made.row = node, None
    return made


def row(of: torch.Tensor, indices: tuple[Node, ...]) -> Symbol:
    """Return a captured tensor with some of its indices."""
    made: Symbol = torch.empty(of.shape[len(indices) :], dtype=of.dtype, device="meta").as_subclass(Symbol)
    made.node, made.row = None, (of, indices)
    return made


def literal(value: Any) -> Literal:
    """Return a Python number, or one of another library, as a part of a tree.

    Raises:
        ExpressionError: for an integer that no int64 holds.
    """
    if isinstance(value, bool):
        return Literal(value)
    if isinstance(value, numbers.Integral):
        if not _LEAST <= int(value) <= _MOST:
            raise ExpressionError("has an integer of more than 64 bits")
        return Literal(int(value))
    return Literal(float(value))
