"""Derivatives of expressions, as expressions: by the score, and by what is looked up in an aux tensor.

They are torch's: min and max share theirs where both are equal, abs has none at 0, and a condition, a comparison or an
integer has none anywhere. The rules name the derivative of each operand once, so that no chain of them doubles, and the
value itself where it is a part of its derivative, so that both are computed once. No kernel takes scores yet.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from codegen.expressions.nodes import ExpressionError, Literal, Node, Operation, Type, operation
from codegen.expressions.parts import Parts

_ZERO, _ONE = Literal(0.0), Literal(1.0)
_Rule = Callable[[Operation, Sequence[Node]], Node]


def derivative(node: Node, of: Node) -> Node:
    """Return the derivative of an expression, simplified.

    Args:
        node: the expression.
        of: what it is derived by: the score, or an element of an aux tensor; wherever it stands, it is the same.

    Raises:
        ExpressionError: for something that is no float: there is no derivative by it.
    """
    if of.type is not Type.FLOAT:
        raise ExpressionError(f"a derivative is by a float, not by {of.type}")
    parts = Parts()
    by, root = parts.add(of), parts.add(node)
    found: list[Node] = []
    for place, part in enumerate(parts.all):
        if place == by:
            found.append(_ONE)
        elif isinstance(part.node, Operation) and part.node.type is Type.FLOAT:
            found.append(_of_operation(part.node, [found[operand] for operand in part.operands]))
        else:
            found.append(_ZERO)
    return found[root]


def _of_operation(node: Operation, inner: Sequence[Node]) -> Node:
    if all(_is(each, 0.0) for each in inner):
        return _ZERO
    return _RULES[node.name](node, inner)


def _is(node: Node, value: float) -> bool:
    return isinstance(node, Literal) and node.value == value


def _as_float(node: Node) -> Node:
    if node.type is Type.FLOAT:
        return node
    return Literal(float(node.value)) if isinstance(node, Literal) else operation("float", node)


def _number(value: float) -> Literal | None:
    """Return a number that is worked out here, None if only a kernel can tell what becomes of it."""
    return Literal(value) if math.isfinite(value) else None


def _sum(a: Node, b: Node) -> Node:
    """Return a + b."""
    if isinstance(a, Literal) and isinstance(b, Literal) and (folded := _number(a.value + b.value)):
        return folded
    if _is(a, 0.0):
        return _as_float(b)
    if isinstance(b, Operation) and b.name == "neg":
        return operation("-", a, *b.operands)
    return _as_float(a) if _is(b, 0.0) else operation("+", a, b)


def _minus(a: Node) -> Node:
    """Return -a."""
    if isinstance(a, Literal):
        return Literal(-float(a.value))
    return a.operands[0] if isinstance(a, Operation) and a.name == "neg" else operation("neg", a)


def _product(a: Node, b: Node) -> Node:
    """Return a * b, both as floats."""
    a, b = _as_float(a), _as_float(b)
    if _is(a, 0.0) or _is(b, 0.0):
        return _ZERO
    if isinstance(a, Literal) and isinstance(b, Literal) and (folded := _number(a.value * b.value)):
        return folded
    for one, other in ((a, b), (b, a)):
        if _is(one, 1.0):
            return other
        if _is(one, -1.0):
            return _minus(other)
    return operation("*", a, b)


def _quotient(a: Node, b: Node) -> Node:
    """Return a / b."""
    if _is(a, 0.0):
        return _ZERO
    both = isinstance(a, Literal) and isinstance(b, Literal)
    if both and (folded := _number(a.value / b.value)):  # type: ignore[union-attr]
        return folded
    return _as_float(a) if _is(b, 1.0) else operation("/", a, b)


def _chosen(condition: Node, one: Node, other: Node) -> Node:
    """Return where(condition, one, other)."""
    if isinstance(condition, Literal):
        return one if condition.value else other
    if one is other or (isinstance(one, Literal) and isinstance(other, Literal) and one.value == other.value):
        return one
    return operation("where", condition, one, other)


def _of_product(node: Operation, inner: Sequence[Node]) -> Node:
    a, b = node.operands
    return _sum(_product(inner[0], b), _product(a, inner[1]))


def _of_quotient(node: Operation, inner: Sequence[Node]) -> Node:
    """Return a' / b - (a / b) / b b'."""
    b = node.operands[1]
    less = _ZERO if _is(inner[1], 0.0) else _product(_quotient(node, b), inner[1])
    return _sum(_quotient(inner[0], b), _minus(less))


def _of_extreme(node: Operation, inner: Sequence[Node]) -> Node:
    """Return the derivative of the operand that is taken; of equal ones half of both."""
    a, b = node.operands
    if inner[0] is inner[1]:
        return inner[0]
    beyond, before = (">", "<") if node.name == "min" else ("<", ">")
    taken = _sum(
        _chosen(operation(beyond, a, b), _ZERO, inner[0]),
        _chosen(operation(before, a, b), _ZERO, inner[1]),
    )
    return _product(taken, _chosen(operation("==", a, b), Literal(0.5), _ONE))


def _of_absolute(node: Operation, inner: Sequence[Node]) -> Node:
    (a,) = node.operands
    negative = operation("where", operation("<", a, _ZERO), Literal(-1.0), _ZERO)
    return _product(inner[0], operation("where", operation(">", a, _ZERO), _ONE, negative))


def _of_tanh(node: Operation, inner: Sequence[Node]) -> Node:
    return _product(inner[0], operation("-", _ONE, operation("*", node, node)))


def _of_log2(node: Operation, inner: Sequence[Node]) -> Node:
    return _quotient(inner[0], _product(node.operands[0], Literal(math.log(2))))


_RULES: Mapping[str, _Rule] = {
    "+": lambda node, inner: _sum(inner[0], inner[1]),
    "-": lambda node, inner: _sum(inner[0], _minus(inner[1])),
    "*": _of_product,
    "/": _of_quotient,
    "neg": lambda node, inner: _minus(inner[0]),
    "min": _of_extreme,
    "max": _of_extreme,
    "abs": _of_absolute,
    "where": lambda node, inner: _chosen(node.operands[0], inner[1], inner[2]),
    "exp": lambda node, inner: _product(inner[0], node),
    "tanh": _of_tanh,
    "log2": _of_log2,
    "sqrt": lambda node, inner: _quotient(inner[0], _product(Literal(2.0), node)),
    "float": lambda node, inner: inner[0],
}
"""Rules of the operations whose value is a float, of what their operands' derivatives are."""
