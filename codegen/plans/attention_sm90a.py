"""Plan of the sm_90a attention kernel: TMA producer warps, WGMMA consumer warpgroups, mbarrier rings."""

from __future__ import annotations

from dataclasses import dataclass

from codegen.arch import ARCHS, KIB
from codegen.dtypes import DTYPES
from codegen.plan import (
    Constant,
    Plan,
    Registers,
    SharedLayout,
    TensorMap,
    check_budget,
    i32,
    pointer,
    require,
    tensor_map,
)
from codegen.plans.attention_key_parts import add_parts, check_key_parts, computing, part_constants, what_streams_are
from codegen.plans.attention_order import order_params
from codegen.plans.attention_pace import check_pace, pace_constants, pace_params, pace_summary
from codegen.plans.attention_params import (
    block_constants,
    index_params,
    lse_params,
    options_summary,
    sink_params,
    size_params,
    softcap_constants,
)
from codegen.plans.attention_queries import SLICE_REGISTERS, q_slice_constants, q_slices
from codegen.plans.attention_query_order import query_order_constants, query_order_params, query_order_prologue
from codegen.plans.attention_rows import SWIZZLE, WARPGROUP_ROWS, Rows
from codegen.plans.attention_share_kv import (
    add_orders,
    check_share_kv,
    flight_owner,
    has_long_tiles,
    order_constants,
    producers,
    q_places,
    shared_summary,
    stream_owns,
)
from codegen.spec import AttentionSpec
from codegen.split import Split

WARPGROUP = 128  # threads
# By consumer warpgroups: registers of a producer and of a consumer thread. The first split that fits is taken. The
# producer gives up what the consumers take (PTX ISA, "setmaxnreg"). One consumer's are for two thread blocks on an SM;
# where there is room for one only, every thread starts with as many as it can have.
Splits = tuple[tuple[int, int], ...]
REGISTER_SPLITS: dict[int, Splits] = {
    1: ((40, 216), (32, 224)),
    2: ((56, 224), (40, 232)),
    3: ((32, 160), (56, 152)),
    4: ((32, 112), (64, 104)),
}
# Of a producer that walks through two kinds of lists, or through several entries for a step: it spilled with 32. All
# others make do with these.
LIST_PRODUCER = 40
# Addresses, loop state, softmax state. With more warpgroups there is less, and the compiler makes do with it: of three,
# 24 beside heads of 128 and steps of 96 keys were too few, and of four 24 beside heads of 64 and steps of 64, and it
# spilled in the main loop.
REGISTER_OVERHEAD = {1: 32, 2: 32, 3: 28, 4: 28}
QUERY_BLOCKS = (1, 2, 4, 8, 16, 32, 64, 128)
LEAST_ROWS = 16  # of a query block: with fewer, most of a wgmma's 64 rows would be padding
TILE_STAGES = 2  # tiles in flight: the next tile's Q is there before this one's last block is done
# Whether Q is kept in registers, places for it in shared memory, whether O leaves from there. The first that fits is
# taken: the next tile's Q should arrive early, and O have a place of its own to leave from. Where Q is in registers,
# its place is free again at once.
ARRANGEMENTS = (
    (True, TILE_STAGES, False),
    (True, 1, False),
    (False, TILE_STAGES, False),
    (False, TILE_STAGES, True),
    (False, 1, True),
)
SHARED_ARRANGEMENTS = ((True, 1, False), (False, TILE_STAGES, True), (False, 1, True))  # with share_kv
LEAST_ENTRIES = 2  # numbers of tiles alternate between two places even where Q has one (the template says why)
TILE_RING = {1: "places for the Q of a tile; entries have two", 2: "depth of the ring of tiles, and of Q"}
PART_FLOATS = "floats that a warpgroup leaves of a part of a tile"
STREAM_SHARERS = "warpgroups that share a stream"
SPLIT_PARAMS = (
    pointer("parts", "float", "unfinished O and softmax state of parts of tiles", writes=True),
    pointer("shares_done", "int", "shares done of each split tile, by warpgroup: 0 between launches", writes=True),
    i32("split_tiles", "tiles at the front that are divided between thread blocks"),
    i32("split_blocks", "thread blocks that they are divided between"),
    i32("shares", "shares of a split tile: what can be divided"),
)


def plan(spec: AttentionSpec, stem: str) -> Plan:
    """Work out every number of the kernel."""
    arch, dtype, pattern = ARCHS[spec.arch], DTYPES[spec.dtype], spec.pattern
    block = pattern.fixed_block
    m, n, d = spec.tile.m, spec.tile.n, spec.head_dim
    _check_tile(spec)
    rows = Rows.of(spec)
    parts = spec.key_parts
    streams, consumers = max(rows.streams, parts), m // WARPGROUP_ROWS * parts
    check_pace(spec, streams)
    columns = SWIZZLE // dtype.bytes
    groups = -(-d // columns)  # TMA fills a group that reaches beyond the head with zeros, and stores none of it
    q_rows, q_owner = (WARPGROUP_ROWS, "warpgroup's Q") if spec.share_kv else (m, "Q tile")
    q_bytes, kv_bytes = (length * groups * SWIZZLE for length in (q_rows, n))
    block_steps = 1 if block is None else max(1, block.kv // n)
    step_blocks = 1 if block is None else max(1, n // block.kv)

    scores, output, queries = (WARPGROUP_ROWS * size // WARPGROUP for size in (n, d, d))
    part_floats = WARPGROUP * (output + 4)  # O, two maxima and two sums of each thread
    accumulators = scores + scores // 2 + output
    # Q in registers saves a fifth of what is read from shared memory, and with it power: what limits the chip.
    kept = accumulators + queries // 2 + REGISTER_OVERHEAD[consumers]
    splits = _splits(spec, consumers, step_blocks)
    most = max(consumer for _, consumer in splits)
    has_room = kept <= most
    skips = _skips(spec, rows)
    for q_in_registers, tile_stages, shares_staging in SHARED_ARRANGEMENTS if spec.share_kv else ARRANGEMENTS:
        rings = _Rings(tile_stages, shares_staging, streams, step_blocks, skips, groups * m * SWIZZLE, kv_bytes)
        shared = _shared(spec, rings, part_floats)
        if (has_room or not q_in_registers) and shared.size <= arch.shared_memory_per_block:
            break
    # Slices of Q take what would be left, and nothing from the producers.
    left = _split(splits, consumers, accumulators)[1] - accumulators - REGISTER_OVERHEAD[consumers]
    slices = 0 if q_in_registers else q_slices(spec, left)
    accumulators += queries // 2 if q_in_registers else slices * SLICE_REGISTERS
    # All column groups of K or V by one copy.
    whole_keys = has_long_tiles(spec) and groups > 1 and d % columns == 0
    kv_box = (columns, n // step_blocks, *((groups,) if whole_keys else ()), 1, 1)
    # Where much comes from device memory, 128 bytes at a time are 0.5% faster: step 81 of docs/ladder-attention.md.
    kv_promotion = 128 if spec.share_kv and spec.paced else 256
    # Two thread blocks of one warpgroup share an SM where shared memory and registers suffice for both.
    fit_registers = accumulators + REGISTER_OVERHEAD[consumers] <= most
    fit_memory = 2 * (shared.size + KIB) <= arch.shared_memory_per_sm
    resident = 2 if consumers == 1 and fit_memory and fit_registers else 1
    registers, split = _registers(splits, consumers, resident, accumulators, arch.registers_per_thread)
    check_budget(spec, shared.size, registers)

    o_group = Constant("kOGroupBytes", WARPGROUP_ROWS * SWIZZLE, "bytes of one column group of a warpgroup's O")
    if shares_staging and not spec.share_kv:  # a warpgroup's rows of O lie where its rows of Q were
        o_group = Constant("kOGroupBytes", m * SWIZZLE, "bytes from one column group of a warpgroup's O to the next")
    constants = [
        Constant("kHeadDim", d, "elements of a head"),
        *(rows.constants(groups, block) if rows.packed else [Constant("kTileM", m, "query rows of a tile")]),
        Constant("kTileN", n, "keys of one step"),
        Constant("kStages", spec.stages, "depth of the K ring and of the V ring"),
        *(
            order_constants(streams)
            if spec.share_kv
            else [Constant("kTileStages", tile_stages, TILE_RING[tile_stages])]
        ),
        *(q_places(tile_stages) if spec.share_kv and not q_in_registers else []),
        *q_slice_constants(slices),
        *query_order_constants(spec, streams),
        *pace_constants(spec),
        Constant("kStreams", streams, f"{what_streams_are(spec)}, each with its own {stream_owns(spec)}"),
        Constant("kStreamRows", rows.stream_queries, f"{'queries' if rows.packed else 'query rows'} of a stream"),
        Constant("kConsumerWarpgroups", consumers, computing(spec)),
        *([] if spec.share_kv else [Constant("kStreamWarpgroups", consumers // streams, STREAM_SHARERS)]),
        Constant("kThreads", WARPGROUP * (1 + consumers), "warpgroup 0 produces, the others consume"),
        *split,
        Constant("kGroupColumns", columns, "columns of a group: one 128-byte swizzled row"),
        Constant(
            "kGroups", groups, "column groups of a head" + ("; TMA fills the last up with zeros" if d % columns else "")
        ),
        Constant("kQGroupBytes", q_rows * SWIZZLE, "bytes of one column group of Q"),
        Constant("kKvGroupBytes", n * SWIZZLE, "bytes of one column group of K or V"),
        o_group,
        Constant("kQBytes", q_bytes, f"bytes of a {q_owner}"),
        Constant("kKvBytes", kv_bytes, "bytes of K, or of V, of one step"),
        Constant("kStepBlocks", step_blocks, "loads of a step: listed blocks, if it holds more than one"),
        Constant("kLoadKeys", n // step_blocks, "keys of one load"),
        *(block_constants(block, block.q if rows.packed else rows.stream_queries, n) if block is not None else []),
        *([Constant("kPartFloats", part_floats, PART_FLOATS)] if spec.split_tail else []),
        *part_constants(spec, part_floats),
        *(Constant(name, value, comment) for name, (value, comment) in pattern.constants().items()),
        *softcap_constants(spec),
    ]
    params = [
        tensor_map("q_map", f"Q ({rows.dims}, batch)"),
        tensor_map(
            "k_map",
            f"K ({f'{columns} columns, kv_len, groups' if whole_keys else 'head_dim, kv_len'}, kv_heads, batch)",
        ),
        tensor_map("v_map", "V, as K"),
        tensor_map("o_map", "O, as Q"),
        *lse_params(spec),
        *sink_params(spec),
        *index_params(spec),
        *query_order_params(spec),
        *order_params(spec),
        *pace_params(spec),
        *(SPLIT_PARAMS if spec.split_tail else ()),
        *size_params(spec),
    ]
    workers = "one consumer warpgroup" if consumers == 1 else f"{consumers} consumer warpgroups"
    heads = f" of {spec.packed_heads} heads" if spec.packed_heads > 1 else ""
    shares = f"{rows.stream_queries} queries{heads}" + (f" in each of {streams} streams" if rows.streams > 1 else "")
    shares += f", their keys in {parts} parts" if parts > 1 else ""
    return Plan(
        spec=spec,
        stem=stem,
        template="attention/sm90a_shared.cu.j2" if spec.share_kv else "attention/sm90a.cu.j2",
        threads=WARPGROUP * (1 + consumers),
        blocks_per_sm=resident,
        persistent=True,
        shared=tuple(shared.regions),
        shared_bytes=shared.size,
        registers=registers,
        params=tuple(params),
        tensor_maps={
            "q_map": TensorMap((columns, *rows.box(WARPGROUP_ROWS if spec.share_kv else rows.box_queries)), SWIZZLE),
            "k_map": TensorMap(kv_box, SWIZZLE, kv_promotion),
            "v_map": TensorMap(kv_box, SWIZZLE, kv_promotion),
            "o_map": TensorMap((columns, *rows.box(rows.warpgroup_queries)), SWIZZLE),
        },
        constants=tuple(constants),
        values={
            "consumers": consumers,
            "moves_registers": bool(split),
            "ping_pong": spec.schedule == "ping_pong",
            "streams": streams,
            # Several streams have a producer warp each, which would wait for what the first one asks for early.
            "asks_early": streams == 1,
            # One of several streams may have no step: its warpgroups would have to pass on turns that they do not take.
            "first_turns": spec.schedule == "ping_pong" and streams == 1,
            "packed": rows.packed,
            "packed_heads": "kPackedHeads" if rows.asks_heads else rows.heads,
            "partial": block is not None and (rows.packed or block.q > rows.stream_queries),
            "tile_stages": tile_stages,
            "shares_staging": shares_staging,
            "q_in_registers": q_in_registers,
            "q_slices": slices,
            "whole_keys": whole_keys,
            "block_steps": block_steps,
            "step_blocks": step_blocks,
            "splits": spec.split_tail,
            "parts": parts,
            "restricts": spec.split_tail or parts > 1,
            "skips": skips,
            "softmax_scale": "p.scale_log2" if spec.softcap is None else "kCappedScale",
            "pattern_template": f"attention/patterns/{pattern.kind}.cuh.j2",
        },
        summary=(
            ("pattern", pattern.describe()),
            *options_summary(spec),
            ("tile", f"{m} {'rows' if rows.packed else 'queries'} x {n} keys: {shares}"),
            ("schedule", f"{spec.schedule}: {producers(spec)} (TMA), {workers} (WGMMA)"),
            ("pipeline", f"{spec.stages} K blocks and {spec.stages} V blocks in flight{flight_owner(spec)}"),
            *shared_summary(spec),
            *pace_summary(spec),
            (
                "grid",
                f"{('one thread block', 'two thread blocks')[resident - 1]} per SM, looping over tiles (persistent)",
            ),
            *([("last round", "its tiles are divided between the thread blocks")] if spec.split_tail else []),
        ),
        split=Split(counters=consumers, part_bytes=4 * consumers * part_floats) if spec.split_tail else None,
        flops=4 * rows.tile_queries * spec.packed_heads * parts * n * d,
        bytes=2 * kv_bytes * streams,
        tile_queries=rows.tile_queries,
        prologue=query_order_prologue(spec, stem, streams),
    )


def _check_tile(spec: AttentionSpec) -> None:
    """Refuse a tile that the kernel is not written for."""
    block, m, n = spec.pattern.fixed_block, spec.tile.m, spec.tile.n
    allowed = tuple(WARPGROUP_ROWS * count for count in REGISTER_SPLITS)
    require(m in allowed, "tile.m", f"is {m}; allowed: {', '.join(map(str, allowed))} (warpgroups of 64 rows)")
    if spec.key_parts > 1:
        check_key_parts(spec)
    turns = f"is ping_pong, where warpgroups take turns; with tile.m {m} there is one: cooperative"
    require(spec.schedule == "cooperative" or m > WARPGROUP_ROWS, "schedule", turns)
    if block is not None:
        sizes = [size for size in QUERY_BLOCKS if size * spec.packed_heads >= LEAST_ROWS]
        those = f"allowed on {spec.arch} with packed_heads {spec.packed_heads}: {', '.join(map(str, sizes))}"
        require(block.q in sizes, "pattern.block.q", f"is {block.q}; {those}")
        require(block.kv in (64, 128), "pattern.block.kv", f"is {block.kv}; allowed on {spec.arch}: 64, 128")
        rows = block.q * spec.packed_heads
        reason = f"is {m}; a tile is whole query blocks, or an equal part of one: a query block has {rows} rows"
        require(m % rows == 0 or rows % m == 0, "tile.m", reason)
    require(n % 16 == 0 and 64 <= n <= 256, "tile.n", f"is {n}; allowed: 64 to 256, multiples of 16")
    keys = spec.pattern.block_keys
    reason = f"is {n}; a step is a block of the pattern, {keys} keys, an equal part of one, or two"
    require(keys is None or keys % n == 0 or n == 2 * keys, "tile.n", reason)
    if spec.share_kv:
        check_share_kv(spec)


def _skips(spec: AttentionSpec, rows: Rows) -> bool:
    """Return whether warpgroups leave out steps of their tile that they see nothing of.

    Where they take turns, all take part in each step. A step wider than the distance of the first warpgroup from the
    last is hardly ever hidden from one of them.
    """
    apart = spec.tile.m - WARPGROUP_ROWS
    alone = rows.streams == spec.key_parts == 1 and not rows.packed and spec.schedule == "cooperative"
    return spec.pattern.banded and alone and spec.tile.n <= apart


def _splits(spec: AttentionSpec, consumers: int, step_blocks: int) -> Splits:
    """Return the splits that leave the producer enough."""
    least = LIST_PRODUCER if spec.pattern.kind == "block_lists" or step_blocks > 1 else 0
    return tuple(split for split in REGISTER_SPLITS[consumers] if split[0] >= least)


def _split(splits: Splits, consumers: int, accumulators: int) -> tuple[int, int]:
    """Return the registers of a producer and of a consumer thread: the first split that fits, or the largest one."""
    needed = accumulators + REGISTER_OVERHEAD[consumers]
    return next((split for split in splits if needed <= split[1]), max(splits, key=lambda split: split[1]))


def _registers(
    splits: Splits, consumers: int, resident: int, accumulators: int, most: int
) -> tuple[Registers, tuple[Constant, Constant] | tuple[()]]:
    """Return a consumer thread's registers, and what setmaxnreg is told, if threads do not just start with all."""
    overhead = REGISTER_OVERHEAD[consumers]
    if consumers == resident == 1:
        return Registers(accumulators=accumulators, overhead=overhead, limit=most), ()
    producer, consumer = _split(splits, consumers, accumulators)
    return Registers(accumulators=accumulators, overhead=overhead, limit=consumer), (
        Constant("kProducerRegisters", producer, "registers a producer thread keeps"),
        Constant("kConsumerRegisters", consumer, "registers a consumer thread takes"),
    )


@dataclass(frozen=True)
class _Rings:
    """What decides how much shared memory a kernel takes."""

    tile_stages: int
    shares_staging: bool  # O leaves from where its tile's Q was
    streams: int
    step_blocks: int
    skips: bool  # consumers know which blocks come
    q_bytes: int  # of a tile
    kv_bytes: int


def _shared(spec: AttentionSpec, rings: _Rings, part_floats: int) -> SharedLayout:
    """Lay out the shared memory: the rings of tiles, of K and of V, and what belongs to them."""
    columns = SWIZZLE // DTYPES[spec.dtype].bytes
    depth = spec.stages * (1 if spec.share_kv else rings.streams)
    held = f"ring of Q tiles, {spec.tile.m} rows in column groups of {columns}"
    if spec.share_kv:
        held = f"Q of each warpgroup, {WARPGROUP_ROWS} rows in column groups of {columns}"
    shared = SharedLayout()
    shared.add("Q", rings.tile_stages * rings.q_bytes, held + (", then O" if rings.shares_staging else ""))
    of_whom = "" if spec.share_kv else " of each stream"
    shared.add("K", depth * rings.kv_bytes, f"K ring{of_whom}")
    shared.add("V", depth * rings.kv_bytes, f"V ring{of_whom}")
    if not rings.shares_staging:
        shared.add("O", rings.q_bytes, "O tile on its way out")
    if spec.share_kv:
        add_orders(shared, spec, rings.streams)
        return shared
    part_barriers = add_parts(shared, spec, part_floats)
    shared.add("Barriers", 8 * (2 * rings.tile_stages + 4 * depth + part_barriers), "mbarriers", align=8)
    words = (3 if spec.split_tail else 1) + rings.streams
    entries = f"ring of tiles: number,{' shares,' if spec.split_tail else ''} numbers of steps"
    size = 4 * max(rings.tile_stages, LEAST_ENTRIES) * words
    shared.add("Entries", size, entries, align=4)
    if not rings.skips:
        shared.add("Slots", 4 * depth * rings.step_blocks, "numbers of the loads in the K rings", align=4)
    if spec.split_tail:
        shared.add("IsLast", 4 * spec.tile.m // WARPGROUP_ROWS, "whether a warpgroup's part came last", align=4)
    return shared
