"""Cost of an expression: estimated instructions per query, per key, and per pair.

The counts apply to 32-bit integers and float32; parts with 64 bits count twice. They include addresses of elements, and
ignore optimizations of the compiler: they rank masks and scores, but do not predict times.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from codegen.expressions.bounds import bounds_of, is_inside
from codegen.expressions.intervals import INT32
from codegen.expressions.nodes import Item, Literal, Node, Operation, Type
from codegen.expressions.parts import Part, Parts
from codegen.expressions.places import Place, uses_of

_FUNCTIONS: Mapping[str, int] = {"exp": 2, "tanh": 6, "log2": 2, "sqrt": 2, "/": 8, "inverse_of_1_plus_exp2": 3}
_DIVISION = 20  # floor division of integers by an unknown divisor
_DIVISION_BY_NUMBER = 6  # multiply-high, shift and rounding, for a constant divisor
_LOAD, _DIM, _CLAMP = 1, 2, 2  # an element: the load; per index, the address computation and the clamp


@dataclass(frozen=True)
class Cost:
    """Estimated instructions of an expression.

    Attributes:
        row: instructions per query.
        column: instructions per key.
        pair: instructions per pair.
    """

    row: int
    column: int
    pair: int

    def __str__(self) -> str:
        once = {"query": self.row, "key": self.column}
        hoisted = ", ".join(f"{count} per {what}" for what, count in once.items() if count)
        return f"about {self.pair} instructions per pair" + (f", plus {hoisted}" if hoisted else "")


def cost_of(node: Node) -> Cost:
    """Estimated instructions of an expression, by place of computation (codegen/expressions/places.py)."""
    parts = Parts()
    root = parts.add(node)
    found = dict.fromkeys(Place, 0)
    for part, place in uses_of(parts.all, root).used:
        found[place] += _own(parts.all[part], parts.all)
    return Cost(found[Place.ROW], found[Place.COLUMN], found[Place.PAIR])


def _own(part: Part, parts: list[Part]) -> int:
    """Instructions of a part, without its operands."""
    node = part.node
    if isinstance(node, Item):
        return _LOAD + sum(_DIM + _CLAMP * (not is_inside(node, axis)) for axis in range(len(node.indices)))
    if not isinstance(node, Operation):
        return 0
    wide = any(_is_wide(each) for each in (node, *(parts[operand].node for operand in part.operands)))
    if node.name in ("//", "%") and node.type is Type.INT:
        return _of_division(node.operands[1]) * (2 if wide else 1)
    return _FUNCTIONS.get(node.name, 1) * (2 if wide else 1)


def _of_division(divisor: Node) -> int:
    if not isinstance(divisor, Literal):
        return _DIVISION
    value = abs(int(divisor.value))
    return 1 if value & (value - 1) == 0 else _DIVISION_BY_NUMBER


def _is_wide(node: Node) -> bool:
    return node.type is Type.INT and not bounds_of(node).within(INT32)
