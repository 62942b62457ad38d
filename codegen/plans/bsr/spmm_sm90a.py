"""Plan of the sm_90a BSR x dense kernel: one TMA producer warp, two WGMMA consumer warpgroups, an mbarrier ring."""

from __future__ import annotations

from dataclasses import replace

from codegen.dtypes import DTYPES
from codegen.flags import SpmmSm90aFlags
from codegen.plan import Constant, Plan, TensorMap, check_budget, require
from codegen.plans.bsr.balance import (
    order_constants,
    order_params,
    order_summary,
    producers,
    schedule_flags,
)
from codegen.plans.bsr.epilogue import (
    epilogue_constants,
    epilogue_maps,
    epilogue_params,
    epilogue_summary,
)
from codegen.plans.bsr.parts import (
    C_GROUP_BYTES,
    COLUMNS_PARAM,
    CONSUMERS,
    MOST_BOX,
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
from codegen.problem import SCHEDULER_BYTES
from codegen.spec import BsrSpmmSpec
from codegen.tile_rules import OneOf, Rule, check_tile

# Columns per tile: registers hold the accumulators of 64 rows and 256 columns per warpgroup. In a tile of 64 rows, each
# warpgroup has half of the columns.
WIDTHS = {64: (128, 256, 512), 128: (128, 256)}
TILE: tuple[Rule[BsrSpmmSpec], ...] = (
    OneOf(
        "m",
        lambda spec: (spec.block.rows,),
        lambda spec, sizes: f"a tile is one block row high, or two of 64: block.rows is {sizes}",
    ),
    OneOf(
        "n",
        lambda spec: WIDTHS.get(spec.block.rows, ()),
        lambda spec, sizes: f"allowed where block.rows is {spec.block.rows}: {sizes}",
    ),
    OneOf(
        "k",
        lambda spec: (group_columns(spec) // 2, group_columns(spec)),
        lambda spec, sizes: f"a step is one swizzled row of A deep, 64 or 128 bytes: {sizes}",
    ),
)


def plan(spec: BsrSpmmSpec, stem: str) -> Plan:
    """Plan of the kernel of a spec."""
    dtype = DTYPES[spec.dtype]
    m, n, k = spec.tile.m, spec.tile.n, spec.tile.k
    columns = group_columns(spec)
    rows, cols = spec.block.rows, spec.block.cols
    require(rows in (64, 128), "block.rows", f"is {rows}; allowed on {spec.arch} with wgmma: 16, 32, 64, 128")
    require(cols in (64, 128), "block.cols", f"is {cols}; allowed with wgmma where block.rows is {rows}: 64, 128")
    check_tile(spec, TILE)
    by_columns = spec.b_layout == "column_major"
    allowed = not by_columns or (n <= MOST_BOX and k == columns)
    require(allowed, "b_layout", f"is {spec.b_layout}; where tile.n is {n} and tile.k {k}: row_major")
    require(spec.stages >= 2, "stages", "is 1; a warpgroup reads one stage while it waits for the next: 2 or more")

    part = Part.of(spec)
    # Not with a dynamic scheduler, where it was slower.
    clips = not (part.by_rows or spec.is_dynamic or by_columns)
    a_row_bytes = k * dtype.bytes
    a_bytes, b_bytes = m * k * dtype.bytes, k * n * dtype.bytes
    shared = spmm_shared(spec, a_bytes, f"ring of A tiles, {m} rows of {a_row_bytes} bytes")
    registers = part.registers
    check_budget(spec, shared.size, registers)

    constants = (
        Constant("kTileM", m, "rows of a C tile: one block row"),
        Constant("kTileN", n, "columns of a C tile"),
        Constant("kTileK", k, "depth of one step"),
        Constant("kBlockCols", spec.block.cols, "columns of a stored block of A"),
        *warpgroup_constants(spec),
        *(() if by_columns else (Constant("kTileGroups", n // columns, "column groups of a tile"),)),
        *part.constants(spmm_staging_groups(spec)),
        Constant("kABytes", a_bytes, "bytes of an A tile"),
        Constant("kBBytes", b_bytes, "bytes of a B tile"),
        *(() if by_columns else (Constant("kBGroupBytes", k * SWIZZLE, "bytes of one column group of B"),)),
        Constant("kCGroupBytes", C_GROUP_BYTES, "bytes of one column group of a warpgroup's C"),
        *epilogue_constants(spec, part.groups * C_GROUP_BYTES),
        *order_constants(spec),
    )
    c_map = TensorMap((columns, WARPGROUP_ROWS), SWIZZLE)
    # Dynamic scheduler: 2% faster with blocks of 64, not slower with 128 (step 39 of docs/notebook/ladder-bsr.md).
    promotion = 128 if spec.is_dynamic else 256
    return Plan(
        spec=spec,
        stem=stem,
        template="bsr_spmm/sm90a.cu.j2",
        threads=THREADS,
        ctas_per_sm=1,
        persistent=True,
        shared=tuple(shared.regions),
        shared_bytes=shared.size,
        registers=registers,
        params=(
            *spmm_params(spec),
            *(() if by_columns else (COLUMNS_PARAM,)),
            *order_params(spec),
            *epilogue_params(spec),
        ),
        tensor_maps={
            "a_map": TensorMap((k, m, 1), a_row_bytes, promotion),
            **{name: replace(how, promotion=promotion) for name, how in spmm_b_maps(spec).items()},
            "c_map": c_map,
            **epilogue_maps(spec, c_map),
        },
        constants=constants,
        flags=SpmmSm90aFlags(
            product=spmm_flags(spec, part.columns),
            by_rows=part.by_rows,
            schedule=schedule_flags(spec),
            a_row_bytes=a_row_bytes,
            clips=clips,
        ),
        grid_summary=order_summary(spec),
        summary=(
            ("blocks of A", f"{spec.block.rows} x {spec.block.cols}"),
            ("tile", f"{m} x {n} of C in steps of {k}; each warpgroup has {WARPGROUP_ROWS} x {part.columns}"),
            ("schedule", f"{spec.schedule}: {producers(spec)} (TMA), {CONSUMERS} consumer warpgroups (WGMMA)"),
            *epilogue_summary(spec),
            ("pipeline", f"ring of {spec.stages} pairs of A and B tiles"),
        ),
        flops=2 * m * n * k,
        bytes=a_bytes + b_bytes,
        arguments=arguments,
        dynamic_scheduler=spec.is_dynamic,
        workspace_bytes=SCHEDULER_BYTES if spec.is_dynamic else {},
    )
