"""The record of an operator: everything in the package that depends on the operator."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar, get_args

from codegen.plan import Plan
from codegen.problem import Shape
from codegen.select.default_tables import Row
from codegen.select.defaults import Choice, Fields
from codegen.spec import SpecBase
from codegen.tile_rules import Rule

S = TypeVar("S", bound=SpecBase)
Sizes = Mapping[str, int]
Unit = tuple[str, int, str]
"""A size, its divisor, and the meaning of the divisor."""


def no_preference(spec: SpecBase) -> tuple[Choice | None, Fields]:
    """Default features of a spec: no preferred combination, and no features beyond its fields."""
    del spec
    return None, {}


class Kernel(Protocol):
    """A module that plans a kernel."""

    __name__: str
    TILE: tuple[Rule[Any], ...]

    def plan(self, spec: Any, stem: str) -> Plan:
        """Plan of a spec."""


@dataclass(frozen=True, kw_only=True)
class Operator(Generic[S]):
    """An operator. Its functions take specs of its model, or the plan of such a spec.

    Attributes:
        model: model of its specs.
        shape: model of the sizes of a problem.
        kernel: kernel of a spec; raises SpecError for an option that no kernel supports.
        heights: tile heights that have separate kernels.
        rows: default tiles and stages of specs.
        features: preferred combination of a partial spec, and the features that ``rows`` needs beyond its fields.
        variations: tunings to try for a problem; empty for operators whose kernels follow from a call.
        check: checks of combinations of fields, which raise SpecError.
        stem: words in the name of a spec without a file, after operator, architecture and type.
        title: words in a listing, before the options.
        computes: fields of a spec that define what its kernel computes, besides the operator and enabled options; None
            for operators with problems (``codegen.select.problem``).
        units: divisors of sizes.
        counts: sizes with a default; each must be at least 1.
        smallest: sizes with a default in the smallest problem of a kernel.
        cases: names of the cases of a kernel.
        random_shapes: whether it also has a case of many random shapes.
        tolerance: largest tolerance of its cases; None for that of its output type.
    """

    model: type[S]
    shape: type[Shape]
    kernel: Callable[[S], Kernel]
    heights: tuple[int, ...] = ()
    rows: tuple[Row, ...]
    features: Callable[[S], tuple[Choice | None, Fields]] = no_preference
    variations: Callable[[Any], Iterator[Fields]] = lambda problem: iter(())
    check: Callable[[S], None] = lambda spec: None
    stem: Callable[[S], list[str]]
    title: Callable[[S], str]
    computes: Callable[[S], tuple[str, ...]] | None = None
    units: Callable[[S, Sizes], list[Unit]] = lambda spec, sizes: []
    counts: Callable[[Plan, S], tuple[str, ...]] = lambda plan, spec: ()
    smallest: Callable[[Plan, S], dict[str, Any]] = lambda plan, spec: {}
    cases: Callable[[Plan, S], Sequence[str]]
    random_shapes: bool = False
    tolerance: float | None = None

    def plan(self, spec: S, stem: str) -> Plan:
        """Plan of the kernel of a spec, named ``stem``."""
        return self.kernel(spec).plan(spec, stem)

    @property
    def name(self) -> str:
        """Name of the operator in specs."""
        return str(get_args(self.model.model_fields["op"].annotation)[0])
