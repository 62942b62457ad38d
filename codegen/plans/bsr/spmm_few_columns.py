"""Plan of the sm_90a BSR x dense kernel for few columns: A and B are loaded from global memory to registers.

With few columns, the time of a product is that of reading the stored blocks. So the kernel reads them once, in storage
order, and the warps of a thread block split a block row, so that all SMs have work.
"""

from __future__ import annotations

from codegen.arch import ARCHS, REGISTER_UNIT
from codegen.dtypes import DTYPES
from codegen.flags import SpmmFewColumnsFlags
from codegen.plan import Constant, Param, Plan, Registers, SharedLayout, check_budget, i32, i64, pointer, require
from codegen.plan import require_left_out as left_out
from codegen.problem import BlockSize, LaunchArgs, SpmmShape
from codegen.spec import BsrSpmmSpec
from codegen.tile_rules import OneOf, Rule, check_tile, listed

WARPS = (8, 4, 2, 1)  # per thread block; each launch chooses
STRIP_ROWS = 16  # rows, two of them per lane: two adjacent products
PADDING = 8  # floats after a row of partial sums, so that fewer of a warp's rows start in the same bank
OVERHEAD_REGISTERS = 32  # addresses and loop state: an allowance
ROWS = (16, 32, 64)
DEPTHS = (16, 32)
WIDTHS = (16, 32, 64)
STAGES = (2, 4)


def plan(spec: BsrSpmmSpec, stem: str) -> Plan:
    """Plan of the kernel of a spec."""
    _check(spec)
    arch, dtype, block, tile = ARCHS[spec.arch], DTYPES[spec.dtype], spec.block, spec.tile
    threads = 32 * WARPS[0]
    strips = tile.m // STRIP_ROWS
    by_columns = spec.b_layout == "column_major"
    a_words = tile.k // 8  # 32-bit words of a lane's part of a row of A, or of a column of B
    b_words = a_words if by_columns else tile.n // 16  # of B, in one load

    shared = SharedLayout()
    stride = tile.n + PADDING
    shared.add("Partial", WARPS[0] * tile.m * stride * 4, "fp32 partial sums of a tile of C, for each warp", align=128)
    used = strips * tile.n // 2 + spec.stages * (strips * 2 * a_words + tile.k * tile.n // 64)
    needed = -(-(used + OVERHEAD_REGISTERS) // REGISTER_UNIT) * REGISTER_UNIT
    registers = Registers(accumulators=used, overhead=OVERHEAD_REGISTERS, limit=min(needed, arch.registers_per_thread))
    ctas_per_sm = max(1, arch.blocks_for(threads, registers.limit))
    check_budget(spec, shared.size, registers)
    element = "unsigned short"
    return Plan(
        spec=spec,
        stem=stem,
        template="bsr_spmm/sm90a_few_columns.cu.j2",
        threads=threads,
        ctas_per_sm=ctas_per_sm,
        persistent=False,
        shared=tuple(shared.regions),
        shared_bytes=shared.size,
        registers=registers,
        params=(
            pointer("a", element, "stored blocks of A (nnz, rows, cols), contiguous"),
            pointer("b", element, "B (K, N)"),
            pointer("c", element, "C (M, N)", writes=True),
            _b_stride(by_columns),
            i64("c_row_stride", "row stride of C, in elements"),
            pointer("crow_indices", "int", "row offsets: first block of each block row, then the end of the last"),
            pointer("col_indices", "int", "block column of each stored block"),
            i32("index_words", "32-bit words per index, 1 or 2; the kernel reads the low word"),
            i32("block_columns", "block columns of A, block rows of B; blocks outside count as zeros"),
            i32(
                "n",
                "columns of B and C; their rows are padded to a multiple of 8, and the kernel overwrites C's padding",
            ),
            i32("column_tiles", "column tiles"),
        ),
        tensor_maps={},
        constants=(
            Constant("kTileM", tile.m, "rows of a C tile"),
            Constant("kTileN", tile.n, "columns of a C tile"),
            Constant("kTileK", tile.k, "columns of A, and rows of B, of a step"),
            Constant("kBlockRows", block.rows, "rows of a stored block of A"),
            Constant("kBlockCols", block.cols, "columns of a stored block of A"),
            Constant("kBlockElements", block.rows * block.cols, "elements of a stored block of A"),
            Constant("kStages", spec.stages, "steps of a warp in registers or in flight; a divisor of 32"),
            Constant("kPartialStride", stride, "row stride of the partial sums, in floats"),
        ),
        flags=SpmmFewColumnsFlags(a_words=a_words, b_words=b_words, by_columns=by_columns),
        grid_summary="one thread block per C tile, (M / tile m) * ceil(N / tile n), with 1 to 8 warps",
        summary=(
            ("blocks of A", f"{block.rows} x {block.cols}"),
            ("tile", f"{tile.m} x {tile.n} of C; 1 to {WARPS[0]} warps split the steps of its block row"),
            ("schedule", f"{spec.schedule}: all warps load ({spec.copy_}) and compute (mma.sync 16 x 8 x 16)"),
            ("pipeline", f"{spec.stages} steps of {tile.k} columns of A in registers or in flight"),
        ),
        flops=2 * tile.m * tile.n * tile.k,
        bytes=(tile.m + tile.n) * tile.k * dtype.bytes,
        sized_by_launch=True,
        arguments=_arguments,
    )


def _b_stride(by_columns: bool) -> Param:
    """Parameter of the layout of B."""
    if by_columns:
        return i64("b_column_stride", "column stride of B, in elements; its rows are adjacent")
    return i64("b_row_stride", "row stride of B, in elements")


def _arguments(plan: Plan, shape: SpmmShape, slots: int) -> LaunchArgs:
    """Launch arguments, with the most warps per tile for which all tiles run concurrently.

    More warps would have less work before their sums are combined, and fewer would leave SMs without loads in flight.
    """
    spec = plan.spec
    assert isinstance(spec, BsrSpmmSpec)
    column_tiles = -(-shape.columns // spec.tile.n)
    tiles = shape.rows // spec.tile.m * column_tiles
    sms = slots // plan.ctas_per_sm
    at_once = ((warps, plan.arch.blocks_for(32 * warps, plan.registers.limit)) for warps in WARPS)
    warps = next((warps for warps, blocks in at_once if tiles <= sms * blocks), WARPS[-1])
    numbers = {
        "block_columns": shape.depth // spec.block.cols,
        "n": shape.columns,
        "column_tiles": column_tiles,
    }
    block = BlockSize(32 * warps, plan.shared_bytes // WARPS[0] * warps)
    return LaunchArgs(numbers, tiles, block=block)


def _allowed(spec: BsrSpmmSpec, sizes: str) -> str:
    return f"allowed with mma and ld_global: {sizes or f'none, with blocks of {spec.block.rows} x {spec.block.cols}'}"


TILE: tuple[Rule[BsrSpmmSpec], ...] = (
    OneOf("m", lambda spec: [rows for rows in ROWS if spec.block.rows % rows == 0], _allowed),
    OneOf("k", lambda spec: [depth for depth in DEPTHS if spec.block.cols % depth == 0], _allowed),
    OneOf("n", lambda spec: WIDTHS, _allowed),
)


def _check(spec: BsrSpmmSpec) -> None:
    """Reject specs that the kernel does not support."""
    others = [option for option in spec.options if option != "b_layout"]
    left_out(spec, others, f"{spec.arch} with mma and ld_global")
    check_tile(spec, TILE)
    stages = f"is {spec.stages}; allowed with mma and ld_global: {listed(STAGES)}"
    require(spec.stages in STAGES, "stages", stages)
