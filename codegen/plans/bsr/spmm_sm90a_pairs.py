"""Plan of the sm_90a BSR x dense kernel whose tiles are two block rows of 64 rows.

Each consumer warpgroup has a block row. A tile of B is loaded once for both if they have a block in the same column.
"""

from __future__ import annotations

from codegen.dtypes import DTYPES
from codegen.plan import Constant, Plan, TensorMap, check_budget, i32, require, require_left_out
from codegen.plans.bsr.balance import order_summary
from codegen.plans.bsr.epilogue import epilogue_params, epilogue_summary
from codegen.plans.bsr.parts import (
    C_GROUP_BYTES,
    COLUMNS_PARAM,
    CONSUMERS,
    ONE_ROW_OF_A,
    SWIZZLE,
    THREADS,
    WARPGROUP_ROWS,
    Part,
    group_columns,
    spmm_b_maps,
    spmm_flags,
    spmm_params,
    spmm_shared,
    spmm_staging_groups,
    warpgroup_constants,
)
from codegen.plans.bsr.spmm_launch import arguments
from codegen.spec import BsrSpmmSpec
from codegen.tile_rules import OneOf, Rule, check_tile

ROWS = CONSUMERS * WARPGROUP_ROWS  # per tile
TILE: tuple[Rule[BsrSpmmSpec], ...] = (
    OneOf("m", lambda spec: (ROWS,), lambda spec, sizes: f"two block rows of 64 are {sizes} rows"),
    OneOf("n", lambda spec: (128, 256), lambda spec, sizes: f"allowed: {sizes}"),
    OneOf("k", lambda spec: (group_columns(spec),), lambda spec, sizes: f"{ONE_ROW_OF_A}: {sizes}"),
)


def plan(spec: BsrSpmmSpec, stem: str) -> Plan:
    """Plan of the kernel of a spec."""
    dtype = DTYPES[spec.dtype]
    n, k = spec.tile.n, spec.tile.k
    columns = group_columns(spec)
    cols = spec.block.cols
    require(cols in (64, 128), "block.cols", f"is {cols}; allowed with wgmma where block.rows is 64: 64, 128")
    check_tile(spec, TILE)
    require(spec.stages >= 2, "stages", "is 1; a warpgroup reads one stage while it waits for the next: 2 or more")
    require_left_out(spec, ("accumulate", "scheduler"), f"tile.m {ROWS} of block rows of 64")

    by_columns = spec.b_layout == "column_major"
    a_bytes, b_bytes = WARPGROUP_ROWS * k * dtype.bytes, k * n * dtype.bytes
    shared = spmm_shared(spec, CONSUMERS * a_bytes, f"ring of pairs of A tiles, {WARPGROUP_ROWS} rows of 128 bytes")
    shared.add("Rows", 4 * spec.stages, "flags of the block rows that have a block in a stage's step", align=8)
    registers = Part.of(spec).registers
    check_budget(spec, shared.size, registers)

    constants = (
        Constant("kBlockRows", WARPGROUP_ROWS, "rows of a block: a consumer's part of a tile"),
        Constant("kBlockCols", cols, "columns of a stored block of A"),
        Constant("kTileN", n, "columns of a C tile"),
        Constant("kTileK", k, "depth of one step"),
        *warpgroup_constants(spec, Constant("kConsumers", CONSUMERS, "warpgroups that compute, each a block row")),
        Constant("kTileGroups", n // columns, "column groups of a tile"),
        Constant("kStagingGroups", spmm_staging_groups(spec), "column groups that a warpgroup may have in flight"),
        Constant("kAccumulators", registers.accumulators, "accumulators per thread"),
        Constant("kABytes", a_bytes, "bytes of the A tile of one block row"),
        Constant("kBBytes", b_bytes, "bytes of a B tile"),
        *(() if by_columns else (Constant("kBGroupBytes", k * SWIZZLE, "bytes of one column group of B"),)),
        Constant("kCGroupBytes", C_GROUP_BYTES, "bytes of one column group of a warpgroup's C"),
    )
    params = (
        *spmm_params(spec),
        i32("block_rows", "block rows of A"),
        i32("row_pairs", "block_rows / 2, rounded up"),
        i32("tiles", "row_pairs * tiles per pair"),
        *(() if by_columns else (COLUMNS_PARAM,)),
        *epilogue_params(spec),
    )
    return Plan(
        spec=spec,
        stem=stem,
        template="bsr_spmm/sm90a_pairs.cu.j2",
        threads=THREADS,
        ctas_per_sm=1,
        persistent=True,
        shared=tuple(shared.regions),
        shared_bytes=shared.size,
        registers=registers,
        params=params,
        tensor_maps={
            "a_map": TensorMap((columns, WARPGROUP_ROWS, 1), SWIZZLE),
            **spmm_b_maps(spec),
            "c_map": TensorMap((columns, WARPGROUP_ROWS), SWIZZLE),
        },
        constants=constants,
        flags=spmm_flags(spec, n),
        grid_summary=order_summary(spec),
        summary=(
            ("blocks of A", f"{WARPGROUP_ROWS} x {cols}"),
            ("tile", f"{ROWS} x {n} of C, two block rows, in steps of {k}; each warpgroup has {WARPGROUP_ROWS} x {n}"),
            ("schedule", f"{spec.schedule}: one producer warp (TMA), {CONSUMERS} consumer warpgroups (WGMMA)"),
            *epilogue_summary(spec),
            ("pipeline", f"ring of {spec.stages} tiles of B, each with one or two of A"),
        ),
        flops=CONSUMERS * 2 * WARPGROUP_ROWS * n * k,
        bytes=CONSUMERS * a_bytes + b_bytes,
        arguments=arguments,
    )
