"""Plan of the sm_90a BSR x BSR kernel: a warp intersects A's block columns with B's block rows, the producer loads.

C is dense, with tiles scheduled in runs (``static``) or one by one (``dynamic``); or C is in BSR with a given pattern,
and a tile is one of its blocks.
"""

from __future__ import annotations

from codegen.arch import ARCHS, KIB
from codegen.dtypes import DTYPES
from codegen.flags import WgmmaFlags
from codegen.plan import (
    Arguments,
    Constant,
    Param,
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
from codegen.plans.bsr.parts import (
    A_MAP,
    BLOCK_DIMS,
    C_BLOCKS_MAP,
    C_GROUP_BYTES,
    C_MAP,
    INTERSECTION_PARAMS,
    ONE_ROW_OF_A,
    RUN_PARAMS,
    SWIZZLE,
    WARPGROUP,
    WARPGROUP_ROWS,
    column_groups,
    one_block,
    stage_ring,
)
from codegen.plans.bsr.spgemm_launch import LATE_TILES, TICKETS_BYTES, OfRuns, of_pattern, of_tickets
from codegen.spec import BsrSpgemmSpec
from codegen.tile_rules import OneOf, Rule, check_tile

RUN_TILES = 4  # more would share the search among more tiles, and divide the work less evenly
OVERHEAD = 32  # registers besides the accumulators
LIST_BYTES = 8 * 32 + 16  # 32 products, each a block of A and one of B; their number, the tile, whether it ends
SCHEDULER = "tickets drawn, finished thread blocks, tiles deferred, classified; late tiles: 0 between launches"

TILE: tuple[Rule[BsrSpgemmSpec], ...] = (
    *one_block(),
    OneOf(
        "k",
        lambda spec: (SWIZZLE // DTYPES[spec.dtype].bytes,),
        lambda spec, sizes: f"{ONE_ROW_OF_A}: {sizes}",
    ),
)


def plan(spec: BsrSpgemmSpec, stem: str) -> Plan:
    """Plan of the kernel of a spec."""
    dtype, arch = DTYPES[spec.dtype], ARCHS[spec.arch]
    block = spec.block.rows
    m, n, k = spec.tile.m, spec.tile.n, spec.tile.k
    columns = SWIZZLE // dtype.bytes
    require(block in (64, 128), "block.rows", f"is {block}; allowed on {arch.name} with wgmma: 64, 128")
    require(spec.block.cols == block, "block.cols", f"is {spec.block.cols}; blocks are square: block.rows is {block}")
    check_tile(spec, TILE)
    allowed = spec.output == "dense" or not spec.is_dynamic
    require(allowed, "scheduler", f"is dynamic; allowed with output bsr on {arch.name}: static")
    require(spec.stages >= 2, "stages", "is 1; a warpgroup reads one stage while it waits for the next: 2 or more")

    # With a dynamic scheduler, a separate warp searches one tile ahead of the producer.
    consumers, other_warps = m // WARPGROUP_ROWS, 2 if spec.is_dynamic else 1
    groups = n // columns
    a_bytes, b_bytes = m * k * dtype.bytes, k * n * dtype.bytes

    shared = SharedLayout()
    ring = stage_ring(spec.stages)
    shared.add("A", spec.stages * a_bytes, f"ring of A tiles, {m} rows of 128 bytes", ring=ring)
    b_doc = f"ring of B tiles, {column_groups(groups)} of {k} rows of 128 bytes"
    shared.add("B", spec.stages * b_bytes, b_doc, ring=ring)
    shared.add("C", consumers * C_GROUP_BYTES, "1 column group of C of each warpgroup", stores=True)
    shared.add("Barriers", 8 * 2 * spec.stages, "mbarriers: full, then empty", align=8)
    if spec.is_dynamic:
        shared.add("List", LIST_BYTES, "the latest products found", align=8)
        shared.add("ListBarriers", 8 * 2, "mbarriers of the list: full, then empty", align=8)
    shared.add("Steps", 4 * spec.stages, "kind of step in each stage", align=4)
    accumulators = WARPGROUP_ROWS * n // WARPGROUP
    # A tile has few steps: one thread block of an SM multiplies while another stores. Each reserves 1 KB more.
    threads = consumers * WARPGROUP + 32 * other_warps
    fitting = min(arch.shared_memory_per_sm // (shared.size + KIB), arch.blocks_for(threads, accumulators + OVERHEAD))
    ctas_per_sm = max(1, fitting)
    registers = Registers(accumulators=accumulators, overhead=OVERHEAD, limit=arch.registers_for(threads, ctas_per_sm))
    check_budget(spec, shared.size, registers)
    searches = ", and one that searches" if spec.is_dynamic else ""
    constants = (
        Constant("kBlock", block, "rows and columns of a stored block, and of a C tile"),
        Constant("kTileK", k, "depth of one step"),
        *_tile_constants(spec),
        Constant("kStages", spec.stages, "depth of the ring of A and B tiles"),
        Constant("kThreads", threads, "warpgroups that consume, then one warp that produces" + searches),
        Constant("kConsumerWarps", consumers * WARPGROUP // 32, "warps that compute"),
        Constant("kGroupColumns", columns, "columns of a group: one 128-byte swizzled row"),
        Constant("kTileGroups", groups, "column groups of a tile"),
        Constant("kWarpgroupRows", WARPGROUP_ROWS, "rows of a warpgroup's part of a tile"),
        Constant("kAccumulators", accumulators, "accumulators per thread"),
        Constant("kABytes", a_bytes, "bytes of an A tile"),
        Constant("kBBytes", b_bytes, "bytes of a B tile"),
        Constant("kBGroupBytes", k * SWIZZLE, "bytes of one column group of B"),
        Constant("kCGroupBytes", C_GROUP_BYTES, "bytes of one column group of a warpgroup's C"),
    )
    params = (
        A_MAP,
        tensor_map("b_map", "stored blocks of B", BLOCK_DIMS),
        C_BLOCKS_MAP if spec.output == "bsr" else C_MAP,
        *INTERSECTION_PARAMS,
        *_tile_params(spec),
    )
    c_box = (columns, WARPGROUP_ROWS)
    is_dynamic = spec.is_dynamic and spec.output == "dense"
    return Plan(
        spec=spec,
        stem=stem,
        template="bsr_spgemm/sm90a.cu.j2",
        threads=threads,
        ctas_per_sm=ctas_per_sm,
        persistent=True,
        shared=tuple(shared.regions),
        shared_bytes=shared.size,
        registers=registers,
        params=params,
        tensor_maps={
            # Blocks are scattered: the L2 need not read their neighbors (step 39 of docs/notebook/ladder-bsr.md).
            "a_map": TensorMap((columns, m, 1), SWIZZLE, promotion=128),
            "b_map": TensorMap((columns, k, 1), SWIZZLE, promotion=128),
            "c_map": TensorMap((*c_box, 1) if spec.output == "bsr" else c_box, SWIZZLE),
        },
        constants=constants,
        flags=WgmmaFlags(n),
        grid_summary=_grid_summary(spec, ctas_per_sm),
        summary=(
            ("blocks", f"{block} x {block} in A and B"),
            ("tile", f"{m} x {n} of C in steps of {k}; each warpgroup has {WARPGROUP_ROWS} x {n}"),
            ("schedule", f"{spec.schedule}: one producer warp (TMA), {consumers} consumer warpgroups (WGMMA)"),
            ("pipeline", f"ring of {spec.stages} pairs of A and B tiles; {_search_summary(spec)}"),
        ),
        flops=2 * m * n * k,
        bytes=a_bytes + b_bytes,
        arguments=_arguments(spec),
        dynamic_scheduler=is_dynamic,
        workspace_bytes=TICKETS_BYTES if is_dynamic else {},
    )


def _arguments(spec: BsrSpgemmSpec) -> Arguments:
    """Function from the shape of a problem to launch arguments."""
    if spec.output == "bsr":
        return of_pattern
    return of_tickets if spec.is_dynamic else OfRuns(RUN_TILES)


def _tile_constants(spec: BsrSpgemmSpec) -> tuple[Constant, ...]:
    """Constants of the order of a dense C's tiles."""
    if spec.output == "bsr":
        return ()
    if spec.is_dynamic:
        return (Constant("kLateTiles", LATE_TILES, "counters of the scheduler, stored before its late tiles"),)
    return (Constant("kRunTiles", RUN_TILES, "adjacent C tiles that share one search"),)


def _tile_params(spec: BsrSpgemmSpec) -> tuple[Param, ...]:
    """Parameters of the tiles of C."""
    if spec.output == "bsr":
        return (
            pointer(
                "c_crow_indices", "int", "row offsets of C: first block of each block row, then the end of the last"
            ),
            pointer("c_col_indices", "int", "block column of each stored block of C"),
            i32("c_index_words", "32-bit words per index of C"),
            i32("block_rows", "block rows of A and of C"),
            i32("blocks", "stored blocks of C"),
        )
    if spec.is_dynamic:
        return (
            i32("column_blocks", "block columns of C"),
            i32("tiles", "block rows of C * column_blocks"),
            pointer("scheduler", "int", SCHEDULER, writes=True),
        )
    return RUN_PARAMS


def _search_summary(spec: BsrSpgemmSpec) -> str:
    """Description of the search for the products of a tile."""
    if spec.output == "bsr":
        return "a search for each tile"
    return "a separate warp searches, one tile ahead" if spec.is_dynamic else f"{RUN_TILES} tiles share a search"


def _grid_summary(spec: BsrSpgemmSpec, ctas_per_sm: int) -> str:
    """Description of the thread blocks of a launch and the order of their tiles."""
    blocks = f"{ctas_per_sm} thread blocks per SM"
    if spec.output == "bsr":
        return f"{blocks}, looping over the listed blocks of C (persistent)"
    if spec.is_dynamic:
        return f"{blocks}; dynamic tile scheduler, short tiles last"
    return f"{blocks}, looping over runs of {RUN_TILES} tiles (persistent)"
