"""Derivatives of expressions, as expressions, with respect to the score or to an element of an aux tensor.

They follow torch: min and max split the derivative evenly between equal operands, that of abs at 0 is 0, and those of
conditions, comparisons and integers are 0. The rules use the derivative of each operand once, so that chains do not
grow exponentially, and reuse the value if it is a part of its derivative.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from codegen.expressions.arithmetic import ONE, ZERO, chosen, is_number, minus, product, quotient, sum_of
from codegen.expressions.nodes import ExpressionError, Literal, Node, Operation, Type, operation
from codegen.expressions.parts import Parts

_Rule = Callable[[Operation, Sequence[Node]], Node]


def derivative(node: Node, of: Node) -> Node:
    """Derivative of an expression, simplified.

    Args:
        node: the expression.
        of: the variable of differentiation: the score, or an element of an aux tensor, at all of its occurrences.

    Raises:
        ExpressionError: if ``of`` is not a float.
    """
    if of.type is not Type.FLOAT:
        raise ExpressionError(f"a derivative is by a float, not by {of.type}")
    parts = Parts()
    by, root = parts.add(of), parts.add(node)
    found: list[Node] = []
    for place, part in enumerate(parts.all):
        if place == by:
            found.append(ONE)
        elif isinstance(part.node, Operation) and part.node.type is Type.FLOAT:
            found.append(_of_operation(part.node, [found[operand] for operand in part.operands]))
        else:
            found.append(ZERO)
    return found[root]


def _of_operation(node: Operation, inner: Sequence[Node]) -> Node:
    if all(is_number(each, 0.0) for each in inner):
        return ZERO
    return _RULES[node.name](node, inner)


def _of_product(node: Operation, inner: Sequence[Node]) -> Node:
    a, b = node.operands
    return sum_of(product(inner[0], b), product(a, inner[1]))


def _of_quotient(node: Operation, inner: Sequence[Node]) -> Node:
    """Derivative ``a' / b - (a / b) / b * b'`` of a quotient."""
    b = node.operands[1]
    less = ZERO if is_number(inner[1], 0.0) else product(quotient(node, b), inner[1])
    return sum_of(quotient(inner[0], b), minus(less))


def _of_extreme(node: Operation, inner: Sequence[Node]) -> Node:
    """Derivative of the selected operand; half of both if they are equal."""
    a, b = node.operands
    if inner[0] is inner[1]:
        return inner[0]
    beyond, before = (">", "<") if node.name == "min" else ("<", ">")
    taken = sum_of(
        chosen(operation(beyond, a, b), ZERO, inner[0]),
        chosen(operation(before, a, b), ZERO, inner[1]),
    )
    return product(taken, chosen(operation("==", a, b), Literal(0.5), ONE))


def _of_absolute(node: Operation, inner: Sequence[Node]) -> Node:
    (a,) = node.operands
    negative = operation("where", operation("<", a, ZERO), Literal(-1.0), ZERO)
    return product(inner[0], operation("where", operation(">", a, ZERO), ONE, negative))


def _of_tanh(node: Operation, inner: Sequence[Node]) -> Node:
    return product(inner[0], operation("-", ONE, operation("*", node, node)))


def _of_log2(node: Operation, inner: Sequence[Node]) -> Node:
    return quotient(inner[0], product(node.operands[0], Literal(math.log(2))))


_RULES: Mapping[str, _Rule] = {
    "+": lambda node, inner: sum_of(inner[0], inner[1]),
    "-": lambda node, inner: sum_of(inner[0], minus(inner[1])),
    "*": _of_product,
    "/": _of_quotient,
    "neg": lambda node, inner: minus(inner[0]),
    "min": _of_extreme,
    "max": _of_extreme,
    "abs": _of_absolute,
    "where": lambda node, inner: chosen(node.operands[0], inner[1], inner[2]),
    "exp": lambda node, inner: product(inner[0], node),
    "tanh": _of_tanh,
    "log2": _of_log2,
    "sqrt": lambda node, inner: quotient(inner[0], product(Literal(2.0), node)),
    "float": lambda node, inner: inner[0],
}
"""Derivatives of the operations with float values, given the derivatives of their operands."""
