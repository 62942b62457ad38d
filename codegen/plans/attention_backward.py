"""Plan of the gradients of attention on sm_90a: dQ by query tiles, dK and dV by key tiles, without atomics."""

from __future__ import annotations

from codegen.arch import ARCHS, KIB, WARP
from codegen.dtypes import DTYPES
from codegen.flags import AttentionBackwardFlags
from codegen.plan import (
    Constant,
    Param,
    Plan,
    Prologue,
    Registers,
    SharedLayout,
    TensorMap,
    check_budget,
    f32,
    i32,
    pointer,
    require,
    tensor_map,
)
from codegen.plans.attention_kv_lengths import key_end_of_masks
from codegen.plans.attention_lists import list_words, step_words
from codegen.plans.attention_logits import keys_of_pattern
from codegen.plans.attention_params import (
    index_params,
    list_constants,
    options_summary,
    softcap_constants,
    tensor_params,
)
from codegen.plans.attention_rows import SWIZZLE, WARPGROUP_ROWS
from codegen.problem import AttentionShape, LaunchArgs
from codegen.spec import AttentionBackwardSpec

PIECES = "attention_backward"
WARPGROUP = 128  # threads
STATS_BYTES = 8  # of a query: log-sum-exp and delta
STATS_ROWS = 128  # rows of the largest tile, and of the largest step
PROLOGUE_THREADS = 1024  # the warps of a thread block divide the lists of a head
# By consumer warpgroups: registers of a producer and of a consumer thread; the first split that fits is taken. Those
# of one consumer are for two thread blocks on an SM.
REGISTER_SPLITS = {1: ((40, 216), (24, 232)), 2: ((40, 232), (24, 240))}
# Addresses, loop state, statistics: an allowance with which nothing spills, and ptxas need not wait behind each wgmma.
# dQ has S of a step and dS of the one before at once, which the sum of its accumulators leaves out.
OVERHEAD_REGISTERS = {"dq": 40, "dkdv": 12}
RUNS_REGISTERS = 8  # more, in dQ, for masks of patterns that show several runs of keys: more bounds are compared with
STEPS = {"dq": range(64, 161, 16), "dkdv": range(16, 129, 16)}  # keys, or queries, of a step


def plan(spec: AttentionBackwardSpec, stem: str) -> Plan:
    """Work out every number of the kernel."""
    _check(spec)
    arch, columns = ARCHS[spec.arch], SWIZZLE // DTYPES[spec.dtype].bytes
    groups, m, n = -(-spec.head_dim // columns), spec.tile.m, spec.tile.n
    is_dq = spec.gradients == "dq"
    resident, step = (m, n) if is_dq else (n, m)
    consumers = resident // WARPGROUP_ROWS
    q_bytes, kv_bytes = m * groups * SWIZZLE, n * groups * SWIZZLE
    shared = _shared(spec, q_bytes, kv_bytes)
    # A thread has half a column of what 64 rows of a product have, and of an operand in 16 bits a quarter.
    sums = spec.head_dim // 2 * (1 if is_dq else 2)
    operand = 0 if is_dq else step // 4  # P^T beside S^T and dP^T; dS takes their place
    accumulators = sums + 2 * (step // 2) + operand
    splits, overhead = REGISTER_SPLITS[consumers], OVERHEAD_REGISTERS[spec.gradients]
    runs = spec.pattern.masks_pairs and not spec.pattern.banded and spec.pattern.fixed_block is None
    overhead += RUNS_REGISTERS if is_dq and runs else 0
    producer, consumer = next((s for s in splits if accumulators + overhead <= s[1]), splits[-1])
    registers = Registers(accumulators=accumulators, overhead=overhead, limit=consumer)
    check_budget(spec, shared.size, registers)
    fits_twice = 2 * (shared.size + KIB) <= arch.shared_memory_per_sm
    return Plan(
        spec=spec,
        stem=stem,
        template=f"{PIECES}/{spec.gradients}.cu.j2",
        threads=WARPGROUP * (1 + consumers),
        ctas_per_sm=2 if consumers == 1 and fits_twice else 1,
        persistent=False,
        shared=tuple(shared.regions),
        shared_bytes=shared.size,
        registers=registers,
        params=_params(spec),
        tensor_maps=_tensor_maps(spec, columns),
        constants=_constants(spec, groups, columns, producer=producer, consumer=consumer),
        flags=_flags(spec, consumers),
        grid_summary="one thread block for each tile",
        summary=(
            ("tile", f"{resident} {'queries' if is_dq else 'keys'}, {step} {'keys' if is_dq else 'queries'} of a step"),
            ("schedule", f"{spec.schedule}: a TMA producer, {consumers} consumer warpgroup{'s' * (consumers > 1)}"),
            *options_summary(spec.forward),
        ),
        flops=2 * spec.head_dim * m * n * (3 if is_dq else 4),
        bytes=2 * (kv_bytes if is_dq else q_bytes),
        arguments=_arguments,
        tile_queries=m if is_dq else 0,
        prologue=Prologue(f"{stem}_prologue", PROLOGUE_THREADS),
    )


def _check(spec: AttentionBackwardSpec) -> None:
    """Refuse a pattern and a tile that the kernels are not written for."""
    block, m, n = spec.pattern.fixed_block, spec.tile.m, spec.tile.n
    require(
        spec.pattern.queries is not None,
        "pattern",
        f"is {spec.pattern.describe()}, of which no gradient is written yet",
    )
    field, resident, step = ("tile.m", m, n) if spec.gradients == "dq" else ("tile.n", n, m)
    other = "tile.n" if field == "tile.m" else "tile.m"
    require(resident in (64, 128), field, f"is {resident}; allowed: 64, 128 (warpgroups of 64 rows)")
    steps = STEPS[spec.gradients]
    allowed = f"allowed: {steps[0]} to {steps[-1]}, multiples of {steps.step}"
    require(step in steps, other, f"is {step}; {allowed}")
    keys = spec.pattern.block_keys
    reason = f"is {n}; it is a block of the pattern, {keys} keys, an equal part of one, or two"
    require(keys is None or keys % n == 0 or n == 2 * keys, "tile.n", reason)
    if block is None:
        return
    for name, size in (("q", block.q), ("kv", block.kv)):
        require(size in (64, 128), f"pattern.block.{name}", f"is {size}; allowed in a gradient: 64, 128")
    if spec.gradients == "dq":
        require(block.q % m == 0, "tile.m", f"is {m}; a tile is a query block, or an equal part: {block.q} rows")
        require(block.kv % n == 0, "tile.n", f"is {n}; a step is a key block, or an equal part: {block.kv} keys")
    else:
        require(block.kv == n, "tile.n", f"is {n}; a tile is a key block: {block.kv} keys")
        require(block.q % m == 0, "tile.m", f"is {m}; a step is a query block, or an equal part: {block.q} queries")


def _shared(spec: AttentionBackwardSpec, q_bytes: int, kv_bytes: int) -> SharedLayout:
    """Lay out the shared memory: what a tile keeps, and the ring of what its steps need."""
    stages, rows = spec.stages, spec.tile.m
    shared = SharedLayout()
    if spec.gradients == "dq":
        shared.add("Q", q_bytes, "Q of the tile in column groups; then dQ on its way out")
        shared.add("Dout", q_bytes, "dO of the tile")
        shared.add("K", stages * kv_bytes, "K ring")
        shared.add("V", stages * kv_bytes, "V ring")
        barriers = 2 * stages + 1
    else:
        shared.add("K", kv_bytes, "K of the tile in column groups; then dK on its way out")
        shared.add("V", kv_bytes, "V of the tile; then dV on its way out")
        shared.add("Q", stages * q_bytes, "Q ring")
        shared.add("Dout", stages * q_bytes, "dO ring")
        shared.add("Stats", stages * rows * STATS_BYTES, "statistics of the queries in the ring", align=16)
        barriers = 2 * stages + 1
    shared.add("Barriers", 8 * barriers, "mbarriers", align=8)
    if spec.gradients == "dkdv" and spec.pattern.masks_by_bits:
        shared.add("StepBits", 8 * stages, "where the bits of the steps in the ring are", align=8)
    elif spec.gradients == "dq" or spec.pattern.masks_pairs:
        shared.add("StepMeta", 4 * stages, "metadata of the steps in the ring", align=4)
    return shared


def _params(spec: AttentionBackwardSpec) -> tuple[Param, ...]:
    """Return the kernel's parameters."""
    is_dq, by_position = spec.gradients == "dq", spec.pattern.masks_pairs and not spec.pattern.masks_by_bits
    element = "unsigned short"
    lists = index_params(spec.forward)
    if _transposes(spec):
        rows = i32("query_blocks", "query blocks of a head: rows of the lists")
        lists += [
            *([] if rows in lists else [rows]),
            pointer("q_offsets", "int", "where the list of each key block begins, and the last one ends", writes=True),
            pointer("q_entries", "int", "lists of query blocks, by key block", writes=True),
            *(
                [pointer("q_entry_places", "int", "places of these entries in the lists of query blocks", writes=True)]
                if spec.pattern.masks_by_bits
                else []
            ),
            pointer("q_places", "int", "where entries go, of each warp of the prologue and key block", writes=True),
            i32("list_batches", "batches that have lists of their own; 1: shared"),
            i32("list_heads", "heads that have lists of their own; 1: shared"),
            i32("list_entries", "entries of all lists of a head"),
            i32("stats_blocks", "thread blocks of the prologue that make statistics; others transpose lists"),
        ]
    gradients = {
        "dq": (tensor_map("dq_map", "dQ, as Q"),),
        "dkdv": (tensor_map("dk_map", "dK, as K"), tensor_map("dv_map", "dV, as K")),
    }[spec.gradients]
    return (
        tensor_map("q_map", "Q (head_dim, q_len, heads, batch)"),
        tensor_map("k_map", "K (head_dim, kv_len, kv_heads, batch)"),
        tensor_map("v_map", "V, as K"),
        tensor_map("dout_map", "dO, as Q"),
        *gradients,
        *tensor_params("out", element, "O (batch, heads, q_len, head_dim)"),
        *tensor_params("dout", element, "dO, as O"),
        pointer("lse", "float", "log-sum-exp of the forward, (batch, heads, q_len) contiguous"),
        pointer("stats", "RowStats", "statistics of all rows, (batch, heads, padded_q_len)", writes=True),
        *lists,
        i32("q_len", "queries of a head"),
        i32("padded_q_len", f"rows of statistics of a head: q_len and {STATS_ROWS} or more behind"),
        *((i32("kv_len", "keys of a head"),) if is_dq or by_position or spec.kv_lengths else ()),
        i32("heads", "query heads"),
        i32("heads_per_kv_head", "query heads that share one K/V head"),
        i32("batch_heads", "batch * heads"),
        i32("query_tiles", "tiles of kTileM queries of a head") if is_dq else i32("key_tiles", "tiles of a K/V head"),
        i32("head_chunks", "16-byte chunks of a row of O and dO"),
        f32("scale_log2", "scale * log2(e), positive: the host refuses others"),
        f32("scale", "the softmax scale"),
    )


def _transposes(spec: AttentionBackwardSpec) -> bool:
    """Return whether the kernel walks over lists the other way round."""
    return spec.gradients == "dkdv" and spec.pattern.fixed_block is not None


def _tensor_maps(spec: AttentionBackwardSpec, columns: int) -> dict[str, TensorMap]:
    """Return how the tensor maps address their tensors: gradients leave by 64 rows of a warpgroup."""
    q, kv, out = (TensorMap((columns, rows, 1, 1), SWIZZLE) for rows in (spec.tile.m, spec.tile.n, WARPGROUP_ROWS))
    gradients = {"dq_map": out} if spec.gradients == "dq" else {"dk_map": out, "dv_map": out}
    return {"q_map": q, "k_map": kv, "v_map": kv, "dout_map": q, **gradients}


def _constants(
    spec: AttentionBackwardSpec, groups: int, columns: int, *, producer: int, consumer: int
) -> tuple[Constant, ...]:
    """Return the named values at the top of the source."""
    is_dq, block, m, n = spec.gradients == "dq", spec.pattern.fixed_block, spec.tile.m, spec.tile.n
    consumers = (m if is_dq else n) // WARPGROUP_ROWS
    listed: list[Constant] = []
    if block is not None and is_dq:
        listed = list_constants(block, block.kv // n)
        listed += [Constant("kBlockQueries", block.q, "queries that share a list")] if block.q > m else []
    elif block is not None:
        listed = [Constant("kBlockSteps", block.q // m, "steps in a listed query block")]
    if spec.pattern.masks_by_bits and not is_dq:
        listed += [Constant("kLaneWords", -(-m // 64), "pairs of words of a step that a lane reads: eight lanes share")]
    lists = spec.pattern.constants().items()
    asks_rows = is_dq and (spec.pattern.masks_pairs if block is None else block.q <= m)
    return (
        Constant("kHeadDim", spec.head_dim, "elements of a head"),
        Constant("kTileM", m, "query rows of a tile" if is_dq else "queries of one step"),
        Constant("kTileN", n, "keys of one step" if is_dq else "keys of a tile"),
        *((Constant("kSubTileRows", m, "queries of a tile, over one range of keys"),) if asks_rows else ()),
        Constant("kStages", spec.stages, "depth of the ring"),
        Constant("kConsumerWarpgroups", consumers, "warpgroups that compute, 64 rows each"),
        Constant("kThreads", WARPGROUP * (1 + consumers), "warpgroup 0 produces, the others consume"),
        Constant("kProducerRegisters", producer, "registers a producer thread keeps"),
        Constant("kConsumerRegisters", consumer, "registers a consumer thread takes"),
        Constant("kGroupColumns", columns, "columns of a group: one 128-byte swizzled row"),
        Constant("kGroups", groups, "column groups of a head"),
        Constant("kQGroupBytes", m * SWIZZLE, "bytes of one column group of Q, or of dO"),
        Constant("kKvGroupBytes", n * SWIZZLE, "bytes of one column group of K or V"),
        Constant("kQBytes", m * SWIZZLE * groups, "bytes of Q, or of dO, of a tile or step"),
        Constant("kKvBytes", n * SWIZZLE * groups, "bytes of K, or of V, of a step or tile"),
        *(() if is_dq else (Constant("kStatsBytes", m * STATS_BYTES, "bytes of the statistics of a step"),)),
        Constant("kPrologueThreads", PROLOGUE_THREADS, "threads of a block of the prologue"),
        Constant("kRowLanes", spec.head_dim // 8, "threads of a row there, 16 bytes each"),
        *listed,
        *(Constant(name, value, comment) for name, (value, comment) in lists),
        *softcap_constants(spec.forward),
    )


def _flags(spec: AttentionBackwardSpec, consumers: int) -> AttentionBackwardFlags:
    """Return what the templates ask."""
    forward, block, is_dq = spec.forward, spec.pattern.fixed_block, spec.gradients == "dq"
    block_steps = 1 if block is None else max(1, block.kv // spec.tile.n)
    rows = "queries" if is_dq else "keys"
    heads = "p.heads_per_kv_head"
    late_first = "(p.query_tiles - 1 - index % p.query_tiles)"
    return AttentionBackwardFlags(
        pattern_template=f"attention/patterns/{spec.pattern.kind}.cuh.j2",
        partial_range=False,
        skip_masked=False,
        step_is=step_words(block_steps, 1) if block is not None else "a key block. Blocks are numbered from key 0 on",
        lists=list_words(
            forward,
            partial=block is not None and block.q > spec.tile.m,
            several_lists=False,
            block_steps=block_steps,
            step_blocks=1,
        ),
        key_end_words=key_end_of_masks(forward),
        logits_piece=f"{PIECES}/logits/{'scaled' if spec.softcap is None else 'capped'}.cuh.j2",
        mask_piece=f"{PIECES}/{spec.gradients}_mask/{_mask(spec)}.cuh.j2",
        queries_piece=f"{PIECES}/queries/{spec.pattern.queries}.cuh.j2",
        masks_pairs=spec.pattern.masks_pairs,
        transposes=_transposes(spec),
        several_lists=spec.pattern.lists > 1,
        # Where late queries see more keys, their tiles come first: thread blocks start in the order of their numbers.
        tile_number=late_first if spec.pattern.load_imbalanced else "(index % p.query_tiles)",
        heads_of_tile=f"(tile.first_key < key_end_of(p, tile.batch) ? {heads} : 0)" if spec.kv_lengths else heads,
        softmax_scale="p.scale_log2" if spec.softcap is None else "kCappedScale",
        keys_of_pattern=keys_of_pattern(forward),
        consumer_warpgroups="warpgroup 1    " if consumers == 1 else "warpgroups 1.. ",
        consumers_own=f"consumer. It owns the tile's 64 {rows}"
        if consumers == 1
        else f"consumers. Each owns 64 {rows}",
        other_workers="the SM's other thread block, if it has one," if consumers == 1 else "the other warpgroup",
    )


def _mask(spec: AttentionBackwardSpec) -> str:
    """Return the piece that hides pairs: dQ always has one, for the end of the keys."""
    if spec.pattern.masks_by_bits:
        return "bits"
    if spec.gradients == "dkdv":
        return "pairs" if spec.pattern.masks_pairs else "none"
    return "last_key" if spec.pattern.has_last_key else "pairs"


def _arguments(plan: Plan, shape: AttentionShape, slots: int) -> LaunchArgs:
    """Work out a launch: one thread block for each tile."""
    del slots
    spec = plan.spec
    assert isinstance(spec, AttentionBackwardSpec)
    padded = padded_rows(shape.q_len)
    if spec.gradients == "dq":
        heads, tiles = shape.heads, {"query_tiles": -(-shape.q_len // spec.tile.m)}
    else:
        heads, tiles = shape.kv_heads, {"key_tiles": -(-shape.kv_len // spec.tile.n)}
    count = heads * sum(tiles.values())
    block = spec.pattern.fixed_block
    numbers = {
        **tiles,
        "q_len": shape.q_len,
        "padded_q_len": padded,
        "kv_len": shape.kv_len,
        "heads": shape.heads,
        "heads_per_kv_head": shape.heads // shape.kv_heads,
        "batch_heads": shape.batch * shape.heads,
        **({} if block is None else {"query_blocks": -(-shape.q_len // block.q)}),
    }
    rows_of_block = PROLOGUE_THREADS // (spec.head_dim // 8)
    stats_blocks = -(-shape.batch * shape.heads * padded // rows_of_block)
    if not _transposes(spec):
        return LaunchArgs(numbers, shape.batch * count, prologue_grid=stats_blocks)
    lists, entries = shape.list_batches * shape.list_heads, numbers["query_blocks"] * shape.list_length
    numbers |= {
        "list_batches": shape.list_batches,
        "list_heads": shape.list_heads,
        "list_entries": entries,
        "stats_blocks": stats_blocks,
    }
    places = PROLOGUE_THREADS // WARP * tiles["key_tiles"]
    scratch = {"q_offsets": tiles["key_tiles"] + 1, "q_entries": max(1, entries), "q_places": places}
    if spec.pattern.masks_by_bits:
        scratch["q_entry_places"] = max(1, entries)
    return LaunchArgs(
        numbers,
        shape.batch * count,
        prologue_grid=stats_blocks + lists,
        scratch={name: 4 * lists * size for name, size in scratch.items()},
    )


def padded_rows(q_len: int) -> int:
    """Return the rows of statistics of a head: no tile or step that begins with a query reaches beyond them."""
    return -(-q_len // STATS_ROWS) * STATS_ROWS + STATS_ROWS
