"""Plan of the tile copy: copies a matrix through shared memory tile by tile, with the copy instruction of the spec."""

from __future__ import annotations

from codegen.arch import ARCHS, KIB
from codegen.dtypes import DTYPES
from codegen.flags import TileCopyFlags
from codegen.plan import (
    Constant,
    Plan,
    Registers,
    Ring,
    SharedLayout,
    TensorMap,
    check_budget,
    i32,
    i64,
    pointer,
    require,
    tensor_map,
)
from codegen.problem import CopyShape, LaunchArgs
from codegen.spec import TileCopySpec
from codegen.tile_rules import OneOf, Rule, check_tile

THREADS = 256
COPY_BYTES = 16  # per load or store of a thread
COPIES_AT_ONCE = 8  # chunks per thread in registers: an allowance
OVERHEAD_REGISTERS = 24  # addresses and loop state: an allowance
TILE: tuple[Rule[TileCopySpec], ...] = (
    OneOf("m", lambda spec: (32, 64, 128), lambda spec, sizes: f"allowed: {sizes}"),
    # A TMA box has at most 256 elements along a dimension.
    OneOf("n", lambda spec: (64, 128, 256), lambda spec, sizes: f"allowed: {sizes}"),
)


def plan(spec: TileCopySpec, stem: str) -> Plan:
    """Plan of the kernel of a spec."""
    arch, dtype = ARCHS[spec.arch], DTYPES[spec.dtype]
    m, n = spec.tile.m, spec.tile.n
    tma, ring = spec.copy_ == "tma", spec.copy_ != "ld_global"
    check_tile(spec, TILE)
    if ring:
        require(spec.stages >= 2, "stages", "is 1; the kernel loads one tile while it stores another: 2 or more")
    else:
        require(spec.stages == 1, "stages", f"is {spec.stages}; plain loads fill one buffer; allowed: 1")

    copy = COPY_BYTES // dtype.bytes
    copies, tile_bytes = m * n // (copy * THREADS), m * n * dtype.bytes
    shared = SharedLayout()
    places = Ring(spec.stages, "full[i]" if tma else "")
    shared.add("Tiles", spec.stages * tile_bytes, f"tiles, {m} rows of {n} elements", align=128, ring=places)
    if tma:
        shared.add("Full", 8 * spec.stages, "mbarriers: the tile of a stage has arrived", align=8)

    held = min(copies, COPIES_AT_ONCE) * COPY_BYTES // 4
    # As many thread blocks as shared memory (the system reserves 1 KB per block), registers and warps allow.
    ctas_per_sm = max(
        1,
        min(
            arch.shared_memory_per_sm // (shared.size + KIB),
            arch.blocks_for(THREADS, held + OVERHEAD_REGISTERS),
            arch.warps_per_sm * 32 // THREADS,
        ),
    )
    limit = arch.registers_for(THREADS, ctas_per_sm)
    registers = Registers(accumulators=held, overhead=OVERHEAD_REGISTERS, limit=limit)
    check_budget(spec, shared.size, registers)

    stages = (Constant("kStages", spec.stages, "depth of the ring of tiles"),) if ring else ()
    source = (
        (tensor_map("in_map", "in", ("columns", "rows")),)
        if tma
        else (
            pointer("in", "unsigned short", "in (rows, columns)"),
            i64("in_row_stride", "row stride of in, in elements"),
        )
    )
    return Plan(
        spec=spec,
        stem=stem,
        template="tile_copy/tile_copy.cu.j2",
        threads=THREADS,
        ctas_per_sm=ctas_per_sm,
        persistent=True,
        shared=tuple(shared.regions),
        shared_bytes=shared.size,
        registers=registers,
        params=(
            *source,
            pointer("out", "unsigned short", "out (rows, columns)", writes=True),
            i64("out_row_stride", "row stride of out, in elements"),
            i32("rows", "rows of in and out"),
            i32("columns", "columns of in and out, a multiple of 8"),
            i32("column_tiles", "column tiles"),
            i32("tiles", "all tiles"),
        ),
        tensor_maps={"in_map": TensorMap((n, m), 0)} if tma else {},
        constants=(
            Constant("kTileM", m, "rows of a tile"),
            Constant("kTileN", n, "columns of a tile"),
            *stages,
            Constant("kThreads", THREADS, "threads per block"),
            Constant("kCopy", copy, "elements of a chunk"),
            Constant("kRowChunks", n // copy, "chunks of a row of a tile"),
            Constant("kCopies", copies, "chunks per thread and tile"),
            *((Constant("kTileBytes", tile_bytes, "bytes of a tile"),) if ring else ()),
        ),
        flags=TileCopyFlags(tma=tma, ring=ring),
        grid_summary=f"{ctas_per_sm} thread blocks on an SM, looping over tiles (persistent)",
        summary=(
            ("tile", f"{m} x {n}"),
            ("schedule", f"{spec.schedule}: loads by {spec.copy_}, stores of 16 bytes from shared memory"),
            ("pipeline", f"ring of {spec.stages} tiles" if ring else "load, wait, store, wait"),
        ),
        flops=0,
        bytes=tile_bytes,
        arguments=_arguments,
    )


def _arguments(plan: Plan, shape: CopyShape, slots: int) -> LaunchArgs:
    """Launch arguments."""
    del slots
    assert isinstance(plan.spec, TileCopySpec)
    column_tiles = -(-shape.columns // plan.spec.tile.n)
    tiles = -(-shape.rows // plan.spec.tile.m) * column_tiles
    numbers = {"rows": shape.rows, "columns": shape.columns, "column_tiles": column_tiles, "tiles": tiles}
    return LaunchArgs(numbers, tiles)
