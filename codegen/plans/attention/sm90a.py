"""Plan of the sm_90a attention kernel: TMA producer warps, WGMMA consumer warpgroups, mbarrier rings."""

from __future__ import annotations

from dataclasses import replace

from codegen.arch import ARCHS, KIB
from codegen.block_sizes import KEYS, query_sizes
from codegen.plan import Constant, Plan, Registers, Ring, SharedLayout, check_budget, require
from codegen.plans.attention import e4m3_cache, fp8
from codegen.plans.attention import sm90a_text as text
from codegen.plans.attention.expressions import expression_registers
from codegen.plans.attention.kv_splits import TILE as KV_SPLITS_TILE
from codegen.plans.attention.kv_splits import add_partials, check_kv_splits
from codegen.plans.attention.launch import arguments, workspace_bytes
from codegen.plans.attention.lockstep import check_lockstep
from codegen.plans.attention.order import is_ordered
from codegen.plans.attention.params import block_of, is_step_of_pattern, step_of_pattern
from codegen.plans.attention.queries import SLICE_COLUMNS, SLICE_REGISTERS, q_slices
from codegen.plans.attention.query_order import query_order_prologue
from codegen.plans.attention.rows import SWIZZLE, WARPGROUP_ROWS
from codegen.plans.attention.share_kv import TILE as SHARE_KV_TILE
from codegen.plans.attention.share_kv import add_orders, check_share_kv_loads
from codegen.plans.attention.sizes import WARPGROUP, Sizes
from codegen.plans.attention.sm90a_flags import flags
from codegen.plans.attention.sm90a_text import Arrangement
from codegen.plans.lengths import check_layout, clears_values
from codegen.spec import AttentionSpec
from codegen.stream_k import StreamK
from codegen.tile_rules import Fits, OneOf, Rule, check_tile, multiples

# By consumer warpgroups: registers per producer and per consumer thread; the first split that fits is used. The
# producer releases the registers that the consumers take (PTX ISA, "setmaxnreg"). The split for one consumer is for two
# thread blocks per SM; if only one fits, every thread starts with the maximum.
Splits = tuple[tuple[int, int], ...]
REGISTER_SPLITS: dict[int, Splits] = {
    1: ((40, 216), (32, 224)),
    2: ((56, 224), (40, 232)),
    3: ((32, 160), (56, 152)),
    4: ((32, 112), (64, 104)),
}
# Least registers of a producer that iterates over two kinds of lists, or over several entries per step: it spilled with
# 32. All other producers fit these.
LIST_PRODUCER = 40
# Addresses, loop state, softmax state. With more warpgroups there are fewer registers, and the compiler copes. With 24
# it spilled in the main loop: for three warpgroups with heads of 128 and steps of 96 keys, and for four with heads of
# 64 and steps of 64.
REGISTER_OVERHEAD = {1: 32, 2: 32, 3: 28, 4: 28}
# For a softcap with shared K/V loads: without these, a step of 128 keys spilled with three warpgroups and heads of 64.
SHARED_SOFTCAP = 8
TILE_STAGES = 2  # tiles in flight: the next tile's Q arrives before this tile's last block is done
# (q_in_registers, tile_stages, o_aliases_q), best first; the first that fits is used. Two stages prefetch the next
# tile's Q; a separate region for O allows storing it meanwhile. Q in registers frees its stage at once.
ARRANGEMENTS = (
    Arrangement(True, TILE_STAGES, False),
    Arrangement(True, 1, False),
    Arrangement(False, TILE_STAGES, False),
    Arrangement(False, TILE_STAGES, True),
    Arrangement(False, 1, True),
)
SHARED_ARRANGEMENTS = (  # with share_kv_loads
    Arrangement(True, 1, False),
    Arrangement(False, TILE_STAGES, True),
    Arrangement(False, 1, True),
)
FP8_ARRANGEMENTS = (*(at for at in ARRANGEMENTS if not at.o_aliases_q), Arrangement(False, 1, False))
CODES_ARRANGEMENTS = (Arrangement(True, 1, False),)
STEP_KEYS = range(64, 257, 16)
LEAST_ENTRIES = 2  # indices of tiles alternate between two entries even if Q has one (the template explains why)


def plan(spec: AttentionSpec, stem: str) -> Plan:
    """Plan of the kernel of a spec."""
    check_layout(spec)
    _check_tile(spec)
    e4m3_cache.check_e4m3_cache(spec)
    sizes = Sizes.of(spec)
    check_lockstep(spec, sizes.sub_tiles)
    at, shared, accumulators = _arrange(sizes)
    arch, consumers = ARCHS[spec.arch], sizes.consumers
    splits = _splits(sizes)
    most = max(consumer for _, consumer in splits)
    # Two thread blocks of one warpgroup share an SM if shared memory and registers suffice for both.
    overhead = _overhead(sizes)
    fit_registers = accumulators + overhead <= most
    fit_memory = 2 * (shared.size + KIB) <= arch.shared_memory_per_sm
    resident = 2 if consumers == 1 and fit_memory and fit_registers else 1
    registers, setmaxnreg = _registers(sizes, splits, resident, accumulators, arch.registers_per_thread)
    check_budget(spec, shared.size, registers)
    resident_blocks = "one thread block" if resident == 1 else "two thread blocks"
    stream_k = StreamK(consumers, 4 * consumers * sizes.partial_floats) if spec.stream_k_tail else None
    is_dynamic = is_ordered(spec) or spec.query_grouping == "search"
    pair_flops = 4 * spec.head_dim * spec.pack_gqa * spec.kv_splits
    return Plan(
        spec=spec,
        stem=stem,
        template="attention/sm90a.cu.j2",
        threads=WARPGROUP * (1 + consumers),
        ctas_per_sm=resident,
        persistent=True,
        shared=tuple(shared.regions),
        shared_bytes=shared.size,
        registers=registers,
        params=text.params(sizes),
        tensor_maps=text.tensor_maps(sizes),
        constants=text.constants(sizes, at, setmaxnreg, registers),
        flags=flags(sizes, at, uses_setmaxnreg=bool(setmaxnreg)),
        grid_summary=f"{resident_blocks} per SM, looping over tiles (persistent)",
        summary=text.summary(sizes),
        stream_k=stream_k,
        flops=pair_flops * sizes.rows.tile_queries * spec.tile.n,
        bytes=2 * sizes.kv_bytes * sizes.sub_tiles // (2 if spec.has_codes else 1),
        arguments=arguments,
        dynamic_scheduler=is_dynamic,
        workspace_bytes=workspace_bytes(spec, stream_k, dynamic=is_dynamic),
        tile_queries=sizes.rows.tile_queries,
        sub_tiles=sizes.sub_tiles,
        prologue=query_order_prologue(spec, stem, sizes.sub_tiles),
    )


def _arrange(sizes: Sizes) -> tuple[Arrangement, SharedLayout, int]:
    """First arrangement that fits, its shared memory, and the accumulators and fragments per thread."""
    spec = sizes.spec
    scores, output, queries = (
        WARPGROUP_ROWS * size // WARPGROUP for size in (spec.tile.n, spec.head_dim, spec.head_dim)
    )
    accumulators = scores + scores // 2 + output
    if fp8.is_fp8(spec):
        accumulators, queries = fp8.registers(spec), queries // 2
    # Q in registers saves a fifth of the shared memory reads and their power, which limits the chip.
    kept = accumulators + queries // 2 + _overhead(sizes)
    splits = _splits(sizes)
    has_room = kept <= max(consumer for _, consumer in splits)
    for at in _arrangements(spec):
        shared = _shared(sizes, at)
        if (has_room or not at.q_in_registers) and shared.size <= ARCHS[spec.arch].shared_memory_per_block:
            break
    if fp8.is_fp8(spec):
        return at, shared, accumulators + (queries // 2 if at.q_in_registers else 0)
    if at.q_in_registers:
        return replace(at, q_slices=spec.head_dim // SLICE_COLUMNS), shared, accumulators + queries // 2
    # Slices of Q use free registers of the consumers; the split with the producer is unchanged.
    left = _split(splits, accumulators + _overhead(sizes))[1] - accumulators - _overhead(sizes)
    slices = q_slices(spec, left)
    return replace(at, q_slices=slices), shared, accumulators + slices * SLICE_REGISTERS


def _arrangements(spec: AttentionSpec) -> tuple[Arrangement, ...]:
    """Arrangements of Q and O, best first. O of FP8 inputs is wider than Q and has its own region."""
    if spec.share_kv_loads:
        return SHARED_ARRANGEMENTS
    if spec.has_codes:  # the converted Q is in registers, and codes take the memory of a stage
        return CODES_ARRANGEMENTS
    return FP8_ARRANGEMENTS if fp8.is_fp8(spec) else ARRANGEMENTS


def _is_whole_query_blocks(spec: AttentionSpec) -> bool:
    """Whether a tile consists of whole query blocks, or is an equal part of one."""
    block = spec.pattern.fixed_block
    rows = spec.tile.m if block is None else block.q * spec.pack_gqa
    return spec.tile.m % rows == 0 or rows % spec.tile.m == 0


def _rows_of_block(spec: AttentionSpec) -> str:
    rows = block_of(spec).q * spec.pack_gqa
    return f"a tile is whole query blocks, or an equal part of one: a query block has {rows} rows"


HEIGHTS: Rule[AttentionSpec] = OneOf(
    "m",
    lambda spec: tuple(WARPGROUP_ROWS * count for count in REGISTER_SPLITS),
    lambda spec, sizes: f"allowed: {sizes} (warpgroups of 64 rows)",
)
STEPS: tuple[Rule[AttentionSpec], ...] = (
    Fits("m", _is_whole_query_blocks, _rows_of_block),
    OneOf("n", lambda spec: STEP_KEYS, lambda spec, sizes: f"allowed: {multiples(STEP_KEYS)}"),
    Fits("n", is_step_of_pattern, lambda spec: f"a step is {step_of_pattern(spec)}"),
)
TILE = (HEIGHTS, *STEPS, *KV_SPLITS_TILE, *SHARE_KV_TILE, *fp8.TILE)


def _check_tile(spec: AttentionSpec) -> None:
    """Reject a tile that the kernel cannot support."""
    block, m = spec.pattern.fixed_block, spec.tile.m
    check_tile(spec, (HEIGHTS,))
    if spec.kv_splits > 1:
        check_kv_splits(spec)
    turns = f"is ping_pong, which needs several warpgroups; tile.m {m} has one: cooperative"
    require(spec.schedule == "cooperative" or m > WARPGROUP_ROWS, "schedule", turns)
    if block is not None:
        sizes, key_sizes = query_sizes(spec.pack_gqa), KEYS["wgmma"]
        those = f"allowed on {spec.arch} with pack_gqa {spec.pack_gqa}: {', '.join(map(str, sizes))}"
        require(block.q in sizes, "pattern.block.q", f"is {block.q}; {those}")
        those_keys = f"is {block.kv}; allowed on {spec.arch}: {', '.join(map(str, key_sizes))}"
        require(block.kv in key_sizes, "pattern.block.kv", those_keys)
    check_tile(spec, STEPS)
    if spec.share_kv_loads:
        check_share_kv_loads(spec)
    if fp8.is_fp8(spec):
        fp8.check_fp8_tile(spec)


def _splits(sizes: Sizes) -> Splits:
    """Register splits with enough registers for the producer; for FP8, the split in which neither side spills."""
    spec, every = sizes.spec, REGISTER_SPLITS[sizes.consumers]
    if fp8.is_fp8(spec):
        return (max(every) if fp8.producer_has_more(sizes) else min(every),)
    least = LIST_PRODUCER if spec.pattern.lists > 1 or sizes.step_blocks > 1 else 0
    return tuple(split for split in every if split[0] >= least)


def _overhead(sizes: Sizes) -> int:
    """Registers to allow per consumer thread besides accumulators and fragments."""
    spec = sizes.spec
    softcap = SHARED_SOFTCAP if spec.share_kv_loads and spec.softcap is not None else 0
    return REGISTER_OVERHEAD[sizes.consumers] + softcap + expression_registers(spec)


def _split(splits: Splits, needed: int) -> tuple[int, int]:
    """Registers per producer and per consumer thread: the first split that fits, else the largest one."""
    return next((split for split in splits if needed <= split[1]), max(splits, key=lambda split: split[1]))


def _registers(
    sizes: Sizes, splits: Splits, resident: int, accumulators: int, most: int
) -> tuple[Registers, tuple[Constant, Constant] | tuple[()]]:
    """Register budget per consumer thread, and setmaxnreg values (none if all registers are allocated at launch)."""
    overhead, expression = _overhead(sizes), expression_registers(sizes.spec)
    if sizes.consumers == resident == 1:
        return Registers(accumulators, overhead, most, expression), ()
    producer, consumer = _split(splits, accumulators + overhead)
    warpgroups = 1 + sizes.consumers
    at_launch = (producer + sizes.consumers * consumer) // warpgroups
    sum_of = f"{producer} + {sizes.consumers} x {consumer} are the {warpgroups} x {at_launch} at launch"
    return Registers(accumulators, overhead, consumer, expression), (
        Constant("kProducerRegisters", producer, "registers per producer thread"),
        Constant("kConsumerRegisters", consumer, f"registers per consumer thread; {sum_of}"),
    )


def _kv_ring(sizes: Sizes, name: str, depth: int) -> Ring:
    """Ring of K or V."""
    full, empty = "[i]", "[i]"
    if sizes.spec.share_kv_loads:
        full = "[u][j]"
    elif sizes.sub_tiles > 1:
        full = empty = "[s][i]"
    return Ring(depth, f"{name}_full{full}", f"{name}_empty{empty}")


def _shared(sizes: Sizes, at: Arrangement) -> SharedLayout:
    """Shared memory layout: the rings of tiles, K and V, and their barriers and metadata."""
    spec = sizes.spec
    q_bytes = sizes.groups * spec.tile.m * SWIZZLE
    depth = spec.stages * (1 if spec.share_kv_loads else sizes.sub_tiles)
    held = f"ring of Q tiles, {spec.tile.m} rows in column groups of {sizes.columns}"
    if spec.share_kv_loads:
        held = f"Q of each warpgroup, {WARPGROUP_ROWS} rows in column groups of {sizes.columns}"
    shared = SharedLayout()
    tiles = None if spec.share_kv_loads else Ring(at.tile_stages, "q_full[i]", "q_empty[i]")
    q_doc = held + (", then O" if at.o_aliases_q else "")
    shared.add("Q", at.tile_stages * q_bytes, q_doc, ring=tiles, stores=at.o_aliases_q)
    of_whom = " of each sub-tile" if sizes.sub_tiles > 1 and not spec.share_kv_loads else ""
    shared.add("K", depth * sizes.kv_bytes, f"K ring{of_whom}", ring=_kv_ring(sizes, "k", depth))
    in_fp8 = fp8.is_fp8(spec)
    v_bytes = fp8.v_bytes(sizes) if in_fp8 else sizes.kv_bytes
    shared.add("V", depth * v_bytes, f"V ring{of_whom}", ring=_kv_ring(sizes, "v", depth))
    if not at.o_aliases_q:
        shared.add("O", fp8.o_bytes(spec) if in_fp8 else q_bytes, "staging of the O tile", stores=True)
    if spec.share_kv_loads:
        add_orders(shared, spec, sizes.sub_tiles)
        return shared
    if spec.has_codes:
        e4m3_cache.add_codes(shared, sizes, depth)
    partial_barriers = add_partials(shared, spec, sizes.partial_floats)
    barriers = 2 * at.tile_stages + 4 * depth + partial_barriers + (sizes.sub_tiles if clears_values(spec) else 0)
    shared.add("Barriers", 8 * barriers, "mbarriers", align=8)
    words = (3 if spec.stream_k_tail else 1) + sizes.sub_tiles
    units = " begin, end," if spec.stream_k_tail else ""
    entries = f"ring of work tiles: index,{units} number{'s' if sizes.sub_tiles > 1 else ''} of steps"
    size = 4 * max(at.tile_stages, LEAST_ENTRIES) * words
    shared.add("WorkTiles", size, entries, align=4, ring=tiles)
    if not sizes.skip_masked:  # otherwise consumers know the blocks
        shared.add("BlockMeta", 4 * depth * sizes.step_blocks, "metadata of the loads in the K rings", align=4)
    if in_fp8:
        fp8.add_scales(shared, sizes, depth)
    if spec.stream_k_tail or spec.split_kv:
        shared.add(
            "IsLast", 4 * spec.tile.m // WARPGROUP_ROWS, "whether a warpgroup stored the last partial result", align=4
        )
    return shared
