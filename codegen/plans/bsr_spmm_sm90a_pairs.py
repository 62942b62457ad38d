"""Plan of the sm_90a BSR x dense kernel whose tiles are two block rows of 64 rows high.

Each consumer warpgroup has a block row. A tile of B is loaded once for both if they have a block in the same column.
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

ROWS = CONSUMERS * WARPGROUP_ROWS  # of a tile


def plan(spec: BsrSpmmSpec, stem: str) -> Plan:
    """Work out every number of the kernel."""
    dtype = DTYPES[spec.dtype]
    n, k = spec.tile.n, spec.tile.k
    columns = SWIZZLE // dtype.bytes
    cols = spec.block.cols
    require(cols in (64, 128), "block.cols", f"is {cols}; allowed where block.rows is 64: 64, 128")
    require(n in (128, 256), "tile.n", f"is {n}; allowed: 128, 256")
    require(k == columns, "tile.k", f"is {k}; a step is one 128-byte swizzled row of A deep: {columns}")
    require(spec.stages >= 2, "stages", "is 1; one stage is still being read while the next is waited for: 2 or more")
    require(spec.cluster == 1, "cluster", f"is {spec.cluster}; allowed where tile.m is two block rows: 1")
    for option in ("accumulate", "balanced"):
        require(not getattr(spec, option), option, f"is true, but not written for tile.m {ROWS} of block rows of 64")

    groups = n // columns
    staging_groups = min(2, groups)  # one is filled while the other is stored; more would cost a stage of the ring
    a_bytes, b_bytes = WARPGROUP_ROWS * k * dtype.bytes, k * n * dtype.bytes
    c_group_bytes = WARPGROUP_ROWS * SWIZZLE

    shared = SharedLayout()
    shared.add("A", spec.stages * CONSUMERS * a_bytes, f"ring of pairs of A tiles, {WARPGROUP_ROWS} rows of 128 bytes")
    shared.add("B", spec.stages * b_bytes, f"ring of B tiles, {groups} column groups of {k} rows of 128 bytes")
    shared.add("C", CONSUMERS * staging_groups * c_group_bytes, f"{staging_groups} C column groups of each warpgroup")
    shared.add("Barriers", 8 * 2 * spec.stages, "mbarriers: full, then empty", align=8)
    shared.add("Rows", 4 * spec.stages, "which block rows have a block in the step of a stage", align=8)
    accumulators = WARPGROUP_ROWS * n // WARPGROUP
    registers = Registers(accumulators=accumulators, overhead=40, limit=CONSUMER_REGISTERS)
    check_budget(spec, shared.size, registers)

    threads = WARPGROUP * (1 + CONSUMERS)
    constants = (
        Constant("kBlockRows", WARPGROUP_ROWS, "rows of a block: a consumer's part of a tile"),
        Constant("kBlockCols", cols, "columns of a stored block of A"),
        Constant("kTileN", n, "columns of a C tile"),
        Constant("kTileK", k, "depth of one step"),
        Constant("kStages", spec.stages, "depth of the ring of A and B tiles"),
        Constant("kThreads", threads, "warpgroup 0 produces, the others consume"),
        Constant("kConsumers", CONSUMERS, "warpgroups that compute, each a block row"),
        Constant("kConsumerWarps", CONSUMERS * WARPGROUP // 32, "warps that compute"),
        Constant("kProducerRegisters", PRODUCER_REGISTERS, "registers a producer thread keeps"),
        Constant("kConsumerRegisters", CONSUMER_REGISTERS, "registers a consumer thread takes"),
        Constant("kGroupColumns", columns, "columns of a group: one 128-byte swizzled row"),
        Constant("kTileGroups", groups, "column groups of a tile"),
        Constant("kStagingGroups", staging_groups, "column groups a warpgroup can have on their way out"),
        Constant("kAccumulators", accumulators, "accumulators of a thread"),
        Constant("kABytes", a_bytes, "bytes of the A tile of one block row"),
        Constant("kBBytes", b_bytes, "bytes of a B tile"),
        Constant("kBGroupBytes", k * SWIZZLE, "bytes of one column group of B"),
        Constant("kCGroupBytes", c_group_bytes, "bytes of one column group of a warpgroup's C"),
    )
    params = (
        tensor_map("a_map", "stored blocks of A (cols, rows, nnz)"),
        tensor_map("b_map", "B (N, K)"),
        tensor_map("b_groups_map", "B's whole column groups (columns of one, K, groups)"),
        tensor_map("c_map", "C (N, M)"),
        pointer("crow_indices", "int", "first block of each block row, and one more"),
        pointer("col_indices", "int", "block column of each block"),
        i32("index_words", "32-bit words of an index: 1 or 2, the low one is read"),
        i32("block_rows", "block rows of A"),
        i32("row_pairs", "half of them, rounded up"),
        i32("tiles", "row_pairs * column_tiles"),
        i32("n", "columns of B and C"),
        *epilogue_params(spec),
    )
    return Plan(
        spec=spec,
        stem=stem,
        template="bsr_spmm/sm90a_pairs.cu.j2",
        threads=threads,
        blocks_per_sm=1,
        persistent=True,
        shared=tuple(shared.regions),
        shared_bytes=shared.size,
        registers=registers,
        params=params,
        tensor_maps={
            "a_map": TensorMap((columns, WARPGROUP_ROWS, 1), SWIZZLE),
            "b_map": TensorMap((columns, k), SWIZZLE),
            "b_groups_map": TensorMap((columns, k, n // columns), SWIZZLE),
            "c_map": TensorMap((columns, WARPGROUP_ROWS), SWIZZLE),
        },
        constants=constants,
        values={"mma_n": n, **epilogue_values(spec)},
        summary=(
            ("blocks of A", f"{WARPGROUP_ROWS} x {cols}"),
            ("tile", f"{ROWS} x {n} of C, two block rows, in steps of {k}; each warpgroup has {WARPGROUP_ROWS} x {n}"),
            ("schedule", f"{spec.schedule}: one producer warp (TMA), {CONSUMERS} consumer warpgroups (WGMMA)"),
            *epilogue_summary(spec),
            ("pipeline", f"ring of {spec.stages} tiles of B, each with one or two of A"),
            ("grid", "one thread block per SM, looping over tiles (persistent), block rows fastest"),
        ),
        flops=CONSUMERS * 2 * WARPGROUP_ROWS * n * k,
        bytes=CONSUMERS * a_bytes + b_bytes,
    )
