"""Plan of attention over lists of keys on sm_90a, for many queries: tiles are key blocks, steps the queries that list
them. Each entry's part of the result goes to device memory; the parts of a query are combined in a fixed order."""

from __future__ import annotations

from codegen.arch import ARCHS, KIB
from codegen.dtypes import DTYPES
from codegen.flags import KeyListsForwardFlags
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
    aligned,
    check_budget,
    f32,
    i32,
    i64,
    pointer,
    require,
    tensor_map,
)
from codegen.plans.attention.rows import KV_DIMS, Q_DIMS, SWIZZLE, WARPGROUP_ROWS
from codegen.plans.attention.sm90a_text import PAGE_DIMS
from codegen.plans.backward import key_lists as backward
from codegen.plans.backward.parts import ELEMENT
from codegen.plans.backward.wgmma import WARPGROUP
from codegen.problem import PAGE_ROWS, KeyListsShape, LaunchArgs
from codegen.spec import KeyListsForwardSpec
from codegen.tile_rules import OneOf, Rule, check_tile

THREADS_OF_ROWS = 256  # per block of the prologue and of the epilogue
BATCH_QUERIES = 64  # of a thread block of the prologue
THREAD_TILES = 8  # of a thread that scans tiles
COUNTERS = 5  # of the prologue's phases
REGISTERS = 104, 152  # per thread of the producer's warpgroup and of the consumer, of two thread blocks per SM
OVERHEAD_REGISTERS = 24  # addresses, loop state, statistics: an allowance
FLOAT = INT = 4  # bytes
SCRATCH_ALIGNMENT = 256  # bytes
COMBINE_WARPS = 3  # of the producer's warpgroup
TURN_BATCH = 16  # entries whose loads overlap: 80 of the registers of a warp that combines
PIECE_BYTES = 512  # of a part, combined by one warp: 16 bytes of each lane
CHUNK_ROWS = 1 << 10
"""Rows of a chunk, the part of a tile's queries that one thread block takes: shorter chunks load keys more often, and
longer ones end a launch less evenly. Chunks of 4,096 rows had 258 TFLOPS, these 276 (H200, 32,768 tokens, 64:4 heads of
128, 16 blocks of 128 keys). An argument of a launch."""
SLICES_AT_A_TIME = 3  # whose parts a launch writes, combines, and the launch before it still combines
SLICE_BYTES = (1 << 30) // SLICES_AT_A_TIME
"""Bytes of the parts of a slice of queries, one query at least. Larger slices have more queries for each tile, and
fewer launches: 512 MiB and 1 GiB had 281 to 287 TFLOPS, little more, and take more memory."""

TILE: tuple[Rule[KeyListsForwardSpec], ...] = (
    OneOf("m", lambda spec: (WARPGROUP_ROWS,), lambda spec, sizes: f"allowed: {sizes} (rows of a warpgroup)"),
    OneOf("n", lambda spec: (spec.entry_keys,), lambda spec, sizes: f"allowed: {sizes}, the keys of an entry"),
)


def plan(spec: KeyListsForwardSpec, stem: str) -> Plan:
    """Plan of the kernel of a spec."""
    require(not spec.is_fp8, "dtype", f"is {spec.dtype}; allowed: fp16, bf16")
    check_tile(spec, TILE)
    m, n, d = spec.tile.m, spec.tile.n, spec.head_dim
    shared = _shared(spec)
    # Per thread and column of 64 rows: half a register for a product, a quarter for a 16-bit operand. S ends before O.
    registers = Registers(n // 4 + max(n, d) // 2, OVERHEAD_REGISTERS, REGISTERS[1])
    check_budget(spec, shared.size, registers)
    fits_twice = 2 * (shared.size + KIB) <= ARCHS[spec.arch].shared_memory_per_sm
    return Plan(
        spec=spec,
        stem=stem,
        template="key_lists_forward/sm90a.cu.j2",
        threads=2 * WARPGROUP,
        ctas_per_sm=2 if fits_twice else 1,
        persistent=False,
        shared=tuple(shared.regions),
        shared_bytes=shared.size,
        registers=registers,
        params=_params(paged=spec.layout == "paged"),
        tensor_maps=_tensor_maps(spec),
        constants=_constants(spec),
        flags=KeyListsForwardFlags(spec.layout == "paged"),
        grid_summary="one thread block for each chunk of a tile's queries",
        summary=(
            ("tile", f"{n} keys, {m // spec.group} queries of {spec.group} heads a step"),
            ("schedule", f"{spec.schedule}: a TMA producer, a consumer, {COMBINE_WARPS} warps that combine parts"),
        ),
        flops=4 * d * m * n,
        bytes=2 * m * d * DTYPES[spec.dtype].bytes,
        arguments=_arguments,
        prologue=Prologue(f"{stem}_transpose", THREADS_OF_ROWS, overlaps=True),
        epilogue=Epilogue(f"{stem}_combine", THREADS_OF_ROWS),
    )


def _columns(spec: KeyListsForwardSpec) -> int:
    """Columns of a group: those of one swizzled row."""
    return SWIZZLE // DTYPES[spec.dtype].bytes


def _part_bytes(spec: KeyListsForwardSpec) -> int:
    """Bytes of an entry's part of the result."""
    return spec.group * spec.head_dim * DTYPES[spec.dtype].bytes


def _shared(spec: KeyListsForwardSpec) -> SharedLayout:
    """Shared memory layout: operands of the tile, and the ring of its steps."""
    stages, m, element = spec.stages, spec.tile.m, DTYPES[spec.dtype].bytes
    q_bytes, kv_bytes = m * spec.head_dim * element, spec.tile.n * spec.head_dim * element
    queries = m // spec.group
    shared = SharedLayout()
    shared.add("K", kv_bytes, "K of the tile in column groups")
    shared.add("V", kv_bytes, "V of the tile")
    shared.add("Q", stages * q_bytes, "Q ring", ring=Ring(stages, "q_full[i]", "q_empty[i]"))
    shared.add("Barriers", 8 * (2 * stages + 1), "mbarriers", align=8)
    last_keys = stages * (queries + 1) * 4
    shared.add("LastKeys", last_keys, "last key that each query of the ring sees; whether one sees fewer", align=4)
    shared.add("Places", stages * queries * 4, "place of the part of each query of the ring", align=4)
    if spec.layout == "paged":
        shared.add("HiddenPages", 4, "keys of the tile outside of the cache, kPageRows for each bit", align=4)
    return shared


def _params(*, paged: bool) -> tuple[Param, ...]:
    """Parameters of the kernel."""
    of_keys = (
        (
            pointer("block_table", "int", "pages of each request; if null, each has a page of its own"),
            i32("table_stride", "row stride of the table"),
            i32("pages", "pages of the cache"),
            i32("page_shift", "log2 of the keys of a page"),
            i32("page_mask", "keys of a page, less 1"),
            i32("request_queries", "queries of each request without bounds"),
            i32("max_keys", "keys that a request has room for"),
            i32("request_tiles", "tiles of a request and head"),
        )
        if paged
        else (i32("key_tokens", "keys of all sequences"),)
    )
    return (
        tensor_map("q_map", "Q", Q_DIMS),
        tensor_map("k_map", "K", PAGE_DIMS if paged else KV_DIMS),
        tensor_map("v_map", "V", PAGE_DIMS if paged else KV_DIMS, like="K"),
        *_list_params(paged=paged),
        pointer("parts", "uint4", "parts of O of the slice, (kv_heads, slice_tokens, list_length)", writes=True),
        pointer("part_lse", "float", "their log-sum-exps to base 2, (..., list_length, group)", writes=True),
        pointer("earlier_parts", "uint4", "parts of the slice before; anything without one", writes=True),
        pointer("earlier_lse", "float", "their log-sum-exps", writes=True),
        pointer("out", ELEMENT, "O (tokens, heads, head_dim)", writes=True),
        *(i64(f"out_{axis}_stride", f"{axis} stride, in elements") for axis in ("head", "row")),
        pointer("lse", "float", "log-sum-exp, (heads, tokens)", writes=True),
        i32("slice", "slice of the queries that the launch computes"),
        i32("slice_tokens", "queries of a slice"),
        i32("sequences", "sequences"),
        *of_keys,
        i32("tokens", "queries of all sequences"),
        i32("kv_heads", "heads of K and V"),
        i32("list_length", "entries of a list"),
        i32("tiles", "tiles of a head"),
        i32("chunk_entries", "entries of a chunk"),
        f32("scale_log2", "scale * log2(e); the host checks that it is positive"),
    )


def _list_params(*, paged: bool) -> tuple[Param, ...]:
    """Parameters of the lists, and of what the kernel before the main one makes of them."""
    first = "request" if paged else "first token in K"
    written = (
        ("sync", "int", "progress of the transposition; 0 between launches"),
        ("tile_counts", "int", "entries of each tile; 0 between launches"),
        ("bounds", "int", f"rising bounds of the sequences in q, then {'their keys' if paged else 'those in k'}"),
        ("carry", "int2", "entries and chunks of the tiles that have been scanned"),
        ("ranks", "int", "rank of each entry in its tile, (kv_heads, tokens, list_length); -1 if it is not seen"),
        ("entries", "int2", "token and turn of each entry, by tile; tiles by slice, head and keys"),
        ("offsets", "int", "first entry of each tile, then the end of the last one"),
        ("places", "int4", f"{first} of each tile of a head, its first position, and keys there"),
        ("chunk_begins", "int", "first chunk of each tile, then the number of chunks"),
        ("chunk_tiles", "int", "tile of each chunk"),
        ("positions", "int", "position of each query (tokens,)"),
        ("turns", "int", "entries that each query sees, (kv_heads, tokens)"),
    )
    return (
        pointer("lists", "int", "blocks of each list, (kv_heads or 1, tokens, list_length)"),
        *(i64(f"lists_{axis}_stride", f"{axis} stride; of heads 0 if they share lists") for axis in ("head", "row")),
        pointer("counts", "int", "entries that count, (kv_heads or 1, tokens); all if null"),
        *(i64(f"counts_{axis}_stride", f"{axis} stride, likewise") for axis in ("head", "row")),
        pointer("cu_seqlens_q", "int", "first query of each sequence, then the end of the last; none if null"),
        pointer("seq_lens", "int", "keys of each request; all if null")
        if paged
        else pointer("cu_seqlens_k", "int", "the same of keys"),
        *(pointer(name, element, doc, writes=True) for name, element, doc in written),
    )


def _tensor_maps(spec: KeyListsForwardSpec) -> dict[str, TensorMap]:
    """Tensor maps of the operands: the heads of one query, and the keys of a tile."""
    kv = TensorMap((_columns(spec), PAGE_ROWS if spec.layout == "paged" else spec.tile.n, 1, 1), SWIZZLE)
    return {"q_map": TensorMap((_columns(spec), 1, spec.group, 1), SWIZZLE), "k_map": kv, "v_map": kv}


def _constants(spec: KeyListsForwardSpec) -> tuple[Constant, ...]:
    """Constants of the source."""
    m, n, d, columns, element = spec.tile.m, spec.tile.n, spec.head_dim, _columns(spec), DTYPES[spec.dtype].bytes
    return (
        Constant("kHeadDim", d, "elements per head"),
        Constant("kGroup", spec.group, "query heads per KV head"),
        Constant("kTileN", n, "keys of a tile"),
        Constant("kStepQueries", m // spec.group, "queries per step"),
        Constant("kStages", spec.stages, "depth of the ring"),
        Constant("kThreads", 2 * WARPGROUP, "warpgroup 0 produces and combines, the other one consumes"),
        Constant("kProducerRegisters", REGISTERS[0], "registers per thread of warpgroup 0"),
        Constant("kConsumerRegisters", REGISTERS[1], "registers per consumer thread"),
        Constant("kGroupColumns", columns, "columns of a group: one 128-byte swizzled row"),
        Constant("kGroups", d // columns, "column groups per head"),
        Constant("kQGroupBytes", m * SWIZZLE, "bytes of one column group of Q"),
        Constant("kKvGroupBytes", n * SWIZZLE, "bytes of one column group of K or V"),
        Constant("kQBytes", m * d * element, "bytes of Q of a step"),
        Constant("kKvBytes", n * d * element, "bytes of K, or of V, of a tile"),
        Constant("kPartBytes", _part_bytes(spec), "bytes of an entry's part of O"),
        Constant("kPieceBytes", PIECE_BYTES, "bytes of a part that a warp combines"),
        Constant("kCombineWarps", COMBINE_WARPS, "warps of warpgroup 0 that combine"),
        Constant("kTurnBatch", TURN_BATCH, "entries of a query whose loads overlap"),
        Constant("kRowThreads", THREADS_OF_ROWS, "threads per block of the prologue, and of the epilogue"),
        Constant("kBatchQueries", BATCH_QUERIES, "queries of a thread block of the prologue, of all heads'"),
        *((Constant("kPageRows", PAGE_ROWS, "keys per copy from a page"),) if spec.layout == "paged" else ()),
        Constant("kThreadTiles", THREAD_TILES, "tiles of a thread that finds the first entries of tiles"),
    )


def slices_of(spec: KeyListsForwardSpec, shape: KeyListsShape) -> tuple[int, int]:
    """Slices of the queries of a call, and queries of each; the last one may have fewer."""
    of_query = shape.kv_heads * shape.list_length * (_part_bytes(spec) + FLOAT * spec.group)
    slices = -(-shape.tokens // max(1, SLICE_BYTES // of_query))
    each = -(-shape.tokens // slices)
    return -(-shape.tokens // each), each


def _arguments(plan: Plan, shape: KeyListsShape, slots: int) -> LaunchArgs:
    """Launch arguments of a slice, with one thread block per chunk."""
    del slots
    spec = plan.spec
    assert isinstance(spec, KeyListsForwardSpec)
    slices, each = slices_of(spec, shape)
    paged, chunk = spec.layout == "paged", CHUNK_ROWS // spec.group
    request_tiles = -(-shape.key_tokens // spec.entry_keys)
    if paged:
        tiles = shape.sequences * request_tiles
    else:
        tiles = backward.tiles_of_head(shape.key_tokens, shape.sequences, spec.entry_keys)

    def of_slice(index: int) -> tuple[int, int]:
        """Queries of a slice, and its chunks at most."""
        tokens = min(each, shape.tokens - index * each)
        entries = shape.kv_heads * tokens * shape.list_length
        return tokens, backward.chunks_of(entries, shape.kv_heads * tiles, chunk)

    tokens, chunks = of_slice(shape.slice)
    queries, of_all, parts = shape.kv_heads * shape.tokens, slices * shape.kv_heads * tiles, each * shape.kv_heads
    batches, scans = -(-queries // BATCH_QUERIES), -(-of_all // (THREADS_OF_ROWS * THREAD_TILES))
    scratch = {
        "parts": parts * shape.list_length * _part_bytes(spec),
        "part_lse": parts * shape.list_length * spec.group * FLOAT,
        "bounds": 2 * INT * (shape.sequences + 1),
        "carry": 2 * INT,
        "ranks": INT * queries * shape.list_length,
        "entries": 2 * INT * queries * shape.list_length,
        "offsets": INT * (of_all + 1),
        "places": 4 * INT * tiles,
        "chunk_begins": INT * (of_all + 1),
        "chunk_tiles": INT * ((slices - 1) * of_slice(0)[1] + of_slice(slices - 1)[1]),
        "positions": INT * shape.tokens,
        "turns": INT * queries,
    }
    others = min(slices, SLICES_AT_A_TIME) - 1
    scratch = {name: aligned(size, SCRATCH_ALIGNMENT) for name, size in scratch.items()}
    scratch |= {"earlier_parts": others * scratch["parts"], "earlier_lse": others * scratch["part_lse"]}
    pieces = tokens * shape.kv_heads * (_part_bytes(spec) // PIECE_BYTES)
    return LaunchArgs(
        {
            "slice": shape.slice,
            "slice_tokens": each,
            "sequences": shape.sequences,
            "tokens": shape.tokens,
            **({"max_keys": shape.key_tokens, "request_tiles": request_tiles} if paged else {}),
            **({} if paged else {"key_tokens": shape.key_tokens}),
            "kv_heads": shape.kv_heads,
            "list_length": shape.list_length,
            "tiles": tiles,
            "chunk_entries": chunk,
        },
        chunks,
        prologue_grid=1 + 2 * batches + scans,
        counters={"sync": COUNTERS, "tile_counts": of_all},
        scratch=scratch,
        epilogue_grid=-(-pieces // (THREADS_OF_ROWS // 32)) if shape.slice == slices - 1 else 0,
        launches=slices,
    )
