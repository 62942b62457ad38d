"""Plan of the sm_90a BSR x dense kernel for blocks of 16 and 32: the product is computed transposed.

A block row of 16 or 32 rows would only fill a part of a wgmma's 64 rows. So the tile is C^T = B^T A^T: 64 columns of B
are the M side of a wgmma, and the block's rows its N side. A step is one block of A, or several consecutive blocks of a
row: ``tile.k`` is its depth.
"""

from __future__ import annotations

from codegen.dtypes import DTYPES
from codegen.flags import SpmmSwapAbFlags
from codegen.plan import Constant, Param, Plan, TensorMap, i32, require
from codegen.plans.bsr.b_by_rows import copy_constants, copy_maps, copy_params, copy_prologue, copy_summary
from codegen.plans.bsr.balance import WARP, order_summary, producers, schedule_flags
from codegen.plans.bsr.epilogue import (
    epilogue_constants,
    epilogue_flags,
    epilogue_maps,
    epilogue_params,
    epilogue_summary,
)
from codegen.plans.bsr.parts import (
    COLUMNS_PARAM,
    CONSUMERS,
    SWIZZLE,
    WARPGROUP,
    Part,
    copies_b,
    one_block_row,
    small_block_registers,
    spmm_b_maps,
    spmm_params,
    spmm_shared,
    spmm_staging_groups,
)
from codegen.plans.bsr.row_chunks import chunk_constants, chunk_order, chunk_params, chunk_summary, row_cutting
from codegen.plans.bsr.spmm_launch import arguments
from codegen.problem import SCHEDULER_BYTES
from codegen.spec import BsrSpmmSpec
from codegen.tile_rules import OneOf, Rule, check_tile

WARPGROUP_COLUMNS = 64  # M side of one wgmma: columns of B
SIZES = (16, 32)  # supported rows and columns per block
WIDTHS = (128, 256, 512, 1024)  # columns per tile
STEP_BLOCKS = (1, 2, 4)  # of A per step; divisors of the 32 block columns that a warp reads at a time
B_ROWS_PARAMS = (
    COLUMNS_PARAM,
    i32("whole_rows", "leading rows of B for which one copy loads all column groups of a tile"),
)
TILES_PARAM = i32("tiles", "tiles of C: block_rows * tiles per block row")

TILE: tuple[Rule[BsrSpmmSpec], ...] = (
    one_block_row(),
    OneOf("n", lambda spec: WIDTHS, lambda spec, sizes: f"allowed where block.rows is {spec.block.rows}: {sizes}"),
    OneOf(
        "k",
        lambda spec: [count * spec.block.cols for count in STEP_BLOCKS],
        lambda spec, sizes: f"a step is 1, 2 or 4 blocks of A, block.cols is {spec.block.cols}: {sizes}",
    ),
)


def plan(spec: BsrSpmmSpec, stem: str) -> Plan:
    """Plan of the kernel of a spec."""
    dtype = DTYPES[spec.dtype]
    rows, cols = spec.block.rows, spec.block.cols
    m, n, k = spec.tile.m, spec.tile.n, spec.tile.k
    require(cols in SIZES, "block.cols", f"is {cols}; allowed with wgmma where block.rows is {rows}: 16, 32")
    check_tile(spec, TILE)
    require(spec.stages >= 2, "stages", "is 1; a warpgroup reads one stage while it waits for the next: 2 or more")

    groups, step_blocks, row_bytes = Part.of(spec).groups, k // cols, cols * dtype.bytes
    a_bytes, b_bytes = m * k * dtype.bytes, k * n * dtype.bytes
    c_group_bytes = m * SWIZZLE
    a_doc = f"ring of blocks of A, {m} rows of {row_bytes} bytes"
    shared = spmm_shared(spec, a_bytes, a_doc, c_group_bytes, step_blocks)
    if spec.is_dynamic:
        shared.add("IsLast", 4 * CONSUMERS, "whether a warpgroup finished the last chunk", align=4)
    workers = "one warp that produces" + (", one that schedules" if spec.is_dynamic else "")
    threads, resident = CONSUMERS * WARPGROUP + (2 if spec.is_dynamic else 1) * WARP, spec.ctas_per_sm
    accumulators = m * WARPGROUP_COLUMNS // WARPGROUP
    registers = small_block_registers(spec, threads, groups * accumulators, shared.size)

    constants = (
        Constant("kTileM", m, "rows of a C tile: one block row"),
        Constant("kTileN", n, "columns of a C tile"),
        *_depth(spec, step_blocks),
        Constant("kStages", spec.stages, "depth of the ring of A and B tiles"),
        Constant("kThreads", threads, f"warpgroups that consume, then {workers}"),
        Constant("kConsumerWarps", CONSUMERS * WARPGROUP // 32, "warps that compute"),
        Constant("kGroupColumns", WARPGROUP_COLUMNS, "columns of a group: the M side of one wgmma"),
        *(() if copies_b(spec) else (Constant("kTileGroups", n // WARPGROUP_COLUMNS, "column groups of a tile"),)),
        Constant("kWarpgroupGroups", groups, "column groups of a warpgroup"),
        Constant("kStagingGroups", spmm_staging_groups(spec), "column groups that a warpgroup may have in flight"),
        Constant("kAccumulators", accumulators, "accumulators per thread and column group"),
        *_step_bytes(a_bytes, b_bytes, step_blocks),
        Constant("kBGroupBytes", cols * SWIZZLE, "bytes of one column group of B"),
        Constant("kCGroupBytes", c_group_bytes, "bytes of one column group of C"),
        *epilogue_constants(spec, groups * c_group_bytes),
        *copy_constants(spec),
        *(chunk_constants(spec) if spec.is_dynamic else ()),
    )
    c_map, prologue = TensorMap((WARPGROUP_COLUMNS, m), SWIZZLE), copy_prologue(spec, stem)
    return Plan(
        spec=spec,
        stem=stem,
        template="bsr_spmm/sm90a_swap_ab.cu.j2",
        threads=threads,
        ctas_per_sm=resident,
        persistent=True,
        shared=tuple(shared.regions),
        shared_bytes=shared.size,
        registers=registers,
        params=(
            *spmm_params(spec),
            *copy_params(spec),
            *(() if prologue else B_ROWS_PARAMS),
            *_work_params(spec),
            *epilogue_params(spec),
        ),
        tensor_maps={
            "a_map": TensorMap((cols, m, step_blocks), row_bytes),
            **copy_maps(spec),
            **spmm_b_maps(spec, step_blocks),
            "c_map": c_map,
            **epilogue_maps(spec, c_map),
        },
        constants=constants,
        flags=SpmmSwapAbFlags(
            mma_n=m,
            a_row_bytes=row_bytes,
            by_columns=spec.b_layout == "column_major",
            copies_b=copies_b(spec),
            schedule=schedule_flags(spec, step_blocks),
            epilogue=epilogue_flags(spec),
        ),
        grid_summary=chunk_order(spec) if spec.is_dynamic else order_summary(spec),
        summary=(
            ("blocks of A", f"{rows} x {cols}"),
            (
                "tile",
                f"{m} x {n} of C, computed transposed, {'a block' if step_blocks == 1 else f'{step_blocks} blocks'} a "
                f"step; each warpgroup has {groups} groups of 64",
            ),
            ("schedule", f"{spec.schedule}: {producers(spec)} (TMA), {CONSUMERS} consumer warpgroups (WGMMA)"),
            *epilogue_summary(spec),
            *copy_summary(spec),
            ("pipeline", f"ring of {spec.stages} pairs of A blocks and B tiles"),
            *(chunk_summary(spec) if spec.is_dynamic else ()),
        ),
        flops=2 * m * n * k,
        bytes=a_bytes + b_bytes,
        arguments=arguments,
        dynamic_scheduler=spec.is_dynamic,
        workspace_bytes=SCHEDULER_BYTES if spec.is_dynamic else {},
        row_cutting=row_cutting(spec) if spec.is_dynamic else None,
        prologue=prologue,
    )


def _work_params(spec: BsrSpmmSpec) -> tuple[Param, ...]:
    """Parameters of the work of thread blocks."""
    return chunk_params() if spec.is_dynamic else (i32("block_rows", "block rows of A"), TILES_PARAM)


def _depth(spec: BsrSpmmSpec, step_blocks: int) -> tuple[Constant, ...]:
    """Constants of a step's depth."""
    cols = spec.block.cols
    depth = Constant("kBlockCols", cols, "columns of a stored block of A")
    if step_blocks == 1:
        return (depth,)
    return (depth, Constant("kStepBlocks", step_blocks, "most blocks of A per step"))


def _step_bytes(a_bytes: int, b_bytes: int, step_blocks: int) -> tuple[Constant, ...]:
    """Constants of the parts of A and B in a stage of the ring."""
    if step_blocks == 1:
        return (
            Constant("kABytes", a_bytes, "bytes of a block of A"),
            Constant("kBBytes", b_bytes, "bytes of a B tile"),
        )
    return (
        Constant("kABytes", a_bytes, "bytes of the blocks of A of one step"),
        Constant("kABlockBytes", a_bytes // step_blocks, "bytes per such step"),
        Constant("kBBytes", b_bytes, "bytes of the B tiles of one step"),
        Constant("kBBlockBytes", b_bytes // step_blocks, "bytes of the B tile of one block of A"),
    )
