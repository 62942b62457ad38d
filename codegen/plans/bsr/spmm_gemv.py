"""Plan of the mma.sync BSR x dense kernel for up to 8 columns: a ring of A for each warp, B straight to registers.

With so few columns a product takes as long as the stored blocks take to be read. So each is read once, in whole lines,
and B and C are read and written where they are, with any strides: no copy pads them.
"""

from __future__ import annotations

from codegen.arch import ARCHS, KIB, REGISTER_UNIT, Arch
from codegen.dtypes import DTYPES
from codegen.flags import SpmmGemvFlags
from codegen.plan import (
    Constant,
    Param,
    Plan,
    Registers,
    Ring,
    SharedLayout,
    check_budget,
    f32,
    i32,
    i64,
    pointer,
    require,
)
from codegen.plan import require_left_out as left_out
from codegen.plans.bsr.epilogue import epilogue_flags, epilogue_summary
from codegen.problem import BlockSize, LaunchArgs, SpmmShape
from codegen.spec import BsrSpmmSpec
from codegen.tile_rules import OneOf, Rule, check_tile, listed

WARPS = 16
"""Warps of a thread block at most: the launch chooses their number."""
MMA_ROWS = 16
"""Rows of C per mma.sync."""
COLUMNS = 8
"""Columns of C of one mma.sync, and of a tile."""
OVERHEAD_REGISTERS = 28
"""Allowance for addresses and loop state."""
FEWEST_REGISTERS = 48
"""Registers of a thread at least before sm_90: with 40, which suffice there, ptxas spills 8 bytes on sm_89."""
BLOCKS_PER_SM = 24
"""Thread blocks that an SM of any architecture can hold."""
SMALL_B = 32 * KIB
"""Bytes of B that fit the L1 in addition to any number of rings."""
RING_SHARE = 0.45
"""Largest share of an SM's shared memory for rings with a larger B; the L1 holds B in the remaining part.

On an H200, a matrix of 14336 x 4096 with blocks of 64, 30% of them stored, and 8 columns by rows took 13.3 us with 93
KB of rings on an SM, and 14.0 us with 186 KB; with blocks of 32, 12.4 us with 75 KB, and 13.5 us with 125 KB.
"""
ROWS = (16, 32)
DEPTHS = (16, 32, 64)
STAGES = (2, 3, 4, 6, 8)
REFUSED = ("output", "accumulate_every", "scales", "scheduler", "transpose_a", "ctas_per_sm")
"""Options of BSR x dense that this kernel does not support."""


def plan(spec: BsrSpmmSpec, stem: str) -> Plan:
    """Plan of the kernel of a spec."""
    _check(spec)
    arch, dtype, block, tile = ARCHS[spec.arch], DTYPES[spec.dtype], spec.block, spec.tile
    part = min(tile.k, 32)
    words = part // 8  # 32-bit words of a lane's part of a row of A, or of a column of B

    slot = tile.m * tile.k * dtype.bytes
    ring = spec.stages * slot
    warp_bytes = ring + tile.m * COLUMNS * 4
    most = min(WARPS, (arch.shared_memory_per_block - KIB) // warp_bytes)
    require(most > 0, "stages", f"are {spec.stages}, of {slot} bytes each: more than shared memory has room for")
    threads = 32 * most
    shared = SharedLayout()
    shared.add("Ring", ring, "steps of A, of warp 0", ring=Ring(spec.stages))
    shared.add("Partial", tile.m * COLUMNS * 4, "fp32 partial sums of a tile of C, of warp 0", align=128)
    shared.add("OtherWarps", (most - 1) * warp_bytes, "both of each other warp, kWarpBytes apart", align=128)
    mmas = tile.m // MMA_ROWS
    # Sums, a lane's words of A, and elements of B: each takes a register where it is loaded by itself.
    used = 4 * mmas + 2 * mmas * words * tile.k // part + tile.k // 4
    needed = -(-(used + OVERHEAD_REGISTERS) // REGISTER_UNIT) * REGISTER_UNIT
    if not arch.has_wgmma:
        needed = max(needed, FEWEST_REGISTERS)
    registers = Registers(accumulators=used, overhead=OVERHEAD_REGISTERS, limit=needed)
    check_budget(spec, shared.size, registers)
    return Plan(
        spec=spec,
        stem=stem,
        template="bsr_spmm/gemv.cu.j2",
        threads=threads,
        ctas_per_sm=max(1, _resident(arch, most, warp_bytes, needed)),
        persistent=False,
        shared=tuple(shared.regions),
        shared_bytes=shared.size,
        registers=registers,
        params=_params(spec),
        tensor_maps={},
        constants=(
            Constant("kTileM", tile.m, "rows of a C tile"),
            Constant("kTileN", COLUMNS, "columns of a C tile, those of one product"),
            Constant("kTileK", tile.k, "columns of A, and rows of B, of a step"),
            Constant("kBlockRows", block.rows, "rows of a stored block of A"),
            Constant("kBlockCols", block.cols, "columns of a stored block of A"),
            Constant("kBlockElements", block.rows * block.cols, "elements of a stored block of A"),
            Constant("kStages", spec.stages, "slots of a warp's ring"),
            Constant("kWarpBytes", warp_bytes, "bytes of shared memory of a warp"),
        ),
        flags=SpmmGemvFlags(words=words, accumulate=spec.accumulate, epilogue=epilogue_flags(spec)),
        grid_summary=f"one thread block per C tile, (M / tile m) * ceil(N / {COLUMNS}), with 1 to {most} warps",
        summary=(
            ("blocks of A", f"{block.rows} x {block.cols}"),
            ("tile", f"{tile.m} x {COLUMNS} of C; 1 to {most} warps divide the steps of its block row"),
            ("schedule", f"{spec.schedule}: all warps load ({spec.copy_}) and compute (mma.sync 16 x 8 x 16)"),
            *epilogue_summary(spec),
            ("pipeline", f"of each warp a ring of {spec.stages} steps of {tile.k} columns of A"),
        ),
        flops=2 * tile.m * COLUMNS * tile.k,
        bytes=(tile.m + COLUMNS) * tile.k * dtype.bytes,
        sized_by_launch=True,
        arguments=_arguments,
    )


def _resident(arch: Arch, warps: int, warp_bytes: int, registers: int) -> int:
    """Thread blocks of so many warps that an SM holds."""
    by_memory = arch.shared_memory_per_sm // (warps * warp_bytes + KIB)
    return min(BLOCKS_PER_SM, by_memory, arch.warps_per_sm // warps, arch.blocks_for(32 * warps, registers))


def _params(spec: BsrSpmmSpec) -> tuple[Param, ...]:
    """Parameters of the kernel."""
    element = "unsigned short"
    added = (
        pointer("c_in", element, "addend c (M, N); may be C itself"),
        i64("c_in_row_stride", "row stride of c, in elements"),
        i64("c_in_column_stride", "column stride of c, in elements"),
        f32("beta", "factor of c; c is not read if it is 0"),
    )
    bias = pointer("bias", element, f"bias of C, one {spec.dtype} element for each row (M)")
    return (
        pointer("a", element, "stored blocks of A (nnz, rows, cols), contiguous"),
        pointer("b", element, "B (K, N)"),
        pointer("c", element, "C (M, N)", writes=True),
        i64("b_row_stride", "row stride of B, in elements"),
        i64("b_column_stride", "column stride of B, in elements"),
        i64("c_row_stride", "row stride of C, in elements"),
        i64("c_column_stride", "column stride of C, in elements"),
        pointer("crow_indices", "int", "row offsets: first block of each block row, then the end of the last"),
        pointer("col_indices", "int", "block column of each stored block"),
        i32("index_words", "32-bit words per index, 1 or 2; the kernel reads the low word"),
        i32("block_columns", "block columns of A, block rows of B; blocks outside count as zeros"),
        i32("n", "columns of B and C"),
        i32("column_tiles", "column tiles"),
        *(added if spec.accumulate else ()),
        *((bias,) if spec.epilogue is not None and spec.epilogue.bias else ()),
    )


def _arguments(plan: Plan, shape: SpmmShape, slots: int) -> LaunchArgs:
    """Launch arguments, with the most warps per tile for which tiles run concurrently and rings leave room for B."""
    spec = plan.spec
    assert isinstance(spec, BsrSpmmSpec)
    column_tiles = -(-shape.columns // COLUMNS)
    tiles = shape.rows // spec.tile.m * column_tiles
    most = plan.threads // 32
    warp_bytes, registers = plan.shared_bytes // most, plan.registers.limit
    of_an_sm = -(-tiles // max(1, slots // plan.ctas_per_sm))
    is_small = shape.depth * shape.columns * plan.dtype.bytes <= SMALL_B
    room = plan.arch.shared_memory_per_sm * (1 if is_small else RING_SHARE)
    fitting = (
        n
        for n in range(most, 1, -1)
        if of_an_sm * n * warp_bytes <= room and of_an_sm <= _resident(plan.arch, n, warp_bytes, registers)
    )
    warps = next(fitting, 1)
    numbers = {
        "block_columns": shape.depth // spec.block.cols,
        "n": shape.columns,
        "column_tiles": column_tiles,
    }
    return LaunchArgs(numbers, tiles, block=BlockSize(32 * warps, warp_bytes * warps))


def _allowed(spec: BsrSpmmSpec, sizes: str) -> str:
    return f"allowed with b_layout strided: {sizes or f'none, with blocks of {spec.block.rows} x {spec.block.cols}'}"


TILE: tuple[Rule[BsrSpmmSpec], ...] = (
    OneOf("m", lambda spec: [rows for rows in ROWS if spec.block.rows % rows == 0], _allowed),
    OneOf("k", lambda spec: [depth for depth in DEPTHS if spec.block.cols % depth == 0], _allowed),
    OneOf("n", lambda spec: (COLUMNS,), _allowed),
)


def _check(spec: BsrSpmmSpec) -> None:
    """Reject specs that the kernel does not support."""
    copy = f"is {spec.mma} with copy {spec.copy_}; with b_layout strided, allowed: mma with cp_async"
    require((spec.mma, spec.copy_) == ("mma", "cp_async"), "mma", copy)
    require(not spec.is_fp8, "dtype", f"is {spec.dtype}; with b_layout strided, allowed: fp16, bf16")
    left_out(spec, REFUSED, "b_layout strided")
    check_tile(spec, TILE)
    stages = f"is {spec.stages}; allowed with b_layout strided: {listed(STAGES)}"
    require(spec.stages in STAGES, "stages", stages)
