"""Performance model of a kernel, from its plan: waves of tiles, steps per tile, arithmetic and bytes per step.

It ranks kernels of a problem with the same instructions; its microseconds are not predictions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from codegen.arch import ARCHS
from codegen.plan import Plan
from codegen.select.problem import AttentionProblem, BsrProblem, Problem
from codegen.spec import AttentionSpec, BsrSddmmSpec, BsrSpmmSpec, UnchosenSpec

LATENCY_US = 0.8  # of a load from device memory: a step takes at least this divided by the loads in flight
TILE_US = 1.5  # per tile in addition to its steps: first loads, output
SPLIT_STEPS = 8  # of a stream-K tail, in steps


@dataclass(frozen=True)
class Estimate:
    """Waves per launch, steps per tile, total bytes loaded, and modeled time."""

    waves: float
    steps: float
    bytes: float
    microseconds: float


def estimate(plan: Plan, problem: Problem, sms: int | None = None) -> Estimate | None:
    """Estimate for a plan; None if a required size is unknown."""
    counts = _attention(plan, problem) if isinstance(problem, AttentionProblem) else _bsr(plan, problem)
    if counts is None or not plan.flops:
        return None
    tiles, steps, longest = counts
    machine = ARCHS[problem.arch].machine
    slots = (sms or machine.sms) * plan.ctas_per_sm
    resident = min(plan.ctas_per_sm, max(1, math.ceil(tiles / (sms or machine.sms))))
    loads = max(1, plan.spec.stages) * resident
    step = max(
        plan.flops * resident / machine.flops,
        plan.bytes * resident / machine.bytes,
        LATENCY_US * resident / loads,
    )
    waves = tiles / slots
    if plan.dynamic_scheduler or plan.stream_k is not None:
        # Balanced: the last wave is distributed, at a cost.
        spread = waves * steps + (SPLIT_STEPS if plan.stream_k is not None and waves % 1 else 0)
        busy = min(math.ceil(waves) * steps, max(spread, min(1.0, waves) * steps))
        split = plan.row_cutting is not None or plan.stream_k is not None
        busy = busy if split else max(busy, longest)
    elif plan.divides_tiles and tiles < (sms or machine.sms):
        busy = longest / ((sms or machine.sms) // tiles)
    else:
        busy = max(math.ceil(waves) * steps, (math.ceil(waves) - 1) * steps + longest)
    time = busy * step + math.ceil(waves) * TILE_US
    return Estimate(waves, steps, tiles * steps * plan.bytes, time)


def _attention(plan: Plan, problem: AttentionProblem) -> tuple[float, float, float] | None:
    """Number of tiles, and steps of the mean and of the longest tile."""
    spec = plan.spec
    assert isinstance(spec, AttentionSpec)
    q_len, kv_len = problem.q_len or problem.kv_len, problem.kv_len or problem.q_len
    keys = seen_keys(problem, plan.tile_queries)
    if problem.heads is None or q_len is None or kv_len is None or keys is None:
        return None
    tiles = (problem.batch or 1) * problem.heads // spec.pack_gqa * math.ceil(q_len / plan.tile_queries)
    mean, most = keys
    if spec.share_kv_loads and spec.pattern.fixed_block is not None:
        # A key block in the lists of several query blocks of a tile is loaded once: all of them share the step.
        blocks = max(1, plan.tile_queries // spec.pattern.fixed_block.q)
        common = problem.overlap or min(1.0, mean / kv_len)
        mean, most = (value * (blocks - (blocks - 1) * common) for value in (mean, most))
    parts = spec.kv_splits * spec.tile.n
    return float(tiles), max(1.0, mean / parts), max(1.0, most / parts)


def seen_keys(problem: AttentionProblem, queries: int) -> tuple[float, float] | None:
    """Keys that a tile of ``queries`` sees: mean over tiles, and for the last tile; None if unknown."""
    pattern = problem.pattern
    kv_len = problem.kv_len or problem.q_len
    if pattern.fixed_block is not None:
        listed = pattern.list_length or problem.list_length
        return None if listed is None else (float(listed * pattern.fixed_block.kv),) * 2
    return None if kv_len is None else pattern.seen_keys(kv_len, queries)


def _bsr(plan: Plan, problem: BsrProblem) -> tuple[float, float, float] | None:
    spec = plan.spec
    assert not isinstance(spec, AttentionSpec | UnchosenSpec)
    if problem.m is None or problem.n is None or problem.k is None or problem.density is None:
        return None
    tile = spec.tile
    stored = problem.m * problem.density
    if isinstance(spec, BsrSddmmSpec):
        blocks_of_tile = max(1, tile.n // spec.block.cols)
        rows = problem.m / spec.block.rows
        tiles = rows * max(1.0, math.ceil(problem.n / spec.block.cols * problem.density / blocks_of_tile))
        return tiles, problem.k / tile.k, problem.k / tile.k
    tiles = math.ceil(problem.m / tile.m) * math.ceil(problem.n / tile.n)
    work = 2.0 * stored * problem.k * math.ceil(problem.n / tile.n) * tile.n
    work *= 1.0 if isinstance(spec, BsrSpmmSpec) else problem.density
    steps = max(1.0, work / tiles / plan.flops)
    return float(tiles), steps, steps * (problem.longest_row or 1.0)
