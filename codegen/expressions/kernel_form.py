"""The form of a score that a kernel computes: the same value with fewer instructions per pair.

A factor of the result (log2(e), for 2^x) is moved inwards, to a place where one multiplication serves many pairs:
``score`` is the product of q.k and scale, and tanh and exp are computed as 2^x of a scaled operand, so these have a
factor that absorbs others. Divisions by values that are the same for all pairs become multiplications. A part that is
linear in the key is evaluated exactly as written at the first key of a thread in a step; the other keys add a slope:

    score + slope[head] * (kv_idx - q_idx)  ->  qk * scale_log2 + (a * column + b)

where ``column`` is a constant of the source, a is slope * log2(e), and b is the value at the first key. Results differ
from those of the text by float32 rounding.

Intermediate numbers must stay in float32's range: a mask that adds the lowest float to hidden pairs would give
-infinity * 0 = NaN at visible pairs. A mask of that kind, a number times a Boolean, is therefore clamped to the largest
float. If other numbers are that large or that small, the text is computed as written and scaled at the end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

from codegen.expressions.arithmetic import (
    LARGEST,
    LEAST_NORMAL,
    ONE,
    ZERO,
    as_float,
    divided,
    is_number,
    minus,
    product,
    quotient,
    sum_of,
)
from codegen.expressions.bounds import bounds_of
from codegen.expressions.intervals import INT64
from codegen.expressions.nodes import Item, Literal, Node, Operation, Type, Variable, children, operation

LOG2_E = math.log2(math.e)
"""Factor of a logit if its weight is computed as 2^x."""
_QK, _SCALE_LOG2, _FIRST = (Variable(name) for name in ("qk", "scale_log2", "first_key"))
_COLUMN, _COLUMN_OF_PAIR = (Variable(name) for name in ("column", "column_of_pair"))
_KEY, _SCORE = Variable("kv_idx"), Variable("score")
_FACTORS = 2.0**-100, 2.0**100
"""Smallest and largest factor that is moved inwards; they leave room for the other factor of the product."""
_THROUGH = ("abs", "min", "max", "where", "neg")
"""Integer operations that give the same float if their operands are converted to float first."""


def kernel_form(node: Node, factor: float = 1.0) -> Node:
    """A score or its derivative in the form that a kernel computes.

    Args:
        node: the expression.
        factor: positive factor of the value.
    """
    return _Columns().of(_Scaled().whole(as_float(node), factor))


class _OutOfRange(Exception):
    """A number times its factor would leave float32's range."""


class _Scaled:
    """Moves a factor inwards. A part that several others share is transformed once per factor."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, float], tuple[Node, Node | None]] = {}
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
            "exp": lambda node, by: _times(by, operation("exp2", self._exponent(node, LOG2_E))),
            "log2": lambda node, by: _times(by, operation("log2", self.of(node.operands[0], 1.0))),
            "sqrt": lambda node, by: _times(by, operation("sqrt", self.of(node.operands[0], 1.0))),
        }

    def whole(self, node: Node, by: float) -> Node:
        """``by * node`` of a whole expression; finite values beyond float32's range become the largest float."""
        if (masked := self._masked(node, by)) is not None:
            return masked[0]
        if isinstance(node, Operation) and node.name in ("where", "min", "max"):
            values = [self.whole(operand, by) for operand in node.operands[-2:]]
            return operation(node.name, *map(self._exact, node.operands[:-2]), *values)
        value = self.of(node, 1.0)
        held = operation("min", _times(by, value), Literal(LARGEST))  # no lower bound: -infinity hides a pair as well
        return operation("where", operation("<", value, Literal(math.inf)), held, value)

    def of(self, node: Node, by: float) -> Node:
        """``by * node``, as a float.

        Raises:
            _OutOfRange: if a number leaves float32's range; never if the factor is 1.
        """
        key = id(node), by
        if key not in self._known:
            form: Node | None
            try:
                form = self._of(node, by)
            except _OutOfRange:  # with a factor of 1: constants that are folded into each other
                form = self._as_written(node) if by == 1.0 else None
            self._known[key] = node, form  # keeps the node alive: its id is the key
        found = self._known[key][1]
        if found is None:
            raise _OutOfRange
        return found

    def _of(self, node: Node, by: float) -> Node:
        if isinstance(node, Literal):
            return _number(float(node.value) * by, node)
        if node == _SCORE:
            return operation("*", _QK, _times(by / LOG2_E, _SCALE_LOG2))
        is_float = node.type is Type.FLOAT
        if isinstance(node, Operation) and (node.name in self._rules if is_float else node.name in _THROUGH):
            return self._rules[node.name](node, by)
        return _times(by, as_float(self._exact(node)))

    def _each(self, node: Operation, by: float) -> tuple[Node, ...]:
        return tuple(self.of(operand, by) for operand in node.operands)

    def _as_written(self, node: Node) -> Node:
        """Product or quotient without folding of its constants."""
        assert isinstance(node, Operation)
        one, other = self._each(node, 1.0)
        return product(one, other) if node.name == "*" else divided(one, other)

    def _masked(self, node: Node, by: float) -> tuple[Node, int] | None:
        """``by * node``, and the sign of its numbers that are clamped to the largest float; 0 if there are none.

        None if other numbers are out of range, or if clamped numbers have both signs: their sum would be wrong.
        """
        try:
            return self.of(node, by), 0
        except _OutOfRange:
            pass
        if sign := _sign_of_mask(node):
            return self._held(node, by), sign
        if not isinstance(node, Operation) or node.name not in ("+", "-"):
            return None
        one, other = (self._masked(operand, by) for operand in node.operands)
        if one is None or other is None:
            return None
        second = (minus(other[0]), -other[1]) if node.name == "-" else other
        if one[1] * second[1] < 0:
            return None
        return sum_of(one[0], second[0]), one[1] or second[1]

    def _held(self, node: Node, by: float) -> Node:
        """``by * node`` of a node that ``_sign_of_mask`` accepts, its number clamped to the largest float."""
        if isinstance(node, Literal):
            return Literal(max(-LARGEST, min(float(node.value) * by, LARGEST)))
        assert isinstance(node, Operation)
        if node.name == "neg":
            return minus(self._held(node.operands[0], by))
        if node.name == "where":
            condition, one, other = node.operands
            return operation("where", self._exact(condition), self._held(one, by), self._held(other, by))
        number, truth = sorted(node.operands, key=lambda operand: not isinstance(operand, Literal))
        return product(self._held(number, by), as_float(self._exact(truth)))

    def _exact(self, node: Node) -> Node:
        """The node with its exact value: operands of comparisons and of integer conversions may be next to a limit."""
        if not self._has_score(node):
            return node
        return self.of(node, 1.0) if node == _SCORE else _of_parts(node, tuple(map(self._exact, children(node))))

    def _exponent(self, node: Operation, by: float) -> Node:
        """``by`` times the operand of exp or tanh, which treat values beyond float32's range like infinity."""
        try:
            return self.of(node.operands[0], by)
        except _OutOfRange:
            return _times(by, self.of(node.operands[0], 1.0))

    def _chosen(self, node: Operation, by: float) -> Node:
        condition, one, other = node.operands
        return operation("where", self._exact(condition), self.of(one, by), self.of(other, by))

    def _product(self, node: Operation, by: float) -> Node:
        """``by * a * b``: the factor goes to a constant, else to an operand that is not per pair, else to the score."""
        a, b = node.operands
        for one, other in ((a, b), (b, a)):
            if isinstance(one, Literal) and _is_factor(by, by * one.value):
                return self._times_number(other, by * float(one.value))
        order: list[Callable[[Node], bool]] = [lambda part: not self._pairs.on_all(part), self._has_score]
        takes = next((place for fits in order for place, part in enumerate((a, b)) if fits(part)), 0)
        one, other = (self.of(part, by if place == takes else 1.0) for place, part in enumerate((a, b)))
        return self._joined(other, one, a) or self._joined(one, other, b) or product(one, other)

    def _joined(self, one: Node, other: Node, what: Node) -> Node | None:
        """``one * other`` as qk * (x * other), if one is qk * x and other, the form of ``what``, is not per pair."""
        is_scaled = isinstance(one, Operation) and (one.name, one.operands[0]) == ("*", _QK)
        if not is_scaled or self._pairs.on_all(what):
            return None
        return operation("*", _QK, product(children(one)[1], other))

    def _times_number(self, node: Node, by: float) -> Node:
        return self.of(node, by) if by > 0 else minus(self.of(node, -by))

    def _has_score(self, node: Node) -> bool:
        return "score" in self._pairs.of(node)

    def _quotient(self, node: Operation, by: float) -> Node:
        """``by * a / b``, as a product with 1 / b if 1 / b serves many pairs."""
        a, b = node.operands
        divisor = self.of(b, 1.0)
        if isinstance(divisor, Literal):
            if divisor.value and _is_factor(by, by / divisor.value):
                return self._times_number(a, by / float(divisor.value))
        elif self._pairs.on_all(a) and not self._pairs.on_all(b):
            one, other = self.of(a, by), divided(ONE, divisor)
            return self._joined(one, other, b) or product(one, other)
        return divided(self.of(a, by), divisor)

    def _tanh(self, node: Operation, by: float) -> Node:
        """``by * tanh(x)`` = by - 2 by / (1 + 2^y) with y = 2 log2(e) x; it is +-by if 2^y is infinite or 0."""
        inverse = operation("inverse_of_1_plus_exp2", self._exponent(node, 2 * LOG2_E))
        return operation("-", Literal(by), product(Literal(2 * by), inverse))


def _is_factor(by: float, joined: float) -> bool:
    """Whether a factor is folded into a constant, with the product ``joined``; never into 0, infinity or NaN.

    Raises:
        _OutOfRange: if the factor is not 1 and the product is too large or too small.
    """
    least, largest = _FACTORS
    if least <= abs(joined) <= largest:
        return True
    if by != 1.0 and joined and math.isfinite(joined):
        raise _OutOfRange
    return False


def _is_far(node: Node) -> bool:
    """Whether a node is a constant that is too large or too small for a factor."""
    return isinstance(node, Literal) and bool(node.value) and not _FACTORS[0] <= abs(node.value) <= _FACTORS[1]


def _number(value: float, of: Literal) -> Literal:
    """Constant ``of`` after scaling to ``value``.

    Raises:
        _OutOfRange: if the scaling leaves the range of normal float32 numbers.
    """
    grown, shrunk = abs(value) > abs(of.value), abs(value) < abs(of.value)
    if math.isfinite(of.value) and ((grown and abs(value) > LARGEST) or (shrunk and abs(value) < LEAST_NORMAL)):
        raise _OutOfRange
    return Literal(value)


def _sign_of_mask(node: Node) -> int:
    """Sign of a mask term: a number, or a number under a condition; 0 for anything else."""
    if isinstance(node, Literal):
        return 0 if math.isinf(node.value) else (node.value > 0) - (node.value < 0)
    if not isinstance(node, Operation):
        return 0
    if node.name == "neg":
        return -_sign_of_mask(node.operands[0])
    signs = [_sign_of_mask(operand) for operand in node.operands if isinstance(operand, Literal)]
    if node.name == "where" and len(signs) == 2:
        return signs[0] or signs[1] if signs[0] * signs[1] >= 0 and _are_finite(node.operands[1:]) else 0
    return signs[0] if node.name == "*" and len(signs) == 1 and any(map(_is_truth, node.operands)) else 0


def _are_finite(nodes: Iterable[Node]) -> bool:
    return all(isinstance(node, Literal) and math.isfinite(node.value) for node in nodes)


def _is_truth(node: Node) -> bool:
    """Whether a node is a Boolean, or a Boolean converted to a number."""
    is_number = isinstance(node, Operation) and node.name in ("float", "int")
    return _is_truth(children(node)[0]) if is_number else node.type is Type.BOOL


def _times(by: float, node: Node) -> Node:
    return product(Literal(1.0 if math.isclose(by, 1.0, rel_tol=1e-12) else by), node)


class _Depending:
    """Dependencies of nodes on groups of variables.

    Args:
        groups: groups of variable names.
    """

    def __init__(self, *groups: tuple[str, ...]) -> None:
        self._groups = groups
        self._names = {name for group in groups for name in group}
        self._known: dict[int, tuple[Node, frozenset[str]]] = {}

    def of(self, node: Node) -> frozenset[str]:
        """Variables that a node depends on."""
        if id(node) not in self._known:
            found = frozenset[str]().union(*map(self.of, children(node)))
            if isinstance(node, Variable) and node.name in self._names:
                found |= {node.name}
            self._known[id(node)] = node, found
        return self._known[id(node)][1]

    def on_all(self, node: Node) -> bool:
        """Whether a node depends on all variables of at least one group."""
        return any(self.of(node).issuperset(group) for group in self._groups)


class _Columns:
    """Evaluates parts that are linear in the key at a thread's first key, and adds a slope for the other keys."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Node, Node]] = {}
        self._slopes: dict[int, tuple[Node, Node | None]] = {}
        self._depends, self._queries = _Depending(("kv_idx",), ("qk",)), _Depending(("q_idx",))

    def of(self, node: Node) -> Node:
        """Node with its largest linear parts in this form."""
        if node.type is not Type.FLOAT or not isinstance(node, Operation) or "kv_idx" not in self._depends.of(node):
            return node
        if id(node) not in self._known:
            self._known[id(node)] = node, self._of(node)
        return self._known[id(node)][1]

    def _of(self, node: Node) -> Node:
        slope = self._slope(node)
        if slope is not None:
            # If the part depends on the query too, one FMA per pair; else the sum is computed once per column.
            column = _COLUMN_OF_PAIR if "q_idx" in self._queries.of(node) else _COLUMN
            return sum_of(product(slope, column), _at_first_key(node))
        return _of_parts(node, tuple(map(self.of, children(node))))

    def _slope(self, node: Node) -> Node | None:
        """Difference of a node between adjacent keys; None if it is not constant."""
        if id(node) not in self._slopes:
            self._slopes[id(node)] = node, self._slope_of(node)
        return self._slopes[id(node)][1]

    def _slope_of(self, node: Node) -> Node | None:
        if node == _KEY:
            return ONE
        if not self._depends.of(node):  # neither on the key nor on q.k
            return ZERO
        if not isinstance(node, Operation) or node.type is Type.BOOL or "qk" in self._depends.of(node):
            return None
        may_wrap = node.type is Type.INT and bounds_of(node) == INT64
        if may_wrap or (node.name in ("*", "/") and any(map(_is_far, node.operands))):  # or may leave float32's range
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
    """Linear node, evaluated at the first key of a thread."""
    if node == _KEY:
        return _FIRST
    return _of_parts(node, tuple(map(_at_first_key, children(node))))


def _of_parts(node: Node, parts: tuple[Node, ...]) -> Node:
    """Node with other operands."""
    if isinstance(node, Operation):
        return Operation(node.name, parts, node.type)
    return Item(node.aux, parts) if isinstance(node, Item) else node
