"""Plan of the sampled products by mma.sync and by WMMA: all warps load and compute, one thread block a tile."""

from __future__ import annotations

from codegen.arch import ARCHS
from codegen.dtypes import DTYPES
from codegen.flags import Flags
from codegen.plan import Constant, Plan, check_budget, i32, i64, pointer, require
from codegen.plans.bsr_parts import INDEX_PARAMS
from codegen.plans.bsr_sddmm_launch import arguments
from codegen.plans.multistage import MMA, Tiles
from codegen.spec import BsrSddmmSpec

WARPS = 4
# A warp's part of a tile has as many rows, or all that there are. 64 x 64 do 32 FLOPs for each byte from shared memory.
WARP_ROWS = 64
SIZES = (16, 32, 64, 128)


def plan(spec: BsrSddmmSpec, stem: str) -> Plan:
    """Work out every number of the kernel."""
    dtype, size = DTYPES[spec.dtype], spec.block.rows
    m, n, k = spec.tile.m, spec.tile.n, spec.tile.k
    _check(spec)

    warp_rows = min(m, WARP_ROWS)
    sets = 2 if spec.mma == "mma" else 1
    tiles = Tiles(spec, WARPS, warp_rows, n * (m // warp_rows) // WARPS, (n, k), sets)
    ring, staging = tiles.shared()
    ring.add("BRows", 4 * n, "rows of B that a unit needs", align=16)
    ctas_per_sm, registers = tiles.occupancy(ring.size)
    check_budget(spec, ring.size, registers)

    element = "unsigned short" if spec.mma == "mma" else dtype.cuda
    row_chunks = k // tiles.copy
    constants = (
        Constant("kTileM", m, "rows of a tile: those of a stored block of C"),
        Constant("kTileN", n, "columns of a tile"),
        Constant("kTileK", k, "depth of one step"),
        Constant("kBlockCols", size, "columns of a stored block of C"),
        Constant("kTileBlocks", n // size, "stored blocks of a tile, at most"),
        Constant("kRowChunks", row_chunks, "chunks of a row of an A or B tile"),
        Constant(
            "kPassRows", tiles.threads // row_chunks, "rows of a tile that all threads copy at a time, a chunk each"
        ),
        *tiles.constants(),
    )
    params = (
        pointer("a", element, "A (M, K)"),
        pointer("b", element, "B (N, K)"),
        pointer("c", element, "stored blocks of C (nnz, rows, cols), contiguous", writes=True),
        i64("a_row_stride", "elements from one row of A to the next"),
        i64("b_row_stride", "elements from one row of B to the next"),
        *INDEX_PARAMS,
        i32("block_rows", "block rows of C"),
        i32("block_columns", "block columns of C"),
        i32("blocks", "stored blocks of C"),
        i32("k", "columns of A and B"),
        i32("steps", "K / kTileK, rounded up"),
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
        flags=Flags(),
        grid_summary=f"one thread block per tile, {ctas_per_sm} at a time on an SM, in the order of storage",
        summary=(
            ("blocks of C", f"{size} x {size}"),
            ("tile", f"{n // size} stored blocks in steps of {k}; those of one block row are computed together"),
            *tiles.summary(),
        ),
        flops=2 * m * n * k,
        bytes=(m + n) * k * dtype.bytes,
        arguments=arguments,
        headers=(dtype.header, "mma.h") if spec.mma == "wmma" else (),
    )


def _check(spec: BsrSddmmSpec) -> None:
    """Refuse what the kernels are not written for."""
    m, n, k, size = spec.tile.m, spec.tile.n, spec.tile.k, spec.block.rows
    arch, mma = ARCHS[spec.arch].name, spec.mma
    allowed = ", ".join(map(str, SIZES))
    require(size in SIZES, "block.rows", f"is {size}; allowed on {arch}: {allowed}")
    require(spec.block.cols == size, "block.cols", f"is {spec.block.cols}; blocks are square: block.rows is {size}")
    require(m == size, "tile.m", f"is {m}; a tile is one block row high: block.rows is {size}")
    widths = (128,) if m == 2 * WARP_ROWS else (128, 256)
    allowed = ", ".join(map(str, widths))
    require(n in widths, "tile.n", f"is {n}; allowed with {mma} and blocks of {size}: {allowed}")
    # All threads copy whole rows together, and no more than a tile has.
    depths = (64,) if m == MMA else (32, 64)
    allowed = ", ".join(map(str, depths))
    require(k in depths, "tile.k", f"is {k}; allowed with {mma} and blocks of {size}: {allowed}")
    require(spec.stages >= 2, "stages", "is 1; a step is loaded while another is computed: 2 or more")
