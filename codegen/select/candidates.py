"""Kernels worth timing for a problem: shipped kernels that compute it, and variations that the model ranks best."""

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

OF_A_TILE = 2  # most candidates with the same tile, which the model can hardly distinguish
SLOW = "wmma"  # shipped as steps of the ladder; kernels with the same tile are faster
STAGES = (8, 6, 5, 4, 3, 2, 1)


def candidates(problem: Problem, most: int = MOST) -> list[NamedSpec]:
    """Shipped kernels that compute a problem, then up to ``most`` variations, sorted by the model.

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
    """Whether A is prepared in the form that a kernel needs."""
    needs = preparation_of(spec)
    if needs is None or isinstance(problem, AttentionProblem):
        return True
    return problem.prepared in ("rows", "packed") or (
        problem.prepared is None and getattr(spec.tile, "m", None) != GATHERED_ROWS
    )


def _ranked(problem: Problem) -> list[Spec]:
    """Variations with a valid plan, with the most stages that it accepts, sorted by the model's time.

    Without sizes, they keep their order.
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
    """Spec with the first of these numbers of stages that has a valid plan."""
    for stages in numbers:
        try:
            spec = parse_spec({**fields, "stages": stages})
            return spec, plan_of(spec, "candidate")
        except SpecError as error:
            if error.field.startswith("tile."):  # a rule of the kernel, independent of stages
                return None
    return None


def _accepted(fields: Fields) -> tuple[Spec, Plan] | None:
    """Spec with its plan, if the plan is valid."""
    try:
        spec = parse_spec(fields)
        return spec, plan_of(spec, "candidate")
    except SpecError:
        return None
