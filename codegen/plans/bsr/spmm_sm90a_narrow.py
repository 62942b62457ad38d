"""Plan of the sm_90a BSR x dense kernel for few columns of a B stored by columns: WGMMA, parts of a block row.

With few columns, the time of a product is that of reading the stored blocks. A tile is as narrow as B, so that no
product is wasted, and several thread blocks divide a block row where tiles are fewer than SMs.
"""

from __future__ import annotations

from codegen.flags import SpmmFlags
from codegen.plan import Constant, Param, Plan, SharedLayout, TensorMap, i32, i64, pointer, require, tensor_map
from codegen.plan import require_left_out as left_out
from codegen.plans.bsr.epilogue import epilogue_flags, epilogue_params, epilogue_summary
from codegen.plans.bsr.parts import (
    A_MAP,
    COLUMNS_PARAM,
    INDEX_PARAMS,
    SWIZZLE,
    WARPGROUP,
    WARPGROUP_ROWS,
    group_columns,
    small_block_registers,
    stage_ring,
)
from codegen.problem import LaunchArgs, SpmmShape
from codegen.spec import BsrSpmmSpec
from codegen.tile_rules import OneOf, Rule, check_tile

WARP = 32
FLOAT_BYTES = 4
WIDTHS = (16, 32, 64, 128)
"""Columns per tile. 128 requires ``ctas_per_sm`` of 2 or more: with 1, the kernel for wide tiles has it."""
FEWEST_BLOCKS = 2
"""Stored blocks per part of a block row, at least, on average: a part costs its partial sums and a meeting."""
MOST_PARTS = 16
"""Parts per block row at most: the last of them to end adds the sums of all."""
PARTS_PER_SM = 1.0
"""Thread blocks per SM up to which block rows are divided."""


def is_narrow(spec: BsrSpmmSpec) -> bool:
    """Whether a spec of wgmma is of this kernel."""
    if spec.b_layout != "column_major" or spec.transpose_a:
        return False
    return spec.tile.n < WIDTHS[-1] or (spec.tile.n == WIDTHS[-1] and spec.ctas_per_sm > 1)


def plan(spec: BsrSpmmSpec, stem: str) -> Plan:
    """Plan of the kernel of a spec."""
    _check(spec)
    block = spec.block
    m, n, k = spec.tile.m, spec.tile.n, spec.tile.k
    warpgroups, accumulators = m // WARPGROUP_ROWS, n // 2
    threads = warpgroups * WARPGROUP + WARP
    a_bytes, b_bytes = m * SWIZZLE, n * SWIZZLE

    shared = SharedLayout()
    ring = stage_ring(spec.stages)
    shared.add("A", spec.stages * a_bytes, f"ring of A tiles, {m} rows of {SWIZZLE} bytes", ring=ring)
    shared.add("B", spec.stages * b_bytes, f"ring of B tiles, {n} columns of {SWIZZLE} bytes", ring=ring)
    shared.add("Barriers", 16 * spec.stages, "mbarriers: full, then empty", align=8)
    shared.add("IsLast", 4 * warpgroups, "whether a warpgroup finished the last part", align=4)
    registers = small_block_registers(spec, threads, accumulators, shared.size)
    constants = (
        Constant("kTileM", m, "rows of a C tile"),
        Constant("kTileN", n, "columns of a C tile"),
        Constant("kTileK", k, "depth of one step"),
        Constant("kBlockRows", block.rows, "rows of a stored block of A"),
        Constant("kBlockCols", block.cols, "columns of a stored block of A"),
        Constant("kStages", spec.stages, "depth of the ring of A and B tiles"),
        Constant("kThreads", threads, "warpgroups that consume, then one warp that produces"),
        Constant("kConsumerWarps", warpgroups * WARPGROUP // WARP, "warps that compute"),
        Constant("kAccumulators", accumulators, "accumulators per thread"),
        Constant("kABytes", a_bytes, "bytes of an A tile"),
        Constant("kBBytes", b_bytes, "bytes of a B tile"),
        Constant("kPartialFloats", WARPGROUP_ROWS * n, "floats of a warpgroup's partial sum"),
    )
    return Plan(
        spec=spec,
        stem=stem,
        template="bsr_spmm/sm90a_narrow.cu.j2",
        threads=threads,
        ctas_per_sm=spec.ctas_per_sm,
        persistent=False,
        shared=tuple(shared.regions),
        shared_bytes=shared.size,
        registers=registers,
        params=_params(spec),
        tensor_maps={
            "a_map": TensorMap((k, m, 1), SWIZZLE, 256),
            "b_map": TensorMap((k, n), SWIZZLE, 256),
        },
        constants=constants,
        flags=SpmmFlags(mma_n=n, by_columns=True, epilogue=epilogue_flags(spec)),
        grid_summary="one thread block per C tile and part of its block row, parts fastest, then column tiles",
        summary=(
            ("blocks of A", f"{block.rows} x {block.cols}"),
            ("tile", f"{m} x {n} of C in steps of {k}; each warpgroup has {WARPGROUP_ROWS} x {n}"),
            ("schedule", f"{spec.schedule}: one producer warp (TMA), {warpgroups} consumer warpgroups (WGMMA)"),
            *epilogue_summary(spec),
            ("pipeline", f"ring of {spec.stages} pairs of A and B tiles"),
            ("parts", f"up to {MOST_PARTS} of a block row, where tiles are few; partial sums of C are added in order"),
        ),
        flops=2 * m * n * k,
        bytes=a_bytes + b_bytes,
        arguments=_arguments,
        divides_tiles=True,
    )


def _params(spec: BsrSpmmSpec) -> tuple[Param, ...]:
    """Parameters of the kernel."""
    return (
        A_MAP,
        tensor_map("b_map", "B, by columns", ("K", "N")),
        pointer("c", "unsigned short", "C (M, N)", writes=True),
        i64("c_row_stride", "row stride of C, in elements"),
        *INDEX_PARAMS,
        COLUMNS_PARAM,
        i32("column_tiles", "column tiles"),
        i32("row_parts", "parts of a block row, one for each of as many thread blocks"),
        pointer("parts_done", "int", "finished parts of each tile, by warpgroup; 0 between launches", writes=True),
        pointer("parts", "float", "partial sums of C: accumulators of the parts of tiles", writes=True),
        *epilogue_params(spec),
    )


def _arguments(plan: Plan, shape: SpmmShape, slots: int) -> LaunchArgs:
    """Launch arguments, with block rows divided as long as an SM has ``PARTS_PER_SM`` thread blocks at most."""
    spec = plan.spec
    assert isinstance(spec, BsrSpmmSpec)
    column_tiles = -(-shape.columns // spec.tile.n)
    tiles = shape.rows // spec.tile.m * column_tiles
    sms = max(1, slots // plan.ctas_per_sm)
    mean = shape.blocks // max(1, shape.rows // spec.block.rows)
    parts = max(1, min(int(PARTS_PER_SM * sms) // max(1, tiles), MOST_PARTS, mean // FEWEST_BLOCKS))
    divided = tiles if parts > 1 else 0
    warpgroups = spec.tile.m // WARPGROUP_ROWS
    numbers = {"n": shape.columns, "column_tiles": column_tiles, "row_parts": parts}
    return LaunchArgs(
        numbers,
        tiles * parts,
        counters={"parts_done": divided * warpgroups},
        scratch={"parts": divided * parts * spec.tile.m * spec.tile.n * FLOAT_BYTES},
    )


TILE: tuple[Rule[BsrSpmmSpec], ...] = (
    OneOf(
        "m",
        lambda spec: [rows for rows in (64, 128) if spec.block.rows % rows == 0],
        lambda spec, sizes: f"a tile has 64 or 128 rows of one block row: {sizes}",
    ),
    OneOf(
        "n", lambda spec: WIDTHS, lambda spec, sizes: f"allowed with b_layout column_major: {sizes}, or a wider tile"
    ),
    OneOf(
        "k",
        lambda spec: (group_columns(spec),),
        lambda spec, sizes: f"a step is one 128-byte swizzled row of A deep: {sizes}",
    ),
)


def _check(spec: BsrSpmmSpec) -> None:
    """Reject specs that the kernel does not support."""
    rows, cols = spec.block.rows, spec.block.cols
    where = f"{spec.arch} with wgmma and tile.n {spec.tile.n}"
    require(rows in (64, 128), "block.rows", f"is {rows}; allowed on {where}: 64, 128")
    require(cols in (64, 128), "block.cols", f"is {cols}; allowed on {where}: 64, 128")
    check_tile(spec, TILE)
    left_out(spec, ("accumulate", "scheduler"), where)
    require(spec.stages >= 2, "stages", "is 1; a warpgroup reads one stage while it waits for the next: 2 or more")
