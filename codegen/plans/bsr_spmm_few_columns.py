"""Plan of the sm_90a BSR x dense kernel for few columns: B stays in shared memory, A goes straight to registers.

With few columns a product takes as long as the stored blocks take to be read. So these are read once, in the order
in which they are stored, by all SMs; B, cut by its rows, is divided between the thread blocks of a cluster.
"""

from __future__ import annotations

from codegen.arch import ARCHS
from codegen.dtypes import DTYPES
from codegen.flags import SpmmFewColumnsFlags
from codegen.plan import Constant, Plan, Registers, SharedLayout, check_budget, i32, i64, pointer, require
from codegen.plan import require_left_out as left_out
from codegen.problem import LaunchArgs, SpmmShape
from codegen.spec import BsrSpmmSpec

WARPS = 20  # 16 would need a second turn where a cluster has 4096 / 15 rows
STRIP_ROWS = 16  # rows of a warp: of one mma.sync
SLICES = 8  # of B: thread blocks of a cluster, the most that every device can place
CLUSTERS = 15  # of a column tile, where it is not known how many run at once: as many as on an H100
STEP_COLUMNS = 32  # of A: 8 elements a lane; fewer in narrower blocks
LANE_INDICES = 4  # of a block row that a lane looks at a time
ENTRY_BYTES = 8
PADDING = 8  # floats behind a row of partial sums: rows of a warp's store lie in distinct banks
OVERHEAD_REGISTERS = 32  # addresses and loop state: an allowance
BLOCK_SIDES = (16, 32, 64)
WIDTHS = (16, 32, 64)


def plan(spec: BsrSpmmSpec, stem: str) -> Plan:
    """Work out every number of the kernel."""
    _check(spec)
    arch, dtype, block, tile = ARCHS[spec.arch], DTYPES[spec.dtype], spec.block, spec.tile
    assert WARPS * STRIP_ROWS % block.rows == 0, "a lane has the same place in a block in every turn"
    threads = 32 * WARPS
    step_columns = min(STEP_COLUMNS, block.cols)
    block_steps = block.cols // step_columns
    words = step_columns // 8  # of a lane, of each of its two rows
    list_entries = 32 * LANE_INDICES * block_steps

    shared = SharedLayout()
    group_bytes = tile.k * 8 * dtype.bytes
    shared.add("B", tile.n // 8 * group_bytes, f"{tile.k} rows of B in column groups of 8: 16 bytes a row", align=128)
    stride = tile.n + PADDING
    shared.add("Partial", tile.m * stride * 4, "fp32 partial sums of a tile of C, over this slice of B", align=128)
    shared.add("Entries", WARPS * list_entries * ENTRY_BYTES, "lists of steps, one a warp", align=16)
    registers = Registers(
        accumulators=tile.n // 2 + spec.stages * 2 * words,
        overhead=OVERHEAD_REGISTERS,
        limit=arch.registers_for(threads, 1),
    )
    check_budget(spec, shared.size, registers)
    element = "unsigned short"
    return Plan(
        spec=spec,
        stem=stem,
        template="bsr_spmm/sm90a_few_columns.cu.j2",
        threads=threads,
        ctas_per_sm=1,
        persistent=False,
        shared=tuple(shared.regions),
        shared_bytes=shared.size,
        registers=registers,
        params=(
            pointer("a", element, "stored blocks of A (nnz, rows, cols), contiguous"),
            pointer("b", element, "B (K, N)"),
            pointer("c", element, "C (M, N)", writes=True),
            i64("b_row_stride", "elements from one row of B to the next"),
            i64("c_row_stride", "elements from one row of C to the next"),
            pointer("crow_indices", "int", "first block of each block row, and one more"),
            pointer("col_indices", "int", "block column of each block"),
            i32("index_words", "32-bit words of an index: 1 or 2, the low one is read"),
            i32("block_rows", "block rows of A"),
            i32("block_columns", "blocks across A, block rows of B"),
            i32("slice_blocks", "of these, those of a slice"),
            i32("n", "columns of B and C; rows of C have room for the next multiple of 8"),
            i32("tile_strips", "strips of a tile, whole block rows"),
            i32("row_tiles", "tiles of so many"),
            i32("row_clusters", "clusters that divide them, each having every row_clusters-th"),
        ),
        tensor_maps={},
        constants=(
            Constant("kTileN", tile.n, "columns of a C tile"),
            Constant("kBlockRows", block.rows, "rows of a stored block of A"),
            Constant("kBlockCols", block.cols, "columns of a stored block of A"),
            Constant("kBlockElements", block.rows * block.cols, "elements of a stored block of A"),
            Constant("kStepColumns", step_columns, "columns of A of a step"),
            Constant("kLaneColumns", step_columns // 4, "of these, side by side, those of a lane"),
            Constant("kStages", spec.stages, "steps of A that a warp has in registers, or on their way there"),
            Constant("kCluster", SLICES, "slices of B's rows: thread blocks of a cluster"),
            Constant("kThreads", threads, "all load and compute"),
            Constant("kLaneIndices", LANE_INDICES, "block columns that a lane looks at, at a time"),
            Constant("kEntries", list_entries, "entries of a warp's list"),
            Constant("kGroupBytes", group_bytes, "bytes of a column group of B"),
            Constant("kPartialStride", stride, "floats from one row of partial sums to the next"),
        ),
        flags=SpmmFewColumnsFlags(words=words, block_steps=block_steps),
        grid_summary=f"clusters of {SLICES} thread blocks, as many as run at once",
        summary=(
            ("blocks of A", f"{block.rows} x {block.cols}"),
            ("tile", f"{tile.m} x {tile.n} of C; each of {WARPS} warps has {STRIP_ROWS} rows at a time"),
            ("slices", f"{SLICES} of B's rows, up to {tile.k} rows each, one a thread block of a cluster"),
            ("schedule", f"{spec.schedule}: all warps load ({spec.copy_}) and compute (mma.sync 16 x 8 x 16)"),
            ("pipeline", f"{spec.stages} steps of {step_columns} columns of A in registers, or on their way"),
        ),
        flops=2 * STRIP_ROWS * tile.n * step_columns,
        bytes=STRIP_ROWS * step_columns * dtype.bytes,
        arguments=_arguments,
        cluster=SLICES,
        depth=SLICES * tile.k,
    )


def _arguments(plan: Plan, shape: SpmmShape, slots: int) -> LaunchArgs:
    """Work out a launch. How rows are divided between clusters changes no sum."""
    spec = plan.spec
    assert isinstance(spec, BsrSpmmSpec)
    block_columns = shape.depth // spec.block.cols
    column_tiles = -(-shape.columns // spec.tile.n)
    # All clusters at once, with tiles as nearly equal as whole block rows allow.
    at_once, unit = slots // SLICES or CLUSTERS, spec.block.rows
    most = max(1, at_once // column_tiles)
    rounds = max(1, -(-shape.rows // (most * spec.tile.m)))
    tile_rows = max(unit, min(spec.tile.m, -(-shape.rows // (most * rounds * unit)) * unit))
    row_tiles = -(-shape.rows // tile_rows)
    row_clusters = min(most, row_tiles)
    numbers = {
        "block_rows": shape.rows // spec.block.rows,
        "block_columns": block_columns,
        "slice_blocks": -(-block_columns // SLICES),
        "n": shape.columns,
        "tile_strips": tile_rows // STRIP_ROWS,
        "row_tiles": row_tiles,
        "row_clusters": row_clusters,
    }
    return LaunchArgs(numbers, row_clusters * column_tiles * SLICES)


def _check(spec: BsrSpmmSpec) -> None:
    """Refuse what the kernel is not written for."""
    left_out(spec, spec.options, f"{spec.arch} with mma and ld_global")
    for name, value, allowed in (
        ("block.rows", spec.block.rows, BLOCK_SIDES),
        ("block.cols", spec.block.cols, BLOCK_SIDES),
        ("tile.n", spec.tile.n, WIDTHS),
    ):
        words = ", ".join(map(str, allowed))
        require(value in allowed, name, f"is {value}; allowed with mma and ld_global: {words}")
    k = spec.tile.k
    m = spec.tile.m
    require(m > 0 and m % 64 == 0, "tile.m", f"is {m}; allowed with mma and ld_global: multiples of 64")
    require(k > 0 and k % 64 == 0, "tile.k", f"is {k}; allowed with mma and ld_global: multiples of 64")
    require(spec.stages >= 2, "stages", "is 1; a step is loaded while another is computed: 2 or more")
