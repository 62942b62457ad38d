"""Plan of the sm_89 attention kernel: a cp.async ring of K and V blocks, mma.sync in every warp."""

from __future__ import annotations

from codegen.arch import ARCHS, KIB
from codegen.block_sizes import query_sizes
from codegen.dtypes import DTYPES
from codegen.flags import AttentionMmaSyncFlags
from codegen.plan import (
    Constant,
    Plan,
    Registers,
    check_budget,
    require,
)
from codegen.plans.attention.expressions import expression_registers, expressions_flags
from codegen.plans.attention.launch import arguments
from codegen.plans.attention.mma_sync_operands import (
    BANK_BYTES,
    CHUNK,
    FP8_STEP,
    check_operands,
    line_bytes,
    o_row_bytes,
    operand_constants,
    operand_params,
    rows_of,
)
from codegen.plans.attention.mma_sync_operands import registers as operand_registers
from codegen.plans.attention.mma_sync_shared import shared_regions
from codegen.plans.attention.params import (
    block_constants,
    block_of,
    check_head_dim,
    index_params,
    logit_constants,
    lse_params,
    options_summary,
    padding_params,
    sink_params,
    size_params,
    sub_tile_doc,
)
from codegen.plans.lengths import check_layout, lengths_of
from codegen.spec import AttentionSpec
from codegen.tile_rules import Fits, OneOf, Rule, check_tile, multiples

WARP = 32  # threads
TILE_ROWS = 16  # rows of one mma.sync
# Shared memory that the system reserves per block (CUDA C++ Programming Guide, "Compute Capability 8.x").
RESERVED = 1 * KIB
# Addresses, loop state, softmax state, operands in flight. The compiler uses a few more if they are free, and would
# spill with fewer.
REGISTER_OVERHEAD = 46
MASK_OVERHEAD = 8  # additional, if a pattern hides some pairs of a block
LOAD_OVERHEAD = 8  # additional, per further load of a step
LENGTH_OVERHEAD = 2  # additional, for kv_lengths if a listed block has several steps
# Spare registers per thread below which values derived from the thread index are recomputed at each use, as they would
# spill.
FEW_LEFT = 4
ROWS = (16, 32, 64, 128, 256)
KEYS = range(32, 129, 16)
NARROW_HEAD = 64  # elements
WIDEST_OF_HIGH_WARPS = 128  # largest head_dim for which O of 32 rows fits a thread's registers
GROUP_KEYS = 16  # for wider heads: the depth of one mma.sync
KV_BYTES = 2**32 * 16  # largest extent of K and of V: 16-byte chunks are counted in 32 bits


def plan(spec: AttentionSpec, stem: str) -> Plan:
    """Plan of the kernel of a spec."""
    arch, dtype, pattern = ARCHS[spec.arch], DTYPES[spec.dtype], spec.pattern
    block = pattern.fixed_block
    m, n, d = spec.tile.m, spec.tile.n, spec.head_dim
    check_layout(spec)
    check_head_dim(spec, "mma")
    check_operands(spec)
    _check_tile(spec)
    load_keys = n if block is None else min(n, block.kv)
    block_steps = 1 if block is None else max(1, block.kv // n)
    warps = m // spec.warp_rows
    threads = warps * WARP
    row_tiles = spec.warp_rows // TILE_ROWS
    # With room for two whole steps, the kernel waits for K and V of a step together: one __syncthreads per step.
    paired = spec.stages >= 4 and spec.stages % 2 == 0
    ahead = spec.stages - 2 if paired else spec.stages - 1
    # With wide heads the P V products of a group of keys hide the exponentials of the next group. Otherwise all weights
    # of a step (or half) come first: fewer votes, and longer runs of products.
    in_one_go = n if paired else n // 2
    group_keys = in_one_go if d <= NARROW_HEAD and in_one_go % GROUP_KEYS == 0 else GROUP_KEYS
    listed = block is not None
    row_bytes = d * dtype.bytes
    line, o_line = line_bytes(row_bytes), line_bytes(o_row_bytes(spec))
    line_chunks = line // CHUNK
    pass_rows = threads // line_chunks
    _check_copies(spec, load_keys, line_chunks)
    q_bytes, slot_bytes = m * row_bytes, n * row_bytes

    scores, output, queries = (spec.warp_rows * size // WARP for size in (n, d, row_bytes // 4))
    # Weights of 16 keys, and of 16 more. If a group has more keys, its weights overwrite their scores.
    fragments = 2 * 4 * row_tiles
    # Q stays in registers if they suffice.
    kept = scores + output + queries + fragments
    overhead = _overhead(spec, loads=n // load_keys, block_steps=block_steps)
    q_in_registers = kept + overhead <= arch.registers_per_thread
    accumulators = kept if q_in_registers else kept - queries
    regions = shared_regions(spec, q_in_registers, ahead)
    shared_bytes = max(region.offset + region.bytes for region in regions)
    ctas_per_sm = max(
        1,
        min(
            arch.shared_memory_per_sm // (shared_bytes + RESERVED),
            arch.blocks_for(threads, accumulators + overhead),
            arch.warps_per_sm // warps,
        ),
    )
    limit = arch.registers_for(threads, ctas_per_sm)
    registers = Registers(accumulators, overhead, limit, expression_registers(spec))
    check_budget(spec, shared_bytes, registers)

    rereads = arch.registers_per_thread - registers.needed < FEW_LEFT
    heads = spec.pack_gqa
    tile_queries = m // heads
    reads = "the two of a step are" if paired else "one is"
    constants = [
        Constant("kHeadDim", d, "elements per head"),
        Constant("kTileM", m, f"{'rows' if heads > 1 else 'queries'} of a thread block"),
        Constant("kTileN", n, "keys per step"),
        Constant("kStages", spec.stages, "slots of the ring"),
        Constant("kAhead", ahead, f"K and V tiles in flight while {reads} read"),
        *(_pack_constants(heads, tile_queries) if heads > 1 else []),
        Constant("kSubTileRows", tile_queries, sub_tile_doc(listed)),
        Constant("kWarpRows", spec.warp_rows, "rows per warp"),
        Constant("kRowTiles", row_tiles, f"tiles of {TILE_ROWS} rows per warp; their products share K and V operands"),
        Constant("kThreads", threads, f"{warps} warp{'s' if warps > 1 else ''}"),
        Constant("kRowBytes", row_bytes, f"bytes per row of {rows_of(spec)}"),
        Constant("kLineChunks", line_chunks, "16-byte chunks per line, the part of a row that adjacent lanes copy"),
        Constant("kRowLines", row_bytes // line, "lines per row"),
        Constant("kSwizzleRows", BANK_BYTES // line, "consecutive rows with the same swizzle"),
        Constant("kPassRows", pass_rows, "rows that all threads copy at a time"),
        Constant("kWarpPassRows", WARP * CHUNK // o_line, "rows that a warp stores at a time"),
        Constant("kSlotBytes", slot_bytes, "bytes of K or V of a step"),
        Constant("kStepBlocks", n // load_keys, "loads per step: its listed blocks, if it has several"),
        Constant("kLoadKeys", load_keys, "keys per load"),
        *operand_constants(spec, load_keys, group_keys),
        *([] if paired else [Constant("kHalfStep", n // 2 // group_keys, "half a step, in groups")]),
        *_pattern_constants(spec, ahead, tile_queries),
        *logit_constants(spec),
    ]
    params = [
        *operand_params(spec),
        *lse_params(spec),
        *sink_params(spec),
        *index_params(spec),
        *padding_params(spec),
        *size_params(spec),
    ]
    return Plan(
        spec=spec,
        stem=stem,
        template="attention/mma_sync.cu.j2",
        threads=threads,
        ctas_per_sm=ctas_per_sm,
        persistent=False,
        shared=regions,
        shared_bytes=shared_bytes,
        registers=registers,
        params=tuple(params),
        tensor_maps={},
        constants=tuple(constants),
        flags=AttentionMmaSyncFlags(
            pattern_template=f"attention/patterns/{pattern.kind}.cuh.j2",
            lengths=lengths_of(spec),
            expressions=expressions_flags(spec),
            partial_range=False,
            skip_masked=False,
            block_steps=block_steps,
            step_blocks=n // load_keys,
            divides_block=block is not None and block.q > tile_queries,
            paired=paired,
            overlaps=in_one_go > group_keys and not dtype.is_fp8,
            q_beyond=q_in_registers and q_bytes > (spec.stages - ahead) * slot_bytes,
            rereads_thread=rereads,
            q_in_registers=q_in_registers,
        ),
        grid_summary=f"one thread block for each tile, {ctas_per_sm} at a time on an SM",
        summary=(
            ("pattern", pattern.describe()),
            *options_summary(spec),
            _tile_summary(spec, q_in_registers),
            (
                "schedule",
                f"{spec.schedule}: {warps} warps load (cp.async) and compute (mma.sync, {spec.warp_rows} rows each)",
            ),
            ("pipeline", f"{ahead} K or V tiles in flight while {reads} read"),
        ),
        flops=4 * m * n * d,
        bytes=2 * slot_bytes,
        arguments=arguments,
        tile_queries=tile_queries,
        kv_bytes=KV_BYTES,
    )


def _overhead(spec: AttentionSpec, *, loads: int, block_steps: int) -> int:
    """Registers per thread besides accumulators and fragments, for ``loads`` loads per step."""
    lengths = lengths_of(spec).by_batch and block_steps > 1
    masks = MASK_OVERHEAD * spec.pattern.masks_pairs
    lists = LOAD_OVERHEAD * (loads - 1) + LENGTH_OVERHEAD * lengths
    return REGISTER_OVERHEAD + operand_registers(spec) + masks + lists + expression_registers(spec)


def _is_part_of_query_block(spec: AttentionSpec) -> bool:
    block = spec.pattern.fixed_block
    return block is None or block.q * spec.pack_gqa % spec.tile.m == 0


def _is_whole_key_blocks(spec: AttentionSpec) -> bool:
    block, n = spec.pattern.fixed_block, spec.tile.n
    return block is None or block.kv % n == 0 or n % block.kv == 0


def _query_block(spec: AttentionSpec) -> str:
    rows = f", {block_of(spec).q * spec.pack_gqa} rows" if spec.pack_gqa > 1 else ""
    return f"a tile is one query block or an equal part of it: pattern.block.q is {block_of(spec).q}{rows}"


SIZES: tuple[Rule[AttentionSpec], ...] = (
    OneOf("m", lambda spec: ROWS, lambda spec, sizes: f"allowed on {spec.arch}: {sizes}"),
    Fits(
        "m",
        lambda spec: spec.tile.m % spec.pack_gqa == 0,
        lambda spec: f"the rows of a query stay together: pack_gqa is {spec.pack_gqa}",
    ),
    OneOf("n", lambda spec: KEYS, lambda spec, sizes: f"allowed on {spec.arch}: {multiples(KEYS)}"),
)
OF_BLOCK: tuple[Rule[AttentionSpec], ...] = (
    Fits("m", _is_part_of_query_block, _query_block),
    Fits(
        "n",
        _is_whole_key_blocks,
        lambda spec: (
            f"a step is one listed block, an equal part of one, or several: pattern.block.kv is {block_of(spec).kv}"
        ),
    ),
)
TILE = (*SIZES, *OF_BLOCK, FP8_STEP)


def _check_tile(spec: AttentionSpec) -> None:
    """Reject a tile that the kernel cannot support."""
    name, block, m = spec.arch, spec.pattern.fixed_block, spec.tile.m
    heads = spec.pack_gqa
    if block is not None:  # before the tile, whose default depends on the block
        sizes = query_sizes(heads)
        packed = f" with pack_gqa {heads}" if heads > 1 else ""
        require(block.q in sizes, "pattern.block.q", f"is {block.q}; allowed on {name}{packed}: {_list(sizes)}")
    check_tile(spec, SIZES)
    high = f"is {spec.warp_rows}; O does not fit a thread's registers with head_dim {spec.head_dim}; allowed: 16"
    require(_may_be_high(spec) or spec.warp_rows == TILE_ROWS, "warp_rows", high)
    require(m >= spec.warp_rows, "warp_rows", f"is {spec.warp_rows}; tile.m has only {m} rows")
    require(spec.stages >= 2, "stages", f"is {spec.stages}; allowed: 2 to 8 (one slot fills while another is read)")
    if block is not None:
        check_tile(spec, OF_BLOCK)


def _may_be_high(spec: AttentionSpec) -> bool:
    """Whether a warp may have 32 rows."""
    return spec.head_dim <= WIDEST_OF_HIGH_WARPS


def _check_copies(spec: AttentionSpec, load_keys: int, line_chunks: int) -> None:
    """Reject a tile if the rows that its threads copy at a time do not divide a step or a listed block."""
    m, warp_rows = spec.tile.m, spec.warp_rows

    def pass_rows(rows: int, of_warp: int) -> int:
        return rows // of_warp * WARP // line_chunks

    def fits(rows: int, of_warp: int) -> bool:
        return rows % spec.pack_gqa == 0 and rows >= of_warp and load_keys % pass_rows(rows, of_warp) == 0

    smaller = _list(tuple(rows for rows in ROWS if rows < m and fits(rows, warp_rows)))
    higher = _may_be_high(spec) and warp_rows == TILE_ROWS and fits(m, 2 * TILE_ROWS)
    instead = " or ".join([f"tile.m {smaller}"] * bool(smaller) + [f"warp_rows {2 * TILE_ROWS}"] * higher)
    reason = (
        f"{m // warp_rows} warps copy {pass_rows(m, warp_rows)} rows of {spec.head_dim} elements at a time, which the "
        f"{load_keys} keys of a step or a listed block are no multiple of; use {instead or 'another tile.n'}"
    )
    field, given = ("tile.m", m) if smaller or not higher else ("warp_rows", warp_rows)
    require(fits(m, warp_rows), field, f"is {given}; {reason}")


def _pack_constants(heads: int, tile_queries: int) -> list[Constant]:
    """Constants of packed rows."""
    return [
        Constant("kPackGqa", heads, "query heads of a pack: row = query * kPackGqa + head"),
        Constant("kTileQueries", tile_queries, "queries of a tile"),
    ]


def _pattern_constants(spec: AttentionSpec, ahead: int, tile_queries: int) -> list[Constant]:
    """Constants of the loop over key blocks, with ``ahead`` K and V tiles in flight."""
    pattern, block = spec.pattern, spec.pattern.fixed_block
    found = []
    if block is not None:
        doc = "steps whose K is requested, starting at the current step"
        found.append(Constant("kStepsAhead", (ahead + 1) // 2, doc))
        found += block_constants(block, tile_queries, spec.tile.n)
    return [*found, *(Constant(name, value, comment) for name, (value, comment) in pattern.constants().items())]


def _tile_summary(spec: AttentionSpec, q_in_registers: bool) -> tuple[str, str]:
    """Summary line of the tile, for ``explain``."""
    rows, place = "rows" if spec.pack_gqa > 1 else "queries", "registers" if q_in_registers else "shared memory"
    return ("tile", f"{spec.tile.m} {rows} x {spec.tile.n} keys, Q in {place}")


def _list(values: tuple[int, ...]) -> str:
    return ", ".join(map(str, values))
