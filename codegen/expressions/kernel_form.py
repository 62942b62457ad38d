"""What a kernel computes of a score: the same value, in fewer instructions for each pair.

A factor that the value is wanted with (log2(e), for 2^x) goes inwards, to where something is multiplied once for many
pairs: ``score`` is the product of q.k and scale, and tanh and exp are 2^x of what they are given, so each has a factor
to take others in. By what no pair changes is multiplied, not divided. And a part that is linear in the key is worked
out at the first key that a thread has of a step, exactly as it is written; further keys add a slope:

    score + slope[head] * (kv_idx - q_idx)  ->  qk * scale_log2 + (a * column + b)

where ``column`` is a constant of the source, a is slope * log2(e), and b what is added at the first key.
Results differ from those of the text by roundings of float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from codegen.expressions.arithmetic import ONE, ZERO, as_float, is_number, minus, product, quotient, sum_of
from codegen.expressions.bounds import bounds_of
from codegen.expressions.intervals import INT64
from codegen.expressions.nodes import Item, Literal, Node, Operation, Type, Variable, children, operation

LOG2_E = math.log2(math.e)
"""Factor of a logit whose weight is 2^x."""
_QK, _SCALE_LOG2, _FIRST = (Variable(name) for name in ("qk", "scale_log2", "first_key"))
_COLUMN, _COLUMN_OF_PAIR = (Variable(name) for name in ("column", "column_of_pair"))
_KEY, _SCORE = Variable("kv_idx"), Variable("score")
_THROUGH = ("abs", "min", "max", "where", "neg")
"""Operations of integers that give the same float if their operands become floats first."""


def kernel_form(node: Node, factor: float = 1.0) -> Node:
    """Return a score, or its derivative, as a kernel computes it.

    Args:
        node: the expression.
        factor: a positive number that its value is multiplied by.
    """
    return _Columns().of(_Scaled().of(as_float(node), factor))


class _Scaled:
    """Takes a factor inwards. A part that several others share is taken once with each factor."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, float], tuple[Node, Node]] = {}
        self._pairs = _Depending(("score",), ("q_idx", "kv_idx"))
        self._rules: Mapping[str, Callable[[Operation, float], Node]] = {
            "+": lambda node, by: sum_of(*self._each(node, by)),
            "-": lambda node, by: sum_of(self.of(node.operands[0], by), minus(self.of(node.operands[1], by))),
            "neg": lambda node, by: minus(self.of(node.operands[0], by)),
            "abs": lambda node, by: operation("abs", *self._each(node, by)),
            "min": lambda node, by: operation("min", *self._each(node, by)),
            "max": lambda node, by: operation("max", *self._each(node, by)),
            "float": lambda node, by: self.of(node.operands[0], by),
            "where": self._chosen,
            "*": self._product,
            "/": self._quotient,
            "tanh": self._tanh,
            "exp": lambda node, by: _times(by, operation("exp2", self.of(node.operands[0], LOG2_E))),
            "log2": lambda node, by: _times(by, operation("log2", self.of(node.operands[0], 1.0))),
            "sqrt": lambda node, by: _times(by, operation("sqrt", self.of(node.operands[0], 1.0))),
        }

    def of(self, node: Node, by: float) -> Node:
        """Return by * node, as a float."""
        key = id(node), by
        if key not in self._known:
            self._known[key] = node, self._of(node, by)  # with the node, whose identity is the key
        return self._known[key][1]

    def _of(self, node: Node, by: float) -> Node:
        if isinstance(node, Literal):
            return Literal(float(node.value) * by)
        if node == _SCORE:
            return operation("*", _QK, _times(by / LOG2_E, _SCALE_LOG2))
        is_float = node.type is Type.FLOAT
        if isinstance(node, Operation) and (node.name in self._rules if is_float else node.name in _THROUGH):
            return self._rules[node.name](node, by)
        return _times(by, as_float(self._exact(node)))

    def _each(self, node: Operation, by: float) -> tuple[Node, ...]:
        return tuple(self.of(operand, by) for operand in node.operands)

    def _exact(self, node: Node) -> Node:
        """Return a node as it is written: what is compared, or becomes an integer, may be just beside a limit."""
        if not self._has_score(node):
            return node
        return self.of(node, 1.0) if node == _SCORE else _of_parts(node, tuple(map(self._exact, children(node))))

    def _chosen(self, node: Operation, by: float) -> Node:
        condition, one, other = node.operands
        return operation("where", self._exact(condition), self.of(one, by), self.of(other, by))

    def _product(self, node: Operation, by: float) -> Node:
        """Return by * a * b: the factor joins a number, else what is not of each pair, else the one with the score."""
        a, b = node.operands
        for one, other in ((a, b), (b, a)):
            if isinstance(one, Literal) and one.value != 0 and math.isfinite(by * one.value):
                return self._times_number(other, by * float(one.value))
        order: list[Callable[[Node], bool]] = [lambda part: not self._pairs.on_all(part), self._has_score]
        takes = next((part for fits in order for part in (a, b) if fits(part)), a)
        one, other = (self.of(part, by if part is takes else 1.0) for part in (a, b))
        return self._joined(other, one, a) or self._joined(one, other, b) or product(one, other)

    def _joined(self, one: Node, other: Node, what: Node) -> Node | None:
        """Return one * other as qk * (x * other), if one is qk * x and other, made of ``what``, is not of each pair."""
        is_scaled = isinstance(one, Operation) and (one.name, one.operands[0]) == ("*", _QK)
        if not is_scaled or self._pairs.on_all(what):
            return None
        return operation("*", _QK, product(children(one)[1], other))

    def _times_number(self, node: Node, by: float) -> Node:
        return self.of(node, by) if by > 0 else minus(self.of(node, -by))

    def _has_score(self, node: Node) -> bool:
        return "score" in self._pairs.of(node)

    def _quotient(self, node: Operation, by: float) -> Node:
        """Return by * a / b: times 1 / b, where that is worked out once for many pairs."""
        a, b = node.operands
        if isinstance(b, Literal) and b.value != 0 and math.isfinite(by / b.value):
            return self._times_number(a, by / float(b.value))
        if self._pairs.on_all(a) and not self._pairs.on_all(b):
            one, other = self.of(a, by), operation("/", ONE, self.of(b, 1.0))
            return self._joined(one, other, b) or product(one, other)
        return operation("/", self.of(a, by), self.of(b, 1.0))

    def _tanh(self, node: Operation, by: float) -> Node:
        """Return by * tanh(x) = by - 2 by / (1 + 2^y), y = 2 log2(e) x: where 2^y is infinite or 0, that is +-by."""
        inverse = operation("inverse_of_1_plus_exp2", self.of(node.operands[0], 2 * LOG2_E))
        return operation("-", Literal(by), product(Literal(2 * by), inverse))


def _times(by: float, node: Node) -> Node:
    return product(Literal(1.0 if math.isclose(by, 1.0, rel_tol=1e-12) else by), node)


class _Depending:
    """What a node depends on, of some variables.

    Args:
        groups: the variables; a node has all that a group stands for if it depends on each of the group.
    """

    def __init__(self, *groups: tuple[str, ...]) -> None:
        self._groups = groups
        self._names = {name for group in groups for name in group}
        self._known: dict[int, tuple[Node, frozenset[str]]] = {}

    def of(self, node: Node) -> frozenset[str]:
        """Return those of the variables that it depends on."""
        if id(node) not in self._known:
            found = frozenset[str]().union(*map(self.of, children(node)))
            if isinstance(node, Variable) and node.name in self._names:
                found |= {node.name}
            self._known[id(node)] = node, found
        return self._known[id(node)][1]

    def on_all(self, node: Node) -> bool:
        """Return whether it depends on all of one of the groups."""
        return any(self.of(node).issuperset(group) for group in self._groups)


class _Columns:
    """Works out what is linear in the key at a thread's first one, and adds a slope for each further one."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Node, Node]] = {}
        self._slopes: dict[int, tuple[Node, Node | None]] = {}
        self._depends, self._queries = _Depending(("kv_idx",), ("qk",)), _Depending(("q_idx",))

    def of(self, node: Node) -> Node:
        """Return a node with its parts that are linear in the key in this form, the largest ones."""
        if node.type is not Type.FLOAT or not isinstance(node, Operation) or "kv_idx" not in self._depends.of(node):
            return node
        if id(node) not in self._known:
            self._known[id(node)] = node, self._of(node)
        return self._known[id(node)][1]

    def _of(self, node: Node) -> Node:
        slope = self._slope(node)
        if slope is not None:
            # Of a query's part too, as one multiplication with an addition; else what follows is once for a column.
            column = _COLUMN_OF_PAIR if "q_idx" in self._queries.of(node) else _COLUMN
            return sum_of(product(slope, column), _at_first_key(node))
        return _of_parts(node, tuple(map(self.of, children(node))))

    def _slope(self, node: Node) -> Node | None:
        """Return what a node grows by from a key to the next, None where that is not the same everywhere."""
        if id(node) not in self._slopes:
            self._slopes[id(node)] = node, self._slope_of(node)
        return self._slopes[id(node)][1]

    def _slope_of(self, node: Node) -> Node | None:
        if node == _KEY:
            return ONE
        if not self._depends.of(node):  # not on the key, nor on q.k
            return ZERO
        if not isinstance(node, Operation) or node.type is Type.BOOL or "qk" in self._depends.of(node):
            return None
        if node.type is Type.INT and bounds_of(node) == INT64:  # it may wrap
            return None
        slopes = [slope for slope in map(self._slope, node.operands) if slope is not None]
        if node.name not in _SLOPES or len(slopes) < len(node.operands):
            return None
        return _SLOPES[node.name](node.operands, slopes)


def _slope_of_product(operands: tuple[Node, ...], slopes: list[Node]) -> Node | None:
    for one, other in ((0, 1), (1, 0)):
        if is_number(slopes[one], 0.0):
            return product(operands[one], slopes[other])
    return None


def _slope_of_quotient(operands: tuple[Node, ...], slopes: list[Node]) -> Node | None:
    return quotient(slopes[0], as_float(operands[1])) if is_number(slopes[1], 0.0) else None


_SLOPES: Mapping[str, Callable[[tuple[Node, ...], list[Node]], Node | None]] = {
    "+": lambda operands, slopes: sum_of(*slopes),
    "-": lambda operands, slopes: sum_of(slopes[0], minus(slopes[1])),
    "neg": lambda operands, slopes: minus(slopes[0]),
    "float": lambda operands, slopes: slopes[0],
    "*": _slope_of_product,
    "/": _slope_of_quotient,
}


def _at_first_key(node: Node) -> Node:
    """Return a node, whose parts are few where the key is, at the first key that a thread has."""
    if node == _KEY:
        return _FIRST
    return _of_parts(node, tuple(map(_at_first_key, children(node))))


def _of_parts(node: Node, parts: tuple[Node, ...]) -> Node:
    """Return a node of other parts."""
    if isinstance(node, Operation):
        return Operation(node.name, parts, node.type)
    return Item(node.aux, parts) if isinstance(node, Item) else node
