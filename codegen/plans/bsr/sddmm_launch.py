"""Launch arguments for the shape of a sampled product."""

from __future__ import annotations

from codegen.plan import Plan
from codegen.problem import LaunchArgs, SddmmShape
from codegen.spec import BsrSddmmSpec


def arguments(plan: Plan, shape: SddmmShape, slots: int) -> LaunchArgs:
    """Launch arguments; a tile is a few stored blocks of C."""
    del slots
    spec = plan.spec
    assert isinstance(spec, BsrSddmmSpec)
    tiles = -(-shape.blocks // (spec.tile.n // spec.block.cols))
    numbers = {
        "block_rows": shape.rows // spec.block.rows,
        "block_columns": shape.columns // spec.block.cols,
        "blocks": shape.blocks,
        "k": shape.depth,
        "steps": -(-shape.depth // spec.tile.k),
        "tiles": tiles,
    }
    return LaunchArgs(numbers, tiles)
