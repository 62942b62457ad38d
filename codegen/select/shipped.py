"""Available kernels for a problem: shipped ones, or those with a receipt."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from codegen.errors import SpecError
from codegen.library import NamedSpec, shipped_specs
from codegen.parse import parse_spec
from codegen.patterns import PatternBase
from codegen.patterns.base import MOST_KEYS
from codegen.select.problem import (
    AttentionProblem,
    Fields,
    Problem,
    has_problem,
    is_chosen,
    preparation_of,
    problem_of,
    said_by,
    tuning_of,
)
from codegen.select.table import Timing
from codegen.spec import canonical


class Shipped(NamedTuple):
    """A shipped kernel, or another one with a receipt, that computes a problem.

    Attributes:
        named: the spec.
        timing: its tuning, in the form of the table's rows, with a placeholder time.
    """

    named: NamedSpec
    timing: Timing


@dataclass(frozen=True)
class Verified:
    """Kernels with receipts, to choose from.

    Attributes:
        holds: whether a kernel has a receipt for the current source.
        own: kernels with receipts other than shipped ones.
    """

    holds: Callable[[NamedSpec], bool]
    own: tuple[NamedSpec, ...] = ()


def serving(
    written: Mapping[str, Any], problem: Problem, *, general: bool, verified: Verified | None = None
) -> dict[str, Shipped]:
    """Shipped kernels that compute a problem, by the label of their tuning.

    Args:
        written: required fields of the kernel's spec.
        problem: the problem.
        general: whether kernels that take numbers of the pattern from the call, or pad heads, are allowed too.
        verified: kernels with receipts, if only these are allowed.
    """
    if not general:
        found = _that_compute(problem.fields(), verified)
        return {label: shipped for label, shipped in found.items() if _agrees(written, shipped.named)}
    if not isinstance(problem, AttentionProblem):
        return _that_compute(problem.fields(), verified)
    for patterns in cases_of(problem.pattern, (problem.q_len or 0) + (problem.kv_len or 0)):
        found = {}
        for pattern in patterns:
            fields = {**problem.fields(), "pattern": pattern.model_dump(mode="json", exclude_none=True)}
            padded = _that_compute({**fields, "pad_heads": True}, verified)
            found = {**padded, **_that_compute(fields, verified), **found}
        if found:
            return found
    return {}


def cases_of(pattern: PatternBase, reach: int = 0) -> Iterator[list[PatternBase]]:
    """Patterns of kernels that compute a given pattern, those of its own kind first: with its numbers, then without.

    Args:
        pattern: pattern of a call.
        reach: keys on either side of a window that covers all keys.
    """
    for case in (pattern, pattern.wider):
        if case is not None and (case is pattern or case.window is None or reach <= MOST_KEYS):
            yield [case, case.general()] if case.numbers() else [case]


def _that_compute(fields: Fields, verified: Verified | None) -> dict[str, Shipped]:
    """Shipped kernels, or all kernels with receipts, of exactly this problem, by the label of their tuning."""
    try:
        semantics = canonical(said_by(parse_spec(fields)))
    except SpecError:  # no kernel pads heads on this architecture
        return {}
    found = _by_semantics().get(semantics, ())
    if verified is not None:
        own = (named for named in verified.own if has_problem(named.spec))
        found = (*found, *(_shipped(named) for named in own if canonical(said_by(named.spec)) == semantics))
        found = tuple(shipped for shipped in found if verified.holds(shipped.named))
    return {shipped.timing.label: shipped for shipped in reversed(found)}


def alike(problem: Problem) -> tuple[Timing, ...]:
    """Tunings of shipped kernels for similar problems, with other numbers of the pattern or other options."""
    return _by_key().get(problem.key(), ())


@cache
def _by_key() -> dict[tuple[object, ...], tuple[Timing, ...]]:
    """Tunings of shipped kernels that are chosen by problem, by the key of their problems."""
    found: dict[tuple[object, ...], tuple[Timing, ...]] = {}
    for named, timing in itertools.chain.from_iterable(_by_semantics().values()):
        if is_chosen(named.spec):
            key = problem_of(named.spec).key()
            found[key] = (*found.get(key, ()), timing)
    return found


def _agrees(written: Mapping[str, Any], named: NamedSpec) -> bool:
    """Whether a spec has all required fields, including given parts of ``tile``."""
    spec = named.spec
    tile = {**spec.tile.model_dump(), **written.get("tile", {})}
    own = spec.model_dump(mode="json", by_alias=True, exclude_none=True)
    try:
        return parse_spec({**own, **written, "tile": tile}) == spec
    except SpecError:
        return False


@cache
def _by_semantics() -> dict[str, tuple[Shipped, ...]]:
    """Shipped kernels by the fields that define their computation, without steps of the ladder and WMMA."""
    found: dict[str, list[Shipped]] = {}
    for named in shipped_specs():
        if has_problem(named.spec) and named.spec.mma != "wmma" and named.subfolder.name != "ladder":
            found.setdefault(canonical(said_by(named.spec)), []).append(_shipped(named))
    return {semantics: tuple(kernels) for semantics, kernels in found.items()}


def _shipped(named: NamedSpec) -> Shipped:
    timing = Timing(spec=tuning_of(named.spec), single_us=1.0, prepared=preparation_of(named.spec))
    return Shipped(named, timing)
