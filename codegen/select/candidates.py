"""Kernels worth timing for a problem: the shipped ones that compute it, and variations that the model ranks best."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from codegen.errors import SpecError
from codegen.library import NamedSpec, shipped_specs, unnamed_stem
from codegen.operators import OPERATORS
from codegen.parse import parse_spec
from codegen.plan import Plan
from codegen.planning import plan_of
from codegen.select.default_tables import GATHERED_ROWS
from codegen.select.estimate import estimate
from codegen.select.limits import MOST
from codegen.select.problem import (
    AttentionProblem,
    Fields,
    Problem,
    is_chosen,
    preparation_of,
    problem_of,
    tuning_of,
)
from codegen.spec import Spec

OF_A_TILE = 2  # of them with the same tile, in which the model hardly tells kernels apart
SLOW = "wmma"  # shipped as steps of a ladder, and beside kernels with the same tile that are faster
STAGES = (8, 6, 5, 4, 3, 2, 1)


def candidates(problem: Problem, most: int = MOST) -> list[NamedSpec]:
    """Return the shipped kernels that compute a problem, then up to ``most`` variations, the best by the model first.

    Raises:
        SpecError: if no kernel computes it.
    """
    found: dict[str, NamedSpec] = {}
    for named in shipped_specs():
        alike = (named.spec.op, named.spec.arch) == (problem.op, problem.arch) and is_chosen(named.spec)
        if alike and named.spec.mma != SLOW:
            if problem_of(named.spec).key() != problem.key() or not is_allowed(named.spec, problem):
                continue
            if applied := _accepted({**problem.fields(), **tuning_of(named.spec)}):
                spec, _ = applied
                found.setdefault(spec.hash, named if named.spec == spec else _unnamed(spec))
    tiles: Counter[str] = Counter()
    for spec in _ranked(problem):
        tile = str(spec.tile)
        if spec.hash in found or tiles[tile] >= OF_A_TILE or not is_allowed(spec, problem):
            continue
        if sum(tiles.values()) >= most:
            break
        tiles[tile] += 1
        found[spec.hash] = _unnamed(spec)
    if not found:
        named = _unnamed(parse_spec(problem.fields()))
        plan_of(named.spec, named.stem)
        return [named]
    return list(found.values())


def _unnamed(spec: Spec) -> NamedSpec:
    return NamedSpec(stem=unnamed_stem(spec), spec=spec)


def is_allowed(spec: Spec, problem: Problem) -> bool:
    """Whether A is prepared as a kernel needs it."""
    needs = preparation_of(spec)
    if needs is None or isinstance(problem, AttentionProblem):
        return True
    return problem.prepared in ("rows", "packed") or (
        problem.prepared is None and getattr(spec.tile, "m", None) != GATHERED_ROWS
    )


def _ranked(problem: Problem) -> list[Spec]:
    """Return the variations that have a plan, with as many stages as it accepts, the fastest by the model first.

    Without sizes they are in the order in which they come.
    """
    fields = problem.fields()
    found: list[tuple[float, int, Spec]] = []
    for tuning in OPERATORS[problem.op].variations(problem):
        numbers = (tuning["stages"],) if "stages" in tuning else STAGES
        deepest = _deepest({**fields, **tuning}, numbers)
        if deepest is None:
            continue
        spec, plan = deepest
        guess = estimate(plan, problem)
        found.append((guess.microseconds if guess else 0.0, len(found), spec))
    return [spec for _, _, spec in sorted(found, key=lambda each: each[:2])]


def _deepest(fields: Fields, numbers: Iterable[int]) -> tuple[Spec, Plan] | None:
    """The spec with the first of these numbers of stages that has a plan."""
    for stages in numbers:
        try:
            spec = parse_spec({**fields, "stages": stages})
            return spec, plan_of(spec, "candidate")
        except SpecError as error:
            if error.field.startswith("tile."):  # by a rule of the kernel, whatever the stages
                return None
    return None


def _accepted(fields: Fields) -> tuple[Spec, Plan] | None:
    """Return a spec with its plan, if it has one."""
    try:
        spec = parse_spec(fields)
        return spec, plan_of(spec, "candidate")
    except SpecError:
        return None
