"""Plan of the WMMA attention kernel: a cp.async ring of K and V blocks, a strip of shared memory for each warp."""

from __future__ import annotations

from codegen.arch import ARCHS, KIB
from codegen.dtypes import DTYPES
from codegen.flags import PatternFlags
from codegen.plan import (
    Constant,
    Plan,
    Registers,
    Ring,
    SharedLayout,
    SharedRegion,
    check_budget,
    require,
)
from codegen.plans.attention.expressions import expressions_flags
from codegen.plans.attention.launch import arguments
from codegen.plans.attention.params import (
    block_constants,
    block_of,
    index_params,
    lse_params,
    options_summary,
    padding_params,
    size_params,
    sub_tile_doc,
    tensor_params,
)
from codegen.plans.lengths import lengths_of
from codegen.spec import AttentionSpec
from codegen.tile_rules import Fits, OneOf, Rule, check_tile

WARP = 32  # threads
MMA = 16  # rows, columns and depth of one WMMA product; rows per warp
CHUNK = 16  # bytes of one cp.async
# With one extra chunk, a row has an odd number of chunks, so that eight rows of a fragment use distinct banks.
PADDING_BYTES = 16
# Padding of a strip, in elements. As floats, rows start 8 banks apart, so that neither stores of accumulators nor reads
# of rows have bank conflicts; as 16-bit elements, a row has an odd number of chunks.
STRIP_PADDING = 8
FACTOR_PADDING = 4  # floats: a strip of 32 keys has no room for more after its P
RESERVED = 1 * KIB  # shared memory that the system reserves per block
FRAGMENT_REGISTERS = 8  # per accumulator, and at most per operand
OVERHEAD_REGISTERS = 64  # addresses, loop state, softmax state, operands in flight: an allowance
MASK_OVERHEAD = 8  # additional, if a pattern hides some pairs of a block
LOAD_OVERHEAD = 4  # additional, per further load of a step
HEAD_DIMS = (64, 128)
ROWS = (16, 32, 64, 128)
KEYS = (32, 64, 128)
BLOCKS = (16, 32, 64, 128)
SIZES: tuple[Rule[AttentionSpec], ...] = (
    OneOf("m", lambda spec: ROWS, lambda spec, sizes: f"allowed with wmma: {sizes}"),
    OneOf("n", lambda spec: KEYS, lambda spec, sizes: f"allowed with wmma: {sizes}"),
)
OF_BLOCK: Rule[AttentionSpec] = Fits(
    "m",
    lambda spec: spec.pattern.fixed_block is None or spec.pattern.fixed_block.q % spec.tile.m == 0,
    lambda spec: f"a tile is one query block or an equal part of it: pattern.block.q is {block_of(spec).q}",
)
TILE = (*SIZES, OF_BLOCK)


def plan(spec: AttentionSpec, stem: str) -> Plan:
    """Plan of the kernel of a spec."""
    arch, dtype, pattern = ARCHS[spec.arch], DTYPES[spec.dtype], spec.pattern
    block = pattern.fixed_block
    m, n, d = spec.tile.m, spec.tile.n, spec.head_dim
    require(spec.layout == "padded", "layout", f"is {spec.layout}; allowed with wmma: padded (others: mma, wgmma)")
    _check(spec)
    load_keys = n if block is None else min(n, block.kv)
    warps = m // MMA
    threads = warps * WARP
    chunk = CHUNK // dtype.bytes
    row_chunks = d // chunk
    pass_rows = threads // row_chunks
    require(
        load_keys % pass_rows == 0,
        "tile.m",
        f"is {m}; {warps} warps copy {pass_rows} rows of {d} elements at a time, which the {load_keys} keys of a step "
        "or a listed block are no multiple of; use a smaller tile.m",
    )
    row_stride = d + PADDING_BYTES // dtype.bytes
    slot_bytes = n * row_stride * dtype.bytes
    strip_stride, factor_stride = n + STRIP_PADDING, MMA + FACTOR_PADDING
    strip_bytes, prob_bytes = (MMA * strip_stride * size for size in (4, dtype.bytes))

    shared = SharedLayout()
    slots = f"{spec.stages} slots, each K or V of one step"
    shared.add("Ring", spec.stages * slot_bytes, slots, ring=Ring(spec.stages))
    shared.add("Strips", warps * strip_bytes, f"a strip for each warp, {MMA} rows of {strip_stride} floats", align=128)
    # Q is loaded to fragments before the last slot and the strips are used.
    doc = "Q tile: in the slot that is filled last" + (", and the strips after it" if m > n else "")
    waiting = SharedRegion("Q", (spec.stages - 1) * slot_bytes, m * row_stride * dtype.bytes, doc, "Ring")
    shared_bytes = max(shared.size, waiting.offset + waiting.bytes)

    queries, output, scores = (FRAGMENT_REGISTERS * size // MMA for size in (d, d, n))
    held = queries + output + scores
    overhead = OVERHEAD_REGISTERS + MASK_OVERHEAD * pattern.masks_pairs + LOAD_OVERHEAD * (n // load_keys - 1)
    # As many thread blocks as shared memory, registers and warps allow.
    ctas_per_sm = max(
        1,
        min(
            arch.shared_memory_per_sm // (shared_bytes + RESERVED),
            arch.blocks_for(threads, held + overhead),
            arch.warps_per_sm // warps,
        ),
    )
    limit = arch.registers_for(threads, ctas_per_sm)
    registers = Registers(accumulators=held, overhead=overhead, limit=limit)
    check_budget(spec, shared_bytes, registers)

    block_steps = 1 if block is None else max(1, block.kv // n)
    constants = (
        Constant("kHeadDim", d, "elements per head"),
        Constant("kTileM", m, "queries per thread block"),
        Constant("kTileN", n, "keys per step"),
        Constant("kStages", spec.stages, "slots of the ring"),
        Constant("kAhead", spec.stages - 1, "K and V tiles in flight while one is read"),
        Constant("kSubTileRows", m, sub_tile_doc(block is not None)),
        Constant("kMma", MMA, "rows, columns and depth of one WMMA product; query rows of a warp"),
        Constant("kThreads", threads, f"{warps} warp{'s' if warps > 1 else ''}"),
        Constant("kChunk", chunk, "elements of a 16-byte copy"),
        Constant("kRowChunks", row_chunks, "16-byte copies of a row of Q, K, V"),
        Constant("kRowStride", row_stride, "row stride of a tile, in elements: 8 rows lie in distinct banks"),
        Constant("kPassRows", pass_rows, "rows that all threads copy at a time"),
        Constant("kSlot", n * row_stride, "elements of a slot of the ring"),
        Constant("kStripStride", strip_stride, "row stride of scores and of P, in elements, with padding"),
        Constant("kStripBytes", strip_bytes, "bytes of a strip"),
        Constant("kFactorsOffset", prob_bytes, "offset of the factors in a strip, after P"),
        Constant("kFactorStride", factor_stride, "row stride of the factors, in floats, with padding"),
        Constant("kOutColumns", min(n, d), "columns of O that pass through a strip at a time"),
        Constant("kStepBlocks", n // load_keys, "loads per step: its listed blocks, if it has several"),
        Constant("kLoadKeys", load_keys, "keys per load"),
        *(block_constants(block, m, n) if block is not None else []),
        *(Constant(name, value, comment) for name, (value, comment) in pattern.constants().items()),
    )
    element = dtype.cuda
    return Plan(
        spec=spec,
        stem=stem,
        template="attention/wmma.cu.j2",
        threads=threads,
        ctas_per_sm=ctas_per_sm,
        persistent=False,
        shared=(*shared.regions, waiting),
        shared_bytes=shared_bytes,
        registers=registers,
        params=(
            *tensor_params("q", element, "Q (batch, heads, q_len, head_dim)"),
            *tensor_params("k", element, "K (batch, kv_heads, kv_len, head_dim)"),
            *tensor_params("v", element, "V, as K"),
            *tensor_params("o", element, "O, as Q", writes=True),
            *lse_params(spec),
            *index_params(spec),
            *padding_params(spec),
            *size_params(spec),
        ),
        tensor_maps={},
        constants=constants,
        flags=PatternFlags(
            pattern_template=f"attention/patterns/{pattern.kind}.cuh.j2",
            lengths=lengths_of(spec),
            expressions=expressions_flags(spec),
            partial_range=False,
            skip_masked=False,
            block_steps=block_steps,
            step_blocks=n // load_keys,
            divides_block=block is not None and block.q > m,
        ),
        grid_summary=f"one thread block for each tile, {ctas_per_sm} at a time on an SM",
        summary=(
            ("pattern", pattern.describe()),
            *options_summary(spec),
            ("tile", f"{m} queries x {n} keys, Q in fragments"),
            ("schedule", f"{spec.schedule}: {warps} warps load (cp.async) and compute (WMMA, {MMA} rows each)"),
            ("softmax", "scores, P and row factors pass through a strip of shared memory for each warp"),
            ("pipeline", f"{spec.stages - 1} K or V tiles in flight while one is read"),
        ),
        flops=4 * m * n * d,
        bytes=2 * n * d * dtype.bytes,
        arguments=arguments,
        headers=(dtype.header, "mma.h"),
        tile_queries=m,
    )


def _check(spec: AttentionSpec) -> None:
    """Reject specs that the kernel does not support."""
    block, packed = spec.pattern.fixed_block, spec.pack_gqa
    require(spec.head_dim in HEAD_DIMS, "head_dim", f"is {spec.head_dim}; allowed with wmma: {_list(HEAD_DIMS)}")
    require(spec.softcap is None, "softcap", f"is {spec.softcap}; attention with wmma does not support it")
    has_score = spec.score is not None
    require(not has_score, "score", "is an expression; attention with wmma does not support it")
    by_expression = spec.pattern.expression is not None
    require(not by_expression, "pattern.mask", "is an expression; attention with wmma does not support it")
    require(not spec.sink, "sink", f"is true; attention with wmma on {spec.arch} does not support it")
    require(packed == 1, "pack_gqa", f"is {packed}; attention with wmma does not support it: 1")
    require(spec.warp_rows == MMA, "warp_rows", f"is {spec.warp_rows}; a warp has the {MMA} rows of one WMMA product")
    check_tile(spec, SIZES)
    require(spec.stages >= 2, "stages", f"is {spec.stages}; allowed: 2 to 8 (one slot fills while another is read)")
    if block is not None:
        require(block.q in BLOCKS, "pattern.block.q", f"is {block.q}; allowed with wmma: {_list(BLOCKS)}")
        check_tile(spec, (OF_BLOCK,))


def _list(values: tuple[int, ...]) -> str:
    return ", ".join(map(str, values))
