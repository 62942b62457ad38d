"""Plan of the mma.sync BSR x dense kernel: a swizzled ring of cp.async, fragments fetched one slice ahead."""

from __future__ import annotations

from codegen.arch import ARCHS, KIB
from codegen.dtypes import DTYPES
from codegen.flags import SpmmMmaFlags
from codegen.plan import (
    Constant,
    Param,
    Plan,
    Registers,
    Ring,
    SharedLayout,
    SharedRegion,
    check_budget,
    i32,
    pointer,
    require,
)
from codegen.plans.bsr.fp8 import (
    MMA_SYNC_DEPTH,
    MMA_SYNC_STEP,
    OUTPUT_BYTES,
    add_mma_sync_scales,
    check_mma_sync,
    mma_sync_depths,
    mma_sync_flags,
    mma_sync_overhead,
    mma_sync_scale_params,
    mma_sync_summary,
)
from codegen.plans.bsr.parts import one_block_row
from codegen.plans.bsr.spmm_launch import L2_BYTES, arguments
from codegen.plans.bsr.spmm_wmma import warp_level_params
from codegen.spec import BsrSpmmSpec
from codegen.tile_rules import OneOf, Rule, check_tile

COPY_BYTES = 16  # of one cp.async and of one row of an 8 x 8 matrix of ldmatrix
LINE_BYTES = 128  # all banks of shared memory
MMA_ROWS, MMA_DEPTH = 16, 16  # of one mma.sync
BLOCK_SIDES = (16, 32, 64, 128)
LOW_ROWS = 32  # most rows of a tile with 512 columns
# A warp's part of C. 64 x 64 gives 32 FLOPs per byte from shared memory, which is then not the limit.
WARP_ROWS = 64  # or all rows of a tile with fewer
WARP_COLUMNS = 64
FP8_WARP_COLUMNS = 32  # products need registers in addition to their sums
OVERHEAD_REGISTERS = 40  # addresses and loop state: an allowance
FP8_OVERHEAD_REGISTERS = 68  # products in addition to sums; with 60, a tile of 32 x 128 spilled below a limit of 128
GROUP_PARAMS = (
    i32("group_rows", "block rows whose blocks fit the L2 together"),
    i32("column_tiles", "tiles per block row"),
)


def plan(spec: BsrSpmmSpec, stem: str) -> Plan:
    """Plan of the kernel of a spec."""
    arch, dtype = ARCHS[spec.arch], DTYPES[spec.dtype]
    m, n, k = spec.tile.m, spec.tile.n, spec.tile.k
    by_columns, in_fp8 = spec.b_layout == "column_major", spec.is_fp8
    _check(spec)
    depth, columns = (MMA_SYNC_DEPTH, FP8_WARP_COLUMNS) if in_fp8 else (MMA_DEPTH, WARP_COLUMNS)
    output_bytes = OUTPUT_BYTES[spec.output] if in_fp8 else dtype.bytes

    copy = COPY_BYTES // dtype.bytes
    warp_rows, warps_n = min(m, WARP_ROWS), n // columns
    warps = m // warp_rows * warps_n
    threads = 32 * warps
    a_chunks = k // copy
    some_copy_a = m * a_chunks < threads  # an A tile has fewer chunks than a thread block has threads
    a_bytes, b_bytes = m * k * dtype.bytes, k * n * dtype.bytes
    staging_bytes = warps * MMA_ROWS * columns * output_bytes

    ring = SharedLayout()
    ring.add("A", spec.stages * a_bytes, f"A tiles, {m} rows of {k} elements, swizzled", ring=Ring(spec.stages))
    b_doc = f"{n} columns of {k} elements" if by_columns else f"{k} rows of {n} elements"
    ring.add("B", spec.stages * b_bytes, f"B tiles, {b_doc}, swizzled", ring=Ring(spec.stages))
    scale_constants = add_mma_sync_scales(spec, ring) if in_fp8 else ()
    # C is staged in the memory of the tiles, which are no longer read.
    staging = SharedRegion(
        "Staging", 0, staging_bytes, "strips of C, one per warp; overlap the tiles", "A", stores=True
    )
    shared_bytes = max(ring.size, staging_bytes)

    fragments = 2 * (warp_rows + columns) * depth * dtype.bytes // 4 // 32  # of two slices
    held = warp_rows * columns // 32 + fragments
    overhead = mma_sync_overhead(spec, FP8_OVERHEAD_REGISTERS) if in_fp8 else OVERHEAD_REGISTERS
    # As many thread blocks as shared memory (the system reserves 1 KB per block), registers and warps allow.
    ctas_per_sm = max(
        1,
        min(
            arch.shared_memory_per_sm // (shared_bytes + KIB),
            arch.blocks_for(threads, held + overhead),
            arch.warps_per_sm // warps,
        ),
    )
    limit = arch.registers_for(threads, ctas_per_sm)
    registers = Registers(accumulators=held, overhead=overhead, limit=limit)
    check_budget(spec, shared_bytes, registers)

    constants = (
        Constant("kTileM", m, "rows of a C tile: one block row"),
        Constant("kTileN", n, "columns of a C tile"),
        Constant("kTileK", k, "depth of one step"),
        Constant("kBlockCols", spec.block.cols, "columns of a stored block of A"),
        Constant("kStages", spec.stages, "depth of the ring of A and B tiles"),
        Constant("kThreads", threads, "all load and compute"),
        Constant("kCopy", copy, "elements of a chunk, one 16-byte copy"),
        *(_common_rows(k, copy, threads) if by_columns else _own_rows(k, n, copy, threads, some_copy_a)),
        Constant("kATile", a_bytes, "bytes of an A tile"),
        Constant("kBTile", b_bytes, "bytes of a B tile"),
        *scale_constants,
        Constant("kWarpsN", warps_n, "warps along a row of C"),
        Constant("kWarpRows", warp_rows, "rows of C of one warp"),
        Constant("kWarpColumns", columns, "columns of C of one warp"),
        Constant("kStripChunks", columns * output_bytes // COPY_BYTES, "chunks of a row of a strip of C"),
    )
    by_block = in_fp8 and spec.scales == "block"
    return Plan(
        spec=spec,
        stem=stem,
        template="bsr_spmm/mma.cu.j2",
        threads=threads,
        ctas_per_sm=ctas_per_sm,
        persistent=False,
        shared=(*ring.regions, staging),
        shared_bytes=shared_bytes,
        registers=registers,
        params=(*_params(spec), *GROUP_PARAMS),
        tensor_maps={},
        constants=constants,
        flags=SpmmMmaFlags(
            one_slice=k == depth,
            by_columns=by_columns,
            some_copy_a=some_copy_a,
            fp8=mma_sync_flags(spec) if in_fp8 else None,
            block_scales=by_block,
        ),
        grid_summary=(
            f"one thread block per tile, {ctas_per_sm} at a time on an SM, block rows fastest among "
            f"{L2_BYTES >> 20} MB of them"
        ),
        summary=(
            ("blocks of A", f"{spec.block.rows} x {spec.block.cols}"),
            ("tile", f"{m} x {n} of C in steps of {k}; each of {warps} warps has {warp_rows} x {columns}"),
            ("schedule", f"{spec.schedule}: all warps load ({spec.copy_}) and compute (mma.sync 16 x 8 x {depth})"),
            *(mma_sync_summary(spec) if in_fp8 else ()),
            ("pipeline", f"ring of {spec.stages} pairs of tiles; fragments of one slice ahead in registers"),
        ),
        flops=2 * m * n * k,
        bytes=a_bytes + b_bytes,
        arguments=arguments,
    )


def _params(spec: BsrSpmmSpec) -> tuple[Param, ...]:
    """Parameters, by the types of the elements."""
    if not spec.is_fp8:
        return warp_level_params("unsigned short", spec.b_layout == "column_major")
    written = pointer("c", mma_sync_flags(spec).element, "C (M, N)", writes=True)
    params = warp_level_params("unsigned char", by_columns=True)
    return (*(written if param.name == "c" else param for param in params), *mma_sync_scale_params(spec))


def _own_rows(k: int, n: int, copy: int, threads: int, some_copy_a: bool) -> tuple[Constant, ...]:
    """Constants of the tiles in shared memory if B is stored by rows: rows of A and B have different lengths."""
    a_chunks, b_chunks = k // copy, n // copy
    a_rows_per_line = max(1, LINE_BYTES // (a_chunks * COPY_BYTES))
    a_pass_rows = Constant(
        "kAPassRows", threads // a_chunks, "rows of an A tile that all threads copy at a time, a chunk each"
    )
    return (
        Constant("kAChunks", a_chunks, "chunks of a row of an A tile"),
        Constant("kBChunks", b_chunks, "chunks of a row of a B tile"),
        Constant("kARowsPerLine", a_rows_per_line, "rows of an A tile that span all banks"),
        *(() if some_copy_a else (a_pass_rows,)),
        Constant("kBPassRows", threads // b_chunks, "rows of a B tile that all threads copy at a time"),
    )


def _common_rows(k: int, copy: int, threads: int) -> tuple[Constant, ...]:
    """Constants of the tiles in shared memory if B is stored by columns: its tile rows are as long as those of A."""
    chunks = k // copy
    return (
        Constant("kRowChunks", chunks, "chunks of a tile row: of a row of A, of a column of B"),
        Constant("kPassRows", threads // chunks, "tile rows that all threads copy at a time, a chunk each"),
    )


def _depths(spec: BsrSpmmSpec) -> tuple[int, ...]:
    """Legal depths of a step, which divide a block."""
    known = mma_sync_depths(spec) if spec.is_fp8 else (16, 32, 64)
    return tuple(depth for depth in known if spec.block.cols % depth == 0)


TILE: tuple[Rule[BsrSpmmSpec], ...] = (
    one_block_row(),
    OneOf(
        "n",
        lambda spec: (128, 256, 512) if spec.block.rows <= LOW_ROWS else (128, 256),
        lambda spec, sizes: f"allowed with mma and block.rows {spec.block.rows}: {sizes}",
    ),
    OneOf("k", _depths, lambda spec, sizes: f"allowed with mma and block.cols {spec.block.cols}: {sizes}"),
    MMA_SYNC_STEP,
)


def _check(spec: BsrSpmmSpec) -> None:
    """Reject specs that the kernel does not support."""
    block = spec.block
    sides = ", ".join(map(str, BLOCK_SIDES))
    if spec.is_fp8:
        check_mma_sync(spec)
    require(spec.epilogue is None, "epilogue", f"is not supported on {spec.arch} with {spec.mma}: leave it out")
    require(not spec.accumulate, "accumulate", f"is not supported on {spec.arch} with {spec.mma}: leave it out")
    require(not spec.is_dynamic, "scheduler", f"is not supported on {spec.arch} with {spec.mma}: leave it out")
    require(not spec.transpose_a, "transpose_a", f"is not supported on {spec.arch} with {spec.mma}: leave it out")
    require(block.rows in BLOCK_SIDES, "block.rows", f"is {block.rows}; allowed with mma: {sides}")
    require(block.cols in BLOCK_SIDES, "block.cols", f"is {block.cols}; allowed with mma: {sides}")
    check_tile(spec, TILE)
    require(spec.stages >= 2, "stages", "is 1; the kernel loads one step while it computes another: 2 or more")
