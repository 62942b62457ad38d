"""Properties of a tree for all values of its tensors: bounds of integers, and parts that are constant.

A query index is less than ``q_len``, a key index less than ``kv_len``, and so on; kernels whose tiles extend beyond the
sequence must ensure this. A part that occurs twice is visited once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from codegen.expressions.intervals import INT32, INT64, INTEGERS, TRUTH, TRUTHS, Interval
from codegen.expressions.nodes import PATTERN_VARIABLES, SIZES, Item, Literal, Node, Operation, Type, Variable, children

_MOST_KEYS = 2**24  # upper bound of a number of keys in a pattern
MOST_POSITIONS = 2**30
"""Most queries and keys per head in kernels with an expression: sums and differences of two indices fit 32 bits."""
_VARIABLES: Mapping[str, Interval] = {
    **dict.fromkeys(("q_idx", "kv_idx", "batch", "head", "first_key"), Interval(0, MOST_POSITIONS - 1)),
    **dict.fromkeys(("q_len", "kv_len"), Interval(1, MOST_POSITIONS)),
    **dict.fromkeys(PATTERN_VARIABLES, Interval(0, _MOST_KEYS)),
}
_DTYPES: Mapping[str, Interval] = {"int32": INT32, "int64": INT64, "bool": TRUTH}


def bounds_of(node: Node) -> Interval:
    """Interval of the values of an integer or a Boolean; all of int64 if the value may wrap.

    Raises:
        ValueError: for a floating-point number.
    """
    if node.type is Type.FLOAT:
        raise ValueError("floating-point numbers have no bounds")
    return _intervals(node)[id(node)]


def constant_of(node: Node) -> bool | None:
    """Constant value of a Boolean, or None if it may be true or false."""
    bounds = bounds_of(node)
    return bool(bounds.low) if node.type is Type.BOOL and bounds.is_one else None


def divides_by_zero(node: Node) -> Node | None:
    """First ``//`` or ``%`` whose divisor may be 0, or None. ``/`` by 0 gives infinity or NaN and is allowed."""
    known = _intervals(node)
    for each in _each(node):
        if isinstance(each, Operation) and each.name in ("//", "%") and 0 in known[id(each.operands[1])]:
            return each
    return None


def is_inside(item: Item, axis: int) -> bool:
    """Whether an index of an element is always within its dimension, so that no clamp is needed.

    True for the variable that counts the dimension, and for 0 if the dimension is a named size: kernels do not run for
    empty sizes.
    """
    index, size = item.indices[axis], item.aux.dims[axis]
    if isinstance(size, int):
        return bounds_of(index).within(Interval(0, size - 1))
    return index == Variable(SIZES[size]) or bounds_of(index) == Interval(0, 0)


def _each(root: Node) -> Iterator[Node]:
    """Yield each node once, operands first, from left to right."""
    seen: set[int] = set()
    left: list[tuple[Node, bool]] = [(root, False)]
    while left:
        node, ready = left.pop()
        if ready:
            yield node
        elif id(node) not in seen:
            seen.add(id(node))
            left.append((node, True))
            left += [(child, False) for child in reversed(children(node))]


def _intervals(root: Node) -> dict[int, Interval]:
    """Intervals of a node and its descendants by id, without floating-point numbers."""
    known: dict[int, Interval] = {}
    for node in _each(root):
        if node.type is not Type.FLOAT:
            known[id(node)] = _interval(node, known)
    return known


def _interval(node: Node, known: Mapping[int, Interval]) -> Interval:
    """Interval of a node, from the intervals of its operands."""
    match node:
        case Literal():
            return Interval(int(node.value), int(node.value))
        case Variable():
            return _VARIABLES[node.name]
        case Item():
            return _DTYPES[node.aux.dtype]
    operands = [known.get(id(operand)) for operand in node.operands]
    if None in operands:  # a floating-point operand
        return TRUTH if node.type is Type.BOOL else INT64
    rules: Mapping[str, Callable[..., Interval]] = TRUTHS if node.type is Type.BOOL else INTEGERS
    return rules[node.name](*operands)
