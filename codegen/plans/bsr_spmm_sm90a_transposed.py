"""Plan of the sm_90a kernel for A^T B, A in block-sparse rows: blocks are read as they are stored, transposed by wgmma.

Blocks of a block column are found through an index that the caller brings. A^T is the M-major operand of a wgmma.
"""

from __future__ import annotations

from codegen.dtypes import DTYPES
from codegen.plan import (
    Constant,
    Plan,
    Registers,
    SharedLayout,
    TensorMap,
    check_budget,
    i32,
    pointer,
    require,
    tensor_map,
)
from codegen.plans.bsr_spmm_sm90a import (
    CONSUMER_REGISTERS,
    CONSUMERS,
    PRODUCER_REGISTERS,
    SWIZZLE,
    WARPGROUP,
    WARPGROUP_ROWS,
)
from codegen.plans.epilogue import epilogue_params, epilogue_summary, epilogue_values
from codegen.spec import BsrSpmmSpec


def plan(spec: BsrSpmmSpec, stem: str) -> Plan:
    """Work out every number of the kernel."""
    dtype = DTYPES[spec.dtype]
    m, n, k = spec.tile.m, spec.tile.n, spec.tile.k
    columns = SWIZZLE // dtype.bytes
    rows, cols = spec.block.rows, spec.block.cols
    require(rows in (64, 128), "block.rows", f"is {rows}; allowed with transpose_a: 64, 128")
    require(cols in (64, 128), "block.cols", f"is {cols}; allowed with transpose_a: 64, 128")
    require(m == cols, "tile.m", f"is {m}; with transpose_a a tile is one block column of A high: block.cols is {cols}")
    require(n in (128, 256), "tile.n", f"is {n}; allowed: 128, 256")
    require(k == columns, "tile.k", f"is {k}; a step is as deep as a column group of A is wide: {columns}")
    require(spec.stages >= 2, "stages", "is 1; one stage is still being read while the next is waited for: 2 or more")
    for option in ("accumulate", "balanced"):
        require(not getattr(spec, option), option, "is true, but not written for transpose_a; allowed: false")
    require(spec.cluster == 1, "cluster", f"is {spec.cluster}; allowed with transpose_a: 1")

    # A tile 128 rows high is split between the warpgroups by rows, one of 64 rows by columns.
    split_rows = m == CONSUMERS * WARPGROUP_ROWS
    warpgroup_columns = n if split_rows else n // CONSUMERS
    groups = warpgroup_columns // columns
    staging_groups = min(2, groups)  # one is filled while the other is stored; more would cost a stage of the ring
    a_bytes, b_bytes = m * k * dtype.bytes, k * n * dtype.bytes
    c_group_bytes = WARPGROUP_ROWS * SWIZZLE

    shared = SharedLayout()
    shared.add("A", spec.stages * a_bytes, f"ring of A tiles, {m // columns} column groups of {k} rows of 128 bytes")
    shared.add("B", spec.stages * b_bytes, f"ring of B tiles, {n // columns} column groups of {k} rows of 128 bytes")
    shared.add("C", CONSUMERS * staging_groups * c_group_bytes, f"{staging_groups} C column groups of each warpgroup")
    shared.add("Barriers", 8 * 2 * spec.stages, "mbarriers: full, then empty", align=8)
    accumulators = WARPGROUP_ROWS * warpgroup_columns // WARPGROUP
    registers = Registers(accumulators=accumulators, overhead=40, limit=CONSUMER_REGISTERS)
    check_budget(spec, shared.size, registers)

    threads = WARPGROUP * (1 + CONSUMERS)
    constants = (
        Constant("kTileM", m, "rows of a C tile: one block column of A"),
        Constant("kTileN", n, "columns of a C tile"),
        Constant("kTileK", k, "depth of one step"),
        Constant("kBlockRows", rows, "rows of a stored block of A"),
        Constant("kStages", spec.stages, "depth of the ring of A and B tiles"),
        Constant("kThreads", threads, "warpgroup 0 produces, the others consume"),
        Constant("kConsumerWarps", CONSUMERS * WARPGROUP // 32, "warps that compute"),
        Constant("kProducerRegisters", PRODUCER_REGISTERS, "registers a producer thread keeps"),
        Constant("kConsumerRegisters", CONSUMER_REGISTERS, "registers a consumer thread takes"),
        Constant("kGroupColumns", columns, "columns of a group: one 128-byte swizzled row"),
        Constant("kAGroups", m // columns, "column groups of an A tile"),
        Constant("kTileGroups", n // columns, "column groups of a B tile"),
        Constant("kWarpgroupRows", WARPGROUP_ROWS if split_rows else 0, "rows from one warpgroup's part to the next"),
        Constant("kWarpgroupColumns", 0 if split_rows else warpgroup_columns, "columns from one part to the next"),
        Constant("kWarpgroupGroups", groups, "column groups of a warpgroup's part"),
        Constant("kStagingGroups", staging_groups, "column groups a warpgroup can have on their way out"),
        Constant("kAccumulators", accumulators, "accumulators of a thread"),
        Constant("kABytes", a_bytes, "bytes of an A tile"),
        Constant("kBBytes", b_bytes, "bytes of a B tile"),
        Constant("kGroupBytes", k * SWIZZLE, "bytes of one column group of A or B"),
        Constant("kCGroupBytes", c_group_bytes, "bytes of one column group of a warpgroup's C"),
    )
    params = (
        tensor_map("a_map", "stored blocks of A (cols, rows, nnz)"),
        tensor_map("b_map", "B (N, M)"),
        tensor_map("b_groups_map", "B's whole column groups (columns of one, M, groups)"),
        tensor_map("c_map", "C (N, K)"),
        pointer("column_starts", "int", "first entry of each block column, and one more"),
        pointer("entries", "int2", "stored block and its block row, in the order of block columns"),
        i32("block_columns", "block columns of A"),
        i32("tiles", "block_columns * column_tiles"),
        i32("n", "columns of B and C"),
        *epilogue_params(spec),
    )
    return Plan(
        spec=spec,
        stem=stem,
        template="bsr_spmm/sm90a_transposed.cu.j2",
        threads=threads,
        blocks_per_sm=1,
        persistent=True,
        shared=tuple(shared.regions),
        shared_bytes=shared.size,
        registers=registers,
        params=params,
        tensor_maps={
            "a_map": TensorMap((columns, k, 1), SWIZZLE),
            "b_map": TensorMap((columns, k), SWIZZLE),
            "b_groups_map": TensorMap((columns, k, n // columns), SWIZZLE),
            "c_map": TensorMap((columns, WARPGROUP_ROWS), SWIZZLE),
        },
        constants=constants,
        values={"mma_n": warpgroup_columns, **epilogue_values(spec)},
        summary=(
            ("blocks of A", f"{rows} x {cols}, transposed as they are read"),
            ("tile", f"{m} x {n} of C in steps of {k}; each warpgroup has {WARPGROUP_ROWS} x {warpgroup_columns}"),
            ("schedule", f"{spec.schedule}: one producer warp (TMA), {CONSUMERS} consumer warpgroups (WGMMA)"),
            *epilogue_summary(spec),
            ("pipeline", f"ring of {spec.stages} pairs of A and B tiles"),
            ("grid", "one thread block per SM, looping over tiles (persistent), block columns of A fastest"),
        ),
        flops=2 * m * n * k,
        bytes=a_bytes + b_bytes,
    )
