"""Plan of the WMMA BSR x dense kernel: every warp computes; plain loads, or a ring filled by cp.async or TMA."""

from __future__ import annotations

from codegen.arch import ARCHS, KIB
from codegen.dtypes import DTYPES
from codegen.flags import SpmmWmmaFlags
from codegen.plan import (
    Constant,
    Param,
    Plan,
    Registers,
    Ring,
    SharedLayout,
    SharedRegion,
    TensorMap,
    check_budget,
    i32,
    i64,
    pointer,
    require,
    tensor_map,
)
from codegen.plans.bsr.parts import A_MAP, one_block_row
from codegen.plans.bsr.spmm_launch import arguments
from codegen.spec import BsrSpmmSpec
from codegen.tile_rules import Fits, OneOf, Rule, check_tile

WARPS = 8  # two per warp scheduler: one computes while the other waits for shared memory
LOW_WARPS = 4  # for tiles of 16 and 32 rows, where more thread blocks share an SM
MMA = 16  # rows, columns and depth of one WMMA product
WARP_ROWS = 2 * MMA  # rows of C per warp: every fragment of B is used twice; in tiles of 256 rows, four times
TALL_WARP_ROWS = 4 * MMA
COPY_BYTES = 16
# With one extra 16-byte chunk, a row has an odd number of chunks, so that eight rows of a fragment use distinct banks.
# (TMA cannot pad: it loads an extra, unused chunk per row.)
PADDING_BYTES = 16
# A warp stores 2 floats per lane and 4 rows at a time: rows 8 banks apart do not conflict.
STAGING_PADDING = 8
FRAGMENT_REGISTERS = 8  # per A or B fragment
OVERHEAD_REGISTERS = 40  # addresses and loop state: an allowance


def plan(spec: BsrSpmmSpec, stem: str) -> Plan:
    """Plan of the kernel of a spec."""
    arch, dtype = ARCHS[spec.arch], DTYPES[spec.dtype]
    m, n, k = spec.tile.m, spec.tile.n, spec.tile.k
    tma = spec.copy_ == "tma"
    asynchronous = spec.copy_ != "ld_global"
    by_columns = spec.b_layout == "column_major"
    _check(spec)

    copy = COPY_BYTES // dtype.bytes
    warps = _warps(m)
    threads = 32 * warps
    a_copies, b_copies = -(-m * k // (copy * threads)), k * n // (copy * threads)
    warp_rows = TALL_WARP_ROWS if m == 256 else min(m, WARP_ROWS)
    warps_n = warps // (m // warp_rows)
    warp_columns = n // warps_n
    # A B tile has the layout of B: columns of k elements, or rows of n.
    line, b_lines, b_length = ("column", n, k) if by_columns else ("row", k, n)
    a_stride, b_stride = (length + PADDING_BYTES // dtype.bytes for length in (k, b_length))
    staging_stride = warp_columns + STAGING_PADDING
    a_bytes, b_bytes = m * a_stride * dtype.bytes, b_lines * b_stride * dtype.bytes
    staging_bytes = warps * MMA * staging_stride * 4

    ring, places = SharedLayout(), Ring(spec.stages, "full[i]" if tma else "")
    ring.add("A", spec.stages * a_bytes, f"A tiles, {m} rows of {a_stride} elements", align=128, ring=places)
    ring.add("B", spec.stages * b_bytes, f"B tiles, {b_lines} {line}s of {b_stride} elements", align=128, ring=places)
    if tma:
        ring.add("Full", 8 * spec.stages, "mbarriers: the tiles of a stage have arrived", align=8)
    # C is staged in the memory of the tiles, which are no longer read.
    doc = "float strips of C, one per warp, overlapping the tiles"
    staging = SharedRegion("Staging", 0, staging_bytes, doc, "A", stores=True)
    shared_bytes = max(ring.size, staging_bytes)

    accumulators = warp_rows * warp_columns // 32
    fragments = (warp_rows // MMA + 1) * FRAGMENT_REGISTERS
    in_flight = 0 if asynchronous else (a_copies + b_copies) * COPY_BYTES // 4
    held = accumulators + max(fragments, in_flight)  # fragments are not live while loads are in flight
    # As many thread blocks as shared memory (the system reserves 1 KB per block), registers and warps allow.
    ctas_per_sm = max(
        1,
        min(
            arch.shared_memory_per_sm // (shared_bytes + KIB),
            arch.blocks_for(threads, held + OVERHEAD_REGISTERS),
            arch.warps_per_sm // warps,
        ),
    )
    limit = arch.registers_for(threads, ctas_per_sm)
    registers = Registers(accumulators=held, overhead=OVERHEAD_REGISTERS, limit=limit)
    check_budget(spec, shared_bytes, registers)

    ring_constants = (
        Constant("kStages", spec.stages, "depth of the ring of A and B tiles"),
        Constant("kATile", m * a_stride, "elements of an A tile, padding included"),
        Constant("kBTile", b_lines * b_stride, "elements of a B tile, padding included"),
    )
    thread_copies = (
        Constant("kACopies", a_copies, "copies per thread for an A tile"),
        Constant("kBCopies", b_copies, "copies per thread for a B tile"),
    )
    constants = (
        Constant("kTileM", m, "rows of a C tile: one block row"),
        Constant("kTileN", n, "columns of a C tile"),
        Constant("kTileK", k, "depth of one step"),
        Constant("kBlockCols", spec.block.cols, "columns of a stored block of A"),
        Constant("kThreads", threads, "all load and compute"),
        Constant("kCopy", copy, "elements of a 16-byte copy"),
        *(() if tma else thread_copies),
        Constant("kAStride", a_stride, "row stride of an A tile, in elements, with padding"),
        Constant("kBStride", b_stride, f"{line} stride of a B tile, in elements, with padding"),
        Constant("kWarpsN", warps_n, "warps along a row of C"),
        Constant("kWarpRows", warp_rows, "rows of C of one warp"),
        Constant("kWarpColumns", warp_columns, "columns of C of one warp"),
        Constant("kStagingStride", staging_stride, "row stride of the staging buffer, in floats, with padding"),
        *(ring_constants if asynchronous else ()),
    )
    maps = {"a_map": TensorMap((a_stride, m, 1), 0), "b_map": TensorMap((b_stride, b_lines), 0)}
    loaders = "one thread issues TMA loads" if tma else "all warps load"
    return Plan(
        spec=spec,
        stem=stem,
        template="bsr_spmm/wmma.cu.j2",
        threads=threads,
        ctas_per_sm=ctas_per_sm,
        persistent=False,
        shared=(*ring.regions, staging),
        shared_bytes=shared_bytes,
        registers=registers,
        params=(_tma_params if tma else warp_level_params)(dtype.cuda, by_columns),
        tensor_maps=maps if tma else {},
        constants=constants,
        flags=SpmmWmmaFlags(
            tma=tma,
            has_ring=asynchronous,
            by_columns=by_columns,
            some_copy_a=m * k < a_copies * copy * threads,
        ),
        grid_summary="one thread block per tile, block rows fastest",
        summary=(
            ("blocks of A", f"{spec.block.rows} x {spec.block.cols}"),
            ("tile", f"{m} x {n} of C in steps of {k}; each of {warps} warps has {warp_rows} x {warp_columns}"),
            ("schedule", f"{spec.schedule}: {loaders} ({spec.copy_}), all warps compute (WMMA 16 x 16 x 16)"),
            ("pipeline", f"ring of {spec.stages} pairs of tiles" if asynchronous else "load, wait, compute, wait"),
        ),
        flops=2 * m * n * k,
        bytes=(m * k + k * n) * dtype.bytes,
        arguments=arguments,
        headers=(dtype.header, "mma.h"),
    )


def _warps(tile_rows: int) -> int:
    """Warps per thread block."""
    return LOW_WARPS if tile_rows <= WARP_ROWS else WARPS


def warp_level_params(element: str, by_columns: bool = False) -> tuple[Param, ...]:
    """Parameters of a kernel in which all warps load, by the C++ type of an element."""
    line = "column" if by_columns else "row"  # contiguous in B
    return (
        pointer("a", element, "stored blocks of A (nnz, rows, cols), contiguous"),
        pointer("b", element, "B, by columns (K, N)" if by_columns else "B (K, N)"),
        pointer("c", element, "C (M, N)", writes=True),
        i64(f"b_{line}_stride", f"{line} stride of B, in elements"),
        i64("c_row_stride", "row stride of C, in elements"),
        pointer("crow_indices", "int", "row offsets: first block of each block row, then the end of the last"),
        pointer("col_indices", "int", "block column of each stored block"),
        i32("index_words", "32-bit words per index, 1 or 2; the kernel reads the low word"),
        i32("block_columns", "block columns of A, block rows of B"),
        i32("block_rows", "block rows of A"),
        i32("n", "columns of B and C; rows of C are padded to a multiple of 8"),
        i32("tiles", "block_rows * tiles per block row: the grid size"),
    )


def _tma_params(element: str, by_columns: bool) -> tuple[Param, ...]:
    """Parameters of the kernel that loads tiles by TMA."""
    by_map = ("a", "b", "b_row_stride", "b_column_stride", "block_columns")
    return (
        A_MAP,
        tensor_map("b_map", "B, by columns", ("K", "N")) if by_columns else tensor_map("b_map", "B", ("N", "K")),
        *(param for param in warp_level_params(element, by_columns) if param.name not in by_map),
    )


def _depths(spec: BsrSpmmSpec) -> tuple[int, ...]:
    """Legal depths of a step, for which every thread makes the same number of copies of B."""
    elements = 32 * _warps(spec.tile.m) * COPY_BYTES // DTYPES[spec.dtype].bytes
    return tuple(k for k in (16, 32, 64, 112) if spec.block.cols % k == spec.tile.n * k % elements == 0)


def _shape(spec: BsrSpmmSpec) -> str:
    return f"block.cols {spec.block.cols} and a tile of {spec.tile.m} x {spec.tile.n}"


TILE: tuple[Rule[BsrSpmmSpec], ...] = (
    one_block_row(),
    OneOf("n", lambda spec: (64, 128), lambda spec, sizes: f"allowed: {sizes}"),
    # With 64 columns, tiles of at least 64 rows need steps of 32 or 64, which do not divide 16 and 112.
    Fits(
        "n",
        lambda spec: bool(_depths(spec)),
        lambda spec: f"allowed with block.rows {spec.tile.m} and block.cols {spec.block.cols}: 128",
    ),
    OneOf("k", _depths, lambda spec, sizes: f"allowed with {_shape(spec)}: {sizes}"),
)


def _check(spec: BsrSpmmSpec) -> None:
    """Reject specs that the kernel does not support."""
    block = spec.block
    require(spec.epilogue is None, "epilogue", f"is not supported on {spec.arch} with {spec.mma}: leave it out")
    require(not spec.accumulate, "accumulate", f"is not supported on {spec.arch} with {spec.mma}: leave it out")
    require(not spec.is_dynamic, "scheduler", f"is not supported on {spec.arch} with {spec.mma}: leave it out")
    require(not spec.transpose_a, "transpose_a", f"is not supported on {spec.arch} with {spec.mma}: leave it out")
    heights = (16, 32, 64, 128, 256)
    require(block.rows in heights, "block.rows", f"is {block.rows}; allowed with wmma: {', '.join(map(str, heights))}")
    columns = (16, 32, 64, 112, 128)
    require(block.cols in columns, "block.cols", f"is {block.cols}; allowed with wmma: {', '.join(map(str, columns))}")
    check_tile(spec, TILE)
    if spec.copy_ != "ld_global":
        require(spec.stages >= 2, "stages", "is 1; the kernel loads one step while it computes another: 2 or more")
    else:
        require(spec.stages == 1, "stages", f"is {spec.stages}; plain loads fill one buffer; allowed: 1")
