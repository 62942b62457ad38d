"""Plan of the sm_90a kernel for A^T B with A in BSR: wgmma transposes the stored blocks.

The caller passes an index of the blocks of each block column. A^T is the M-major operand of a wgmma.
"""

from __future__ import annotations

from codegen.dtypes import DTYPES
from codegen.flags import SpmmTransposedFlags
from codegen.plan import Constant, Plan, TensorMap, check_budget, pointer, require, require_left_out, tensor_map
from codegen.plans.bsr.balance import in_bands, order_summary, place_params
from codegen.plans.bsr.epilogue import epilogue_params, epilogue_summary
from codegen.plans.bsr.parts import (
    A_MAP,
    C_GROUP_BYTES,
    COLUMNS_PARAM,
    CONSUMERS,
    SWIZZLE,
    THREADS,
    WARPGROUP_ROWS,
    Part,
    b_params,
    group_columns,
    spmm_b_maps,
    spmm_flags,
    spmm_shared,
    spmm_staging_groups,
    warpgroup_constants,
)
from codegen.plans.bsr.spmm_launch import arguments
from codegen.spec import BsrSpmmSpec
from codegen.tile_rules import OneOf, Rule, check_tile

TILE: tuple[Rule[BsrSpmmSpec], ...] = (
    OneOf(
        "m",
        lambda spec: (spec.block.cols,),
        lambda spec, sizes: f"with transpose_a a tile is one block column of A high: block.cols is {sizes}",
    ),
    OneOf("n", lambda spec: (128, 256), lambda spec, sizes: f"allowed: {sizes}"),
    OneOf(
        "k",
        lambda spec: (group_columns(spec),),
        lambda spec, sizes: f"a step is as deep as a column group of A is wide: {sizes}",
    ),
)


def plan(spec: BsrSpmmSpec, stem: str) -> Plan:
    """Plan of the kernel of a spec."""
    dtype = DTYPES[spec.dtype]
    m, n, k = spec.tile.m, spec.tile.n, spec.tile.k
    columns = group_columns(spec)
    rows, cols = spec.block.rows, spec.block.cols
    require(rows in (64, 128), "block.rows", f"is {rows}; allowed with transpose_a: 64, 128")
    require(cols in (64, 128), "block.cols", f"is {cols}; allowed with transpose_a: 64, 128")
    check_tile(spec, TILE)
    require(spec.stages >= 2, "stages", "is 1; a warpgroup reads one stage while it waits for the next: 2 or more")
    require_left_out(spec, ("accumulate", "scheduler"), "transpose_a")

    by_columns = spec.b_layout == "column_major"
    part = Part.of(spec)
    a_bytes, b_bytes = m * k * dtype.bytes, k * n * dtype.bytes
    shared = spmm_shared(spec, a_bytes, f"ring of A tiles, {m // columns} column groups of {k} rows of 128 bytes")
    registers = part.registers
    check_budget(spec, shared.size, registers)

    constants = (
        Constant("kTileM", m, "rows of a C tile: one block column of A"),
        Constant("kTileN", n, "columns of a C tile"),
        Constant("kTileK", k, "depth of one step"),
        Constant("kBlockRows", rows, "rows of a stored block of A"),
        *warpgroup_constants(spec),
        Constant("kAGroups", m // columns, "column groups of an A tile"),
        *(() if by_columns else (Constant("kTileGroups", n // columns, "column groups of a B tile"),)),
        *part.constants(spmm_staging_groups(spec)),
        Constant("kABytes", a_bytes, "bytes of an A tile"),
        Constant("kBBytes", b_bytes, "bytes of a B tile"),
        Constant("kAGroupBytes", k * SWIZZLE, "bytes of one column group of A"),
        *(() if by_columns else (Constant("kBGroupBytes", k * SWIZZLE, "bytes of one column group of B"),)),
        Constant("kCGroupBytes", C_GROUP_BYTES, "bytes of one column group of a warpgroup's C"),
    )
    params = (
        A_MAP,
        *b_params(spec, "M"),
        tensor_map("c_map", "C", ("N", "K"), writes=True),
        pointer("column_starts", "int", "column offsets: first entry of each block column, then the end of the last"),
        pointer("entries", "int2", "stored block and its block row, in the order of block columns"),
        *place_params(spec, "block_columns", "block columns of A"),
        *(() if by_columns else (COLUMNS_PARAM,)),
        *epilogue_params(spec),
    )
    return Plan(
        spec=spec,
        stem=stem,
        template="bsr_spmm/sm90a_transposed.cu.j2",
        threads=THREADS,
        ctas_per_sm=1,
        persistent=True,
        shared=tuple(shared.regions),
        shared_bytes=shared.size,
        registers=registers,
        params=params,
        tensor_maps={
            "a_map": TensorMap((columns, k, 1), SWIZZLE),
            **spmm_b_maps(spec),
            "c_map": TensorMap((columns, WARPGROUP_ROWS), SWIZZLE),
        },
        constants=constants,
        flags=SpmmTransposedFlags(
            product=spmm_flags(spec, part.columns),
            in_bands=in_bands(spec),
            by_rows=part.by_rows,
        ),
        grid_summary=order_summary(spec),
        summary=(
            ("blocks of A", f"{rows} x {cols}, transposed as they are read"),
            ("tile", f"{m} x {n} of C in steps of {k}; each warpgroup has {WARPGROUP_ROWS} x {part.columns}"),
            ("schedule", f"{spec.schedule}: one producer warp (TMA), {CONSUMERS} consumer warpgroups (WGMMA)"),
            *epilogue_summary(spec),
            ("pipeline", f"ring of {spec.stages} pairs of A and B tiles"),
        ),
        flops=2 * m * n * k,
        bytes=a_bytes + b_bytes,
        arguments=arguments,
    )
