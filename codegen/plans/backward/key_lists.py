"""Plan of the gradients of attention over lists of keys on sm_90a: tiles are key blocks, steps the queries that list
them; five products; dQ is summed in fixed point, in any order. A tile of smaller blocks than a warpgroup multiplies has
several of them, its pieces; an entry has a bit for each piece that its query lists."""

from __future__ import annotations

from codegen.arch import ARCHS, KIB
from codegen.dtypes import DTYPES
from codegen.flags import KeyListsBackwardFlags
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
    f32,
    i32,
    i64,
    pointer,
    require,
)
from codegen.plans.attention.rows import SWIZZLE, WARPGROUP_ROWS
from codegen.plans.backward.parts import ELEMENT, STATS_BYTES
from codegen.plans.backward.wgmma import OPERANDS, WARPGROUP
from codegen.problem import KeyListsShape, LaunchArgs
from codegen.spec import KeyListsBackwardSpec
from codegen.tile_rules import OneOf, Rule, check_tile, multiples

THREADS_OF_ROWS = 256  # per block of the prologue, and of the epilogue
OVERHEAD_REGISTERS = 12  # addresses, loop state, statistics, like the kernel of all gradients
FLOAT = 4  # bytes
NORM = 4  # bytes of the norm of a row of dO
SCALE = 2  # bytes of the scale of a row in fixed point
LARGEST = 8  # bytes of the largest |K| and the largest norm of V of a query
CHUNK_ROWS = 1 << 12
"""Rows of a chunk, the part of a tile's queries that one thread block takes, of tiles of 128 keys; of others in
proportion. Chunks that run at one time have queries near each other, and short chunks nearer ones, so that Q, dO and
the sums of dQ stay in the L2 cache; but each chunk has its own sums of dK and dV. Estimated, and an argument of a
launch. Tiles of several blocks have chunks of as many rows: entries of a query are merged, but memory for the sums of
chunks is that of entries that are not, whose number the host knows."""
REGISTERS = {1: (24, 232), 2: (24, 240)}
"""Registers per producer and per consumer thread, by consumer warpgroups. Those of one consumer are for two thread
blocks per SM: with 224 and 48 rows, heads of 128, the compiler waits for each product."""


def tile_keys(entry_keys: int) -> int:
    """Keys of a tile: those of an entry, or the fewest that a warpgroup multiplies."""
    return max(entry_keys, WARPGROUP_ROWS)


def _steps(spec: KeyListsBackwardSpec) -> range:
    """Legal rows per step: whole queries; if a warpgroup computes dQ of half of them, whole instructions."""
    step = 16 if _divided(spec) == 1 else 32
    return range(step, 129, step)


TILE: tuple[Rule[KeyListsBackwardSpec], ...] = (
    OneOf("m", _steps, lambda spec, sizes: f"allowed: {multiples(_steps(spec))}"),
    OneOf(
        "n",
        lambda spec: (tile_keys(spec.entry_keys),),
        lambda spec, sizes: f"allowed: {sizes}, the keys of an entry, or {WARPGROUP_ROWS} if it has fewer",
    ),
)


def _columns(spec: KeyListsBackwardSpec) -> int:
    """Columns of a group: those of one swizzled row."""
    return SWIZZLE // DTYPES[spec.dtype].bytes


def _divided(spec: KeyListsBackwardSpec) -> int:
    """Parts of the rows of a step whose dQ different warpgroups compute."""
    return max(1, _consumers(spec) // (spec.head_dim // _columns(spec)))


def _consumers(spec: KeyListsBackwardSpec) -> int:
    """Warpgroups that compute, 64 keys each."""
    return tile_keys(spec.entry_keys) // WARPGROUP_ROWS


def _pieces(spec: KeyListsBackwardSpec) -> int:
    """Blocks of a tile."""
    return tile_keys(spec.entry_keys) // spec.entry_keys


def plan(spec: KeyListsBackwardSpec, stem: str) -> Plan:
    """Plan of the kernel of a spec."""
    require(not spec.is_fp8, "dtype", f"is {spec.dtype}; allowed: fp16, bf16")
    check_tile(spec, TILE)
    m, n, d = spec.tile.m, spec.tile.n, spec.head_dim
    consumers = _consumers(spec)
    shared = _shared(spec)
    # Per thread and column of 64 rows: half a register for a product, a quarter for a 16-bit operand. dK, dV; S^T and
    # dP^T, or dQ in their place; P^T.
    accumulators = d + m + m // 4
    producer, consumer = REGISTERS[consumers]
    registers = Registers(accumulators, OVERHEAD_REGISTERS, consumer)
    check_budget(spec, shared.size, registers)
    fits_twice = 2 * (shared.size + KIB) <= ARCHS[spec.arch].shared_memory_per_sm
    return Plan(
        spec=spec,
        stem=stem,
        template="key_lists_backward/sm90a.cu.j2",
        threads=WARPGROUP * (1 + consumers),
        ctas_per_sm=2 if consumers == 1 and fits_twice else 1,
        persistent=False,
        dynamic_scheduler=False,
        shared=tuple(shared.regions),
        shared_bytes=shared.size,
        registers=registers,
        params=_params(in_pieces=_pieces(spec) > 1),
        tensor_maps=_tensor_maps(spec),
        constants=_constants(spec, producer=producer, consumer=consumer),
        flags=KeyListsBackwardFlags(m // _divided(spec), in_pieces=_pieces(spec) > 1),
        grid_summary="one thread block for each chunk of a tile's queries",
        summary=(
            ("tile", f"{n} keys, {m // spec.group} queries of {spec.group} heads a step"),
            ("schedule", f"{spec.schedule}: a TMA producer, a warp that adds to dQ, {consumers} consumers"),
        ),
        flops=2 * d * m * n * 5,
        bytes=2 * m * d * DTYPES[spec.dtype].bytes + FLOAT * m * d,
        arguments=_arguments,
        prologue=Prologue(f"{stem}_prologue", THREADS_OF_ROWS),
        epilogue=Epilogue(f"{stem}_convert", THREADS_OF_ROWS),
    )


def _dq_parts(spec: KeyListsBackwardSpec) -> int:
    """Products of dQ of a warpgroup: each for one group of columns."""
    return max(1, spec.head_dim // _columns(spec) // _consumers(spec))


def _ds_buffers(spec: KeyListsBackwardSpec) -> int:
    """Buffers of dS. One warpgroup has one, and a second barrier in each step, which costs it little. That leaves
    shared memory for a ring of two stages, with two thread blocks per SM."""
    return min(2, _consumers(spec))


def _shared(spec: KeyListsBackwardSpec) -> SharedLayout:
    """Shared memory layout: operands of the tile, the ring of its steps, and results that steps pass on."""
    stages, m, element = spec.stages, spec.tile.m, DTYPES[spec.dtype].bytes
    q_bytes, kv_bytes = m * spec.head_dim * element, spec.tile.n * spec.head_dim * element
    shared = SharedLayout()
    shared.add("K", kv_bytes, "K of the tile in column groups")
    shared.add("V", kv_bytes, "V of the tile")
    ring = Ring(stages, "q_full[i]", "q_empty[i]")
    shared.add("Q", stages * q_bytes, "Q ring", ring=ring)
    shared.add("Dout", stages * q_bytes, "dO ring", ring=ring)
    buffers = _ds_buffers(spec)
    steps = "a step" if buffers == 1 else "a step, and of the previous one"
    shared.add("Ds", buffers * m * spec.tile.n * element, f"dS of {steps}: column groups of 64 keys")
    shared.add("Parts", m * spec.head_dim * FLOAT, "staging of a step's part of dQ, query by query", stores=True)
    shared.add("Stats", stages * m * STATS_BYTES, "statistics of the rows in the ring", align=16)
    shared.add("Norms", stages * m * NORM, "norms of the rows of dO in the ring", align=16)
    shared.add("Barriers", 8 * (2 * stages + 3), "mbarriers", align=8)
    last_keys = stages * (_pieces(spec) * (m // spec.group) + 1) * 4
    what = "last key that each query of the ring sees" if _pieces(spec) == 1 else "last keys of queries, by piece"
    shared.add("LastKeys", last_keys, f"{what}; whether one sees fewer", align=4)
    largest = stages * (m // spec.group) * LARGEST
    shared.add("Largest", largest, "largest |K| and norm of V of each query of the ring", align=8)
    shared.add("Scales", 2 * m * SCALE, "scales of the rows of a step, and of the previous one", align=4)
    return shared


def _strided(name: str, doc: str, *, writes: bool = False) -> tuple[Param, ...]:
    """Address and strides of a tensor (tokens, heads, head_dim)."""
    strides = (i64(f"{name}_{axis}_stride", f"{axis} stride, in elements") for axis in ("head", "row"))
    return (pointer(name, ELEMENT, doc, writes=writes), *strides)


def list_params(*, in_pieces: bool) -> tuple[Param, ...]:
    """Parameters of transposed lists."""
    of_entries = (pointer("pieces", "unsigned char", "pieces of the tile that an entry lists, a bit each"),)
    return (
        pointer("entries", "int", "token of each entry, by tile"),
        *(of_entries if in_pieces else ()),
        pointer("offsets", "int", "first entry of each tile, then the end of the last one"),
        pointer("places", "int4", "first token in K of each tile of a head, its position, and keys there"),
        pointer("chunk_begins", "int", "first chunk of each tile, then the number of chunks"),
        pointer("chunk_tiles", "int", "tile of each chunk; none behind the last one"),
        pointer("positions", "int", "position of each query (tokens,)"),
    )


def _params(*, in_pieces: bool) -> tuple[Param, ...]:
    """Parameters of the kernel."""
    return (
        *OPERANDS,
        *_strided("k", "K (key tokens, kv_heads, head_dim)"),
        *_strided("v", "V, as K"),
        *_strided("out", "O (tokens, heads, head_dim)"),
        *_strided("dout", "dO, as O"),
        pointer("lse", "float", "log-sum-exp of the forward, (heads, tokens) contiguous"),
        pointer("dlse", "float", "gradient of the log-sum-exp, as lse; 0 if null"),
        pointer("stats", "RowStats", "statistics of all rows, (tokens, heads)", writes=True),
        pointer("norms", "float", "norms of the rows of dO, as stats", writes=True),
        pointer("beyond", "unsigned char", "1 for rows whose dQ fixed point does not hold, as stats", writes=True),
        pointer(
            "largest", "int2", "largest |K| and norm of V of the tiles of a query, (kv_heads, tokens)", writes=True
        ),
        *list_params(in_pieces=in_pieces),
        pointer("chunk_order", "int", "chunk of each thread block"),
        *_strided("dq", "dQ, as O", writes=True),
        *_strided("dk", "dK (key tokens, kv_heads, head_dim)", writes=True),
        *_strided("dv", "dV, as K", writes=True),
        pointer("accum", "int", "sums of dQ in fixed point, (kv_heads, tokens, kPartBytes / 4)", writes=True),
        pointer("partials", "float", "dK and dV of each chunk", writes=True),
        i32("tokens", "queries of all sequences"),
        i32("heads", "query heads"),
        i32("kv_heads", "heads of K and V"),
        i32("tiles", "tiles of a head"),
        i32("chunk_entries", "entries of a chunk"),
        i32("row_blocks", "thread blocks of the prologue that have rows; the others have a tile each"),
        i32("dq_blocks", "thread blocks of the epilogue that convert dQ; the others add up dK and dV"),
        f32("scale_log2", "scale * log2(e); the host checks that it is positive"),
        f32("scale", "the softmax scale"),
    )


def _tensor_maps(spec: KeyListsBackwardSpec) -> dict[str, TensorMap]:
    """Tensor maps of the operands: the heads of one query, and the keys of a tile."""
    q = TensorMap((_columns(spec), 1, spec.group, 1), SWIZZLE)
    kv = TensorMap((_columns(spec), spec.tile.n, 1, 1), SWIZZLE)
    return {"q_map": q, "k_map": kv, "v_map": kv, "dout_map": q}


def _constants(spec: KeyListsBackwardSpec, *, producer: int, consumer: int) -> tuple[Constant, ...]:
    """Constants of the source."""
    m, n, d, columns, element = spec.tile.m, spec.tile.n, spec.head_dim, _columns(spec), DTYPES[spec.dtype].bytes
    consumers, pieces = _consumers(spec), _pieces(spec)
    of_pieces = (
        Constant("kPieces", pieces, "blocks of a tile"),
        Constant("kPieceKeys", spec.entry_keys, "keys of a block"),
        Constant("kStepPieces", pieces * (m // spec.group), "queries per step, times the blocks of a tile"),
    )
    return (
        Constant("kHeadDim", d, "elements per head"),
        Constant("kGroup", spec.group, "query heads per KV head"),
        Constant("kTileM", m, "rows per step"),
        Constant("kTileN", n, "keys of a tile"),
        *(of_pieces if pieces > 1 else ()),
        Constant("kStepQueries", m // spec.group, "queries per step"),
        Constant("kStages", spec.stages, "depth of the ring"),
        Constant("kConsumerWarpgroups", consumers, "warpgroups that compute, 64 keys each"),
        Constant("kThreads", WARPGROUP * (1 + consumers), "warpgroup 0 produces, the others consume"),
        Constant("kProducerRegisters", producer, "registers per producer thread"),
        Constant("kConsumerRegisters", consumer, "registers per consumer thread"),
        Constant("kGroupColumns", columns, "columns of a group: one 128-byte swizzled row"),
        Constant("kGroups", d // columns, "column groups per head"),
        Constant("kQGroupBytes", m * SWIZZLE, "bytes of one column group of Q, of dO, or of dS"),
        Constant("kKvGroupBytes", n * SWIZZLE, "bytes of one column group of K or V"),
        Constant("kQBytes", m * d * element, "bytes of Q, or of dO, of a step"),
        Constant("kKvBytes", n * d * element, "bytes of K, or of V, of a tile"),
        Constant("kDsBuffers", _ds_buffers(spec), "buffers of dS"),
        Constant("kDsBytes", m * n * element, "bytes of dS of a step"),
        Constant("kStatsBytes", m * STATS_BYTES, "bytes of the statistics of a step"),
        Constant("kNormsBytes", m * NORM, "bytes of the norms of the rows of a step"),
        Constant("kDqColumnParts", d // columns, "parts of 64 columns of dQ, indexed by warpgroup"),
        Constant("kDqParts", _dq_parts(spec), "such parts of a warpgroup"),
        Constant("kDqQueries", m // _divided(spec), "rows of a warpgroup's part of dQ"),
        Constant("kPartBytes", spec.group * d * FLOAT, "bytes of a query's part of dQ"),
        Constant("kSumFloats", n * d, "elements of dK, or of dV, of a chunk"),
        Constant("kRowThreads", THREADS_OF_ROWS, "threads per block of the prologue, and of the epilogue"),
        Constant("kRowLanes", d // 8, "threads per row in the prologue, 16 bytes each"),
    )


def tiles_of_head(key_tokens: int, sequences: int, keys: int) -> int:
    """Tiles of a KV head at most, wherever sequences begin."""
    return key_tokens // keys + sequences


def chunks_of(entries: int, tiles: int, chunk: int) -> int:
    """Chunks of all heads at most: each tile with entries has at most one that is not full."""
    return entries // chunk + min(tiles, entries)


def chunk_sizes(shape: KeyListsShape, entry_keys: int, group: int) -> tuple[dict[str, int], int]:
    """Tiles of a head and entries of a chunk, by parameter, and the chunks of all heads at most."""
    keys = tile_keys(entry_keys)
    rows = CHUNK_ROWS * keys // 128 if keys == entry_keys else CHUNK_ROWS
    chunk, tiles = max(1, rows // group), tiles_of_head(shape.key_tokens, shape.sequences, keys)
    entries = shape.kv_heads * shape.tokens * shape.list_length
    return {"tiles": tiles, "chunk_entries": chunk}, chunks_of(entries, shape.kv_heads * tiles, chunk)


def _arguments(plan: Plan, shape: KeyListsShape, slots: int) -> LaunchArgs:
    """Launch arguments, with one thread block per chunk."""
    del slots
    spec = plan.spec
    assert isinstance(spec, KeyListsBackwardSpec)
    sizes, chunks = chunk_sizes(shape, spec.entry_keys, spec.group)
    pairs = shape.kv_heads * shape.tokens
    dq_blocks = -(-pairs // (spec.tile.m // spec.group))
    row_blocks = -(-shape.tokens * shape.kv_heads * spec.group // (THREADS_OF_ROWS // (spec.head_dim // 8)))
    tiles, sum_bytes = shape.kv_heads * sizes["tiles"], spec.tile.n * spec.head_dim * FLOAT
    return LaunchArgs(
        {
            "tokens": shape.tokens,
            "heads": shape.kv_heads * spec.group,
            "kv_heads": shape.kv_heads,
            **sizes,
            "row_blocks": row_blocks,
            "dq_blocks": dq_blocks,
        },
        chunks,
        prologue_grid=row_blocks + tiles,
        scratch={"partials": chunks * 2 * sum_bytes, "norms": pairs * spec.group * NORM},
        epilogue_grid=dq_blocks + tiles * 2 * (sum_bytes // 16 // THREADS_OF_ROWS),
        sums={
            "accum": pairs * spec.group * spec.head_dim * FLOAT,
            "largest": pairs * LARGEST,
            "beyond": pairs * spec.group,
        },
    )
