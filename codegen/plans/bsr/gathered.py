"""Shared by the plans of sm_90a BSR x dense kernels whose tiles gather block rows of 16 or 32 rows.

All block rows of a tile with a block in a column use the same loaded rows of B. The assignment of block rows to tiles
and the order of the columns of A are computed once per matrix (:mod:`runtime.prepare.row_clusters`).
"""

from __future__ import annotations

from codegen.arch import ARCHS
from codegen.dtypes import DTYPES
from codegen.flags import Flags
from codegen.plan import (
    Constant,
    Param,
    Plan,
    Prologue,
    Registers,
    Ring,
    SharedLayout,
    TensorMap,
    check_budget,
    i32,
    pointer,
    require,
    require_left_out,
)
from codegen.plans.bsr.parts import C_MAP, COLUMNS_PARAM, SWIZZLE, WARPGROUP, b_params
from codegen.plans.bsr.spmm_launch import arguments
from codegen.preparation import RECORD_WORDS, ROUND_COLUMNS, GatheredLayout, round_columns
from codegen.select.default_tables import GATHERED_ROWS
from codegen.spec import BsrSpmmSpec
from codegen.tile_rules import OneOf, Rule, check_tile

BLOCK_ROWS = {"mma": 16, "wgmma": 32}  # supported rows per block
BLOCK_COLUMNS = (16, 32)
CONSUMERS = 3  # warpgroups that compute
ROWS, COLUMNS = GATHERED_ROWS, 128  # per tile: its accumulators fill the registers
GROUP_COLUMNS = 64  # per column group: rows of 128 bytes in shared memory
CLUSTER = 2  # thread blocks that load A together
THREADS = (CONSUMERS + 1) * WARPGROUP
# 128 registers x 4 warpgroups at launch = 32 + 3 x 160 afterwards (PTX ISA, "setmaxnreg").
PRODUCER_REGISTERS, CONSUMER_REGISTERS = 32, 160
CONSUMERS_TAKE = "registers per consumer thread; 32 + 3 x 160 equals the 4 x 128 at launch"
PACK_THREADS = 256
CHUNK_BYTES = 16  # of A that a thread packs at a time
COLUMN_WARPS = WARPGROUP // 32 - 1  # producer warps for B; the last producer warp loads A
RECORDS = 4  # of rounds that a producer warp prefetches
ENTRY_BYTES = 4  # per slot of a packet: the location of its block's rows of B, or half of that for two rounds
STAGING_BYTES = 8192  # of C, per warpgroup


def gathers_rows(spec: BsrSpmmSpec) -> bool:
    """Whether a tile has many block rows, grouped by the caller."""
    if spec.mma == "wgmma":
        return not spec.transpose_a and spec.block.rows in BLOCK_ROWS.values() and spec.tile.m > spec.block.rows
    return spec.mma == "mma" and spec.copy_ == "tma"


def slots(spec: BsrSpmmSpec) -> int:
    """Block rows per tile."""
    return ROWS // spec.block.rows


def packet_bytes(spec: BsrSpmmSpec) -> int:
    """Most bytes of A per round: a block for each slot, and the locations of its rows of B."""
    needed = slots(spec) * (block_bytes(spec) + ENTRY_BYTES)
    unit = 16 * CLUSTER  # each thread block of the cluster copies a part
    return -(-needed // unit) * unit


def ring_columns(spec: BsrSpmmSpec) -> int:
    """Block columns whose rows of B fit the ring, which uses the rest of shared memory."""
    return (ARCHS[spec.arch].shared_memory_per_block - _layout(spec, 0).size) // column_bytes(spec)


def block_bytes(spec: BsrSpmmSpec) -> int:
    """Bytes of a block of A."""
    return spec.block.rows * spec.block.cols * DTYPES[spec.dtype].bytes


def column_bytes(spec: BsrSpmmSpec) -> int:
    """Bytes of the rows of B of a block column, for the columns of a tile."""
    return spec.block.cols * COLUMNS * DTYPES[spec.dtype].bytes


TILE: tuple[Rule[BsrSpmmSpec], ...] = (
    OneOf("m", lambda spec: (ROWS,), lambda spec, sizes: f"allowed with mma and tma: {sizes}, rows gathered"),
    OneOf("n", lambda spec: (COLUMNS,), lambda spec, sizes: f"allowed where tile.m is {ROWS}: {sizes}"),
    OneOf(
        "k",
        lambda spec: (spec.block.cols,),
        lambda spec, sizes: f"a step is one block of A deep, block.cols is {spec.block.cols}: {sizes}",
    ),
)


def check_fields(spec: BsrSpmmSpec) -> None:
    """Reject fields that kernels with gathered block rows do not support."""
    rows, cols, written = spec.block.rows, spec.block.cols, BLOCK_ROWS[spec.mma]
    if spec.mma == "wgmma":
        gathered = f"{ROWS}, rows gathered" + ("" if rows == written else ", with mma: mma and copy: tma")
        allowed = rows == written and spec.tile.m == ROWS
        require(allowed, "tile.m", f"is {spec.tile.m}; allowed where block.rows is {rows}: {rows}, or {gathered}")
    require(rows == written, "block.rows", f"is {rows}; allowed with mma and tma: {written}")
    require(cols in BLOCK_COLUMNS, "block.cols", f"is {cols}; allowed where block.rows is {rows}: 16, 32")
    require(not spec.transpose_a, "transpose_a", f"is true; not supported with tile.m {ROWS}")
    check_tile(spec, TILE)
    require(spec.ctas_per_sm == 1, "ctas_per_sm", f"is {spec.ctas_per_sm}; allowed where tile.m is {ROWS}: 1")
    require_left_out(spec, ("accumulate", "scheduler"), f"tile.m {ROWS}")
    require(spec.epilogue is None, "epilogue", f"is set; not supported with tile.m {ROWS}")
    order = spec.b_layout
    require(order == "row_major", "b_layout", f"is {order}; allowed with tile.m {ROWS}: row_major")
    require(spec.stages >= 2, "stages", "is 1; a warpgroup reads one packet while it waits for the next: 2 or more")


def build(
    spec: BsrSpmmSpec,
    stem: str,
    *,
    template: str,
    accumulators: int,
    constants: tuple[Constant, ...],
    flags: Flags,
    a_element: str,
    tile: str,
    consumers: str,
) -> Plan:
    """Plan of a kernel after the check of its fields.

    Args:
        spec: spec of the kernel.
        stem: name of the kernel.
        template: template of the kernel.
        accumulators: accumulators per consumer thread.
        constants: constants of the consumers, added after those of the producer.
        flags: template parameters.
        a_element: C++ type through which the kernel reads A.
        tile: description of a tile in the source.
        consumers: description of the consumers in the source.
    """
    rows, cols, groups = spec.block.rows, spec.block.cols, COLUMNS // GROUP_COLUMNS
    shared = _layout(spec, max(ring_columns(spec), min(ROUND_COLUMNS, slots(spec))))  # room for at least one round
    registers = Registers(accumulators=accumulators, overhead=32, limit=CONSUMER_REGISTERS)
    check_budget(spec, shared.size, registers)
    return Plan(
        spec=spec,
        stem=stem,
        template=template,
        threads=THREADS,
        ctas_per_sm=1,
        persistent=True,
        shared=tuple(shared.regions),
        shared_bytes=shared.size,
        registers=registers,
        params=_params(spec, a_element),
        tensor_maps={
            "b_map": TensorMap((GROUP_COLUMNS, cols), SWIZZLE),
            "b_groups_map": TensorMap((GROUP_COLUMNS, cols, groups), SWIZZLE),
            "c_map": TensorMap((GROUP_COLUMNS, rows), SWIZZLE),
        },
        constants=(*_constants(spec), *constants),
        flags=flags,
        grid_summary="one thread block per SM, looping over tiles (persistent), groups of block rows fastest",
        summary=_summary(spec, tile, consumers),
        flops=2 * ROWS * COLUMNS * cols,
        bytes=packet_bytes(spec) // CLUSTER + ROUND_COLUMNS * column_bytes(spec),
        arguments=arguments,
        gathered=GatheredLayout(slots(spec), ring_columns(spec), packet_bytes(spec)),
        cluster=CLUSTER,
        prologue=Prologue(f"{stem}_pack_a", PACK_THREADS),
    )


def _constants(spec: BsrSpmmSpec) -> tuple[Constant, ...]:
    """Constants of the producer, and of both producer and consumers."""
    chunks = block_bytes(spec) // CHUNK_BYTES
    assert slots(spec) * chunks % PACK_THREADS == 0, "threads that pack have equally many chunks"
    return (
        Constant("kBlockRows", spec.block.rows, "rows of a block of A"),
        Constant("kBlockCols", spec.block.cols, "columns of a block of A"),
        Constant("kTileSlots", slots(spec), "slots per C tile, one for each block row"),
        Constant("kTileN", COLUMNS, "columns of a C tile"),
        Constant("kCluster", CLUSTER, "thread blocks that load A together: neighboring column tiles of a group"),
        Constant("kStages", spec.stages, "depth of the ring of packets, one round each"),
        Constant("kRingColumns", ring_columns(spec), "slots of the ring of rows of B, one block column each"),
        Constant("kRoundColumns", ROUND_COLUMNS, "most block columns per round"),
        Constant("kRecordWords", RECORD_WORDS, "words per record of a round"),
        Constant("kRecords", RECORDS, "records that a producer warp loads ahead"),
        Constant("kThreads", THREADS, "warpgroups that consume, then one that produces"),
        Constant("kProducerWarps", WARPGROUP // 32, "producer warps"),
        Constant("kColumnWarps", COLUMN_WARPS, "producer warps that load rows of B; the last warp loads packets"),
        Constant(
            "kWarpColumns",
            -(-round_columns(ring_columns(spec)) // COLUMN_WARPS),
            "most columns of a round per such warp",
        ),
        Constant("kProducerRegisters", PRODUCER_REGISTERS, "registers per producer thread"),
        Constant("kConsumerRegisters", CONSUMER_REGISTERS, CONSUMERS_TAKE),
        Constant("kPackThreads", PACK_THREADS, "threads per block of the prologue that packs A"),
        Constant("kPackChunks", slots(spec) * chunks // PACK_THREADS, "chunks of A per thread of the prologue"),
        Constant("kBlockChunks", chunks, "16-byte chunks per block of A"),
        Constant("kGroupColumns", GROUP_COLUMNS, "columns of a column group"),
        Constant("kTileGroups", COLUMNS // GROUP_COLUMNS, "column groups of a tile"),
        Constant("kABlockBytes", block_bytes(spec), "bytes of a block of A"),
        Constant("kPacketBytes", packet_bytes(spec), "most bytes per packet"),
        Constant("kStageBytes", _stage_bytes(spec), "stride between packets in shared memory, in bytes"),
        Constant("kBColumnBytes", column_bytes(spec), "bytes of the rows of B that match a block column"),
        Constant("kBGroupBytes", spec.block.cols * SWIZZLE, "bytes per column group of these rows"),
    )


def _params(spec: BsrSpmmSpec, a_element: str) -> tuple[Param, ...]:
    """Parameters: matrices, and the rounds of each cluster of block rows."""
    return (
        *b_params(spec, "K"),
        C_MAP,
        pointer("a", a_element, "stored blocks of A"),
        pointer("rounds", "int", "records: 15 block columns, then a StepHeader"),
        pointer("entries", "int2", "for each round and slot: stored block, ring slot of its rows of B; or -1"),
        pointer("round_starts", "int", "first round of each group, then the end of the last"),
        pointer("slot_rows", "int", "for each group and slot: block row, or -1"),
        pointer("packets", "uint4", "for each round: blocks of A and the ring slots of their rows of B", writes=True),
        i32("groups", "groups of block rows"),
        i32("tiles", "groups * clusters of column tiles"),
        COLUMNS_PARAM,
        i32("whole_rows", "leading rows of B for which one copy loads all column groups of a tile"),
    )


def _summary(spec: BsrSpmmSpec, tile: str, consumers: str) -> tuple[tuple[str, str], ...]:
    """Summary of the kernel, for ``explain`` and the source."""
    return (
        ("blocks of A", f"{spec.block.rows} x {spec.block.cols}"),
        ("tile", f"{tile}: {slots(spec)} block rows, grouped in advance by the columns they share"),
        ("schedule", f"{spec.schedule}: one producer warpgroup (TMA), {consumers}"),
        ("cluster", f"{CLUSTER} adjacent tiles load A once"),
        ("before", "a prologue packs the blocks of A in the order of use, into device memory of at least A's size"),
        (
            "pipeline",
            f"ring of the rows of B of {ring_columns(spec)} block columns, {spec.stages} packets of A",
        ),
    )


def _stage_bytes(spec: BsrSpmmSpec) -> int:
    """Stride between packets in shared memory, in bytes: whole repeats of the swizzle."""
    repeat = 8 * spec.block.cols * DTYPES[spec.dtype].bytes
    return -(-packet_bytes(spec) // repeat) * repeat


def _layout(spec: BsrSpmmSpec, columns: int) -> SharedLayout:
    """Shared memory layout, with room for the rows of B of ``columns`` block columns."""
    cols, width = spec.block.cols, COLUMNS // GROUP_COLUMNS
    shared = SharedLayout()
    doc = f"ring of rows of B, {columns} x {width} column groups of {cols} rows of {SWIZZLE} bytes"
    shared.add("B", columns * column_bytes(spec), doc, ring=Ring(spec.stages, "full[i]", "rows[i]"))
    shared.add("Zeros", column_bytes(spec), "rows of zeros, the operand of slots without a block")
    shared.add("C", CONSUMERS * STAGING_BYTES, "staging of C", stores=True)
    doc, packets = (
        "ring of packets: blocks of A and locations of their rows of B",
        Ring(spec.stages, "full[i]", "packet[i]"),
    )
    shared.add("Packets", spec.stages * _stage_bytes(spec), doc, ring=packets)
    shared.add("Barriers", 3 * 8 * spec.stages, "mbarriers: full, of packets, of rows of B", align=8)
    return shared
