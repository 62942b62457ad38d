"""Plan of BSR x BSR by mma.sync and by WMMA: a thread block finds, loads and multiplies the products of a few tiles."""

from __future__ import annotations

from dataclasses import replace

from codegen.arch import ARCHS
from codegen.dtypes import DTYPES
from codegen.flags import Flags
from codegen.plan import Constant, Plan, SharedRegion, check_budget, i64, pointer, require
from codegen.plans.bsr.multistage import Tiles
from codegen.plans.bsr.parts import INTERSECTION_PARAMS, RUN_PARAMS, one_block
from codegen.plans.bsr.spgemm_launch import OfRuns
from codegen.spec import BsrSpgemmSpec
from codegen.tile_rules import OneOf, Rule, check_tile

# By block size: warps per thread block, and rows and columns of C per warp. A single warp computes a small tile,
# without waiting for others.
PARTS = {16: (1, 16), 32: (1, 32), 64: (4, 32), 128: (4, 64)}
# This many columns of C share a search, and at least four tiles: more would distribute the work less evenly.
RUN_COLUMNS = 256
LEAST_RUN_TILES = 4


def plan(spec: BsrSpgemmSpec, stem: str) -> Plan:
    """Plan of the kernel of a spec."""
    dtype, block = DTYPES[spec.dtype], spec.block.rows
    k = spec.tile.k
    _check(spec)

    warps, side = PARTS[block]
    tiles = Tiles(spec, warps, side, side, (k, block), 1)
    ring, staging = tiles.shared()
    ring.add("List", 8 * tiles.threads, "products of a tile: block of A, block of B", align=16)
    # Not in addition to the tiles: three stages of blocks of 128 and a list are exactly half of an SM's memory.
    counted = "products found by each warp; overlaps the tiles after the staging"
    counts = SharedRegion("Counts", staging.bytes, 4 * warps, counted)
    under = next((region.name for region in ring.regions if region.overlaps(counts)), None)
    counts = replace(counts, aliases=under)
    ring.size = max(ring.size, counts.offset + counts.bytes)
    ctas_per_sm, registers = tiles.occupancy(ring.size)
    check_budget(spec, ring.size, registers)

    element = "unsigned short" if spec.mma == "mma" else dtype.cuda
    run_tiles = max(LEAST_RUN_TILES, RUN_COLUMNS // block)
    swizzled = (
        Constant("kAPassRows", tiles.threads * tiles.copy // k, "rows of an A tile that all threads copy at a time"),
        Constant("kBPassRows", tiles.threads * tiles.copy // block, "rows of a B tile that they copy at a time"),
    )
    constants = (
        Constant("kBlock", block, "rows and columns of a stored block, and of a C tile"),
        Constant("kTileK", k, "depth of one step"),
        Constant("kRunTiles", run_tiles, "adjacent C tiles that share one search"),
        *(swizzled if spec.mma == "mma" else ()),
        *tiles.constants(),
    )
    params = (
        pointer("a", element, "stored blocks of A (nnz, rows, cols), contiguous"),
        pointer("b", element, "stored blocks of B (nnz, rows, cols), contiguous"),
        pointer("c", element, "C (M, N)", writes=True),
        i64("c_row_stride", "row stride of C, in elements"),
        *INTERSECTION_PARAMS,
        *RUN_PARAMS,
    )
    return Plan(
        spec=spec,
        stem=stem,
        template=f"bsr_spgemm/{spec.mma}.cu.j2",
        threads=tiles.threads,
        ctas_per_sm=ctas_per_sm,
        persistent=False,
        shared=(*ring.regions, staging, counts),
        shared_bytes=ring.size,
        registers=registers,
        params=params,
        tensor_maps={},
        constants=constants,
        flags=Flags(),
        grid_summary=f"one thread block for a run of {run_tiles} tiles, {ctas_per_sm} at a time on an SM",
        summary=(
            ("blocks", f"{block} x {block} in A and B"),
            ("tile", f"{block} x {block} of C in steps of {k}; {run_tiles} tiles share a search"),
            *tiles.summary(),
        ),
        flops=2 * block * block * k,
        bytes=2 * block * k * dtype.bytes,
        arguments=OfRuns(run_tiles),
        headers=(dtype.header, "mma.h") if spec.mma == "wmma" else (),
    )


TILE: tuple[Rule[BsrSpgemmSpec], ...] = (
    *one_block(),
    OneOf(
        "k",
        lambda spec: [depth for depth in (16, 32, 64) if spec.block.rows % depth == 0],
        lambda spec, sizes: f"allowed with {spec.mma} and blocks of {spec.block.rows}: {sizes}",
    ),
)


def _check(spec: BsrSpgemmSpec) -> None:
    """Reject specs that the kernels do not support."""
    block = spec.block.rows
    allowed = ", ".join(map(str, PARTS))
    require(block in PARTS, "block.rows", f"is {block}; allowed on {ARCHS[spec.arch].name}: {allowed}")
    require(spec.block.cols == block, "block.cols", f"is {spec.block.cols}; blocks are square: block.rows is {block}")
    check_tile(spec, TILE)
    require(spec.output == "dense", "output", f"is {spec.output}; with {spec.mma} on {spec.arch} C is dense")
    reason = f"is dynamic; with {spec.mma} on {spec.arch} the tile scheduler is static: leave it out"
    require(not spec.is_dynamic, "scheduler", reason)
    require(spec.stages >= 2, "stages", "is 1; the kernel loads one step while it computes another: 2 or more")
