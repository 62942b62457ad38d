"""Run-time numbers of a pattern: a window, and the initial keys that all later queries see."""

from __future__ import annotations

from typing import Any

from codegen.patterns import PatternBase
from codegen.patterns.base import MOST_KEYS
from codegen.wording import shown
from runtime.errors import ArgumentError

_EXPECTED = {
    "window": f"expected (left, right): keys before and after the query's own position, each 0 to {MOST_KEYS}",
    "sink_keys": f"expected the number of initial keys that every later query sees, 0 to {MOST_KEYS}",
}


def numbers_for(kernel: PatternBase, pattern: PatternBase) -> dict[str, Any]:
    """Run-time numbers of a kernel for a pattern, or for a special case of a wider pattern; none if the spec has
    them."""
    if not kernel.is_general:
        return {}
    case = pattern if pattern.kind == kernel.kind else pattern.wider
    assert case is not None
    return case.numbers()


class PatternNumbers:
    """The arguments ``window`` and ``sink_keys`` of a kernel.

    Args:
        pattern: pattern of the kernel's spec.
        stem: name of the kernel, for messages.

    Attributes:
        params: kernel parameters of the numbers, in the order of the pattern; none if the spec has the numbers.
    """

    def __init__(self, pattern: PatternBase, stem: str) -> None:
        self.params = tuple(pattern.number_params)
        self._taken = {number.argument: 0 for number in pattern.call_numbers} if self.params else {}
        for number in pattern.call_numbers if self.params else ():
            self._taken[number.argument] += 1
        self._has = {number.argument for number in pattern.call_numbers}
        self._stem = stem

    def checked(self, window: Any, sink_keys: Any) -> tuple[int, ...]:
        """Check the arguments: the values of ``params``, empty if the spec has the numbers.

        Raises:
            ArgumentError: if an argument is missing, out of range, or not an argument of this kernel.
        """
        found: dict[str, tuple[int, ...]] = {}
        for name, value in (("sink_keys", sink_keys), ("window", window)):
            if name in self._taken:
                found[name] = _numbers(name, value, self._taken[name])
            elif value is not None:
                says = "its spec has the numbers" if name in self._has else "its pattern has no such numbers"
                raise ArgumentError(name, f"is {shown(value)}, but {self._stem} takes none: {says}")
        return tuple(number for name in self._taken for number in found[name])

    def of_shape(self, numbers: tuple[int, ...]) -> dict[str, int]:
        """Fields of an ``AttentionShape`` with these values."""
        return dict(zip(self.params, numbers, strict=True))


def _numbers(name: str, value: Any, count: int) -> tuple[int, ...]:
    """Values of an argument: ``count`` integers from 0 to MOST_KEYS."""
    if value is None:
        raise ArgumentError(name, f"is missing, {_EXPECTED[name]}")
    given = (value,) if count == 1 else value
    is_sequence = isinstance(given, tuple | list) and len(given) == count
    if not is_sequence or not all(type(each) is int and 0 <= each <= MOST_KEYS for each in given):
        raise ArgumentError(name, f"is {shown(value)}, {_EXPECTED[name]}")
    return tuple(given)
