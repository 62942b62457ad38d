"""Plan of the sm_90a sampled product with blocks of 16 and 32: the product is computed transposed.

A block of 16 or 32 rows would only fill a part of a wgmma's 64 rows. So the tile is C^T = B A^T: 64 rows of B, those of
two or four stored blocks, are the M side of a wgmma, and the rows of A its N side.
"""

from __future__ import annotations

from codegen.arch import ARCHS, KIB
from codegen.dtypes import DTYPES
from codegen.flags import WgmmaFlags
from codegen.plan import Constant, Plan, SharedLayout, TensorMap, i32, require
from codegen.plans.bsr.balance import WARP
from codegen.plans.bsr.parts import (
    CONSUMERS,
    INDEX_PARAMS,
    SDDMM_MAPS,
    SWIZZLE,
    WARPGROUP,
    Part,
    group_columns,
    one_block_row,
    small_block_registers,
    stage_ring,
)
from codegen.plans.bsr.sddmm_launch import arguments
from codegen.spec import BsrSddmmSpec
from codegen.tile_rules import OneOf, Rule, check_tile

SIZES = (16, 32)  # supported rows and columns per block
WIDTHS = (128, 256, 512)  # columns per tile: at most 32 blocks, one for each lane of a warp
GROUP_COLUMNS = 64  # M side of one wgmma: rows of B
PIECE = 16  # rows and columns that a warp stores at a time: its columns of a column group


def plan(spec: BsrSddmmSpec, stem: str) -> Plan:
    """Plan of the kernel of a spec."""
    dtype = DTYPES[spec.dtype]
    rows, cols = spec.block.rows, spec.block.cols
    m, n, k = spec.tile.m, spec.tile.n, spec.tile.k
    _check(spec)

    groups, resident = Part.of(spec).groups, spec.ctas_per_sm
    a_bytes, b_bytes, piece_bytes = m * k * dtype.bytes, n * k * dtype.bytes, PIECE * PIECE * dtype.bytes
    shared, pieces = _shared(spec, a_bytes, b_bytes, piece_bytes)
    threads = CONSUMERS * WARPGROUP + WARP
    accumulators = m * GROUP_COLUMNS // WARPGROUP
    registers = small_block_registers(spec, threads, groups * accumulators, shared.size)

    constants = (
        Constant("kTileM", m, "rows of a tile: those of a stored block of C"),
        Constant("kBlockCols", cols, "columns of a stored block of C"),
        Constant("kTileBlocks", n // cols, "most stored blocks per tile"),
        Constant("kTileK", k, "depth of one step"),
        Constant("kStages", spec.stages, "depth of the ring of A and B tiles"),
        Constant("kThreads", threads, "warpgroups that consume, then one warp that produces"),
        Constant("kConsumerWarps", CONSUMERS * WARPGROUP // WARP, "warps that compute"),
        Constant("kGroupColumns", GROUP_COLUMNS, "columns of C of a column group, rows of B: the M side of one wgmma"),
        Constant("kWarpgroupGroups", groups, "column groups of a warpgroup's part"),
        Constant("kAccumulators", accumulators, "accumulators per thread and column group"),
        Constant("kPieceSize", PIECE, "rows and columns of a piece of C, which a warp stores at a time"),
        Constant("kStagingPieces", pieces, "pieces that a warp may have in flight"),
        Constant("kABytes", a_bytes, "bytes of an A tile"),
        Constant("kBBytes", b_bytes, "bytes of a B tile"),
        Constant("kBBlockBytes", cols * k * dtype.bytes, "bytes of a B tile per stored block"),
        Constant("kBGroupBytes", GROUP_COLUMNS * k * dtype.bytes, "bytes of a B tile per column group"),
        Constant("kPieceBytes", piece_bytes, "bytes of a piece of C"),
    )
    params = (
        *SDDMM_MAPS,
        *INDEX_PARAMS,
        i32("block_rows", "block rows of C"),
        i32("block_columns", "block columns of C"),
        i32("blocks", "stored blocks of C"),
        i32("steps", "K / kTileK, rounded up"),
        i32("tiles", "blocks / kTileBlocks, rounded up"),
    )
    return Plan(
        spec=spec,
        stem=stem,
        template="bsr_sddmm/sm90a_swap_ab.cu.j2",
        threads=threads,
        ctas_per_sm=resident,
        persistent=True,
        shared=tuple(shared.regions),
        shared_bytes=shared.size,
        registers=registers,
        params=params,
        tensor_maps={
            "a_map": TensorMap((k, m), SWIZZLE),
            "b_map": TensorMap((k, cols), SWIZZLE),
            "c_map": TensorMap((PIECE, PIECE, 1), PIECE * dtype.bytes),
        },
        constants=constants,
        flags=WgmmaFlags(mma_n=m),
        grid_summary=(
            f"{'one thread block' if resident == 1 else f'{resident} thread blocks'} per SM, looping over tiles "
            "(persistent), in the order of storage"
        ),
        summary=(
            ("blocks of C", f"{rows} x {cols}"),
            (
                "tile",
                f"{n // cols} stored blocks in steps of {k}; those of one block row are computed together, transposed; "
                f"each warpgroup has {groups} groups of 64 columns",
            ),
            ("schedule", f"{spec.schedule}: one producer warp (TMA), {CONSUMERS} consumer warpgroups (WGMMA)"),
            ("pipeline", f"ring of {spec.stages} pairs of A and B tiles"),
        ),
        flops=2 * m * n * k,
        bytes=a_bytes + b_bytes,
        arguments=arguments,
    )


def _allowed(spec: BsrSddmmSpec, sizes: str) -> str:
    return f"allowed with wgmma where block.rows is {spec.block.rows}: {sizes}"


TILE: tuple[Rule[BsrSddmmSpec], ...] = (
    one_block_row(),
    OneOf("n", lambda spec: WIDTHS, _allowed),
    OneOf("k", lambda spec: (group_columns(spec),), _allowed),  # one 128-byte swizzled row
)


def _check(spec: BsrSddmmSpec) -> None:
    """Reject specs that the kernel does not support."""
    require(spec.block.cols in SIZES, "block.cols", f"is {spec.block.cols}; {_allowed(spec, '16, 32')}")
    check_tile(spec, TILE)
    require(spec.stages >= 2, "stages", "is 1; a warpgroup reads one stage while it waits for the next: 2 or more")


def _shared(spec: BsrSddmmSpec, a_bytes: int, b_bytes: int, piece_bytes: int) -> tuple[SharedLayout, int]:
    """Shared memory, and the pieces of C that a warp can stage: two if they fit in addition to the ring."""
    arch, warps = ARCHS[spec.arch], CONSUMERS * WARPGROUP // WARP
    for pieces in (2, 1):
        shared, ring, tile = SharedLayout(), stage_ring(spec.stages), spec.tile
        shared.add("A", spec.stages * a_bytes, f"ring of A tiles, {tile.m} rows of {tile.k} columns", ring=ring)
        shared.add("B", spec.stages * b_bytes, f"ring of B tiles, {tile.n} rows of {tile.k} columns", ring=ring)
        count = "a piece" if pieces == 1 else f"{pieces} pieces"
        shared.add("C", warps * pieces * piece_bytes, f"{count} of C of each warp", stores=True)
        shared.add("Barriers", 8 * 2 * spec.stages, "mbarriers: full, then empty", align=8)
        shared.add("Counts", 4 * spec.stages, "stored blocks of the unit of each stage", align=4)
        room = min(arch.shared_memory_per_block, arch.shared_memory_per_sm // spec.ctas_per_sm - KIB)
        if shared.size <= room:
            break
    return shared, pieces
