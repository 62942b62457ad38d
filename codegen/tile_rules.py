"""Rules for the tile sizes of a kernel, declared once.

Plans check their specs with these rules; the page of specs and the search for kernels enumerate the sizes that they
allow. The rules do not include limits of registers and shared memory, which only a plan checks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from codegen.errors import SpecError

S = TypeVar("S")
Tile = dict[str, int]


@dataclass(frozen=True)
class OneOf(Generic[S]):
    """Sizes of one field of the tile.

    Attributes:
        field: the field: "m".
        of: allowed sizes for a spec, ascending; they may depend on fields with preceding rules.
        reason: text of a message after "is 48; ", for the spec and the sizes in words.
    """

    field: str
    of: Callable[[S], Sequence[int]]
    reason: Callable[[S, str], str]

    def allows(self, spec: S) -> bool:
        """Whether a spec has one of the sizes."""
        return _size(spec, self.field) in self.of(spec)

    def refusal(self, spec: S) -> str:
        """Text of a message about a size that is not allowed."""
        return self.reason(spec, listed(self.of(spec)))


@dataclass(frozen=True)
class Fits(Generic[S]):
    """A further condition on a field of the tile.

    Attributes:
        field: the field in a message.
        allows: the condition.
        refusal: text of a message after "is 48; ".
    """

    field: str
    allows: Callable[[S], bool]
    refusal: Callable[[S], str]


Rule = OneOf[S] | Fits[S]


def check_tile(spec: S, rules: Iterable[Rule[S]]) -> None:
    """Reject a tile that violates a rule.

    Raises:
        SpecError: names the field of the tile, its value and what is allowed.
    """
    for rule in rules:
        if not rule.allows(spec):
            raise SpecError(f"tile.{rule.field}", f"is {_size(spec, rule.field)}; {rule.refusal(spec)}")


def tiles(spec: Any, rules: Sequence[Rule[Any]]) -> Iterator[Tile]:
    """Tiles of a spec that the rules allow, in ascending order of the first fields."""
    sizes: dict[str, OneOf[Any]] = {}
    for rule in rules:
        if isinstance(rule, OneOf):
            sizes.setdefault(rule.field, rule)
    yield from _completed(spec, rules, list(sizes.items()))


def _completed(spec: Any, rules: Sequence[Rule[Any]], sizes: Sequence[tuple[str, OneOf[Any]]]) -> Iterator[Tile]:
    """Tiles for all allowed values of the fields in ``sizes``."""
    if not sizes:
        if all(rule.allows(spec) for rule in rules):
            yield spec.tile.model_dump()
        return
    (field, rule), *more = sizes
    for size in rule.of(spec):
        yield from _completed(with_tile(spec, {field: size}), rules, more)


def with_tile(spec: Any, tile: Tile) -> Any:
    """A spec with other tile sizes, without checks."""
    return spec.model_copy(update={"tile": spec.tile.model_copy(update=tile)})


def listed(sizes: Iterable[int]) -> str:
    """Sizes in words."""
    return ", ".join(map(str, sizes))


def multiples(sizes: range) -> str:
    """A range of sizes in words."""
    return f"{sizes[0]} to {sizes[-1]}, multiples of {sizes.step}"


def _size(spec: Any, field: str) -> int:
    size: int = getattr(spec.tile, field)
    return size
