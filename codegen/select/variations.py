"""Tunings to try for a problem; plans may reject some. They have no stages if the most that fit are best."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from codegen.arch import ARCHS
from codegen.select.default_tables import GATHERED_ROWS
from codegen.select.defaults import GATHERING
from codegen.select.problem import AttentionProblem, BsrProblem, Fields

UNEVEN = 1.2
"""Ratio of longest to mean row from which a dynamic scheduler is tried on large products; small products always try it,
as it splits rows."""
FEW_COLUMNS = 128  # of B; up to this number, the kernels for few columns are tried
FEW_TILES = 4096 * 2048  # elements of C
WGMMA: Fields = {"mma": "wgmma", "copy": "tma", "schedule": "cooperative"}
MMA: Fields = {"mma": "mma", "copy": "cp_async", "schedule": "multistage"}
WIDTHS = (64, 128, 192, 256, 384, 512)
"""Columns per tile."""


def attention_variations(problem: AttentionProblem) -> Iterator[Fields]:
    """Tunings of attention."""
    return _attention_sm90a(problem) if ARCHS[problem.arch].has_wgmma else _attention_mma_sync()


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
        yield {**WGMMA, "schedule": schedule, "tile": {"m": m, "n": n}, **more}


def _attention_mma_sync() -> Iterator[Fields]:
    for m, n, warp_rows in itertools.product((16, 32, 64, 128), range(16, 129, 16), (16, 32)):
        yield {**MMA, "tile": {"m": m, "n": n}, "warp_rows": warp_rows}


def spgemm_variations(problem: BsrProblem) -> Iterator[Fields]:
    """Tunings of BSR x BSR."""
    rows = problem.block.rows
    for how, k, scheduler in itertools.product(_instructions(problem), _depths(problem), ("static", "dynamic")):
        yield {**how, "tile": {"m": rows, "n": rows, "k": k}, "scheduler": scheduler}


def sddmm_variations(problem: BsrProblem) -> Iterator[Fields]:
    """Tunings of sampled products."""
    axes = _instructions(problem), WIDTHS, _depths(problem), _resident(problem)
    for how, n, k, ctas in itertools.product(*axes):
        yield {**how, "tile": {"m": problem.block.rows, "n": n, "k": k}, "ctas_per_sm": ctas}


def spmm_variations(problem: BsrProblem) -> Iterator[Fields]:
    """Tunings of BSR x dense."""
    rows, arch = problem.block.rows, ARCHS[problem.arch]
    few = {"mma": "mma", "copy": "ld_global", "schedule": "multistage"}
    if arch.has_kernel(problem.op, **few) and (problem.n is None or problem.n <= FEW_COLUMNS):
        for m, n, k in itertools.product((16, 32, 64), (16, 32, 64), (16, 32)):
            yield {**few, "stages": 2, "tile": {"m": m, "n": n, "k": k}}
    yield from _narrow(problem)
    heights = [rows, 128] if rows == 64 else [rows]
    schedulers = ["static", "dynamic"] if _may_be_uneven(problem) else ["static"]
    axes = _instructions(problem), heights, WIDTHS, _depths(problem), _resident(problem), schedulers
    for how, m, n, k, ctas, scheduler in itertools.product(*axes):
        yield {**how, "tile": {"m": m, "n": n, "k": k}, "ctas_per_sm": ctas, "scheduler": scheduler}
    if problem.prepared in ("rows", "packed") and rows in (16, 32) and arch.has_kernel(problem.op, *GATHERING):
        yield {"tile": {"m": GATHERED_ROWS}}


def _narrow(problem: BsrProblem) -> Iterator[Fields]:
    """Tunings for few columns of a B stored by columns, with blocks of 64 and 128."""
    few = problem.n is None or problem.n <= FEW_COLUMNS
    if few and ARCHS[problem.arch].has_wgmma and problem.b_layout == "column_major" and problem.block.rows >= 64:
        for m, n, ctas in itertools.product((64, 128), (16, 32, 64, 128), (1, 2, 3)):
            yield {**WGMMA, "tile": {"m": m, "n": n, "k": 64}, "ctas_per_sm": ctas}


def _instructions(problem: BsrProblem) -> list[Fields]:
    return [WGMMA, MMA] if ARCHS[problem.arch].has_wgmma else [MMA]


def _depths(problem: BsrProblem) -> list[int]:
    """Depths of a step to try."""
    return [k for k in (16, 32, 64, 128) if k <= max(64, problem.block.cols)]


def _resident(problem: BsrProblem) -> tuple[int, ...]:
    """Thread blocks per SM to try."""
    return (1, 2, 3) if problem.block.rows in (16, 32) and ARCHS[problem.arch].has_wgmma else (1,)


def _may_be_uneven(problem: BsrProblem) -> bool:
    """Whether a dynamic scheduler may pay off."""
    if problem.prepared == "none":
        return False
    small = problem.m is None or problem.n is None or problem.m * problem.n <= FEW_TILES
    return small or problem.longest_row is None or problem.longest_row >= UNEVEN
