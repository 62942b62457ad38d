"""Sums, products and quotients of trees, with constant folding: 1 * x is x, 2 * 3 is 6.

These functions do not raise errors: if simplification yields a divisor of 0, the result follows float32.
"""

from __future__ import annotations

from codegen.expressions.nodes import Literal, Node, Operation, Type, operation

ZERO, ONE = Literal(0.0), Literal(1.0)
LARGEST = (2 - 2.0**-23) * 2.0**127
"""The largest float32."""
LEAST_NORMAL = 2.0**-126
"""The smallest normal float32 above 0."""


def is_number(node: Node, value: float) -> bool:
    """Whether a node is this number."""
    return isinstance(node, Literal) and node.value == value


def as_float(node: Node) -> Node:
    """Node as a float."""
    if node.type is Type.FLOAT:
        return node
    return Literal(float(node.value)) if isinstance(node, Literal) else operation("float", node)


def _number(value: float) -> Literal | None:
    """Number computed at generation time; None if float32 arithmetic may give another result."""
    return Literal(value) if value == 0 or LEAST_NORMAL <= abs(value) <= LARGEST else None


def sum_of(a: Node, b: Node) -> Node:
    """Sum ``a + b``."""
    if isinstance(a, Literal) and isinstance(b, Literal) and (folded := _number(a.value + b.value)):
        return folded
    if is_number(a, 0.0):
        return as_float(b)
    if isinstance(b, Operation) and b.name == "neg":
        return operation("-", a, *b.operands)
    return as_float(a) if is_number(b, 0.0) else operation("+", a, b)


def minus(a: Node) -> Node:
    """Negation ``-a``."""
    if isinstance(a, Literal):
        return Literal(-float(a.value))
    return a.operands[0] if isinstance(a, Operation) and a.name == "neg" else operation("neg", a)


def product(a: Node, b: Node) -> Node:
    """Product ``a * b``, both as floats."""
    a, b = as_float(a), as_float(b)
    if is_number(a, 0.0) or is_number(b, 0.0):
        return ZERO
    if isinstance(a, Literal) and isinstance(b, Literal) and (folded := _number(a.value * b.value)):
        return folded
    for one, other in ((a, b), (b, a)):
        if is_number(one, 1.0):
            return other
        if is_number(one, -1.0):
            return minus(other)
    return operation("*", a, b)


def quotient(a: Node, b: Node) -> Node:
    """Quotient ``a / b``, simplified."""
    if is_number(a, 0.0):
        return ZERO
    if isinstance(a, Literal) and isinstance(b, Literal) and b.value and (folded := _number(a.value / b.value)):
        return folded
    return as_float(a) if is_number(b, 1.0) else divided(a, b)


def divided(a: Node, b: Node) -> Node:
    """Quotient ``a / b``, not simplified."""
    return Operation("/", (a, b), Type.FLOAT)


def chosen(condition: Node, one: Node, other: Node) -> Node:
    """Node ``where(condition, one, other)``."""
    if isinstance(condition, Literal):
        return one if condition.value else other
    if one is other or (isinstance(one, Literal) and isinstance(other, Literal) and one.value == other.value):
        return one
    return operation("where", condition, one, other)
