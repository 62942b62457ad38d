"""Shared by the plans of BSR products in FP8.

A product is computed transposed: columns of C are the M side of a wgmma, and rows of a block its N side. Both operands
are K-major, as 8-bit operands must be.
"""

from __future__ import annotations

from typing import Any

from codegen.arch import ARCHS
from codegen.flags import BsrFp8Flags, MmaSyncFp8Flags, Sums
from codegen.plan import Constant, Param, Registers, SharedLayout, TensorMap, i64, pointer, require, require_left_out
from codegen.plans.bsr.parts import (
    CONSUMER_REGISTERS,
    CONSUMERS,
    CONSUMERS_TAKE,
    PRODUCER_REGISTERS,
    THREADS,
    WARPGROUP,
    one_block_row,
    stage_ring,
)
from codegen.spec import BsrSddmmSpec, BsrSpmmSpec, SpecBase
from codegen.tile_rules import Fits, OneOf, Rule, check_tile

SIZES = (32, 64, 128)  # rows and columns of a block
CONVERTED_ROWS = 32
"""Most rows per block for mma.sync on an architecture whose tensor cores support FP8 with wgmma only: mma.sync
then converts its operands to fp16 in registers, and warps with 64 rows spill."""
CONVERSION_OVERHEAD = 64  # registers of such conversions
MMA_SYNC_DEPTH = 32  # of an m16n8k32, in bytes: the same as 16 elements of 16 bits
GROUP_COLUMNS = 64  # M side of one wgmma: columns of C
PIECE_ROWS = 32  # of C that a warpgroup stores at a time, per group
STAGING_BYTES = 16 << 10  # for the pieces of a warpgroup
MOST_ACCUMULATORS = 128  # per thread for all groups: more do not fit in addition to those of the tensor core
COPY_COLUMNS = 256  # most columns of B per copy
SCALE_COLUMNS = 128  # columns of A, and rows of a column of B, that share a scale
OUTPUT_BYTES = {"fp16": 2, "bf16": 2, "fp32": 4}
Fp8Spec = BsrSpmmSpec | BsrSddmmSpec

TENSOR_SCALES = (
    pointer("a_scale", "float", "scale of A: value = code * scale"),
    pointer("b_scale", "float", "scale of B"),
)


MMA_SYNC_STEP: Fits[Any] = Fits(
    "k",
    lambda spec: not spec.is_fp8 or spec.scales == "tensor" or spec.tile.k >= 2 * MMA_SYNC_DEPTH,
    lambda spec: f"with {spec.scales} scales a step has slices of {MMA_SYNC_DEPTH}: {2 * MMA_SYNC_DEPTH} or more",
)


def check_mma_sync(spec: Fp8Spec) -> None:
    """Reject specs that mma.sync kernels do not support.

    Raises:
        SpecError: names the field.
    """
    sizes = ", ".join(map(str, SIZES))
    for side, size in (("rows", spec.block.rows), ("cols", spec.block.cols)):
        require(size in SIZES, f"block.{side}", f"is {size}; allowed where dtype is {spec.dtype}: {sizes}")
    if isinstance(spec, BsrSpmmSpec):
        reason = f"mma.sync of {spec.dtype} requires K-major operands, so B is stored by columns: column_major"
        require(spec.b_layout == "column_major", "b_layout", f"is {spec.b_layout}; {reason}")
    if not ARCHS[spec.arch].has_fp8_mma_sync:
        why = "its mma.sync converts FP8 to fp16 in registers, and more rows spill; use wgmma"
        require(
            spec.block.rows <= CONVERTED_ROWS,
            "block.rows",
            f"is {spec.block.rows}; allowed with mma, {spec.dtype} and {spec.arch}: {CONVERTED_ROWS} ({why})",
        )
    check_scales(spec)
    check_tile(spec, (MMA_SYNC_STEP,))


def mma_sync_overhead(spec: SpecBase, overhead: int) -> int:
    """Registers per thread besides sums and fragments: more if operands are converted."""
    return overhead + (0 if ARCHS[spec.arch].has_fp8_mma_sync else CONVERSION_OVERHEAD)


def mma_sync_depths(spec: Fp8Spec) -> tuple[int, ...]:
    """Legal depths of a step with mma.sync: four unrolled slices of a warp's 64 rows would spill."""
    return (32, 64, 128) if spec.block.rows < 64 else (32, 64)


def check_scales(spec: Fp8Spec) -> None:
    """Reject fields that are incompatible with scales of blocks or rows.

    Raises:
        SpecError: names the field.
    """
    if spec.scales == "tensor":
        return
    cols = spec.block.cols
    if spec.scales == "block":
        require(cols == SCALE_COLUMNS, "scales", f"is block; a scale spans {SCALE_COLUMNS} of K, block.cols is {cols}")
    require_left_out(spec, ("accumulate_every",), f"{spec.scales} scales, as each step is promoted on its own")


def mma_sync_flags(spec: Fp8Spec) -> MmaSyncFp8Flags:
    """Template parameters of mma.sync kernels."""
    one_scale = spec.scales == "tensor"
    return MmaSyncFp8Flags(
        sums=sums(spec),
        scaling="A value is its code times the scale of its operand" if one_scale else scaling(spec),
        one_scale=one_scale,
        element="float" if spec.output == "fp32" else "unsigned short",
    )


def sums(spec: Fp8Spec) -> Sums:
    """How products are accumulated."""
    if spec.scales == "tensor":
        return "promoted" if spec.accumulate_every else "fast"
    return "scaled" if spec.scales == "block" else "scaled_rows"


def mma_sync_summary(spec: Fp8Spec) -> tuple[tuple[str, str], ...]:
    """Lines for ``explain``: scales and accumulation."""
    promoted = spec.accumulate_every or spec.scales != "tensor"
    where = "promoted to fp32 after each product of depth 32" if promoted else "in the tensor core over a whole row"
    return (("scales", scaling(spec)), ("sums", where))


def scaling(spec: Fp8Spec) -> str:
    """Description of the scales."""
    if spec.scales == "block":
        return f"A has a scale for each stored block, B one for each {SCALE_COLUMNS} rows of a column"
    if spec.scales == "row":
        return f"Rows of A and of B have a scale for each {SCALE_COLUMNS} columns"
    return "A and B have one scale each"


def mma_sync_scale_params(spec: Fp8Spec) -> tuple[Param, ...]:
    """Parameters of the scales of an mma.sync kernel."""
    if spec.scales == "block":
        return (
            pointer("a_scale", "float", "scales of the stored blocks of A (nnz,)"),
            pointer("b_scale", "float", "scales of B (K / 128, N), one for each 128 rows of a column"),
            i64("b_scale_stride", "stride between the scales of adjacent groups of 128 rows of B, in elements"),
        )
    if spec.scales == "row":
        return (
            pointer("a_scale", "float", "scales of A (K / 128, M), one for each 128 columns of a row"),
            pointer("b_scale", "float", "scales of B (K / 128, N), one for each 128 columns of a row"),
            i64("a_scale_stride", "stride between the scales of adjacent groups of 128 columns of A, in elements"),
            i64("b_scale_stride", "stride between the scales of adjacent groups of 128 columns of B, in elements"),
        )
    return TENSOR_SCALES


def add_mma_sync_scales(spec: Fp8Spec, ring: SharedLayout) -> tuple[Constant, ...]:
    """Allocate the scales of the stages of an mma.sync kernel; return their constants."""
    m, n = spec.tile.m, spec.tile.n
    of_a = Constant("kAScaleBytes", 4 * m, "bytes of the scales of an A tile")
    of_b = Constant("kBScaleBytes", 4 * n, "bytes of the scales of a B tile")
    if spec.scales == "block":
        ring.add("BScales", spec.stages * 4 * n, f"scales of the {n} columns of each stage", align=16)
        return (of_b,)
    if spec.scales == "row":
        ring.add("AScales", spec.stages * 4 * m, f"scales of the {m} rows of A of each stage", align=16)
        ring.add("BScales", spec.stages * 4 * n, f"scales of the {n} rows of B of each stage", align=16)
        return (of_a, of_b)
    return ()


def _widths(spec: Fp8Spec) -> list[int]:
    """Legal columns of a tile, by the registers for its accumulators."""
    widest = CONSUMERS * GROUP_COLUMNS * MOST_ACCUMULATORS // products(spec)
    return [n for n in (128, 256, 512, 1024) if n <= widest]


BLOCK_TILE: tuple[Rule[Fp8Spec], ...] = (
    one_block_row(),
    OneOf(
        "n",
        _widths,
        lambda spec, sizes: f"allowed where dtype is {spec.dtype} and block.rows is {spec.block.rows}: {sizes}",
    ),
)
"""Rules for the rows and columns of wgmma tiles."""


def check_blocks(spec: Fp8Spec) -> None:
    """Reject blocks and tiles that the kernels cannot support."""
    rows, cols = spec.block.rows, spec.block.cols
    sizes = ", ".join(map(str, SIZES))
    for side, size in (("rows", rows), ("cols", cols)):
        require(size in SIZES, f"block.{side}", f"is {size}; allowed where dtype is {spec.dtype}: {sizes}")
    check_tile(spec, BLOCK_TILE)
    require(spec.stages >= 2, "stages", "is 1; a warpgroup reads one stage while it waits for the next: 2 or more")
    require(spec.ctas_per_sm == 1, "ctas_per_sm", f"is {spec.ctas_per_sm}; allowed where dtype is {spec.dtype}: 1")
    every = interval(spec)
    require(
        every < spec.stages,
        "accumulate_every",
        f"is {every}; the ring holds all of these steps at once: less than stages, {spec.stages}",
    )


def interval(spec: Fp8Spec) -> int:
    """Steps that the tensor core accumulates; 1 with scales of blocks or rows, as each step has its own scales."""
    return spec.accumulate_every if spec.scales == "tensor" else 1


def products(spec: Fp8Spec) -> int:
    """Accumulators per thread and column group."""
    return spec.block.rows * GROUP_COLUMNS // WARPGROUP


def groups(spec: Fp8Spec) -> int:
    """Column groups per warpgroup."""
    return spec.tile.n // CONSUMERS // GROUP_COLUMNS


def registers(spec: Fp8Spec) -> Registers:
    """Register budget per consumer thread: sums and, if products are promoted, the products of one group."""
    accumulators = products(spec) * (groups(spec) + (interval(spec) > 0))
    return Registers(accumulators=accumulators, overhead=40, limit=CONSUMER_REGISTERS)


def _box_row_bytes(spec: Fp8Spec) -> int:
    """Bytes per row of a box of C: 64 columns, or those of a block of a sampled product, at most 128 bytes."""
    columns = GROUP_COLUMNS if isinstance(spec, BsrSpmmSpec) else min(GROUP_COLUMNS, spec.block.cols)
    return min(128, columns * OUTPUT_BYTES[spec.output])


def c_map(spec: Fp8Spec) -> TensorMap:
    """Tensor map of C; in a sampled product, a box lies in one stored block."""
    columns = _box_row_bytes(spec) // OUTPUT_BYTES[spec.output]
    further = () if isinstance(spec, BsrSpmmSpec) else (1,)
    return TensorMap((columns, PIECE_ROWS, *further), _box_row_bytes(spec), dtype=spec.output)


def staging_pieces(spec: Fp8Spec) -> int:
    """Pieces of C that a warpgroup may have in flight; scales of a ring leave room for fewer."""
    most_bytes = STAGING_BYTES if spec.scales == "tensor" else STAGING_BYTES // 2
    return min(most_bytes // _piece_bytes(spec), groups(spec) * spec.block.rows // PIECE_ROWS)


def _piece_bytes(spec: Fp8Spec) -> int:
    return PIECE_ROWS * GROUP_COLUMNS * OUTPUT_BYTES[spec.output]


def shared_layout(spec: Fp8Spec, pieces: int) -> SharedLayout:
    """The shared memory that both kernels have."""
    m, n, k = spec.tile.m, spec.tile.n, spec.tile.k
    shared, ring = SharedLayout(), stage_ring(spec.stages)
    shared.add("A", spec.stages * m * k, f"ring of A tiles, {m} rows of {k} bytes", ring=ring)
    shared.add("B", spec.stages * n * k, f"ring of B tiles, {n} columns of {k} bytes", ring=ring)
    shared.add("C", CONSUMERS * pieces * _piece_bytes(spec), f"{pieces} pieces of C of each warpgroup", stores=True)
    return shared


def constants(spec: Fp8Spec, pieces: int) -> tuple[Constant, ...]:
    """Constants that both kernels have."""
    m, n, k, row_bytes = spec.tile.m, spec.tile.n, spec.tile.k, _box_row_bytes(spec)
    return (
        Constant("kTileM", m, "rows of a C tile: one block row"),
        Constant("kTileK", k, "depth of one step, bytes of a row of A and of a column of B"),
        Constant("kStages", spec.stages, "depth of the ring of A and B tiles"),
        *_interval_constant(spec),
        Constant("kThreads", THREADS, "warpgroup 0 produces, the others consume"),
        Constant("kConsumerWarps", CONSUMERS * WARPGROUP // 32, "warps that compute"),
        Constant("kProducerRegisters", PRODUCER_REGISTERS, "registers per producer thread"),
        Constant("kConsumerRegisters", CONSUMER_REGISTERS, CONSUMERS_TAKE),
        Constant("kGroupColumns", GROUP_COLUMNS, "columns of a group: the M side of one wgmma"),
        Constant("kWarpgroupGroups", groups(spec), "column groups of a warpgroup"),
        Constant("kProducts", products(spec), "accumulators per thread and column group"),
        Constant("kABytes", m * k, "bytes of an A tile"),
        Constant("kBBytes", n * k, "bytes of a B tile"),
        Constant("kBGroupBytes", GROUP_COLUMNS * k, "bytes of the columns of B of one group"),
        Constant("kPieceRows", PIECE_ROWS, "rows of a piece of C"),
        Constant("kPieceBytes", _piece_bytes(spec), "bytes of a piece of C"),
        Constant("kBoxRowBytes", row_bytes, "bytes of a row of a box of C: the span of its swizzle"),
        Constant("kBoxColumns", row_bytes // OUTPUT_BYTES[spec.output], "columns of a box of C"),
        Constant("kBoxBytes", PIECE_ROWS * row_bytes, "bytes of a box of C"),
        Constant("kStagingPieces", pieces, "pieces of C that a warpgroup may have in flight"),
    )


def _interval_constant(spec: Fp8Spec) -> tuple[Constant, ...]:
    """Constant of the promotion interval, if the kernel has one."""
    if not spec.accumulate_every or spec.scales != "tensor":
        return ()
    return (
        Constant("kAccumulateEvery", spec.accumulate_every, "steps that the tensor core accumulates before promotion"),
    )


def fp8_flags(spec: Fp8Spec) -> BsrFp8Flags:
    """Template parameters of both kernels."""
    return BsrFp8Flags(mma_n=spec.block.rows, sums=sums(spec))
