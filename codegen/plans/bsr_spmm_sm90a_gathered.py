"""Plan of the sm_90a BSR x dense kernel for blocks of 16 and 32 whose tiles are many block rows high.

Rows of B that a tile has loaded are used by all block rows that have a block there: which rows a tile gathers, and in
which order it meets the columns of A, is worked out once for a matrix (:mod:`runtime.row_groups`). The product is
computed transposed, as in :mod:`codegen.plans.bsr_spmm_sm90a_narrow`.
"""

from __future__ import annotations

from codegen.arch import ARCHS
from codegen.dtypes import DTYPES
from codegen.plan import (
    Constant,
    Param,
    Plan,
    Prologue,
    Registers,
    SharedLayout,
    TensorMap,
    check_budget,
    i32,
    pointer,
    require,
)
from codegen.plans.bsr_parts import C_MAP, COLUMNS_PARAM, SWIZZLE, WARPGROUP, b_params, group_columns
from codegen.spec import BsrSpmmSpec

SIZES = (16, 32)  # rows and columns of a block that the kernel is written for
CONSUMERS = 3  # warpgroups that compute, each a third of the block rows of a tile
ROWS, COLUMNS = 384, 128  # of a tile: its accumulators fill the registers
WARPGROUP_COLUMNS = 64  # M side of one wgmma: columns of B
# 128 registers x 4 warpgroups at launch = 32 + 3 x 160 afterwards (PTX ISA, "setmaxnreg").
PRODUCER_REGISTERS, CONSUMER_REGISTERS = 32, 160
PACK_THREADS = 256
RECORD_WORDS = 16  # of a round: its block columns; the last word tells how many they are
ROUND_COLUMNS = RECORD_WORDS - 1  # block columns of a round, at most
COUNT_BITS = 8  # of a record's last word; the place in the ring is above them
TILE_ROWS = 16  # block rows that take as long as what a tile costs beside its block rows
ENTRY_BYTES = 4  # where a block of A finds its rows of B
STAGING_BYTES = 8192  # a warpgroup's, of C


def gathers_rows(spec: BsrSpmmSpec) -> bool:
    """Return whether a tile has many block rows, which the caller has grouped."""
    small = spec.mma == "wgmma" and not spec.transpose_a and spec.block.rows in SIZES
    return small and spec.tile.m > spec.block.rows


def slots(spec: BsrSpmmSpec) -> int:
    """Return the block rows of a tile."""
    return ROWS // spec.block.rows


def packet_bytes(spec: BsrSpmmSpec) -> int:
    """Return the bytes of what one copy brings for a round: a block of A for each slot, and its rows of B's place."""
    return slots(spec) * (_block_bytes(spec) + ENTRY_BYTES)


def ring_columns(spec: BsrSpmmSpec) -> int:
    """Return for how many block columns the ring has room for their rows of B: all that is left of shared memory."""
    return (ARCHS[spec.arch].shared_memory_per_block - _layout(spec, 0).size) // _column_bytes(spec)


def count_groups(block_rows: int, slots: int, column_tiles: int = 0, sm_count: int = 0) -> int:
    """Return into how many groups to divide the block rows of a matrix: as few as leave no SM idle for long.

    Args:
        block_rows: of the matrix.
        slots: rows of a group, at most.
        column_tiles: tiles of B's columns, each multiplied by every group; 0 for the fewest groups.
        sm_count: SMs that share the tiles; 0 for the fewest groups.
    """
    fewest = -(-block_rows // slots)
    if fewest == 0 or column_tiles <= 0 or sm_count <= 0:
        return fewest

    def duration(groups: int) -> int:
        waves = -(-groups * column_tiles // sm_count)
        return waves * (-(-block_rows // groups) + TILE_ROWS)

    return min(range(fewest, min(2 * fewest, block_rows) + 1), key=duration)


def _block_bytes(spec: BsrSpmmSpec) -> int:
    return spec.block.rows * spec.block.cols * DTYPES[spec.dtype].bytes


def _column_bytes(spec: BsrSpmmSpec) -> int:
    """Return the bytes of the rows of B that meet a block column, as wide as a tile."""
    return spec.block.cols * COLUMNS * DTYPES[spec.dtype].bytes


def _stage_bytes(spec: BsrSpmmSpec) -> int:
    """Return the bytes from one packet in shared memory to the next: whole repeats of the swizzle."""
    repeat = 8 * spec.block.cols * DTYPES[spec.dtype].bytes
    return -(-packet_bytes(spec) // repeat) * repeat


def _layout(spec: BsrSpmmSpec, columns: int) -> SharedLayout:
    """Lay out shared memory, with room for the rows of B of so many block columns."""
    cols, width = spec.block.cols, COLUMNS // group_columns(spec)
    shared = SharedLayout()
    doc = f"ring of rows of B, {columns} x {width} column groups of {cols} rows of 128 bytes"
    shared.add("B", columns * _column_bytes(spec), doc)
    shared.add("Zeros", _column_bytes(spec), "rows of zeros: what a slot without a block multiplies")
    shared.add("C", CONSUMERS * STAGING_BYTES, "C of some slots of each warpgroup")
    shared.add("Packets", spec.stages * _stage_bytes(spec), "ring of packets: blocks of A, where they find rows of B")
    shared.add("Barriers", 2 * 8 * spec.stages, "mbarriers: full, then empty", align=8)
    return shared


def plan(spec: BsrSpmmSpec, stem: str) -> Plan:
    """Work out every number of the kernel."""
    dtype = DTYPES[spec.dtype]
    rows, cols = spec.block.rows, spec.block.cols
    m, n, k = spec.tile.m, spec.tile.n, spec.tile.k
    require(cols in SIZES, "block.cols", f"is {cols}; allowed where block.rows is {rows}: 16, 32")
    require(m == ROWS, "tile.m", f"is {m}; allowed where block.rows is {rows}: {rows}, or {ROWS}, rows gathered")
    require(n == COLUMNS, "tile.n", f"is {n}; allowed where tile.m is {ROWS}: {COLUMNS}")
    require(k == cols, "tile.k", f"is {k}; a step is one block of A deep, block.cols is {cols}: {cols}")
    require(spec.cluster == 1, "cluster", f"is {spec.cluster}; allowed where block.rows is {rows}: 1")
    require(spec.blocks_per_sm == 1, "blocks_per_sm", f"is {spec.blocks_per_sm}; allowed where tile.m is {ROWS}: 1")
    for option in ("accumulate", "balanced"):
        require(not getattr(spec, option), option, f"is true, but not written for tile.m {ROWS}")
    require(spec.epilogue is None, "epilogue", f"is given, but not written for tile.m {ROWS}")
    layout = spec.b_layout
    require(layout == "row_major", "b_layout", f"is {layout}, but not written for tile.m {ROWS}: row_major")
    require(spec.stages >= 2, "stages", "is 1; one packet is still being read while the next is waited for: 2 or more")

    columns = ring_columns(spec)
    fewest = min(ROUND_COLUMNS, slots(spec))
    shared = _layout(spec, max(columns, fewest))
    warpgroup_slots, staged = slots(spec) // CONSUMERS, STAGING_BYTES // (rows * COLUMNS * dtype.bytes)
    groups, accumulators = n // WARPGROUP_COLUMNS, rows * WARPGROUP_COLUMNS // WARPGROUP
    registers = Registers(accumulators=warpgroup_slots * groups * accumulators, overhead=32, limit=CONSUMER_REGISTERS)
    check_budget(spec, shared.size, registers)

    constants = (
        Constant("kBlockRows", rows, "rows of a block of A"),
        Constant("kBlockCols", cols, "columns of a block of A"),
        Constant("kTileSlots", slots(spec), "block rows of a C tile"),
        Constant("kTileN", n, "columns of a C tile"),
        Constant("kStages", spec.stages, "rounds whose packets have a place"),
        Constant("kRingColumns", columns, "block columns whose rows of B have a place"),
        Constant("kRoundColumns", ROUND_COLUMNS, "block columns of a round, at most"),
        Constant("kThreads", (CONSUMERS + 1) * WARPGROUP, "warpgroups that consume, then one that produces"),
        Constant("kConsumers", CONSUMERS, "warpgroups that compute"),
        Constant("kProducerWarps", WARPGROUP // 32, "warps that load"),
        Constant("kProducerRegisters", PRODUCER_REGISTERS, "registers a producer thread keeps"),
        Constant("kConsumerRegisters", CONSUMER_REGISTERS, "registers a consumer thread takes"),
        Constant("kPackThreads", PACK_THREADS, "threads of a block that packs"),
        Constant("kSlots", warpgroup_slots, "block rows of a warpgroup"),
        Constant("kStagingSlots", staged, "of these, how many leave at a time"),
        Constant("kGroupColumns", WARPGROUP_COLUMNS, "columns of a group: the M side of one wgmma"),
        Constant("kTileGroups", groups, "column groups of a tile"),
        Constant("kAccumulators", accumulators, "accumulators of a thread for one block row and column group"),
        Constant("kARowBytes", cols * dtype.bytes, "bytes of a row of a block of A"),
        Constant("kABlockBytes", _block_bytes(spec), "bytes of a block of A"),
        Constant("kPacketBytes", packet_bytes(spec), "bytes of a packet"),
        Constant("kStageBytes", _stage_bytes(spec), "bytes from one packet to the next in shared memory"),
        Constant("kBColumnBytes", _column_bytes(spec), "bytes of the rows of B that meet a block column"),
        Constant("kBGroupBytes", cols * SWIZZLE, "bytes of one column group of them"),
        Constant("kCGroupBytes", rows * SWIZZLE, "bytes of one column group of a block row of C"),
    )
    params = (
        *b_params(spec, "K"),
        C_MAP,
        *_order_params(),
        COLUMNS_PARAM,
        i32("whole_rows", "rows of B, from the first, of which one copy brings all column groups of a tile"),
    )
    return Plan(
        spec=spec,
        stem=stem,
        template="bsr_spmm/sm90a_gathered.cu.j2",
        threads=(CONSUMERS + 1) * WARPGROUP,
        blocks_per_sm=1,
        persistent=True,
        shared=tuple(shared.regions),
        shared_bytes=shared.size,
        registers=registers,
        params=params,
        tensor_maps={
            "b_map": TensorMap((WARPGROUP_COLUMNS, cols), SWIZZLE),
            "b_groups_map": TensorMap((WARPGROUP_COLUMNS, cols, groups), SWIZZLE),
            "c_map": TensorMap((WARPGROUP_COLUMNS, rows), SWIZZLE),
        },
        constants=constants,
        values={"mma_n": rows, "a_row_bytes": cols * dtype.bytes},
        summary=(
            ("blocks of A", f"{rows} x {cols}"),
            (
                "tile",
                f"{ROWS} x {n} of C, computed transposed: {slots(spec)} block rows, grouped beforehand by the columns "
                "they share",
            ),
            ("schedule", f"{spec.schedule}: one producer warpgroup (TMA), {CONSUMERS} consumer warpgroups (WGMMA)"),
            ("before", "A is packed in the order in which its blocks are used, to device memory of its size or more"),
            ("pipeline", f"ring of the rows of B that {columns} block columns meet, {spec.stages} packets of A"),
            ("grid", "one thread block per SM, looping over tiles (persistent), groups of block rows fastest"),
        ),
        flops=2 * m * n * k,
        bytes=slots(spec) * _block_bytes(spec) + ROUND_COLUMNS * _column_bytes(spec),
        prologue=Prologue(f"{stem}_pack_a", PACK_THREADS),
    )


def _order_params() -> tuple[Param, ...]:
    """Return the parameters that say what is where, and what is multiplied when."""
    return (
        pointer("a", "uint4", "stored blocks of A"),
        pointer("rounds", "int", "16 words of each round: block columns; their number + first place in the ring << 8"),
        pointer("entries", "int2", "of each round and slot: stored block, which column of the round it meets; or -1"),
        pointer("round_starts", "int", "first round of each group, and one more"),
        pointer("slot_rows", "int", "of each group and slot: block row, or -1"),
        pointer("packets", "uint4", "of each round: blocks of A and the places of their rows of B", writes=True),
        i32("groups", "groups of block rows"),
        i32("tiles", "groups * column tiles"),
    )
