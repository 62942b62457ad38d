"""Plan of the sampled products by mma.sync and by WMMA: all warps load and compute, with one thread block per tile."""

from __future__ import annotations

from codegen.dtypes import DTYPES
from codegen.flags import Flags, SddmmMmaFlags
from codegen.plan import Constant, Plan, check_budget, i32, i64, pointer, require
from codegen.plans.bsr.fp8 import (
    MMA_SYNC_STEP,
    SCALE_COLUMNS,
    add_mma_sync_scales,
    check_mma_sync,
    mma_sync_depths,
    mma_sync_flags,
    mma_sync_scale_params,
    mma_sync_summary,
)
from codegen.plans.bsr.multistage import COPY_BYTES, MMA, Tiles
from codegen.plans.bsr.parts import INDEX_PARAMS, one_block_row
from codegen.plans.bsr.sddmm_launch import arguments
from codegen.spec import BsrSddmmSpec
from codegen.tile_rules import OneOf, Rule, check_tile

WARPS = 4
FP8_WARPS = 8  # with narrower parts: products need registers in addition to their sums
# Most rows of a warp's part of a tile. 64 x 64 gives 32 FLOPs per byte from shared memory.
WARP_ROWS = 64
SIZES = (16, 32, 64, 128)


def plan(spec: BsrSddmmSpec, stem: str) -> Plan:
    """Plan of the kernel of a spec."""
    dtype, size = DTYPES[spec.dtype], spec.block.rows
    m, n, k = spec.tile.m, spec.tile.n, spec.tile.k
    _check(spec)

    warp_rows = min(m, WARP_ROWS)
    sets = 2 if spec.mma == "mma" else 1
    in_fp8 = spec.is_fp8
    warps = FP8_WARPS if in_fp8 else WARPS
    tiles = Tiles(spec, warps, warp_rows, n * (m // warp_rows) // warps, (n, k), sets)
    ring, staging = tiles.shared()
    by_row = in_fp8 and spec.scales == "row"
    scale_constants = add_mma_sync_scales(spec, ring) if in_fp8 else ()
    ring.add("BRows", 4 * n, "rows of B that a unit needs", align=16)
    ctas_per_sm, registers = tiles.occupancy(ring.size)
    check_budget(spec, ring.size, registers)

    fp8 = mma_sync_flags(spec) if in_fp8 else None
    written = fp8.element if fp8 else "unsigned short" if spec.mma == "mma" else dtype.cuda
    element = "unsigned char" if in_fp8 else written
    row_chunks = k // tiles.copy
    constants = (
        Constant("kTileM", m, "rows of a tile: those of a stored block of C"),
        Constant("kTileN", n, "columns of a tile"),
        Constant("kTileK", k, "depth of one step"),
        Constant("kBlockCols", size, "columns of a stored block of C"),
        Constant("kTileBlocks", n // size, "most stored blocks per tile"),
        Constant("kRowChunks", row_chunks, "chunks of a row of an A or B tile"),
        Constant(
            "kPassRows", tiles.threads // row_chunks, "rows of a tile that all threads copy at a time, a chunk each"
        ),
        *tiles.constants(),
        *scale_constants,
        *((Constant("kScaleDepth", SCALE_COLUMNS, "columns of A and B that share scales"),) if by_row else ()),
    )
    params = (
        pointer("a", element, "A (M, K)"),
        pointer("b", element, "B (N, K)"),
        pointer("c", written, "stored blocks of C (nnz, rows, cols), contiguous", writes=True),
        i64("a_row_stride", "row stride of A, in elements"),
        i64("b_row_stride", "row stride of B, in elements"),
        *INDEX_PARAMS,
        i32("block_rows", "block rows of C"),
        i32("block_columns", "block columns of C"),
        i32("blocks", "stored blocks of C"),
        i32("k", "columns of A and B"),
        i32("steps", "K / kTileK, rounded up"),
        *(mma_sync_scale_params(spec) if in_fp8 else ()),
    )
    return Plan(
        spec=spec,
        stem=stem,
        template=f"bsr_sddmm/{spec.mma}.cu.j2",
        threads=tiles.threads,
        ctas_per_sm=ctas_per_sm,
        persistent=False,
        shared=(*ring.regions, staging),
        shared_bytes=ring.size,
        registers=registers,
        params=params,
        tensor_maps={},
        constants=constants,
        flags=SddmmMmaFlags(fp8, by_row) if spec.mma == "mma" else Flags(),
        grid_summary=f"one thread block per tile, {ctas_per_sm} at a time on an SM, in the order of storage",
        summary=(
            ("blocks of C", f"{size} x {size}"),
            ("tile", f"{n // size} stored blocks in steps of {k}; those of one block row are computed together"),
            *(mma_sync_summary(spec) if in_fp8 else ()),
            *tiles.summary(),
        ),
        flops=2 * m * n * k,
        bytes=(m + n) * k * dtype.bytes,
        arguments=arguments,
        headers=(dtype.header, "mma.h") if spec.mma == "wmma" else (),
    )


def _check(spec: BsrSddmmSpec) -> None:
    """Reject specs that the kernels do not support."""
    size, arch = spec.block.rows, spec.arch
    allowed = ", ".join(map(str, SIZES))
    if spec.is_fp8:
        check_mma_sync(spec)
    require(size in SIZES, "block.rows", f"is {size}; allowed on {arch}: {allowed}")
    require(spec.block.cols == size, "block.cols", f"is {spec.block.cols}; blocks are square: block.rows is {size}")
    check_tile(spec, TILE)
    require(spec.stages >= 2, "stages", "is 1; the kernel loads one step while it computes another: 2 or more")


def _fp8_depths(spec: BsrSddmmSpec) -> tuple[int, ...]:
    """Legal depths of a step: at least two slices, and no more rows per copy pass than an A tile has."""
    rows_of_pass = {k: 32 * FP8_WARPS // (k // COPY_BYTES) for k in mma_sync_depths(spec)[1:]}
    return tuple(k for k, rows in rows_of_pass.items() if rows <= spec.tile.m)


def _depths(spec: BsrSddmmSpec) -> tuple[int, ...]:
    """Legal depths of a step: a copy pass of all threads has whole rows, and no more than a tile has."""
    if spec.tile.m == MMA:
        return (64,)
    return _fp8_depths(spec) if spec.is_fp8 else (32, 64)


def _allowed(spec: BsrSddmmSpec, sizes: str) -> str:
    return f"allowed with {spec.mma} and blocks of {spec.block.rows}: {sizes}"


TILE: tuple[Rule[BsrSddmmSpec], ...] = (
    one_block_row(),
    OneOf("n", lambda spec: (128,) if spec.tile.m == 2 * WARP_ROWS else (128, 256), _allowed),
    OneOf("k", _depths, _allowed),
    MMA_SYNC_STEP,
)
