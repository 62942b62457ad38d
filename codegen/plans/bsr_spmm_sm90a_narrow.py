"""Plan of the sm_90a BSR x dense kernel for blocks of 16 and 32: the product is computed transposed.

A block row of 16 or 32 rows would fill a part of a wgmma's 64 only. So the tile is C^T = B^T A^T: 64 columns of B are
the M side of a wgmma, the block's rows its N side.
"""

from __future__ import annotations

from codegen.dtypes import DTYPES
from codegen.plan import Constant, Plan, Registers, TensorMap, check_budget, require
from codegen.plans.balance import order_constants, order_params, order_summary
from codegen.plans.bsr_parts import (
    COLUMNS_PARAM,
    CONSUMERS,
    SPMM_PARAMS,
    SWIZZLE,
    WARPGROUP,
    Part,
    spmm_b_maps,
    spmm_shared,
    spmm_staging_groups,
)
from codegen.plans.epilogue import (
    epilogue_constants,
    epilogue_maps,
    epilogue_params,
    epilogue_summary,
    epilogue_values,
)
from codegen.spec import BsrSpmmSpec

WARPGROUP_COLUMNS = 64  # M side of one wgmma: columns of B
SIZES = (16, 32)  # rows and columns of a block that the kernel is written for
REGISTERS = 224  # of a thread, if 288 threads have an SM to themselves


def plan(spec: BsrSpmmSpec, stem: str) -> Plan:
    """Work out every number of the kernel."""
    dtype = DTYPES[spec.dtype]
    rows, cols = spec.block.rows, spec.block.cols
    m, n, k = spec.tile.m, spec.tile.n, spec.tile.k
    require(cols in SIZES, "block.cols", f"is {cols}; allowed where block.rows is {rows}: 16, 32")
    require(m == rows, "tile.m", f"is {m}; a tile is one block row high: block.rows is {rows}")
    require(n in (128, 256, 512), "tile.n", f"is {n}; allowed where block.rows is {rows}: 128, 256, 512")
    require(k == cols, "tile.k", f"is {k}; a step is one block of A deep: block.cols is {cols}")
    require(spec.cluster == 1, "cluster", f"is {spec.cluster}; allowed where block.rows is {rows}: 1")
    require(spec.stages >= 2, "stages", "is 1; one stage is still being read while the next is waited for: 2 or more")

    groups = Part.of(spec).groups
    a_bytes, b_bytes = m * k * dtype.bytes, k * n * dtype.bytes
    c_group_bytes = m * SWIZZLE
    shared = spmm_shared(spec, a_bytes, f"ring of blocks of A, {m} rows of {k * dtype.bytes} bytes", c_group_bytes)
    accumulators = m * WARPGROUP_COLUMNS // WARPGROUP
    registers = Registers(accumulators=groups * accumulators, overhead=40, limit=REGISTERS)
    check_budget(spec, shared.size, registers)

    threads = CONSUMERS * WARPGROUP + 32
    constants = (
        Constant("kTileM", m, "rows of a C tile: one block row"),
        Constant("kTileN", n, "columns of a C tile"),
        Constant("kTileK", k, "depth of one step: the columns of a stored block of A"),
        Constant("kStages", spec.stages, "depth of the ring of A and B tiles"),
        Constant("kThreads", threads, "warpgroups that consume, then one warp that produces"),
        Constant("kConsumerWarps", CONSUMERS * WARPGROUP // 32, "warps that compute"),
        Constant("kGroupColumns", WARPGROUP_COLUMNS, "columns of a group: the M side of one wgmma"),
        Constant("kTileGroups", n // WARPGROUP_COLUMNS, "column groups of a tile"),
        Constant("kWarpgroupGroups", groups, "column groups of a warpgroup's part"),
        Constant("kStagingGroups", spmm_staging_groups(spec), "column groups a warpgroup can have on their way out"),
        Constant("kAccumulators", accumulators, "accumulators of a thread for one column group"),
        Constant("kABytes", a_bytes, "bytes of a block of A"),
        Constant("kBBytes", b_bytes, "bytes of a B tile"),
        Constant("kBGroupBytes", k * SWIZZLE, "bytes of one column group of B"),
        Constant("kCGroupBytes", c_group_bytes, "bytes of one column group of C"),
        *epilogue_constants(spec, groups * c_group_bytes),
        *order_constants(spec),
    )
    c_map = TensorMap((WARPGROUP_COLUMNS, m), SWIZZLE)
    return Plan(
        spec=spec,
        stem=stem,
        template="bsr_spmm/sm90a_narrow.cu.j2",
        threads=threads,
        blocks_per_sm=1,
        persistent=True,
        shared=tuple(shared.regions),
        shared_bytes=shared.size,
        registers=registers,
        params=(*SPMM_PARAMS, COLUMNS_PARAM, *order_params(spec), *epilogue_params(spec)),
        tensor_maps={
            "a_map": TensorMap((k, m, 1), k * dtype.bytes),
            **spmm_b_maps(spec),
            "c_map": c_map,
            **epilogue_maps(spec, c_map),
        },
        constants=constants,
        values={"mma_n": m, "a_row_bytes": k * dtype.bytes, **epilogue_values(spec)},
        summary=(
            ("blocks of A", f"{rows} x {cols}"),
            ("tile", f"{m} x {n} of C, computed transposed, a block a step; each warpgroup has {groups} groups of 64"),
            ("schedule", f"{spec.schedule}: one producer warp (TMA), {CONSUMERS} consumer warpgroups (WGMMA)"),
            *epilogue_summary(spec),
            ("pipeline", f"ring of {spec.stages} pairs of A blocks and B tiles"),
            order_summary(spec),
        ),
        flops=2 * m * n * k,
        bytes=a_bytes + b_bytes,
    )
