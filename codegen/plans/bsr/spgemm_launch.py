"""Launch arguments for the shape of a BSR x BSR product, by the order of C's tiles."""

from __future__ import annotations

from dataclasses import dataclass

from codegen.plan import Plan
from codegen.problem import COUNTER_BYTES, LaunchArgs, SpgemmShape
from codegen.spec import BsrSpgemmSpec

LATE_TILES = 4  # words: tickets, finished thread blocks, and 64 bits of deferred and classified tiles
TICKETS_BYTES = {"scheduler": f"{COUNTER_BYTES} * tiles + {COUNTER_BYTES * LATE_TILES}"}
"""Workspace of the dynamic tile scheduler."""


@dataclass(frozen=True)
class OfRuns:
    """Launch arguments if thread blocks take runs of ``run_tiles`` tiles of a dense C."""

    run_tiles: int

    def __call__(self, plan: Plan, shape: SpgemmShape, slots: int) -> LaunchArgs:
        """Launch arguments."""
        del slots
        block = _spec(plan).block
        column_blocks = shape.columns // block.cols
        row_runs = -(-column_blocks // self.run_tiles)
        runs = shape.rows // block.rows * row_runs
        numbers = {"column_blocks": column_blocks, "row_runs": row_runs, "runs": runs}
        return LaunchArgs(numbers | _inner_blocks(plan, shape), runs)


def of_tickets(plan: Plan, shape: SpgemmShape, slots: int) -> LaunchArgs:
    """Launch arguments with a dynamic tile scheduler and a dense C."""
    del slots
    block = _spec(plan).block
    column_blocks = shape.columns // block.cols
    tiles = shape.rows // block.rows * column_blocks
    numbers = {"column_blocks": column_blocks, "tiles": tiles}
    return LaunchArgs(numbers | _inner_blocks(plan, shape), tiles, counters={"scheduler": LATE_TILES + tiles})


def of_pattern(plan: Plan, shape: SpgemmShape, slots: int) -> LaunchArgs:
    """Launch arguments for the blocks of C in a pattern."""
    del slots
    numbers = {"block_rows": shape.rows // _spec(plan).block.rows, "blocks": shape.blocks}
    return LaunchArgs(numbers | _inner_blocks(plan, shape), shape.blocks)


def _inner_blocks(plan: Plan, shape: SpgemmShape) -> dict[str, int]:
    return {"inner_blocks": shape.depth // _spec(plan).block.cols}


def _spec(plan: Plan) -> BsrSpgemmSpec:
    assert isinstance(plan.spec, BsrSpgemmSpec)
    return plan.spec
