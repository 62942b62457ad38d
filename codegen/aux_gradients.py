"""Gradients of the aux tensors of a score: where the score reads them, and the pairs whose dS is summed per element.

An index counts batches, heads, queries, keys or distances (q_idx - kv_idx): it is such a variable or its negative, plus
a constant, clamped to constants. The pairs that read an element are then one or several adjacent rows, columns or
diagonals of the scores.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import inf

from codegen.errors import SpecError
from codegen.expressions.arithmetic import ZERO, as_float
from codegen.expressions.derivative import derivative
from codegen.expressions.nodes import Item, Literal, Node, Operation, Type, Variable, children
from codegen.expressions.text import text_of
from codegen.score import Score
from codegen.wording import shown

DISTANCE = "distance"
"""Name of the quantity q_idx - kv_idx, as an index counts it."""
ROWS, COLUMNS, DIAGONALS = "rows", "columns", "diagonals"
_LINES: Mapping[str, str] = {"q_idx": ROWS, "kv_idx": COLUMNS, DISTANCE: DIAGONALS}
ALLOWED = "batch, head, q_idx, kv_idx or q_idx - kv_idx, plus numbers, in min() and max() with numbers"
MOST_READS = 8
"""Most reads of tensors with a gradient in a score; each read has its own sums."""


@dataclass(frozen=True)
class Index:
    """An index of a tensor: sign * count + offset, clamped to [low, high].

    Attributes:
        counts: the variable: batch, head, q_idx, kv_idx or DISTANCE; empty for a constant.
        sign: 1 or -1; 0 for a constant.
        offset: constant that is added.
        low: lower bound.
        high: upper bound.
    """

    counts: str
    sign: int
    offset: int
    low: float = -inf
    high: float = inf


@dataclass(frozen=True)
class Read:
    """A read of an element whose gradient is requested, and on which the score depends.

    Attributes:
        item: the element.
        slope: the derivative of the score with respect to it.
        lines: the pairs that share it: ROWS, those of one or several queries; COLUMNS; or DIAGONALS.
    """

    item: Item
    slope: Node
    lines: str


@dataclass(frozen=True)
class _Linear:
    """A linear combination of variables plus a constant, clamped to two bounds."""

    factors: tuple[tuple[str, int], ...]
    offset: int
    low: float = -inf
    high: float = inf

    @property
    def is_held(self) -> bool:
        return (self.low, self.high) != (-inf, inf)

    @property
    def number(self) -> int | None:
        """The constant, if it has no variables; else None."""
        return None if self.factors else int(max(self.low, min(self.offset, self.high)))


@lru_cache(maxsize=256)
def reads_of(score: Score, names: tuple[str, ...]) -> tuple[Read, ...]:
    """Reads of tensors in a score, in the order of its text.

    Args:
        score: the score.
        names: names of the tensors whose gradients are requested. A tensor that is only read in conditions has no
            reads in the result.

    Raises:
        SpecError: for an unknown or non-floating-point tensor, and for an index that is not in ALLOWED.
    """
    _check(score, names)
    whole = as_float(score.expression)
    found: dict[Item, Node] = {}
    for item in _items(whole):
        if item.aux.name in names and item not in found and (slope := derivative(whole, item)) != ZERO:
            found[item] = slope
    if len(found) > MOST_READS:
        reason = f"reads {len(found)} elements of tensors with a gradient; at most {MOST_READS} are allowed"
        raise SpecError("score.value", reason)
    return tuple(Read(item, slope, _lines(item)) for item, slope in found.items())


def indices_of(item: Item, lengths: Mapping[str, int]) -> tuple[Index, ...]:
    """Indices of an element.

    Args:
        item: the element.
        lengths: q_len and kv_len.

    Raises:
        SpecError: names the tensor and an index that is not in ALLOWED.
    """
    return tuple(_index(item, index, lengths) for index in item.indices)


def sums_name(reads: Sequence[Read], number: int) -> str:
    """Name of the kernel parameter with the sums of a read; each further read of a tensor has its own."""
    aux = reads[number].item.aux
    again = sum(read.item.aux == aux for read in reads[:number])
    return f"daux{again + 1 if again else ''}_{aux.name}"  # daux_b_2 would belong to a tensor b_2


def lines_of(read: Read, *, q_len: int, kv_len: int) -> int:
    """Number of sums: queries, keys, or diagonals (one per distance)."""
    return {ROWS: q_len, COLUMNS: kv_len, DIAGONALS: q_len + kv_len - 1}[read.lines]


def _check(score: Score, names: tuple[str, ...]) -> None:
    declared = {aux.name: aux for aux in score.aux_tensors}
    for name in names:
        if name not in declared:
            raise SpecError(
                "aux_gradients", f"has {shown(name)}, but the score has {', '.join(declared) or 'no tensor'}"
            )
        if not declared[name].dtype.startswith(("fp", "bf")):
            raise SpecError(f"score.aux.{name}", f"is {declared[name]}; only floating-point tensors have a gradient")


def _lines(item: Item) -> str:
    """Kind of the lines of pairs that share an element: rows, columns or diagonals."""
    counted = [index.counts for index in indices_of(item, {"q_len": 1, "kv_len": 1}) if index.counts]
    lines = [_LINES[counts] for counts in counted if counts in _LINES]
    if len(lines) > 1 or len(set(counted)) < len(counted):
        reason = "only one of its indices may count queries, keys or distances, and no two may count the same"
        raise SpecError(f"score.aux.{item.aux.name}", f"has no gradient in {text_of(item)}: {reason}")
    return lines[0] if lines else ROWS


def _index(item: Item, node: Node, lengths: Mapping[str, int]) -> Index:
    found = _linear(node, lengths)
    index = None if found is None else _counting(found)
    if index is None:
        reason = f"has no gradient: its index is {text_of(node)}, allowed: {ALLOWED}"
        raise SpecError(f"score.aux.{item.aux.name}", reason)
    return index


def _counting(found: _Linear) -> Index | None:
    factors, held = dict(found.factors), (found.offset, found.low, found.high)
    if not factors:
        return Index("", 0, *held)
    if set(factors) == {"q_idx", "kv_idx"} and factors["q_idx"] == -factors["kv_idx"] and abs(factors["q_idx"]) == 1:
        return Index(DISTANCE, factors["q_idx"], *held)
    ((name, factor),) = factors.items() if len(factors) == 1 else (("", 0),)
    return Index(name, factor, *held) if abs(factor) == 1 else None


def _linear(node: Node, lengths: Mapping[str, int]) -> _Linear | None:
    """An integer tree as a linear function of variables; None if it is not linear."""
    if isinstance(node, Literal):
        return _Linear((), int(node.value))
    if isinstance(node, Variable):
        return _Linear((), lengths[node.name]) if node.name in lengths else _Linear(((node.name, 1),), 0)
    if not isinstance(node, Operation) or node.type is not Type.INT or node.name not in _RULES:
        return None
    operands = [_linear(operand, lengths) for operand in node.operands]
    return None if None in operands else _RULES[node.name](*operands)


def _sum(a: _Linear, b: _Linear) -> _Linear | None:
    for one, other in ((a, b), (b, a)):
        if (number := other.number) is not None:
            return _Linear(one.factors, one.offset + number, one.low + number, one.high + number)
    if a.is_held or b.is_held:
        return None
    factors = dict(a.factors)
    for name, factor in b.factors:
        factors[name] = factors.get(name, 0) + factor
    return _Linear(tuple((name, factor) for name, factor in factors.items() if factor), a.offset + b.offset)


def _negative(a: _Linear) -> _Linear:
    return _Linear(tuple((name, -factor) for name, factor in a.factors), -a.offset, -a.high, -a.low)


def _held(a: _Linear, b: _Linear, hold: Callable[[float, float], float]) -> _Linear | None:
    for one, other in ((a, b), (b, a)):
        if (number := other.number) is not None:
            return _Linear(one.factors, one.offset, hold(one.low, number), hold(one.high, number))
    return None


_RULES: Mapping[str, Callable[..., _Linear | None]] = {
    "+": _sum,
    "-": lambda a, b: _sum(a, _negative(b)),
    "neg": _negative,
    "min": lambda a, b: _held(a, b, min),
    "max": lambda a, b: _held(a, b, max),
    "int": lambda a: a,
}


def _items(root: Node) -> Sequence[Item]:
    """Elements that a tree reads, from left to right, with repetitions."""
    found: list[Item] = []
    left = [root]
    while left:
        node = left.pop()
        if isinstance(node, Item):
            found.append(node)
        left += reversed(children(node))
    return found
