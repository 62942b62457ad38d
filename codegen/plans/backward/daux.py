"""Plan of the gradients of a score's tensors: by mma.sync, over query tiles, with sums per thread block."""

from __future__ import annotations

from dataclasses import replace

from codegen.arch import ARCHS, WARP
from codegen.aux_gradients import COLUMNS, DIAGONALS, ROWS, Read, lines_of, reads_of, sums_name
from codegen.dtypes import DTYPES
from codegen.flags import AttentionBackwardAuxFlags
from codegen.plan import (
    Constant,
    Param,
    Plan,
    Prologue,
    Registers,
    Ring,
    SharedLayout,
    SharedRegion,
    check_budget,
    i32,
    pointer,
    require,
)
from codegen.plans.attention.expressions import (
    aux_slope_registers,
    aux_sum_flags,
    expression_registers,
    with_helpers_of,
)
from codegen.plans.attention.mma_sync import RESERVED, TILE_ROWS
from codegen.plans.attention.mma_sync_operands import BANK_BYTES, CHUNK
from codegen.plans.attention.params import options_summary, tensor_params
from codegen.plans.backward.parts import (
    ELEMENT,
    OF_BLOCKS,
    PIECES,
    PROLOGUE_THREADS,
    arguments,
    check_blocks,
    check_pattern,
    params,
    pattern_flags,
    size_constants,
    step_meta,
    walk_constants,
)
from codegen.problem import AttentionShape, LaunchArgs
from codegen.spec import AttentionBackwardSpec
from codegen.tile_rules import OneOf, Rule, check_tile
from codegen.wording import shown

HEAD_DIMS = (64, 128, 192, 256)
QUERIES = 64  # per tile: four warps have a thread for each of its diagonals
STEPS = (16, 32, 64)  # keys per step
OVERHEAD_REGISTERS = 50  # like the kernels of dQ
READ_REGISTERS = 10  # per element whose gradient is summed: no tested kernel spills with this allowance
BLOCKS = 512  # most thread blocks that share the tiles of all heads, but at least one per head
SUM_BYTES = (
    64 << 20
)  # most bytes of all thread blocks' sums over keys and distances, with at least one thread block per head
WORD_KEYS = 32  # bits per word


def plan(spec: AttentionBackwardSpec, stem: str) -> Plan:
    """Plan of the kernel of a spec."""
    reads = _checked(spec)
    arch, m, n, d = ARCHS[spec.arch], spec.tile.m, spec.tile.n, spec.head_dim
    warps = m // TILE_ROWS
    threads, row_bytes = warps * WARP, d * DTYPES[spec.dtype].bytes
    regions, shared_bytes = _shared(spec, reads, row_bytes)
    accumulators = 2 * (d // 4) + 3 * (n // 2) + 2 * len(reads)  # Q and dO; S, dP and their part; sums of two queries
    expression = expression_registers(spec.forward) + aux_slope_registers(reads) + READ_REGISTERS * len(reads)
    overhead = OVERHEAD_REGISTERS + expression
    fits = (
        arch.shared_memory_per_sm // (shared_bytes + RESERVED),
        arch.blocks_for(threads, accumulators + overhead),
        arch.warps_per_sm // warps,
    )
    ctas_per_sm = max(1, min(fits))
    registers = Registers(accumulators, overhead, arch.registers_for(threads, ctas_per_sm), expression)
    check_budget(spec, shared_bytes, registers)
    return Plan(
        spec=spec,
        stem=stem,
        template=f"{PIECES}/mma_sync_daux.cu.j2",
        threads=threads,
        ctas_per_sm=ctas_per_sm,
        persistent=False,
        shared=regions,
        shared_bytes=shared_bytes,
        registers=registers,
        params=params(spec, _operands(reads)),
        tensor_maps={},
        constants=_constants(spec, threads, row_bytes, has_pairs=_has_pairs(reads)),
        flags=_flags(spec, reads),
        grid_summary=f"up to {BLOCKS} thread blocks, each with tiles of one head, {ctas_per_sm} at a time on an SM",
        summary=(
            ("tile", f"{m} queries, {n} keys of a step"),
            ("schedule", f"{spec.schedule}: {warps} warps load (cp.async) and compute (mma.sync, 16 rows each)"),
            *((f"sums {sums_name(reads, i)}", f"{read.lines} of dS") for i, read in enumerate(reads)),
            *options_summary(spec.forward),
        ),
        flops=2 * d * m * n * 2,
        bytes=2 * n * row_bytes,
        arguments=_arguments,
        tile_queries=m,
        prologue=Prologue(f"{stem}_prologue", PROLOGUE_THREADS),
    )


SIZES: tuple[Rule[AttentionBackwardSpec], ...] = (
    OneOf(
        "m",
        lambda spec: (QUERIES,),
        lambda spec, sizes: f"allowed with gradients daux: {sizes} (four warps of {TILE_ROWS} rows)",
    ),
    OneOf("n", lambda spec: STEPS, lambda spec, sizes: f"allowed with gradients daux: {sizes}"),
)
TILE = (*SIZES, *OF_BLOCKS)


def _checked(spec: AttentionBackwardSpec) -> tuple[Read, ...]:
    """Reject specs that the kernel does not support; return the reads whose gradients it sums."""
    check_pattern(spec)
    require(spec.mma == "mma", "mma", f"is {spec.mma}; allowed with gradients daux: mma")
    require(spec.score is not None, "score", "is missing; gradients daux are those of its tensors")
    require(bool(spec.aux_gradients), "aux_gradients", "is empty; gradients daux are those of the tensors it lists")
    assert spec.score is not None
    d = spec.head_dim
    sizes = ", ".join(map(str, HEAD_DIMS))
    require(d in HEAD_DIMS, "head_dim", f"is {d}; allowed with gradients daux: {sizes}")
    check_tile(spec, SIZES)
    require(spec.stages >= 2, "stages", f"is {spec.stages}; allowed: 2 to 8 (one stage fills while another is read)")
    check_blocks(spec)
    reads = reads_of(spec.score, spec.aux_gradients)
    read = {read.item.aux.name for read in reads}
    none = ", ".join(shown(name) for name in spec.aux_gradients if name not in read)
    reason = f"has {none}, which the score reads only in conditions: its gradient is always 0"
    require(not none, "aux_gradients", reason)
    return reads


def _shared(
    spec: AttentionBackwardSpec, reads: tuple[Read, ...], row_bytes: int
) -> tuple[tuple[SharedRegion, ...], int]:
    """Shared memory layout: the ring, which first receives Q and dO, and the pairs for sums across warps."""
    stages, shared = spec.stages, SharedLayout()
    q_bytes, kv_bytes = spec.tile.m * row_bytes, spec.tile.n * row_bytes
    doc = f"{stages} stages, each K and V of a step"
    ring = shared.add("Ring", max(stages * 2 * kv_bytes, 2 * q_bytes), doc, ring=Ring(stages))
    if _has_pairs(reads):
        shared.add(
            "Pairs", spec.tile.m * _pair_stride(spec) * 4, "contributions of a step's pairs to sums across warps"
        )
    step_meta(shared, spec)
    over = (
        SharedRegion("Q", ring.offset, q_bytes, "Q of the tile, initially", "Ring"),
        SharedRegion("Dout", ring.offset + q_bytes, q_bytes, "dO of the tile, initially", "Ring"),
    )
    return (*shared.regions, *over), shared.size


def _has_pairs(reads: tuple[Read, ...]) -> bool:
    return any(read.lines != ROWS for read in reads)


def _pair_stride(spec: AttentionBackwardSpec) -> int:
    return spec.tile.n + 1  # neither adjacent elements of a column nor of a diagonal share a bank


def _operands(reads: tuple[Read, ...]) -> tuple[Param, ...]:
    """Operands and the sums."""
    shapes = {
        ROWS: "(batch, heads, q_len)",
        COLUMNS: "(batch, heads, splits, kv_len), 0 initially",
        DIAGONALS: "(batch, heads, splits, q_len + kv_len - 1), 0 initially",
    }
    sums = [
        pointer(sums_name(reads, i), "float", f"sums of its {read.lines}, {shapes[read.lines]}", writes=True)
        for i, read in enumerate(reads)
    ]
    return (
        *tensor_params("q", ELEMENT, "Q (batch, heads, q_len, head_dim)"),
        *tensor_params("k", ELEMENT, "K (batch, kv_heads, kv_len, head_dim)"),
        *tensor_params("v", ELEMENT, "V, as K"),
        *sums,
        i32("splits", "thread blocks that share the tiles of a head"),
    )


SCALES = ("kScoreScale", "kCappedScale")
"""Constants of logits that only the gradients of q and k need; this kernel has neither."""


def _constants(spec: AttentionBackwardSpec, threads: int, row_bytes: int, *, has_pairs: bool) -> tuple[Constant, ...]:
    """Constants of the source."""
    line_chunks, n = BANK_BYTES // CHUNK, spec.tile.n
    apart = "stride between the pairs of adjacent queries, in floats: kTileN + 1"
    words = f"words of {WORD_KEYS} bits for a query and a step"
    return (
        *size_constants(spec),
        Constant("kThreads", threads, f"{threads // WARP} warps of {TILE_ROWS} rows"),
        Constant("kRowBytes", row_bytes, "bytes of a row of a head"),
        Constant("kLineChunks", line_chunks, "16-byte chunks per line, the part of a row that adjacent lanes copy"),
        Constant("kRowLines", row_bytes // BANK_BYTES, "lines per row"),
        Constant("kSwizzleRows", 1, "consecutive rows with the same swizzle"),
        Constant("kPassRows", threads // line_chunks, "rows that all threads copy at a time"),
        Constant("kKvBytes", n * row_bytes, "bytes of K, or of V, of a step"),
        *((Constant("kPairStride", _pair_stride(spec), apart),) if has_pairs else ()),
        *((Constant("kStepWords", max(1, n // WORD_KEYS), words),) if spec.pattern.masks_by_bits else ()),
        *(each for each in walk_constants(spec) if each.name not in SCALES),
    )


def _flags(spec: AttentionBackwardSpec, reads: tuple[Read, ...]) -> AttentionBackwardAuxFlags:
    """Template parameters."""
    sums, pattern = aux_sum_flags(reads), pattern_flags(spec)
    return AttentionBackwardAuxFlags(
        pattern=replace(pattern, expressions=with_helpers_of(pattern.expressions, sums)),
        aux_sums=sums,
        has_pairs=_has_pairs(reads),
    )


def _arguments(plan: Plan, shape: AttentionShape, slots: int) -> LaunchArgs:
    """Launch arguments. The sums, and hence the order of additions, depend on the shape only."""
    of_tiles = arguments(plan, shape, slots)
    spec = plan.spec
    assert isinstance(spec, AttentionBackwardSpec)
    assert spec.score is not None
    reads = reads_of(spec.score, spec.aux_gradients)
    heads = shape.batch * shape.heads
    lines = [lines_of(read, q_len=shape.q_len, kv_len=shape.kv_len) for read in reads]
    of_split = 4 * heads * sum(n for n, read in zip(lines, reads, strict=True) if read.lines != ROWS)
    most = min(BLOCKS // heads, SUM_BYTES // of_split if of_split else BLOCKS)
    splits = min(max(1, most), of_tiles.numbers["query_tiles"])
    sums = {
        sums_name(reads, i): 4 * heads * lines[i] * (1 if read.lines == ROWS else splits)
        for i, read in enumerate(reads)
    }
    return replace(of_tiles, numbers={**of_tiles.numbers, "splits": splits}, tiles=heads * splits, sums=sums)
