"""Plan of all gradients of attention on sm_90a, by key tiles, in five products.

Parts of dQ are added in turns, in fixed point, or in any order.
"""

from __future__ import annotations

from dataclasses import replace

from codegen.arch import ARCHS
from codegen.dtypes import DTYPES
from codegen.flags import AttentionBackwardSm90aFlags
from codegen.plan import (
    Constant,
    Epilogue,
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
)
from codegen.plans.attention.expressions import expression_registers
from codegen.plans.attention.params import options_summary, tensor_params
from codegen.plans.attention.rows import SWIZZLE, WARPGROUP_ROWS
from codegen.plans.backward.parts import (
    ELEMENT,
    OF_BLOCKS,
    PROLOGUE_THREADS,
    STATS_BYTES,
    arguments,
    arrived_barrier,
    check_blocks,
    check_pattern,
    gradient_params,
    is_packed,
    params,
    size_constants,
    step_meta,
    step_places,
    sums_in_fixed_point,
    tile_segment,
    walk_constants,
    walk_flags,
)
from codegen.plans.backward.wgmma import DKDV_MAPS, OPERANDS, WARPGROUP
from codegen.plans.lengths import tiles_of
from codegen.problem import COUNTER_BYTES, AttentionShape, LaunchArgs
from codegen.spec import AttentionBackwardSpec
from codegen.tile_rules import OneOf, Rule, check_tile, multiples

HEAD_DIMS = (64, 80, 96, 128)
_SIZES = ", ".join(map(str, HEAD_DIMS))
KEYS = 128  # per tile: two consumer warpgroups
NARROW = 64  # bytes per row of a narrow column group
DQ_WARPS = 2  # warps that add to dQ, in alternate steps
CONVERT_THREADS = 256
NORM_BYTES, LARGEST_BYTES, SCALE_BYTES = 4, 8, 2  # of a row of dO, of a query block, and of a row in fixed point
# Registers per producer and per consumer thread; the first split that fits is used.
REGISTER_SPLITS = (40, 232), (24, 240)
OVERHEAD_REGISTERS = 12  # addresses, loop state, statistics, like the kernel of dK and dV
EXPRESSION_OVERHEAD = 8  # no tested mask spills with this allowance
# Tiles whose heads are interleaved, by the order in which tiles add to dQ: enough that the tiles of a head start one
# after another, as they wait for each other's dQ. With more heads, dQ would exceed the L2. Tiles of a window share few
# queries.
TILES_IN_TURNS = {"causal": 512, "sliding_window": 1024, None: 1024}
GROUPED_CAUSAL_TILES = 256  # with grouped heads, each of which has sums of dQ in the L2; not of packed sequences
DENSE_TILES_PER_COLUMN = 4  # of dense attention, per element of a head


def plan(spec: AttentionBackwardSpec, stem: str) -> Plan:
    """Plan of the kernel of a spec."""
    _check(spec)
    row_bytes, m, n = _row_bytes(spec), spec.tile.m, spec.tile.n
    shared = _shared(spec, row_bytes)
    # Per thread and column of 64 rows: half a register for a product, a quarter for a 16-bit operand. dK, dV; S^T and
    # dP^T, or dQ in their place; P^T.
    accumulators = spec.head_dim + m + m // 4
    overhead = OVERHEAD_REGISTERS + EXPRESSION_OVERHEAD * bool(spec.forward.expressions)
    expression = expression_registers(spec.forward, gradients=True)
    overhead += expression
    needed = accumulators + overhead
    producer, consumer = next((s for s in REGISTER_SPLITS if needed <= s[1]), REGISTER_SPLITS[-1])
    registers = Registers(accumulators, overhead, consumer, expression)
    check_budget(spec, shared.size, registers)
    return Plan(
        spec=spec,
        stem=stem,
        template="attention_backward/dq_dkdv.cu.j2",
        threads=WARPGROUP * 3,
        ctas_per_sm=1,
        persistent=False,
        dynamic_scheduler=_takes_turns(spec),
        workspace_bytes={"scheduler": str(COUNTER_BYTES)} if _takes_turns(spec) else {},
        shared=tuple(shared.regions),
        shared_bytes=shared.size,
        registers=registers,
        params=_params(spec),
        tensor_maps=_tensor_maps(spec, row_bytes),
        constants=_constants(spec, row_bytes, producer=producer, consumer=consumer),
        flags=_flags(spec),
        grid_summary="one thread block for each tile",
        summary=(
            ("tile", f"{n} keys, {m} queries of a step"),
            ("schedule", f"{spec.schedule}: a TMA producer, two warps that add to dQ, 2 consumer warpgroups"),
            *options_summary(spec.forward),
        ),
        flops=2 * spec.head_dim * m * n * 5,
        bytes=2 * m * _row_groups(spec, row_bytes) * row_bytes + 4 * m * spec.head_dim,
        arguments=_arguments,
        prologue=Prologue(f"{stem}_prologue", PROLOGUE_THREADS),
        epilogue=Epilogue(f"{stem}_convert_dq", CONVERT_THREADS),
    )


def _takes_turns(spec: AttentionBackwardSpec) -> bool:
    """Whether tiles add to dQ in the order of their index."""
    return spec.deterministic and not sums_in_fixed_point(spec)


def _steps(spec: AttentionBackwardSpec) -> range:
    """Legal queries per step; with heads of 64, a warpgroup computes dQ of half of them."""
    step = 32 if spec.head_dim == 64 else 16
    return range(step, 129, step)


WIDTH: Rule[AttentionBackwardSpec] = OneOf(
    "n", lambda spec: (KEYS,), lambda spec, sizes: f"allowed with gradients dq_dkdv: {sizes} (two warpgroups)"
)
STEP: Rule[AttentionBackwardSpec] = OneOf("m", _steps, lambda spec, sizes: f"allowed: {multiples(_steps(spec))}")
TILE = (WIDTH, STEP, *OF_BLOCKS)


def _check(spec: AttentionBackwardSpec) -> None:
    """Reject a pattern and a tile that the kernel cannot support."""
    check_pattern(spec)
    fixed_point = sums_in_fixed_point(spec)
    written = spec.pattern.dq_order is not None or fixed_point or not spec.deterministic
    reason = f"is {spec.pattern.kind}, whose key tiles cannot add to dQ in a fixed order; use dq, dkdv"
    require(written, "pattern.kind", reason)
    reason = "is false; sums of lists are of integers, with the same bits in any order: leave it out"
    require(spec.deterministic or not fixed_point, "deterministic", reason)
    reason = "is set; dQ of lists is summed in fixed point, which needs a bound of dS; use gradients: dq and dkdv"
    require(spec.score is None or not fixed_point, "score", reason)
    reason = "is varlen; lists of packed sequences have two kernels: use gradients: dq and dkdv"
    require(not (fixed_point and is_packed(spec)), "layout", reason)
    d = spec.head_dim
    require(not fixed_point or d % 64 == 0, "head_dim", f"is {d}; allowed with lists: 64, 128; use dq, dkdv")
    require(d in HEAD_DIMS, "head_dim", f"is {d}; allowed with gradients dq_dkdv: {_SIZES} (registers); use dq, dkdv")
    check_tile(spec, (WIDTH,))
    check_blocks(spec)
    check_tile(spec, (STEP,))


def _dq_queries(spec: AttentionBackwardSpec) -> int:
    """Queries whose dQ a warpgroup computes, in 64 columns of a head; with heads of 64, half of the queries."""
    return spec.tile.m // 2 if spec.head_dim == 64 else spec.tile.m


def _row_groups(spec: AttentionBackwardSpec, row_bytes: int) -> int:
    """Column groups of a head, for a number of bytes per row of a group."""
    return -(-spec.head_dim * DTYPES[spec.dtype].bytes // row_bytes)


def _row_bytes(spec: AttentionBackwardSpec) -> int:
    """Bytes per row of a column group: 128, or 64 if the zeros in the last group of 128 do not fit."""
    head_bytes = spec.head_dim * DTYPES[spec.dtype].bytes
    fits = _shared(spec, SWIZZLE).size <= ARCHS[spec.arch].shared_memory_per_block
    return SWIZZLE if fits or head_bytes % NARROW != 0 else NARROW


def _shared(spec: AttentionBackwardSpec, row_bytes: int) -> SharedLayout:
    """Shared memory layout: operands of the tile, the ring of its steps, and results that steps pass on."""
    stages, m = spec.stages, spec.tile.m
    head_bytes = _row_groups(spec, row_bytes) * row_bytes
    q_bytes, kv_bytes = m * head_bytes, spec.tile.n * head_bytes
    shared = SharedLayout()
    shared.add("K", kv_bytes, "K of the tile in column groups; then staging of dK", stores=True)
    shared.add("V", kv_bytes, "V of the tile; then staging of dV", stores=True)
    ring = Ring(stages, "q_full[i]", "q_empty[i]")
    shared.add("Q", stages * q_bytes, "Q ring", ring=ring)
    shared.add("Dout", stages * q_bytes, "dO ring", ring=ring)
    shared.add(
        "Ds",
        2 * m * spec.tile.n * DTYPES[spec.dtype].bytes,
        f"dS of a step, and of the previous one: column groups of {row_bytes // 2} keys",
    )
    shared.add("Dq", m * spec.head_dim * 4, "staging of a step's part of dQ", stores=True)
    shared.add("Stats", stages * m * STATS_BYTES, "statistics of the queries in the ring", align=16)
    shared.add("Barriers", 8 * (2 * stages + 2 + DQ_WARPS), "mbarriers", align=8)
    if sums_in_fixed_point(spec):
        shared.add("Norms", stages * m * NORM_BYTES, "norms of the rows of dO in the ring", align=16)
        shared.add("Largest", stages * LARGEST_BYTES, "largest |K| and norm of V of the steps in the ring", align=8)
        shared.add("Scales", 2 * m * SCALE_BYTES, "scales of the rows of a step, and of the previous one", align=4)
    if _takes_turns(spec):
        shared.add("TileIndex", 4, "index of the thread block's tile", align=4)
    if spec.score is not None:
        step_places(shared, spec)
    step_meta(shared, spec)
    tile_segment(shared, spec)
    arrived_barrier(shared, spec)
    return shared


def _rising(spec: AttentionBackwardSpec) -> tuple[Param, ...]:
    """Bounds that the prologue writes if tiles of packed sequences take turns: all turns of a step must come."""
    if not (is_packed(spec) and _takes_turns(spec)):
        return ()
    doc = "cu_seqlens_{}, rising and within the tensor"
    return tuple(pointer(f"rising_{name}", "int", doc.format(name), writes=True) for name in "qk")


def _params(spec: AttentionBackwardSpec) -> tuple[Param, ...]:
    """Parameters of the kernel."""
    turns = (
        pointer(
            "dq_semaphore", "int", "tiles already added to each step of dQ, (batch, heads, query_steps)", writes=True
        ),
        pointer("scheduler", "int", "tiles that thread blocks have taken", writes=True),
    )
    of_dq = tensor_params("dq", ELEMENT, "dQ, as O", writes=True)
    fixed_point = sums_in_fixed_point(spec)
    number, what = ("int", "sums of dQ in fixed point") if fixed_point else ("float", "sums of dQ")
    own = (
        *DKDV_MAPS,
        *(gradient_params(spec) if is_packed(spec) else of_dq),
        pointer("dq_accum", number, f"{what}, (batch, heads, query_steps, kDqBytes / 4)", writes=True),
        *(turns if _takes_turns(spec) else ()),
        *(_fixed_point_params() if fixed_point else ()),
        i32("query_steps", "steps of kTileM queries per head"),
        i32("head_group", "K/V heads whose tiles are interleaved"),
        *(_rising(spec)),
    )
    return params(spec, (*OPERANDS, *own))


def _fixed_point_params() -> tuple[Param, ...]:
    """Parameters of the bounds of dQ's rows."""
    largest = "largest |K| and norm of V"
    return (
        *tensor_params("k", ELEMENT, "K (batch, kv_heads, kv_len, head_dim)"),
        *tensor_params("v", ELEMENT, "V, as K"),
        pointer("dlse", "float", "gradient of the log-sum-exp, as lse; 0 if null"),
        pointer("norms", "float", "norms of the rows of dO, as stats", writes=True),
        pointer("beyond", "unsigned char", "1 for rows whose dQ fixed point does not hold, as stats", writes=True),
        pointer("tile_largest", "int2", f"{largest} of each tile, (batch, kv_heads, key_tiles)", writes=True),
        pointer("largest", "int2", f"{largest} of a query block's lists, (batch, heads, query_blocks)", writes=True),
        pointer("bounded_tiles", "int", "tiles of a K/V head that have been bounded", writes=True),
        i32("bound_blocks", "thread blocks of the prologue that bound a tile each; they come first"),
    )


def _tensor_maps(spec: AttentionBackwardSpec, row_bytes: int) -> dict[str, TensorMap]:
    """Tensor maps of the operands and gradients; a warpgroup stores dK and dV 64 rows at a time."""
    columns = row_bytes // DTYPES[spec.dtype].bytes
    q, kv, out = (TensorMap((columns, rows, 1, 1), row_bytes) for rows in (spec.tile.m, spec.tile.n, WARPGROUP_ROWS))
    return {"q_map": q, "k_map": kv, "v_map": kv, "dout_map": q, "dk_map": out, "dv_map": out}


def _constants(spec: AttentionBackwardSpec, row_bytes: int, *, producer: int, consumer: int) -> tuple[Constant, ...]:
    """Constants of the source."""
    m, n, fixed_point = spec.tile.m, spec.tile.n, sums_in_fixed_point(spec)
    groups, columns = _row_groups(spec, row_bytes), row_bytes // DTYPES[spec.dtype].bytes
    return (
        *size_constants(spec),
        Constant("kConsumerWarpgroups", 2, "warpgroups that compute, 64 keys each"),
        Constant("kThreads", WARPGROUP * 3, "warpgroup 0 produces, the others consume"),
        Constant("kDqWarps", DQ_WARPS, "warps that add to dQ"),
        Constant("kProducerRegisters", producer, "registers per producer thread"),
        Constant("kConsumerRegisters", consumer, "registers per consumer thread"),
        Constant("kGroupColumns", columns, f"columns of a group: one {row_bytes}-byte swizzled row"),
        Constant("kGroups", groups, "column groups per head"),
        Constant("kQGroupBytes", m * row_bytes, "bytes of one column group of Q, of dO, or of dS"),
        Constant("kKvGroupBytes", n * row_bytes, "bytes of one column group of K or V"),
        Constant("kQBytes", m * row_bytes * groups, "bytes of Q, or of dO, of a step"),
        Constant("kKvBytes", n * row_bytes * groups, "bytes of K, or of V, of a tile"),
        Constant("kDsBytes", m * n * DTYPES[spec.dtype].bytes, "bytes of dS of a step"),
        Constant("kStatsBytes", m * STATS_BYTES, "bytes of the statistics of a step"),
        Constant(
            "kDqColumnParts", -(-spec.head_dim // WARPGROUP_ROWS), "parts of 64 columns of dQ, indexed by warpgroup"
        ),
        Constant("kDqQueries", _dq_queries(spec), "queries of a warpgroup's part of dQ"),
        Constant("kDqBytes", m * spec.head_dim * 4, f"bytes of a step's dQ, in {'s32' if fixed_point else 'fp32'}"),
        *((Constant("kNormsBytes", m * NORM_BYTES, "bytes of the norms of a step"),) if fixed_point else ()),
        *_part_constants(spec),
        Constant("kConvertThreads", CONVERT_THREADS, "threads per block of the epilogue"),
        *walk_constants(spec),
    )


def _part_constants(spec: AttentionBackwardSpec) -> list[Constant]:
    """Constants of the parts of dQ, if the last one has fewer columns."""
    rest = spec.head_dim % WARPGROUP_ROWS
    if rest == 0:
        return []
    return [
        Constant("kDqPartBytes", spec.tile.m * WARPGROUP_ROWS * 4, "bytes of the first part of a step's dQ"),
        Constant("kLastDqThreads", 2 * rest, "threads that have columns of the last part"),
    ]


def _flags(spec: AttentionBackwardSpec) -> AttentionBackwardSm90aFlags:
    """Template parameters."""
    # Tiles add to dQ in index order. Head by head, a tile with few steps would wait for longer ones at each head.
    steps_first = spec.pattern.load_imbalanced and spec.pattern.fixed_block is None
    return AttentionBackwardSm90aFlags(
        walk=walk_flags(spec),
        consumers=spec.tile.n // WARPGROUP_ROWS,
        dq_queries=_dq_queries(spec),
        row_bytes=_row_bytes(spec),
        steps_first=steps_first,
        takes_turns=_takes_turns(spec),
    )


def _arguments(plan: Plan, shape: AttentionShape, slots: int) -> LaunchArgs:
    """Launch arguments, with one thread block per tile."""
    spec, args = plan.spec, arguments(plan, shape, slots)
    assert isinstance(spec, AttentionBackwardSpec)
    tiles, block = max(1, args.numbers["key_tiles"]), spec.pattern.fixed_block
    rows = spec.tile.m if block is None else block.q  # with lists, all steps of a block run, even beyond the last query
    steps = -(-shape.q_len // rows) * (rows // spec.tile.m)
    rising = {}
    if is_packed(spec):
        steps = tiles_of(shape.q_len, shape.sequences, spec.tile.m)
        rising = dict.fromkeys((param.name for param in _rising(spec)), 4 * (shape.sequences + 1))
    all_steps = shape.batch * shape.heads * steps
    dq_accum = {"dq_accum": all_steps * spec.tile.m * spec.head_dim * 4}
    numbers = {**args.numbers, "query_steps": steps, "head_group": _head_group(spec, shape, tiles)}
    args = replace(args, numbers=numbers, epilogue_grid=all_steps)
    if sums_in_fixed_point(spec):
        return _in_fixed_point(args, shape, dq_accum)
    if not _takes_turns(spec):
        return replace(args, sums=dq_accum)
    return replace(
        args,
        counters={"dq_semaphore": all_steps, "scheduler": 1},
        scratch={**args.scratch, **rising, **dq_accum},
        prologue_grid=args.prologue_grid + bool(rising),
    )


def _head_group(spec: AttentionBackwardSpec, shape: AttentionShape, tiles: int) -> int:
    """K/V heads whose tiles are interleaved, for a number of tiles per head; groups have the same size if possible."""
    order = spec.pattern.dq_order
    if order == "dense":
        in_turns = DENSE_TILES_PER_COLUMN * spec.head_dim
    elif order == "causal" and shape.heads > shape.kv_heads and not is_packed(spec):
        in_turns = GROUPED_CAUSAL_TILES
    else:
        in_turns = TILES_IN_TURNS[order]
    heads = shape.kv_heads if is_packed(spec) else shape.batch * shape.kv_heads
    groups = max(1, -(-heads // max(1, in_turns // tiles)))
    return max(1, -(-heads // groups))


def _in_fixed_point(args: LaunchArgs, shape: AttentionShape, dq_accum: dict[str, int]) -> LaunchArgs:
    """Launch arguments, with thread blocks of the prologue that bound the tiles."""
    rows = shape.batch * shape.heads * args.numbers["padded_q_len"]
    tiles = shape.batch * shape.kv_heads * args.numbers["key_tiles"]
    query_blocks = shape.batch * shape.heads * args.numbers["query_blocks"]
    of_rows = {"norms": rows * NORM_BYTES, "beyond": rows}
    largest = {"tile_largest": tiles * LARGEST_BYTES, "largest": query_blocks * LARGEST_BYTES}
    return replace(
        args,
        numbers={**args.numbers, "bound_blocks": tiles},
        counters={"bounded_tiles": shape.batch * shape.kv_heads},
        scratch={**args.scratch, **of_rows, **largest},
        prologue_grid=tiles + args.prologue_grid,
        sums=dq_accum,
    )
