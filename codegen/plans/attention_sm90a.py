"""Plan of the sm_90a attention kernel: TMA producer warps, WGMMA consumer warpgroups, mbarrier rings."""

from __future__ import annotations

from dataclasses import dataclass

from codegen.arch import ARCHS
from codegen.dtypes import DTYPES
from codegen.patterns.base import Block
from codegen.plan import (
    Constant,
    Plan,
    Registers,
    SharedLayout,
    TensorMap,
    check_budget,
    pointer,
    require,
    tensor_map,
)
from codegen.plans.attention_params import (
    index_params,
    lse_params,
    options_summary,
    sink_params,
    size_params,
    softcap_constants,
)
from codegen.spec import AttentionSpec

WARPGROUP = 128  # threads
WARPGROUP_ROWS = 64  # rows of one wgmma
SWIZZLE = 128  # bytes: width of one column group in shared memory
# Registers of a producer and of a consumer thread; the first split that fits is taken. 65536 over 3 warpgroups: the
# producer gives up what the consumers take (PTX ISA, "setmaxnreg"). With fewer than 40 it spills.
REGISTER_SPLITS = ((56, 224), (40, 232))
REGISTER_OVERHEAD = 40  # addresses, loop state, softmax state
QUERY_BLOCKS = (1, 2, 4, 8, 16, 32, 64, 128)
LEAST_ROWS = 16  # of a query block: with fewer, most of a wgmma's 64 rows would be padding
TILE_STAGES = 2  # tiles in flight: the next tile's Q is there before this one's last block is done
LEAST_ENTRIES = 2  # numbers of tiles alternate between two places even where Q has one (the template says why)
OWN_STAGING_DIM = 128  # O of longer heads is staged where Q was: there is no room for both
SCHEDULER = "tiles handed out, thread blocks that ended: both 0 between launches"
L2_BYTES = 32 << 20  # half of the L2 (H100: 50 MB, H200: 60 MB): the rest goes to Q, O and to what is on its way out


def plan(spec: AttentionSpec, stem: str) -> Plan:
    """Work out every number of the kernel."""
    arch, dtype, pattern = ARCHS[spec.arch], DTYPES[spec.dtype], spec.pattern
    block = pattern.fixed_block
    m, n, d = spec.tile.m, spec.tile.n, spec.head_dim
    require(m == 128, "tile.m", f"is {m}; this kernel has two consumer warpgroups of 64 rows: 128")
    require(n in (64, 128), "tile.n", f"is {n}; allowed: 64, 128")
    if block is not None:
        sizes = [size for size in QUERY_BLOCKS if size * spec.packed_heads >= LEAST_ROWS]
        allowed = f"allowed on {arch.name} with packed_heads {spec.packed_heads}: {', '.join(map(str, sizes))}"
        require(block.q in sizes, "pattern.block.q", f"is {block.q}; {allowed}")
        require(block.kv in (64, 128), "pattern.block.kv", f"is {block.kv}; allowed on {arch.name}: 64, 128")
        reason = f"is {n}; a step is one listed block or an equal part of it: pattern.block.kv is {block.kv}"
        require(block.kv % n == 0, "tile.n", reason)
    rows = _Rows.of(spec)
    streams, consumers = rows.streams, m // WARPGROUP_ROWS
    columns = SWIZZLE // dtype.bytes
    groups = -(-d // columns)  # TMA fills a group that reaches beyond the head with zeros, and stores none of it
    q_bytes, kv_bytes = (length * groups * SWIZZLE for length in (m, n))
    block_steps = 1 if block is None else block.kv // n

    shares_staging = d > OWN_STAGING_DIM
    tile_stages = TILE_STAGES
    shared = _shared(spec, streams, tile_stages, q_bytes, kv_bytes)
    if shares_staging and shared.size > arch.shared_memory_per_block:
        tile_stages = 1
        shared = _shared(spec, streams, tile_stages, q_bytes, kv_bytes)
    scores, output = WARPGROUP_ROWS * n // WARPGROUP, WARPGROUP_ROWS * d // WARPGROUP
    accumulators = scores + scores // 2 + output
    fitting = [split for split in REGISTER_SPLITS if accumulators + REGISTER_OVERHEAD <= split[1]]
    producer_registers, consumer_registers = (fitting or REGISTER_SPLITS[-1:])[0]
    registers = Registers(accumulators=accumulators, overhead=REGISTER_OVERHEAD, limit=consumer_registers)
    check_budget(spec, shared.size, registers)

    scheduling = [
        Constant("kKeyBytes", 2 * d * dtype.bytes, "bytes of a key: a row of K and one of V"),
        Constant("kL2Bytes", L2_BYTES, "K and V that are meant to be in the L2 at once"),
    ]
    steps = [Constant("kBlockSteps", block_steps, "steps of kTileN keys in a listed block")]
    o_group = Constant("kOGroupBytes", WARPGROUP_ROWS * SWIZZLE, "bytes of one column group of a warpgroup's O")
    if shares_staging:  # a warpgroup's rows of O lie where its rows of Q were
        o_group = Constant("kOGroupBytes", m * SWIZZLE, "bytes from one column group of a warpgroup's O to the next")
    constants = [
        Constant("kHeadDim", d, "elements of a head"),
        *(rows.constants(groups, block) if rows.packed else [Constant("kTileM", m, "query rows of a thread block")]),
        Constant("kTileN", n, "keys of one step"),
        Constant("kStages", spec.stages, "depth of the K ring and of the V ring"),
        Constant("kTileStages", tile_stages, "depth of the ring of tiles, and of Q"),
        Constant("kStreams", streams, "query blocks in a tile, each with its own key blocks and K/V rings"),
        Constant("kStreamRows", rows.stream_queries, f"{'queries' if rows.packed else 'query rows'} of a stream"),
        Constant("kConsumerWarpgroups", consumers, "warpgroups that compute, 64 rows each"),
        Constant("kStreamWarpgroups", consumers // streams, "warpgroups that share a stream"),
        Constant("kThreads", WARPGROUP * (1 + consumers), "warpgroup 0 produces, the others consume"),
        Constant("kProducerRegisters", producer_registers, "registers a producer thread keeps"),
        Constant("kConsumerRegisters", consumer_registers, "registers a consumer thread takes"),
        Constant("kGroupColumns", columns, "columns of a group: one 128-byte swizzled row"),
        Constant("kGroups", groups, "column groups of a tile"),
        Constant("kQGroupBytes", m * SWIZZLE, "bytes of one column group of Q"),
        Constant("kKvGroupBytes", n * SWIZZLE, "bytes of one column group of K or V"),
        o_group,
        Constant("kQBytes", q_bytes, "bytes of a Q tile"),
        Constant("kKvBytes", kv_bytes, "bytes of a K or V block"),
        *(steps if block_steps > 1 else []),
        *(scheduling if pattern.uneven else []),
        *(Constant(name, value, comment) for name, (value, comment) in pattern.constants().items()),
        *softcap_constants(spec),
    ]
    params = [
        tensor_map("q_map", f"Q ({rows.dims}, batch)"),
        tensor_map("k_map", "K (head_dim, kv_len, kv_heads, batch)"),
        tensor_map("v_map", "V, as K"),
        tensor_map("o_map", "O, as Q"),
        *lse_params(spec),
        *sink_params(spec),
        *index_params(spec),
        *([pointer("scheduler", "int", SCHEDULER, writes=True)] if pattern.uneven else []),
        *size_params(spec),
    ]
    heads = f" of {spec.packed_heads} heads" if spec.packed_heads > 1 else ""
    shares = f"{rows.stream_queries} queries{heads}" + (f" in each of {streams} streams" if streams > 1 else "")
    return Plan(
        spec=spec,
        stem=stem,
        template="attention/sm90a.cu.j2",
        threads=WARPGROUP * (1 + consumers),
        blocks_per_sm=1,
        persistent=True,
        shared=tuple(shared.regions),
        shared_bytes=shared.size,
        registers=registers,
        params=tuple(params),
        tensor_maps={
            "q_map": TensorMap((columns, *rows.box(rows.box_queries)), SWIZZLE),
            "k_map": TensorMap((columns, n, 1, 1), SWIZZLE),
            "v_map": TensorMap((columns, n, 1, 1), SWIZZLE),
            "o_map": TensorMap((columns, *rows.box(rows.warpgroup_queries)), SWIZZLE),
        },
        constants=tuple(constants),
        values={
            "ping_pong": spec.schedule == "ping_pong",
            "streams": streams,
            "packed": rows.packed,
            "tile_stages": tile_stages,
            "shares_staging": shares_staging,
            "block_steps": block_steps,
            "softmax_scale": "p.scale_log2" if spec.softcap is None else "kCappedScale",
            "pattern_template": f"attention/patterns/{pattern.kind}.cuh.j2",
        },
        summary=(
            ("pattern", pattern.describe()),
            *options_summary(spec),
            ("tile", f"{m} {'rows' if rows.packed else 'queries'} x {n} keys: {shares}"),
            ("schedule", f"{spec.schedule}: one producer warp a stream (TMA), {consumers} consumer warpgroups (WGMMA)"),
            ("pipeline", f"{spec.stages} K blocks and {spec.stages} V blocks in flight for each stream"),
            ("grid", "one thread block per SM, looping over tiles (persistent)"),
        ),
        flops=4 * rows.tile_queries * spec.packed_heads * n * d,
        bytes=2 * kv_bytes * streams,
        tile_queries=rows.tile_queries,
    )


@dataclass(frozen=True)
class _Rows:
    """Whose queries a tile's rows are.

    Warpgroups whose rows belong to one query block share a list, hence the K/V that it brings in: a stream. Where a
    query block fills less than a warpgroup, the rest of the warpgroup's rows is padding.

    Attributes:
        heads: query heads packed into the rows of a query.
        streams: query blocks of a tile that follow lists of their own.
        stream_queries: queries of a stream.
        warpgroup_queries: queries of a warpgroup.
        boxes: copies that a column group of Q takes: one, or where there is padding one a stream.
        packed: whether rows are anything but consecutive queries of one head.
    """

    heads: int
    streams: int
    stream_queries: int
    warpgroup_queries: int
    boxes: int
    packed: bool

    @classmethod
    def of(cls, spec: AttentionSpec) -> _Rows:
        """Share out the rows of a tile."""
        block, heads, m = spec.pattern.fixed_block, spec.packed_heads, spec.tile.m
        block_rows = m if block is None else min(m, block.q * heads)
        streams = 1 if block_rows == m else m // WARPGROUP_ROWS
        padded = block_rows < WARPGROUP_ROWS
        return cls(
            heads=heads,
            streams=streams,
            stream_queries=block_rows // heads,
            warpgroup_queries=min(block_rows, WARPGROUP_ROWS) // heads,
            boxes=streams if padded else 1,
            packed=heads > 1 or padded,
        )

    @property
    def dims(self) -> str:
        """Dimensions of the tensor maps of Q and O, less the last."""
        return "head_dim, heads of a pack, q_len, packs" if self.packed else "head_dim, q_len, heads"

    @property
    def tile_queries(self) -> int:
        """Queries of a tile."""
        return self.streams * self.stream_queries

    @property
    def box_queries(self) -> int:
        """Queries of one copy of Q."""
        return self.tile_queries // self.boxes

    def box(self, queries: int) -> tuple[int, ...]:
        """Return the box of ``queries`` queries in a tensor map, without its columns."""
        return (self.heads, queries, 1, 1) if self.packed else (queries, 1, 1)

    def constants(self, groups: int, block: Block | None) -> list[Constant]:
        """Return the constants of packed rows."""
        load_bytes = groups * self.boxes * self.box_queries * self.heads * SWIZZLE
        listed = [] if block is None else [Constant("kBlockQueries", block.q, "queries that share a list")]
        return [
            Constant("kPackedHeads", self.heads, "query heads of a pack: row = query * kPackedHeads + head"),
            Constant("kTileQueries", self.tile_queries, "queries of a tile"),
            Constant("kWarpgroupQueries", self.warpgroup_queries, "queries of a warpgroup; its other rows are padding"),
            Constant("kQBoxes", self.boxes, "copies that fill a column group of Q, one warpgroup's rows apart"),
            Constant("kQLoadBytes", load_bytes, "bytes that the copies of a Q tile bring"),
            *listed,
        ]


def _shared(spec: AttentionSpec, streams: int, tile_stages: int, q_bytes: int, kv_bytes: int) -> SharedLayout:
    """Lay out the shared memory of ``tile_stages`` Q tiles and ``spec.stages`` blocks of K and of V for each stream."""
    shares_staging = spec.head_dim > OWN_STAGING_DIM
    columns = SWIZZLE // DTYPES[spec.dtype].bytes
    held = f"ring of Q tiles, {spec.tile.m} rows in column groups of {columns}"
    shared = SharedLayout()
    shared.add("Q", tile_stages * q_bytes, held + (", then O" if shares_staging else ""))
    shared.add("K", streams * spec.stages * kv_bytes, "K ring of each stream")
    shared.add("V", streams * spec.stages * kv_bytes, "V ring of each stream")
    if not shares_staging:
        shared.add("O", q_bytes, "O tile on its way out")
    shared.add("Barriers", 8 * (2 * tile_stages + 4 * streams * spec.stages), "mbarriers", align=8)
    entries = max(tile_stages, LEAST_ENTRIES)
    shared.add("Entries", 4 * entries * (1 + streams), "ring of tiles: number, block counts", align=4)
    shared.add("Slots", 4 * streams * spec.stages, "number of the block in each stage of the K rings", align=4)
    return shared
