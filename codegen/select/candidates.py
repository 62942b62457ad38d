"""Kernels worth timing for a problem: the shipped ones that compute it, and variations that the model ranks best."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator

from codegen.arch import ARCHS
from codegen.errors import SpecError
from codegen.library import NamedSpec, shipped_specs, unnamed_stem
from codegen.parse import parse_spec
from codegen.plan import Plan
from codegen.plans import plan_of
from codegen.select.default_tables import GATHERED_ROWS
from codegen.select.defaults import GATHERING
from codegen.select.estimate import estimate
from codegen.select.problem import (
    AttentionProblem,
    BsrProblem,
    Fields,
    Problem,
    is_chosen,
    preparation_of,
    problem_of,
    tuning_of,
)
from codegen.spec import Spec

MOST = 12  # variations of a problem
OF_A_TILE = 2  # of them with the same tile, in which the model hardly tells kernels apart
SLOW = "wmma"  # shipped as steps of a ladder, and beside kernels with the same tile that are faster
STAGES = (8, 6, 5, 4, 3, 2, 1)
UNEVEN = 1.2
"""Longest row over the mean one from which a dynamic scheduler is tried on large products; on small ones it is anyway,
as it cuts rows."""
FEW_COLUMNS = 128  # of B, up to which its own kernel is tried
FEW_TILES = 4096 * 2048  # elements of C


def variations(problem: Problem) -> Iterator[Fields]:
    """Yield tunings, of which a plan need not accept any; without stages where as many as fit are best."""
    if isinstance(problem, AttentionProblem):
        yield from _attention_sm90a(problem) if ARCHS[problem.arch].has_wgmma else _attention_mma_sync(problem)
    else:
        yield from _bsr(problem)


def _attention_sm90a(problem: AttentionProblem) -> Iterator[Fields]:
    options: list[Fields] = [{}, {"kv_splits": 2}, {"stream_k_tail": False}]
    listed = problem.pattern.lists == 1
    if listed:
        options += [{"share_kv_loads": True}, {"share_kv_loads": True, "l2_lockstep": True}, {"l2_lockstep": True}]
        options += [{"share_kv_loads": True, "query_grouping": "search"}] if problem.query_grouping == "none" else []
    if problem.query_grouping == "given":
        options = [each for each in options if each.get("share_kv_loads")]
    for m, n, schedule, more in itertools.product(
        (64, 128, 192, 256), range(32, 193, 16), ("ping_pong", "cooperative"), options
    ):
        combined = {"mma": "wgmma", "copy": "tma", "schedule": schedule}
        yield {**combined, "tile": {"m": m, "n": n}, **more}


def _attention_mma_sync(problem: AttentionProblem) -> Iterator[Fields]:
    for m, n, warp_rows in itertools.product((16, 32, 64, 128), range(16, 129, 16), (16, 32)):
        combined = {"mma": "mma", "copy": "cp_async", "schedule": "multistage"}
        yield {**combined, "tile": {"m": m, "n": n}, "warp_rows": warp_rows}


def _bsr(problem: BsrProblem) -> Iterator[Fields]:
    rows, cols = problem.block.rows, problem.block.cols
    wgmma = {"mma": "wgmma", "copy": "tma", "schedule": "cooperative"}
    mma = {"mma": "mma", "copy": "cp_async", "schedule": "multistage"}
    arch = ARCHS[problem.arch]
    combined = [wgmma, mma] if arch.has_wgmma else [mma]
    depths = [k for k in (16, 32, 64, 128) if k <= max(64, cols)]
    if problem.op == "bsr_spgemm":
        for how, k, scheduler in itertools.product(combined, depths, ("static", "dynamic")):
            yield {**how, "tile": {"m": rows, "n": rows, "k": k}, "scheduler": scheduler}
        return
    widths = (64, 128, 192, 256, 384, 512)
    resident = (1, 2, 3) if rows in (16, 32) and arch.has_wgmma else (1,)
    if problem.op == "bsr_sddmm":
        for how, n, k, ctas in itertools.product(combined, widths, depths, resident):
            yield {**how, "tile": {"m": rows, "n": n, "k": k}, "ctas_per_sm": ctas}
        return
    few = {"mma": "mma", "copy": "ld_global", "schedule": "multistage"}
    if arch.has_kernel(problem.op, **few) and (problem.n is None or problem.n <= FEW_COLUMNS):
        for m, n, k in itertools.product((16, 32, 64), (16, 32, 64), (16, 32)):
            yield {**few, "stages": 2, "tile": {"m": m, "n": n, "k": k}}
    heights = [rows, 128] if rows == 64 else [rows]
    schedulers = ["static", "dynamic"] if _may_be_uneven(problem) else ["static"]
    for how, m, n, k, ctas, scheduler in itertools.product(combined, heights, widths, depths, resident, schedulers):
        yield {**how, "tile": {"m": m, "n": n, "k": k}, "ctas_per_sm": ctas, "scheduler": scheduler}
    if problem.prepared in ("rows", "packed") and rows in (16, 32) and arch.has_kernel(problem.op, *GATHERING):
        yield {"tile": {"m": GATHERED_ROWS}}


def _may_be_uneven(problem: BsrProblem) -> bool:
    """Return whether a dynamic scheduler may pay."""
    if problem.prepared == "none":
        return False
    small = problem.m is None or problem.n is None or problem.m * problem.n <= FEW_TILES
    return small or problem.longest_row is None or problem.longest_row >= UNEVEN


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
    """Return whether A is prepared as a kernel needs it."""
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
    for tuning in variations(problem):
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
