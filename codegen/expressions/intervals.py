"""Interval arithmetic of integers.

Each result contains every value that the operator can give for values of its operands, and few others. Integers are
int64 and wrap, like torch's: the interval of a value that may wrap is all of int64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Interval:
    """The integers from ``low`` to ``high``, both included."""

    low: int
    high: int

    def __contains__(self, value: int) -> bool:
        return self.low <= value <= self.high

    def within(self, other: Interval) -> bool:
        """Whether another interval contains this one."""
        return other.low <= self.low and self.high <= other.high

    @property
    def is_one(self) -> bool:
        """Whether the interval has a single value."""
        return self.low == self.high


INT32 = Interval(-(2**31), 2**31 - 1)
INT64 = Interval(-(2**63), 2**63 - 1)
TRUTH = Interval(0, 1)
ALWAYS, NEVER = Interval(1, 1), Interval(0, 0)


def _around(values: Iterable[int]) -> Interval:
    """Smallest interval around some values; all of int64 if one of them wraps."""
    known = list(values)
    interval = Interval(min(known), max(known))
    return interval if interval.within(INT64) else INT64


def union(*intervals: Interval) -> Interval:
    """Smallest interval around some intervals."""
    return Interval(min(each.low for each in intervals), max(each.high for each in intervals))


def _by_ends(operator: Callable[[int, int], int]) -> Callable[[Interval, Interval], Interval]:
    """Interval operator for a function that is monotonic in each operand: its extremes are at the ends."""
    return lambda a, b: _around(operator(x, y) for x in (a.low, a.high) for y in (b.low, b.high))


def _divisors(b: Interval) -> list[Interval]:
    """Intervals of the negative and of the positive divisors; division by 0 has no value."""
    parts = [Interval(b.low, min(b.high, -1)), Interval(max(b.low, 1), b.high)]
    return [part for part in parts if part.low <= part.high]


def _quotient(a: Interval, b: Interval) -> Interval:
    parts = [_by_ends(lambda x, y: x // y)(a, part) for part in _divisors(b)]
    return union(*parts) if parts else INT64


def _remainder(a: Interval, b: Interval) -> Interval:
    parts = [_remainder_by(a, part) for part in _divisors(b)]
    return union(*parts) if parts else INT64


def _remainder_by(a: Interval, b: Interval) -> Interval:
    """Remainders by divisors of one sign; the remainder has the sign of the divisor."""
    if b.is_one and a.low // b.low == a.high // b.low:
        return Interval(a.low % b.low, a.high % b.low)
    if b.high < 0:  # -x % -y == -(x % y)
        mirrored = _remainder_by(Interval(-a.high, -a.low), Interval(-b.high, -b.low))
        return Interval(-mirrored.high, -mirrored.low)
    if a.low >= 0 and a.high < b.low:
        return a
    return Interval(0, min(a.high, b.high - 1) if a.low >= 0 else b.high - 1)


def _power_above(*intervals: Interval) -> int:
    """Smallest 2**n such that all values lie between -2**n and 2**n - 1."""
    ends = [end for each in intervals for end in (each.low, each.high)]
    return 1 << max((end if end >= 0 else ~end).bit_length() for end in ends)


def _not(a: Interval) -> Interval:
    return Interval(~a.high, ~a.low)


def _and(a: Interval, b: Interval) -> Interval:
    if a.is_one and b.is_one:
        return Interval(a.low & b.low, a.low & b.low)
    limits = [each.high for each in (a, b) if each.low >= 0]
    if limits:  # its bits are a subset of theirs
        return Interval(0, min(limits))
    negative = a.high < 0 and b.high < 0  # then at most either operand
    return Interval(-_power_above(a, b), min(a.high, b.high) if negative else max(a.high, b.high))


def _or(a: Interval, b: Interval) -> Interval:
    return _not(_and(_not(a), _not(b)))


def _xor(a: Interval, b: Interval) -> Interval:
    if a.is_one and b.is_one:
        return Interval(a.low ^ b.low, a.low ^ b.low)
    power = _power_above(a, b)
    signs = {end < 0 for end in (a.low, a.high)}, {end < 0 for end in (b.low, b.high)}
    if len(signs[0]) > 1 or len(signs[1]) > 1:
        return Interval(-power, power - 1)
    return Interval(0, power - 1) if signs[0] == signs[1] else Interval(-power, -1)


def _absolute(a: Interval) -> Interval:
    return _around([0 if 0 in a else min(abs(a.low), abs(a.high)), abs(a.low), abs(a.high)])


def _least(a: Interval, b: Interval) -> Interval:
    return Interval(min(a.low, b.low), min(a.high, b.high))


def _largest(a: Interval, b: Interval) -> Interval:
    return Interval(max(a.low, b.low), max(a.high, b.high))


def _known(always: bool, never: bool) -> Interval:
    return ALWAYS if always else NEVER if never else TRUTH


def _less(a: Interval, b: Interval) -> Interval:
    return _known(a.high < b.low, a.low >= b.high)


def _opposite(a: Interval) -> Interval:
    return Interval(1 - a.high, 1 - a.low)


def _equal(a: Interval, b: Interval) -> Interval:
    return _known(a.is_one and a == b, a.high < b.low or b.high < a.low)


def _chosen(condition: Interval, one: Interval, other: Interval) -> Interval:
    return union(one, other) if condition == TRUTH else one if condition == ALWAYS else other


_Rule = Callable[..., Interval]
TRUTHS: Mapping[str, _Rule] = {
    "&": _least,
    "|": _largest,
    "^": lambda a, b: _opposite(_equal(a, b)),
    "~": _opposite,
    "and": _least,
    "or": _largest,
    "not": _opposite,
    "==": _equal,
    "!=": lambda a, b: _opposite(_equal(a, b)),
    "<": _less,
    ">": lambda a, b: _less(b, a),
    "<=": lambda a, b: _opposite(_less(b, a)),
    ">=": lambda a, b: _opposite(_less(a, b)),
    "bool": lambda a: _opposite(_equal(a, NEVER)),
    "where": _chosen,
}
"""Interval operators with Boolean results, for integer or Boolean operands."""
INTEGERS: Mapping[str, _Rule] = {
    "+": _by_ends(lambda x, y: x + y),
    "-": _by_ends(lambda x, y: x - y),
    "*": _by_ends(lambda x, y: x * y),
    "//": _quotient,
    "%": _remainder,
    "<<": _by_ends(lambda x, y: x << y),
    ">>": _by_ends(lambda x, y: x >> y),
    "&": _and,
    "|": _or,
    "^": _xor,
    "~": _not,
    "neg": lambda a: _around([-a.low, -a.high]),
    "min": _least,
    "max": _largest,
    "abs": _absolute,
    "where": _chosen,
    "int": lambda a: a,
}
"""Interval operators with integer results, for integer or Boolean operands."""
