"""Plan of the gradients of attention on sm_90a: dQ by query tiles, dK and dV by key tiles, without atomics."""

from __future__ import annotations

from codegen.arch import ARCHS, KIB, WARP
from codegen.flags import AttentionBackwardFlags
from codegen.plan import (
    Constant,
    Param,
    Plan,
    Prologue,
    TensorMap,
    check_budget,
    f32,
    i32,
    pointer,
    require,
    tensor_map,
)
from codegen.plans.attention_backward_sizes import STATS_BYTES, Sizes, divides_products
from codegen.plans.attention_kv_lengths import key_end_words
from codegen.plans.attention_lists import list_words, step_words
from codegen.plans.attention_logits import keys_of_pattern
from codegen.plans.attention_params import index_params, list_constants, tensor_params
from codegen.plans.attention_rows import SWIZZLE, WARPGROUP_ROWS
from codegen.problem import AttentionShape, LaunchArgs
from codegen.spec import AttentionBackwardSpec

WARPGROUP = 128  # threads
STATS_ROWS = 128  # rows of the largest tile, and of the largest step
PROLOGUE_THREADS = 1024  # the warps of a thread block divide the lists of a head
STEPS = {"dq": range(64, 161, 16), "dkdv": range(16, 129, 16)}  # keys, or queries, of a step
NARROWEST_OF_WIDE_HEADS = 32  # keys of a step of dQ with heads of more than 128, whose steps fill shared memory


def plan(spec: AttentionBackwardSpec, stem: str) -> Plan:
    """Work out every number of the kernel."""
    _check(spec)
    arch, sizes, m, n = ARCHS[spec.arch], Sizes.of(spec), spec.tile.m, spec.tile.n
    is_dq, shared, consumers = spec.gradients == "dq", sizes.shared, sizes.consumers
    resident, step = (m, n) if is_dq else (n, m)
    check_budget(spec, shared.size, sizes.registers)
    fits_twice = 2 * (shared.size + KIB) <= arch.shared_memory_per_sm
    return Plan(
        spec=spec,
        stem=stem,
        template=f"attention_backward/{spec.gradients}.cu.j2",
        threads=WARPGROUP * (1 + consumers),
        ctas_per_sm=2 if consumers == 1 and fits_twice else 1,
        persistent=False,
        shared=tuple(shared.regions),
        shared_bytes=shared.size,
        registers=sizes.registers,
        params=_params(spec),
        tensor_maps=_tensor_maps(spec, sizes.columns),
        constants=_constants(spec, sizes),
        flags=_flags(spec, sizes),
        grid_summary="one thread block for each tile",
        summary=(
            ("tile", f"{resident} {'queries' if is_dq else 'keys'}, {step} {'keys' if is_dq else 'queries'} of a step"),
            ("schedule", f"{spec.schedule}: a TMA producer, {consumers} consumer warpgroup{'s' * (consumers > 1)}"),
        ),
        flops=2 * spec.head_dim * m * n * (3 if is_dq else 4),
        bytes=2 * (sizes.kv_bytes if is_dq else sizes.q_bytes),
        arguments=_arguments,
        tile_queries=m if is_dq else 0,
        prologue=Prologue(f"{stem}_prologue", PROLOGUE_THREADS),
    )


def _check(spec: AttentionBackwardSpec) -> None:
    """Refuse a pattern and a tile that the kernels are not written for."""
    block, m, n = spec.pattern.fixed_block, spec.tile.m, spec.tile.n
    written = spec.pattern.queries is not None and not spec.pattern.masks_by_bits
    require(written, "pattern", f"is {spec.pattern.describe()}, of which no gradient is written yet")
    field, resident, step = ("tile.m", m, n) if spec.gradients == "dq" else ("tile.n", n, m)
    other = "tile.n" if field == "tile.m" else "tile.m"
    if divides_products(spec):
        require(n == 64, "tile.n", f"is {n}; allowed with head_dim {spec.head_dim}: 64 (rows of a warpgroup)")
    require(resident in (64, 128), field, f"is {resident}; allowed: 64, 128 (warpgroups of 64 rows)")
    steps = STEPS[spec.gradients]
    if spec.gradients == "dq" and spec.head_dim > 128:
        steps = range(NARROWEST_OF_WIDE_HEADS, steps.stop, steps.step)
    allowed = f"allowed: {steps[0]} to {steps[-1]}, multiples of {steps.step}"
    require(step in steps, other, f"is {step}; {allowed}")
    if spec.gradients == "dq" or divides_products(spec):
        # A step is issued before the one before it has ended, and frees its stage.
        require(spec.stages > 1, "stages", f"is {spec.stages}; allowed: 2 or more (two steps are in flight)")
    if block is None:
        return
    for name, size in (("q", block.q), ("kv", block.kv)):
        require(size in (64, 128), f"pattern.block.{name}", f"is {size}; allowed in a gradient: 64, 128")
    if spec.gradients == "dq":
        require(block.q % m == 0, "tile.m", f"is {m}; a tile is a query block, or an equal part: {block.q} rows")
        require(block.kv % n == 0, "tile.n", f"is {n}; a step is a key block, or an equal part: {block.kv} keys")
    else:
        require(block.kv % n == 0, "tile.n", f"is {n}; a tile is a key block, or an equal part: {block.kv} keys")
        require(block.q % m == 0, "tile.m", f"is {m}; a step is a query block, or an equal part: {block.q} queries")


def _params(spec: AttentionBackwardSpec) -> tuple[Param, ...]:
    """Return the kernel's parameters."""
    is_dq = spec.gradients == "dq"
    element = "unsigned short"
    lists = index_params(spec.forward)
    if _transposes(spec):
        rows = i32("query_blocks", "query blocks of a head: rows of the lists")
        lists += [
            *([] if rows in lists else [rows]),
            *([i32("key_blocks", "key blocks of a head")] if _divides_key_blocks(spec) else []),
            pointer("q_offsets", "int", "where the list of each key block begins, and the last one ends", writes=True),
            pointer("q_entries", "int", "lists of query blocks, by key block", writes=True),
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
        *((i32("kv_len", "keys of a head"),) if is_dq or spec.pattern.masks_pairs else ()),
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


def _divides_key_blocks(spec: AttentionBackwardSpec) -> bool:
    """Return whether several tiles share the list of a key block."""
    block = spec.pattern.fixed_block
    return spec.gradients == "dkdv" and block is not None and block.kv > spec.tile.n


def _tensor_maps(spec: AttentionBackwardSpec, columns: int) -> dict[str, TensorMap]:
    """Return how the tensor maps address their tensors: gradients leave by 64 rows of a warpgroup."""
    q, kv, out = (TensorMap((columns, rows, 1, 1), SWIZZLE) for rows in (spec.tile.m, spec.tile.n, WARPGROUP_ROWS))
    gradients = {"dq_map": out} if spec.gradients == "dq" else {"dk_map": out, "dv_map": out}
    return {"q_map": q, "k_map": kv, "v_map": kv, "dout_map": q, **gradients}


def _constants(spec: AttentionBackwardSpec, sizes: Sizes) -> tuple[Constant, ...]:
    """Return the named values at the top of the source."""
    is_dq, block, m, n = spec.gradients == "dq", spec.pattern.fixed_block, spec.tile.m, spec.tile.n
    groups, columns, consumers = sizes.groups, sizes.columns, sizes.consumers
    listed: list[Constant] = []
    if block is not None and is_dq:
        listed = list_constants(block, block.kv // n)
        listed += [Constant("kBlockQueries", block.q, "queries that share a list")] if block.q > m else []
    elif block is not None:
        listed = [Constant("kBlockSteps", block.q // m, "steps in a listed query block")]
        if _divides_key_blocks(spec):
            listed.append(Constant("kBlockKeys", block.kv, "keys that share a list"))
    lists = spec.pattern.constants().items()
    work = "of the same 64 keys: one sums up dV, one dK" if sizes.divides_products else "64 rows each"
    filled = "; TMA fills the last up with zeros" if spec.head_dim % columns else ""
    asks_rows = is_dq and (spec.pattern.masks_pairs if block is None else block.q <= m)
    return (
        Constant("kHeadDim", spec.head_dim, "elements of a head"),
        Constant("kTileM", m, "query rows of a tile" if is_dq else "queries of one step"),
        Constant("kTileN", n, "keys of one step" if is_dq else "keys of a tile"),
        *((Constant("kSubTileRows", m, "queries of a tile, over one range of keys"),) if asks_rows else ()),
        Constant("kStages", spec.stages, "depth of the ring"),
        *((Constant("kVStages", sizes.v_stages, "depth of the ring of V"),) if sizes.v_stages < spec.stages else ()),
        Constant("kConsumerWarpgroups", consumers, f"warpgroups that compute, {work}"),
        Constant("kThreads", WARPGROUP * (1 + consumers), "warpgroup 0 produces, the others consume"),
        Constant("kProducerRegisters", sizes.producer, "registers a producer thread keeps"),
        Constant("kConsumerRegisters", sizes.registers.limit, "registers a consumer thread takes"),
        Constant("kGroupColumns", columns, "columns of a group: one 128-byte swizzled row"),
        Constant("kGroups", groups, f"column groups of a head{filled}"),
        Constant("kQGroupBytes", m * SWIZZLE, "bytes of one column group of Q, or of dO"),
        Constant("kKvGroupBytes", n * SWIZZLE, "bytes of one column group of K or V"),
        Constant("kQBytes", sizes.q_bytes, "bytes of Q, or of dO, of a tile or step"),
        Constant("kKvBytes", sizes.kv_bytes, "bytes of K, or of V, of a step or tile"),
        *(() if is_dq else (Constant("kStatsBytes", m * STATS_BYTES, "bytes of the statistics of a step"),)),
        Constant("kPrologueThreads", PROLOGUE_THREADS, "threads of a block of the prologue"),
        Constant("kRowLanes", _row_lanes(spec), "threads of a row there, 16 bytes each"),
        *listed,
        *(Constant(name, value, comment) for name, (value, comment) in lists),
    )


def _row_lanes(spec: AttentionBackwardSpec) -> int:
    """Return the threads of a row in the prologue: a power of two, as whole rows share a warp; some may be idle."""
    return 1 << (spec.head_dim // 8 - 1).bit_length()


def _flags(spec: AttentionBackwardSpec, sizes: Sizes) -> AttentionBackwardFlags:
    """Return what the templates ask."""
    forward, block, words = spec.forward, spec.pattern.fixed_block, key_end_words(spec.forward)
    block_steps = 1 if block is None else max(1, block.kv // spec.tile.n)
    rows = "queries" if spec.gradients == "dq" else "keys"
    consumers, parts = sizes.consumers, _divides_key_blocks(spec)
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
        key_end_of_batch=words.key_end_of_batch,
        no_block=words.no_block,
        queries_piece=f"attention_backward/queries/{spec.pattern.queries}.cuh.j2",
        masks_pairs=spec.pattern.masks_pairs,
        transposes=_transposes(spec),
        divides_products=sizes.divides_products,
        short_v_ring=sizes.v_stages < spec.stages,
        key_blocks="p.key_blocks" if parts else "p.key_tiles",
        keys_of_list="kBlockKeys" if parts else "kTileN",
        several_lists=spec.pattern.lists > 1,
        # Where late queries see more keys, their tiles come first: thread blocks start in the order of their numbers.
        tile_number=late_first if spec.pattern.load_imbalanced else "(index % p.query_tiles)",
        keys_of_pattern=keys_of_pattern(forward),
        consumer_warpgroups="warpgroup 1    " if consumers == 1 else "warpgroups 1.. ",
        consumers_own=f"consumer. It owns the tile's 64 {rows}"
        if consumers == 1
        else f"consumers. Each owns 64 {rows}",
        other_workers="the SM's other thread block, if it has one," if consumers == 1 else "the other warpgroup",
    )


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
        **(
            {}
            if block is None
            else {"query_blocks": -(-shape.q_len // block.q), "key_blocks": -(-shape.kv_len // block.kv)}
        ),
    }
    rows_of_block = PROLOGUE_THREADS // _row_lanes(spec)
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
    places = PROLOGUE_THREADS // WARP * numbers["key_blocks"]
    scratch = {"q_offsets": numbers["key_blocks"] + 1, "q_entries": max(1, entries), "q_places": places}
    return LaunchArgs(
        numbers,
        shape.batch * count,
        prologue_grid=stats_blocks + lists,
        scratch={name: 4 * lists * size for name, size in scratch.items()},
    )


def padded_rows(q_len: int) -> int:
    """Return the rows of statistics of a head: no tile or step that begins with a query reaches beyond them."""
    return -(-q_len // STATS_ROWS) * STATS_ROWS + STATS_ROWS
