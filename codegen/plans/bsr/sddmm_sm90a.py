"""Plan of the sm_90a sampled product: the blocks of A B^T in a BSR pattern, several of a block row at a time."""

from __future__ import annotations

from codegen.arch import ARCHS
from codegen.dtypes import DTYPES
from codegen.flags import SddmmSm90aFlags
from codegen.plan import Constant, Plan, SharedLayout, TensorMap, check_budget, i32, require
from codegen.plans.bsr.parts import (
    C_GROUP_BYTES,
    CONSUMERS,
    INDEX_PARAMS,
    ONE_ROW,
    SWIZZLE,
    THREADS,
    WARPGROUP_ROWS,
    Part,
    column_groups,
    group_columns,
    one_block_row,
    sddmm_maps,
    stage_ring,
    warpgroup_constants,
)
from codegen.plans.bsr.sddmm_launch import arguments
from codegen.spec import BsrSddmmSpec
from codegen.tile_rules import OneOf, Rule, check_tile

STAGING_GROUPS = 2  # column groups of C: one is filled while the other is stored

TILE: tuple[Rule[BsrSddmmSpec], ...] = (
    one_block_row(),
    OneOf("n", lambda spec: (128, 256), lambda spec, sizes: f"allowed: {sizes}"),
    OneOf("k", lambda spec: (group_columns(spec),), lambda spec, sizes: f"{ONE_ROW}: {sizes}"),
)


def plan(spec: BsrSddmmSpec, stem: str) -> Plan:
    """Plan of the kernel of a spec."""
    dtype = DTYPES[spec.dtype]
    rows, cols = spec.block.rows, spec.block.cols
    m, n, k = spec.tile.m, spec.tile.n, spec.tile.k
    columns = group_columns(spec)
    for name, size in (("rows", rows), ("cols", cols)):
        require(
            size in (64, 128), f"block.{name}", f"is {size}; allowed on {ARCHS[spec.arch].name} with wgmma: 64, 128"
        )
    check_tile(spec, TILE)
    require(spec.stages >= 2, "stages", "is 1; a warpgroup reads one stage while it waits for the next: 2 or more")

    part = Part.of(spec)
    a_columns, b_columns = (layout == "column_major" for layout in (spec.a_layout, spec.b_layout))
    a_bytes, b_bytes = m * k * dtype.bytes, n * k * dtype.bytes
    shared, ring = SharedLayout(), stage_ring(spec.stages)
    transposed = " and of ".join(name for name, given in (("A", a_columns), ("B", b_columns)) if given)
    for name, size, tile_bytes, by_columns in (("A", m, a_bytes, a_columns), ("B", n, b_bytes, b_columns)):
        rows_doc = f"{column_groups(size // columns)} of {k}" if by_columns else f"{size}"
        shared.add(name, spec.stages * tile_bytes, f"ring of {name} tiles, {rows_doc} rows of 128 bytes", ring=ring)
    c_doc = f"{STAGING_GROUPS} column groups of C of each warpgroup"
    shared.add("C", CONSUMERS * STAGING_GROUPS * C_GROUP_BYTES, c_doc, stores=True)
    shared.add("Barriers", 8 * 2 * spec.stages, "mbarriers: full, then empty", align=8)
    shared.add("Counts", 4 * spec.stages, "stored blocks of the unit of each stage", align=4)
    registers = part.registers
    check_budget(spec, shared.size, registers)

    constants = (
        Constant("kBlockRows", rows, "rows of a stored block of C: those of a tile"),
        Constant("kBlockCols", cols, "columns of a stored block of C"),
        Constant("kTileBlocks", n // cols, "most stored blocks per tile"),
        Constant("kTileK", k, "depth of one step"),
        *warpgroup_constants(spec),
        *part.constants(STAGING_GROUPS),
        Constant("kABytes", a_bytes, "bytes of an A tile"),
        Constant("kBBytes", b_bytes, "bytes of a B tile"),
        Constant("kBBlockBytes", cols * k * dtype.bytes, "bytes of a B tile per stored block"),
        *([Constant("kGroupBytes", k * SWIZZLE, f"bytes of a group of {transposed}")] if transposed else []),
        Constant("kCGroupBytes", C_GROUP_BYTES, "bytes of one column group of a warpgroup's C"),
    )
    params = (
        *sddmm_maps(spec),
        *INDEX_PARAMS,
        i32("block_rows", "block rows of C"),
        i32("blocks", "stored blocks of C"),
        i32("steps", "K / kTileK, rounded up"),
        i32("tiles", "blocks / kTileBlocks, rounded up"),
    )
    return Plan(
        spec=spec,
        stem=stem,
        template="bsr_sddmm/sm90a.cu.j2",
        threads=THREADS,
        ctas_per_sm=1,
        persistent=True,
        shared=tuple(shared.regions),
        shared_bytes=shared.size,
        registers=registers,
        params=params,
        tensor_maps={
            "a_map": TensorMap((columns, k if a_columns else m), SWIZZLE),
            "b_map": TensorMap((columns, k if b_columns else cols), SWIZZLE),
            "c_map": TensorMap((columns, WARPGROUP_ROWS, 1), SWIZZLE),
        },
        constants=constants,
        flags=SddmmSm90aFlags(part.columns, by_rows=part.by_rows, a_columns=a_columns, b_columns=b_columns),
        grid_summary="one thread block per SM, looping over tiles (persistent), in the order of storage",
        summary=(
            ("blocks of C", f"{rows} x {cols}"),
            ("tile", f"{n // cols} stored blocks in steps of {k}; those of one block row are computed together"),
            ("schedule", f"{spec.schedule}: one producer warp (TMA), {CONSUMERS} consumer warpgroups (WGMMA)"),
            ("pipeline", f"ring of {spec.stages} pairs of A and B tiles"),
        ),
        flops=2 * m * n * k,
        bytes=a_bytes + b_bytes,
        arguments=arguments,
    )
