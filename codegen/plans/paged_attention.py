"""Plan of attention over pages: rings of K and V for each warp, steps divided between thread blocks on the device."""

from __future__ import annotations

from typing import NamedTuple

from codegen.arch import ARCHS, KIB
from codegen.dtypes import DTYPES
from codegen.flags import PagedFlags
from codegen.plan import (
    Constant,
    Param,
    Plan,
    Registers,
    Ring,
    SharedLayout,
    check_budget,
    f32,
    i32,
    i64,
    pointer,
    require,
)
from codegen.plans.cache_scales import scale_params
from codegen.problem import LaunchArgs, PagedShape
from codegen.spec import PagedAttentionSpec
from codegen.tile_rules import OneOf, Rule, check_tile

WARP_BYTES = 32
"""Bytes of a column of V that a warp takes in a step: 16 keys, the depth of a product, or 32 of e4m3."""
MMA_ROWS = 16
WARPS = (1, 2, 4, 8)
LEAST_KEYS = 128
"""Keys of a thread block at least, so that few parts have to be added."""
TILE_COST = 2
"""Units of work that a tile counts besides its steps, about the time of its results on an H200."""
LEAST_UNITS = 8
"""Units of a thread block on average, from which thread blocks begin and end with tiles of one length."""
PART_KEYS = 1024
"""Keys of a part at least, where parts depend on the length of their request alone, or on the width of lists."""
OVERHEAD_REGISTERS = 80
"""Allowance for addresses, the cursor, logits and loop state."""
MOST_Q = 128
"""Columns of Q, over 16 rows each, that operands in registers have at most."""
LOADS_IN_FLIGHT = 32
"""16-byte loads of parts that a thread has in flight at most."""
FLOAT = 4
TILE: tuple[Rule[PagedAttentionSpec], ...] = (
    OneOf("m", lambda spec: (MMA_ROWS, 2 * MMA_ROWS), lambda spec, sizes: f"allowed: {sizes}"),
    OneOf(
        "n", lambda spec: tuple(_warp_keys(spec) * warps for warps in WARPS), lambda spec, sizes: f"allowed: {sizes}"
    ),
)


def _warp_keys(spec: PagedAttentionSpec) -> int:
    """Keys of a step per warp."""
    return WARP_BYTES // _element(spec)


def _element(spec: PagedAttentionSpec) -> int:
    """Bytes per element of K and V."""
    return 1 if spec.cache == "e4m3" else DTYPES[spec.dtype].bytes


def plan(spec: PagedAttentionSpec, stem: str) -> Plan:
    """Plan of the kernel of a spec."""
    arch, dtype, tile = ARCHS[spec.arch], DTYPES[spec.dtype], spec.tile
    check_tile(spec, TILE)
    e4m3_archs = ", ".join(name for name, found in ARCHS.items() if found.has_fp8)
    require(spec.cache == "same" or arch.has_fp8, "cache", f"is {spec.cache}; {arch.name} lacks FP8: use {e4m3_archs}")
    is_e4m3 = spec.cache == "e4m3"
    require(not is_e4m3 or spec.head_dim != 192, "head_dim", "is 192; e4m3 caches have heads of 64, 128 or 256")
    warp_keys, element = _warp_keys(spec), _element(spec)
    warps = tile.n // warp_keys
    ring = spec.stages * 2 * warp_keys * spec.head_dim * element
    sums = tile.m * (spec.head_dim + 8) * FLOAT
    require(ring >= sums, "stages", f"is {spec.stages}: {ring} bytes, fewer than the {sums} of a warp's sums")

    shared = SharedLayout()
    shared.add("Q", tile.m * spec.head_dim * dtype.bytes, "rows of Q", align=128)
    kind = "e4m3 codes" if is_e4m3 else "elements"
    shared.add(
        "Ring", warps * ring, f"{kind} of K and V; a ring per warp, and its sums at the end", ring=Ring(spec.stages)
    )
    shared.add(
        "Keys",
        warps * spec.stages * (warp_keys * (3 if is_e4m3 else 1) + 4) * 4,
        "positions of the keys in the rings",
        align=16,
    )
    shared.add("Rows", warps * tile.m * 2 * FLOAT, "maximum and weight of each row, by warp", align=16)
    shared.add("Places", tile.m * 8, "token and query head of each row", align=16)
    shared.add("Scan", (warps + 2) * 4, "sums of units of work", align=16)
    resident = max(1, arch.shared_memory_per_sm // (shared.size + KIB))
    resident = min(resident, arch.warps_per_sm // warps)
    mmas = tile.m // MMA_ROWS
    in_registers = mmas * spec.head_dim <= MOST_Q
    used = mmas * (spec.head_dim // 2 + 16) + (mmas * spec.head_dim // 4 if in_registers else 0)
    needed = used + OVERHEAD_REGISTERS
    while resident > 1 and arch.registers_for(32 * warps, resident) < needed:
        resident -= 1
    registers = Registers(used, OVERHEAD_REGISTERS, arch.registers_for(32 * warps, resident))
    check_budget(spec, shared.size, registers)
    return Plan(
        spec=spec,
        stem=stem,
        template="paged_attention/mma_sync.cu.j2",
        threads=32 * warps,
        ctas_per_sm=resident,
        persistent=True,
        shared=tuple(shared.regions),
        shared_bytes=shared.size,
        registers=registers,
        params=_params(spec),
        tensor_maps={},
        constants=(
            Constant("kHeadDim", spec.head_dim, "elements per head"),
            Constant("kTileM", tile.m, "rows per tile"),
            Constant("kTileN", tile.n, "keys per step"),
            Constant("kWarps", warps, f"warps, with {warp_keys} keys of a step each"),
            Constant("kStages", spec.stages, "slots of a warp's ring"),
            Constant("kKvBytes", element, "bytes per element of K and V"),
            Constant("kTileCost", TILE_COST, "units of work of a tile besides its steps"),
            Constant("kLeastSteps", _least_steps(spec), "units of a thread block at least, if there are as many"),
            Constant("kLeastUnits", LEAST_UNITS, "units of a thread block from which tiles are whole"),
            Constant("kPartsAtOnce", _parts_at_once(spec, warps), "parts of a tile that a thread adds at once"),
            Constant("kPartSteps", -(-PART_KEYS // tile.n), "steps of a part at least, if most_parts is set"),
        ),
        flags=PagedFlags(
            product=DTYPES["fp16"] if is_e4m3 else dtype,
            e4m3_cache=is_e4m3,
            pack="pack" if not is_e4m3 or spec.dtype == "fp16" else "pack_out",
            q_in_registers=in_registers,
        ),
        grid_summary="as many thread blocks as run concurrently, for any lengths",
        summary=(
            ("tile", f"{tile.m} rows, {tile.n} keys a step, {warp_keys} for each warp"),
            ("schedule", f"{spec.schedule}: all warps load ({spec.copy_}) and compute (mma.sync 16 x 8 x 16)"),
            ("pipeline", f"of each warp a ring of {spec.stages} slots of {warp_keys} keys and values"),
        ),
        flops=4 * tile.m * tile.n * spec.head_dim,
        bytes=2 * tile.n * spec.head_dim * element,
        arguments=_arguments,
    )


def _parts_at_once(spec: PagedAttentionSpec, warps: int) -> int:
    """Parts whose sums a thread loads at once: a power of two, at most the threads of a row."""
    row_threads = 32 * warps // spec.tile.m
    loads = spec.head_dim // 4 // row_threads
    return max(1, min(row_threads, 1 << (LOADS_IN_FLIGHT // loads).bit_length() - 1))


def _params(spec: PagedAttentionSpec) -> tuple[Param, ...]:
    """Parameters of the kernel."""
    element, codes = "unsigned short", "unsigned char"
    return (
        pointer("q", element, "Q (tokens, heads, head_dim)"),
        i64("q_token_stride", "token stride of Q, in elements"),
        i64("q_head_stride", "head stride of Q, in elements"),
        pointer("k_cache", codes, "K (pages, tokens of a page, kv_heads, head_dim), in any order but for head_dim"),
        pointer("v_cache", codes, "V, as K and with the same strides"),
        i32("page_chunks", "page stride of K and V, in 16 bytes"),
        i32("token_chunks", "token stride, likewise"),
        i32("head_chunks", "head stride, likewise"),
        i32("pages", "pages of K; requests if K is not paged"),
        i32("page_shift", "tokens of a page, as a power of two; 31 if K is not paged"),
        i32("page_mask", "tokens of a page, less 1"),
        pointer("block_table", "int", "pages of each request (batch, most pages), or null: request i has page i"),
        i64("table_stride", "row stride of block_table"),
        pointer("seq_lens", "int", "keys of each request (batch,), or null: max_keys each"),
        i32("max_keys", "keys of a request at most: those of a row of block_table"),
        pointer("cu_seqlens_q", "int", "first token of each request, then the end of the last, or null"),
        i32("request_queries", "tokens per request without cu_seqlens_q"),
        i32("batch", "requests"),
        i32("total_q", "tokens of all requests"),
        i32("kv_heads", "heads of K and V"),
        i32("group", "query heads per KV head"),
        i32("group_reciprocal", "(2^31 - 1) / group, rounded down"),
        i32("window_left", "keys that a query sees before its own position"),
        i32("window_right", "keys that it sees after its own position"),
        i32("sink_keys", "keys at the beginning that every later query sees"),
        pointer("lists", "int", "entries of each query (list_heads, tokens, list_length), or null: no lists"),
        i32("list_heads", "KV heads with lists, 1 if all share them"),
        i64("list_head_stride", "head stride of lists"),
        i64("list_token_stride", "token stride of lists"),
        i32("list_length", "entries of a list"),
        i32("entry_shift", "keys of an entry, as a power of two"),
        pointer(
            "counts", "int", "entries that count in each list (list_heads, tokens), or null: all but negative ones"
        ),
        i64("count_head_stride", "head stride of counts"),
        i64("count_token_stride", "token stride of counts"),
        i32("list_steps", "steps of a list"),
        i32("token_tiles", "tiles of the query heads of a token and a KV head"),
        i32("list_units", "units of work of all lists"),
        i32("list_blocks", "thread blocks that have some"),
        i32("list_sharers", "thread blocks of a tile, 0 if their ranges cross tiles"),
        i32("list_quota", "units of a thread block"),
        i32("list_extra", "sharers of a tile, or thread blocks of all, that have one more"),
        i32("list_sharers_reciprocal", "(2^31 - 1) / list_sharers, likewise below"),
        i32("tile_units_reciprocal", "of the units of a tile"),
        i32("token_tiles_reciprocal", "of token_tiles"),
        i32("kv_heads_reciprocal", "of kv_heads"),
        f32("scale_log2", "softmax scale times log2(e)"),
        f32("softcap", "cap of the logits, 0 for none"),
        pointer("sink", "float", "a logit of each query head that joins its sums (heads,), or null"),
        *(scale_params() if spec.cache == "e4m3" else ()),
        pointer("out", element, "result (tokens, heads, head_dim)", writes=True),
        i64("out_token_stride", "token stride of the result, in elements"),
        i64("out_head_stride", "head stride of the result, in elements"),
        pointer("lse", "float", "log-sum-exp (heads, tokens), or null", writes=True),
        i32("most_parts", "parts of a tile at most, if its own length alone divides it; otherwise 0"),
        pointer("partials", "float", "sums of parts", writes=True),
        pointer("counters", "int", "finished parts of a tile, 0 between launches", writes=True),
    )


def tiles_of(spec: PagedAttentionSpec, shape: PagedShape) -> int:
    """Tiles of a launch at most, over all KV heads."""
    group, rows = shape.heads // shape.kv_heads, spec.tile.m
    if shape.list_length:
        return shape.tokens * -(-group // rows) * shape.kv_heads
    return (shape.tokens * group // rows + shape.batch) * shape.kv_heads


class _Division(NamedTuple):
    """Division of the units of lists between thread blocks: what `divide` of the kernel finds for requests.

    Attributes:
        blocks: thread blocks that have some.
        sharers: thread blocks of a tile, 1 if each has whole ones, 0 if their ranges cross tiles.
        quota: units of a thread block.
        extra: sharers of a tile, or thread blocks of all, that have one more.
    """

    blocks: int
    sharers: int
    quota: int
    extra: int

    @classmethod
    def of(cls, spec: PagedAttentionSpec, tiles: int, tile_units: int, slots: int) -> _Division:
        """Division of a launch on a device that runs `slots` thread blocks."""
        total = tiles * tile_units
        blocks = max(1, min(slots, -(-total // _least_steps(spec))))
        if total >= LEAST_UNITS * blocks:
            each, sharers = -(-tiles // blocks), max(1, blocks // tiles)
            used = -(-tiles // each) * sharers
            if 16 * (blocks - used) <= blocks:
                return cls(used, sharers, *divmod(each * tile_units, sharers))
        return cls(blocks, 0, *divmod(total, blocks))


def _least_steps(spec: PagedAttentionSpec) -> int:
    """Units of a thread block at least."""
    return -(-LEAST_KEYS // spec.tile.n)


def _reciprocal(divisor: int) -> int:
    """Factor with which the kernel divides without a division; 0, which no number is divided by, counts as 1."""
    return (2**31 - 1) // max(1, divisor)


def _arguments(plan: Plan, shape: PagedShape, slots: int) -> LaunchArgs:
    """Launch arguments: a grid that depends on the device alone."""
    spec = plan.spec
    assert isinstance(spec, PagedAttentionSpec)
    group = shape.heads // shape.kv_heads
    tiles = tiles_of(spec, shape)
    places = tiles * shape.most_parts if shape.most_parts else 2 * slots
    part = spec.tile.m * (spec.head_dim + 2) * FLOAT
    list_steps, token_tiles = max(1, -(-shape.list_length * shape.entry_keys // spec.tile.n)), -(-group // spec.tile.m)
    list_units = TILE_COST + list_steps
    division = _Division.of(spec, tiles, list_units, slots)
    numbers = {
        "batch": shape.batch,
        "total_q": shape.tokens,
        "kv_heads": shape.kv_heads,
        "group": group,
        "group_reciprocal": _reciprocal(group),
        "list_length": shape.list_length,
        "entry_shift": shape.entry_keys.bit_length() - 1,
        "list_steps": list_steps,
        "token_tiles": token_tiles,
        "list_units": tiles * list_units,
        **{f"list_{name}": number for name, number in division._asdict().items()},
        "list_sharers_reciprocal": _reciprocal(division.sharers),
        "tile_units_reciprocal": _reciprocal(list_units),
        "token_tiles_reciprocal": _reciprocal(token_tiles),
        "kv_heads_reciprocal": _reciprocal(shape.kv_heads),
        "most_parts": shape.most_parts,
    }
    return LaunchArgs(
        numbers,
        slots,
        counters={"counters": tiles if shape.most_parts else slots},
        scratch={"partials": places * part},
        units=tiles * (TILE_COST + max(1, -(-(shape.list_length * shape.entry_keys or shape.max_keys) // spec.tile.n))),
    )
