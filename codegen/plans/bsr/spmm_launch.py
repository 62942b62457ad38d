"""Launch arguments for the shape of a BSR x dense product."""

from __future__ import annotations

from codegen.dtypes import DTYPES
from codegen.plan import Plan
from codegen.plans.bsr.b_by_rows import copy_stride, copy_tiles
from codegen.plans.bsr.balance import group_tiles
from codegen.plans.bsr.parts import copies_b, group_columns
from codegen.preparation import RowCut
from codegen.problem import SCHEDULER_COUNTERS, LaunchArgs, SpmmShape
from codegen.spec import BsrSpmmSpec

L2_BYTES = 16 << 20  # of A at a time: a third of the L2, which B and C use too


def arguments(plan: Plan, shape: SpmmShape, slots: int) -> LaunchArgs:
    """Launch arguments; the split of tiles does not depend on the number of concurrent thread blocks."""
    del slots
    spec = plan.spec
    assert isinstance(spec, BsrSpmmSpec)
    block_rows, tile_rows = shape.rows // spec.block.rows, -(-shape.rows // spec.tile.m)
    column_tiles = -(-shape.columns // spec.tile.n // plan.cluster)
    copy_rows, copy_columns = copy_tiles(spec, shape.depth, shape.columns)
    prologue_grid = copy_rows * copy_columns
    if shape.groups is not None:
        tile_rows, prologue_grid = shape.groups, shape.rounds
    units, counters, scratch = tile_rows, {}, {}
    if plan.dynamic_scheduler:
        counters["scheduler"] = SCHEDULER_COUNTERS
    if plan.row_cutting is not None and shape.chunk_blocks is not None:
        cut = RowCut.at(shape.chunk_blocks, block_rows, shape.blocks)
        units = cut.chunks  # an upper bound
        counters["chunks_done"], scratch["parts"] = plan.row_cutting.workspace(cut, column_tiles)
    numbers = {
        "block_rows": block_rows,
        "row_pairs": tile_rows,
        "groups": tile_rows,
        "column_tiles": column_tiles,
        "group_tiles": min(group_tiles(spec, shape.depth), column_tiles),
        "group_rows": group_rows(spec, block_rows, shape.blocks),
        "tiles": units * column_tiles,
        "chunk_blocks": shape.chunk_blocks or 0,
        "n": shape.columns,
        "block_columns": tile_rows if spec.transpose_a else shape.depth // spec.block.cols,
        "copy_rows": copy_rows,
        "whole_rows": whole_rows(spec, shape.depth, shape.columns, shape.b_row_stride),
    }
    stride = copy_stride(spec, shape.columns) if copies_b(spec) else None
    return LaunchArgs(numbers, units * column_tiles * plan.cluster, prologue_grid, counters, scratch, stride)


def group_rows(spec: BsrSpmmSpec, block_rows: int, blocks: int) -> int:
    """Number of block rows, of ``block_rows`` with ``blocks`` blocks in total, whose part of A fits the L2."""
    a_bytes = blocks * spec.block.rows * spec.block.cols * DTYPES[spec.dtype].bytes
    groups = max(1, -(-a_bytes // L2_BYTES))
    return max(1, -(-block_rows // groups))


def whole_rows(spec: BsrSpmmSpec, depth: int, columns: int, stride: int) -> int:
    """Number of leading rows of B for which one copy may load all column groups.

    The last group may extend beyond its row into the rows below, whose elements are loaded but not used. The last rows
    of B have too few rows below them, and a copy loads all rows of a block column.

    Args:
        spec: the spec.
        depth: rows of B.
        columns: columns of B.
        stride: row stride of B, in elements.
    """
    beyond = -columns % group_columns(spec)
    if beyond == 0:
        return depth
    if stride <= 0:
        return 0
    rows, cols = -(-beyond // stride), spec.block.cols
    return max(0, depth - -(-rows // cols) * cols)
