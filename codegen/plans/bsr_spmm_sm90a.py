"""Plan of the sm_90a BSR x dense kernel: one TMA producer warp, two WGMMA consumer warpgroups, an mbarrier ring."""

from __future__ import annotations

from codegen.arch import ARCHS
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
from codegen.plans.balance import QUEUE_BYTES, order_constants, order_params, order_summary
from codegen.plans.epilogue import (
    barriers,
    epilogue_constants,
    epilogue_maps,
    epilogue_params,
    epilogue_summary,
    epilogue_values,
)
from codegen.spec import BsrSpmmSpec

WARPGROUP = 128  # threads
WARPGROUP_ROWS = 64  # rows of one wgmma
CONSUMERS = 2  # warpgroups that compute
SWIZZLE = 128  # bytes: width of one column group in shared memory
# 168 registers x 3 warpgroups at launch = 40 + 2 x 232 afterwards (PTX ISA, "setmaxnreg").
PRODUCER_REGISTERS = 40
CONSUMER_REGISTERS = 232


def plan(spec: BsrSpmmSpec, stem: str) -> Plan:
    """Work out every number of the kernel."""
    dtype = DTYPES[spec.dtype]
    m, n, k = spec.tile.m, spec.tile.n, spec.tile.k
    columns = SWIZZLE // dtype.bytes
    rows, cols = spec.block.rows, spec.block.cols
    require(rows in (64, 128), "block.rows", f"is {rows}; allowed on {ARCHS[spec.arch].name}: 16, 32, 64, 128")
    require(cols in (64, 128), "block.cols", f"is {cols}; allowed where block.rows is {rows}: 64, 128")
    high = f"a tile is one block row high, or two of 64: block.rows is {rows}"
    require(m == rows, "tile.m", f"is {m}; {high}")
    require(n in (128, 256), "tile.n", f"is {n}; allowed: 128, 256")
    require(k == columns, "tile.k", f"is {k}; a step is one 128-byte swizzled row of A deep: {columns}")
    allowed = spec.cluster == 1 or not spec.balanced
    require(allowed, "cluster", f"is {spec.cluster}; tiles that are handed out go to single thread blocks: 1")
    require(spec.stages >= 2, "stages", "is 1; one stage is still being read while the next is waited for: 2 or more")

    # A tile 128 rows high is split between the warpgroups by rows, one of 64 rows by columns.
    split_rows = m == CONSUMERS * WARPGROUP_ROWS
    warpgroup_columns = n if split_rows else n // CONSUMERS
    groups = warpgroup_columns // columns
    # One is filled while the other is stored; more would cost a stage of the ring. What is added comes all at once.
    staging_groups = groups if spec.accumulate else min(2, groups)
    a_bytes, b_bytes = m * k * dtype.bytes, k * n * dtype.bytes
    c_group_bytes = WARPGROUP_ROWS * SWIZZLE

    shared = SharedLayout()
    shared.add("A", spec.stages * a_bytes, f"ring of A tiles, {m} rows of 128 bytes")
    shared.add("B", spec.stages * b_bytes, f"ring of B tiles, {n // columns} column groups of {k} rows of 128 bytes")
    shared.add("C", CONSUMERS * staging_groups * c_group_bytes, f"{staging_groups} C column groups of each warpgroup")
    shared.add("Barriers", *barriers(spec, CONSUMERS), align=8)
    if spec.balanced:
        shared.add("Queue", QUEUE_BYTES, "announced tiles: number, block row, its first block, its end", 16)
    accumulators = WARPGROUP_ROWS * warpgroup_columns // WARPGROUP
    registers = Registers(accumulators=accumulators, overhead=40, limit=CONSUMER_REGISTERS)
    check_budget(spec, shared.size, registers)

    threads = WARPGROUP * (1 + CONSUMERS)
    constants = (
        Constant("kTileM", m, "rows of a C tile: one block row"),
        Constant("kTileN", n, "columns of a C tile"),
        Constant("kTileK", k, "depth of one step"),
        Constant("kBlockCols", spec.block.cols, "columns of a stored block of A"),
        Constant("kStages", spec.stages, "depth of the ring of A and B tiles"),
        Constant("kThreads", threads, "warpgroup 0 produces, the others consume"),
        Constant("kConsumerWarps", CONSUMERS * WARPGROUP // 32, "warps that compute"),
        Constant("kProducerRegisters", PRODUCER_REGISTERS, "registers a producer thread keeps"),
        Constant("kConsumerRegisters", CONSUMER_REGISTERS, "registers a consumer thread takes"),
        Constant("kGroupColumns", columns, "columns of a group: one 128-byte swizzled row"),
        Constant("kTileGroups", n // columns, "column groups of a tile"),
        Constant("kWarpgroupRows", WARPGROUP_ROWS if split_rows else 0, "rows from one warpgroup's part to the next"),
        Constant("kWarpgroupColumns", 0 if split_rows else warpgroup_columns, "columns from one part to the next"),
        Constant("kWarpgroupGroups", groups, "column groups of a warpgroup's part"),
        Constant("kStagingGroups", staging_groups, "column groups a warpgroup can have on their way out"),
        Constant("kAccumulators", accumulators, "accumulators of a thread"),
        Constant("kABytes", a_bytes, "bytes of an A tile"),
        Constant("kBBytes", b_bytes, "bytes of a B tile"),
        Constant("kBGroupBytes", k * SWIZZLE, "bytes of one column group of B"),
        Constant("kCGroupBytes", c_group_bytes, "bytes of one column group of a warpgroup's C"),
        *epilogue_constants(spec, groups * c_group_bytes),
        *order_constants(spec),
        *(
            (
                Constant("kCluster", spec.cluster, "thread blocks that share A: neighbouring tiles of one block row"),
                Constant("kAPartRows", m // spec.cluster, "rows of A that each of them loads for all"),
                Constant("kAPartBytes", a_bytes // spec.cluster, "bytes of these"),
            )
            if spec.cluster > 1
            else ()
        ),
    )
    c_map = TensorMap((columns, WARPGROUP_ROWS), SWIZZLE)
    params = (
        tensor_map("a_map", "stored blocks of A (cols, rows, nnz)"),
        tensor_map("b_map", "B (N, K)"),
        tensor_map("b_groups_map", "B's whole column groups (columns of one, K, groups)"),
        tensor_map("c_map", "C (N, M)"),
        pointer("crow_indices", "int", "first block of each block row, and one more"),
        pointer("col_indices", "int", "block column of each block"),
        i32("index_words", "32-bit words of an index: 1 or 2, the low one is read"),
        i32("n", "columns of B and C"),
        *order_params(spec),
        *epilogue_params(spec),
    )
    return Plan(
        spec=spec,
        stem=stem,
        template="bsr_spmm/sm90a.cu.j2",
        threads=threads,
        blocks_per_sm=1,
        persistent=True,
        shared=tuple(shared.regions),
        shared_bytes=shared.size,
        registers=registers,
        params=params,
        tensor_maps={
            "a_map": TensorMap((columns, m // spec.cluster, 1), SWIZZLE),
            "b_map": TensorMap((columns, k), SWIZZLE),
            "b_groups_map": TensorMap((columns, k, n // columns), SWIZZLE),
            "c_map": c_map,
            **epilogue_maps(spec, c_map),
        },
        constants=constants,
        values={"mma_n": warpgroup_columns, **epilogue_values(spec)},
        summary=(
            ("blocks of A", f"{spec.block.rows} x {spec.block.cols}"),
            ("tile", f"{m} x {n} of C in steps of {k}; each warpgroup has {WARPGROUP_ROWS} x {warpgroup_columns}"),
            ("schedule", f"{spec.schedule}: one producer warp (TMA), {CONSUMERS} consumer warpgroups (WGMMA)"),
            *epilogue_summary(spec),
            ("pipeline", f"ring of {spec.stages} pairs of A and B tiles"),
            order_summary(spec),
            *((("cluster", f"{spec.cluster} tiles side by side, which load A once"),) if spec.cluster > 1 else ()),
        ),
        flops=2 * m * n * k,
        bytes=a_bytes // spec.cluster + b_bytes,
        cluster=spec.cluster,
    )
