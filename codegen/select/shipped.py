"""The shipped kernels that compute a problem: those with a committed source and a receipt."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

from codegen.errors import SpecError
from codegen.library import NamedSpec, shipped_specs
from codegen.parse import parse_spec
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
    """A shipped kernel that computes a problem.

    Attributes:
        named: the spec.
        timing: its tuning, as rows of the table have it, with a time that says nothing.
    """

    named: NamedSpec
    timing: Timing


def serving(written: Mapping[str, Any], problem: Problem, *, general: bool) -> dict[str, Shipped]:
    """Shipped kernels that compute a problem, by the label of their tuning.

    Args:
        written: fields that the kernel's spec must have.
        problem: the problem.
        general: whether kernels that take numbers of the pattern from the call, or fill heads up, will do too.
    """
    found: dict[str, Shipped] = {}
    kernels = _by_semantics()
    for fields in _alternatives(problem.fields(), problem) if general else [problem.fields()]:
        try:
            semantics = canonical(said_by(parse_spec(fields)))
        except SpecError:  # no kernel is general in this way
            continue
        for shipped in kernels.get(semantics, ()):
            if general or _agrees(written, shipped.named):
                found.setdefault(shipped.timing.label, shipped)
    return found


def alike(problem: Problem) -> list[Timing]:
    """Tunings of shipped kernels for problems that compare with one: with other numbers of the pattern, or options."""
    return [
        shipped.timing
        for kernels in _by_semantics().values()
        for shipped in kernels
        if (shipped.named.spec.op, shipped.named.spec.arch) == (problem.op, problem.arch)
        and is_chosen(shipped.named.spec)
        and problem_of(shipped.named.spec).key() == problem.key()
    ]


def _alternatives(fields: Fields, problem: Problem) -> Iterator[Fields]:
    """Fields of a problem, then those of problems that it is one of."""
    yield fields
    if not isinstance(problem, AttentionProblem):
        return
    patterns = [fields["pattern"]]
    if problem.pattern.numbers():
        patterns.append(problem.pattern.general().model_dump(mode="json", exclude_none=True))
        yield {**fields, "pattern": patterns[1]}
    if not problem.pad_heads:
        for pattern in patterns:
            yield {**fields, "pattern": pattern, "pad_heads": True}


def _agrees(written: Mapping[str, Any], named: NamedSpec) -> bool:
    """Whether a spec has all fields that are written, of ``tile`` those that are."""
    spec = named.spec
    tile = {**spec.tile.model_dump(), **written.get("tile", {})}
    own = spec.model_dump(mode="json", by_alias=True, exclude_none=True)
    try:
        return parse_spec({**own, **written, "tile": tile}) == spec
    except SpecError:
        return False


@cache
def _by_semantics() -> dict[str, tuple[Shipped, ...]]:
    """Shipped kernels by the fields that say what they compute."""
    found: dict[str, list[Shipped]] = {}
    for named in shipped_specs():
        if has_problem(named.spec):
            timing = Timing(spec=tuning_of(named.spec), single_us=1.0, prepared=preparation_of(named.spec))
            found.setdefault(canonical(said_by(named.spec)), []).append(Shipped(named, timing))
    return {semantics: tuple(kernels) for semantics, kernels in found.items()}
