"""Plan of the gradients of attention on sm_89: those of sm_90a by mma.sync, operands through a ring of cp.async."""

from __future__ import annotations

from codegen.arch import ARCHS, WARP
from codegen.dtypes import DTYPES
from codegen.flags import AttentionBackwardMmaSyncFlags
from codegen.plan import Constant, Param, Plan, Prologue, Registers, SharedLayout, SharedRegion, check_budget, require
from codegen.plans.attention_backward_parts import (
    ELEMENT,
    PROLOGUE_THREADS,
    STATS_BYTES,
    arguments,
    check_blocks,
    check_pattern,
    params,
    size_constants,
    walk_constants,
    walk_flags,
)
from codegen.plans.attention_kv_lengths import key_end_words
from codegen.plans.attention_mma_sync import BANK_BYTES, CHUNK, RESERVED, TILE_ROWS
from codegen.plans.attention_params import tensor_params
from codegen.spec import AttentionBackwardSpec

PIECES = "attention/mma_sync"
HEAD_DIMS = (64, 128)
RESIDENT = (64, 128)  # rows of a tile, 16 a warp
STEPS = range(16, 129, 16)  # keys, or queries, of a step
# Addresses, loop state, statistics, operands in flight: an allowance with which nothing spills.
OVERHEAD_REGISTERS = 50


def plan(spec: AttentionBackwardSpec, stem: str) -> Plan:
    """Work out every number of the kernel."""
    _check(spec)
    arch, m, n, d = ARCHS[spec.arch], spec.tile.m, spec.tile.n, spec.head_dim
    is_dq = spec.gradients == "dq"
    resident, step = (m, n) if is_dq else (n, m)
    warps = resident // TILE_ROWS
    threads = warps * WARP
    row_bytes = d * DTYPES[spec.dtype].bytes
    pass_rows = threads // (BANK_BYTES // CHUNK)
    other, given = ("tile.n", n) if is_dq else ("tile.m", m)
    reason = f"is {given}; {warps} warps copy {pass_rows} rows at a time: a multiple is expected"
    require(step % pass_rows == 0, other, reason)
    regions, shared_bytes = _shared(spec, row_bytes)
    # A thread has of 16 rows of a product half a column, of an operand in 16 bits a quarter.
    sums = d // 2 * (1 if is_dq else 2)
    operands = 2 * (d // 4) if is_dq else 0  # Q and dO stay
    accumulators = sums + operands + 2 * (step // 2) + step // 4
    ctas_per_sm = max(
        1,
        min(
            arch.shared_memory_per_sm // (shared_bytes + RESERVED),
            arch.blocks_for(threads, accumulators + OVERHEAD_REGISTERS),
            arch.warps_per_sm // warps,
        ),
    )
    registers = Registers(accumulators, OVERHEAD_REGISTERS, arch.registers_for(threads, ctas_per_sm))
    check_budget(spec, shared_bytes, registers)
    words = key_end_words(spec.forward)
    tile, step_rows = ("queries", "keys") if is_dq else ("keys", "queries")
    return Plan(
        spec=spec,
        stem=stem,
        template=f"attention_backward/mma_sync_{spec.gradients}.cu.j2",
        threads=threads,
        ctas_per_sm=ctas_per_sm,
        persistent=False,
        shared=regions,
        shared_bytes=shared_bytes,
        registers=registers,
        params=params(spec, _operands(spec)),
        tensor_maps={},
        constants=_constants(spec, threads, row_bytes),
        flags=AttentionBackwardMmaSyncFlags(
            walk=walk_flags(spec),
            key_end_of_batch=words.key_end_of_batch,
            no_block=words.no_block,
            columns_piece=f"{PIECES}/columns/padded.cuh.j2",
            rows_piece=f"{PIECES}/rows/plain.cuh.j2",
            thread="threadIdx.x",
        ),
        grid_summary=f"one thread block for each tile, {ctas_per_sm} at a time on an SM",
        summary=(
            ("tile", f"{resident} {tile}, {step} {step_rows} of a step"),
            ("schedule", f"{spec.schedule}: {warps} warps load (cp.async) and compute (mma.sync, 16 rows each)"),
        ),
        flops=2 * d * m * n * (3 if is_dq else 4),
        bytes=2 * step * row_bytes,
        arguments=arguments,
        tile_queries=m if is_dq else 0,
        prologue=Prologue(f"{stem}_prologue", PROLOGUE_THREADS),
    )


def _check(spec: AttentionBackwardSpec) -> None:
    """Refuse a pattern and a tile that the kernels are not written for."""
    check_pattern(spec)
    require(spec.gradients != "dq_dkdv", "gradients", f"is dq_dkdv; allowed on {spec.arch}: dq, dkdv")
    d = spec.head_dim
    require(
        d in HEAD_DIMS, "head_dim", f"is {d}; allowed in a gradient on {spec.arch}: {', '.join(map(str, HEAD_DIMS))}"
    )
    by_expression = spec.pattern.expression is not None
    reason = f"is an expression, of which {spec.arch} has no gradient; allowed: none, causal"
    require(not by_expression, "pattern.mask", reason)
    bits = spec.pattern.masks_by_bits
    require(not bits, "pattern.mask", f"is bits, of which {spec.arch} has no gradient; allowed: none, causal")
    has_score = spec.score is not None
    require(not has_score, "score", f"is an expression, of which {spec.arch} has no gradient")
    require(spec.softcap is None, "softcap", f"is {spec.softcap}, of which {spec.arch} has no gradient")
    require(not spec.kv_lengths, "kv_lengths", f"is true, of which {spec.arch} has no gradient")
    field, resident, other, step = "tile.m", spec.tile.m, "tile.n", spec.tile.n
    if spec.gradients == "dkdv":
        field, resident, other, step = other, step, field, resident
    require(resident in RESIDENT, field, f"is {resident}; allowed: 64, 128 (warps of {TILE_ROWS} rows)")
    allowed = f"allowed: {STEPS[0]} to {STEPS[-1]}, multiples of {STEPS.step}"
    require(step in STEPS, other, f"is {step}; {allowed}")
    require(spec.stages >= 2, "stages", f"is {spec.stages}; allowed: 2 to 8 (one stage fills while another is read)")
    check_blocks(spec)


def _shared(spec: AttentionBackwardSpec, row_bytes: int) -> tuple[tuple[SharedRegion, ...], int]:
    """Lay out the shared memory: what a tile keeps, and the ring of what its steps need."""
    stages, shared = spec.stages, SharedLayout()
    q_bytes, kv_bytes = spec.tile.m * row_bytes, spec.tile.n * row_bytes
    if spec.gradients == "dq":
        # Q and dO, which registers keep, arrive in the ring's place before it is used.
        ring = shared.add("Ring", max(stages * 2 * kv_bytes, 2 * q_bytes), f"{stages} stages, each K and V of a step")
        over: tuple[SharedRegion, ...] = (
            SharedRegion("Q", ring.offset, q_bytes, "Q of the tile, at first; in the end dQ on its way out", "Ring"),
            SharedRegion("Dout", ring.offset + q_bytes, q_bytes, "dO of the tile, at first", "Ring"),
        )
    else:
        shared.add("K", kv_bytes, "K of the tile; then dK on its way out")
        shared.add("V", kv_bytes, "V of the tile; then dV on its way out")
        shared.add("Q", stages * q_bytes, "Q ring")
        shared.add("Dout", stages * q_bytes, "dO ring")
        shared.add("Stats", stages * spec.tile.m * STATS_BYTES, "statistics of the queries in the ring", align=16)
        over = ()
    if spec.gradients == "dq" or spec.pattern.masks_pairs:
        shared.add("StepMeta", 4 * stages, "metadata of the steps in the ring", align=4)
    return (*shared.regions, *over), shared.size


def _operands(spec: AttentionBackwardSpec) -> tuple[Param, ...]:
    """Return the operands and the gradients."""
    gradients = {"dq": (("dq", "dQ, as Q"),), "dkdv": (("dk", "dK, as K"), ("dv", "dV, as K"))}[spec.gradients]
    return (
        *tensor_params("q", ELEMENT, "Q (batch, heads, q_len, head_dim)"),
        *tensor_params("k", ELEMENT, "K (batch, kv_heads, kv_len, head_dim)"),
        *tensor_params("v", ELEMENT, "V, as K"),
        *(param for name, doc in gradients for param in tensor_params(name, ELEMENT, doc, writes=True)),
    )


def _constants(spec: AttentionBackwardSpec, threads: int, row_bytes: int) -> tuple[Constant, ...]:
    """Return the named values at the top of the source."""
    line_chunks = BANK_BYTES // CHUNK
    ring = {
        "dq": (Constant("kKvBytes", spec.tile.n * row_bytes, "bytes of K, or of V, of a step"),),
        "dkdv": (
            Constant("kQBytes", spec.tile.m * row_bytes, "bytes of Q, or of dO, of a step"),
            Constant("kStatsBytes", spec.tile.m * STATS_BYTES, "bytes of the statistics of a step"),
        ),
    }[spec.gradients]
    return (
        *size_constants(spec),
        Constant("kThreads", threads, f"{threads // WARP} warps of {TILE_ROWS} rows"),
        Constant("kRowBytes", row_bytes, "bytes of a row of a head"),
        Constant("kLineChunks", line_chunks, "16-byte chunks of a line: what lanes side by side copy of a row"),
        Constant("kRowLines", row_bytes // BANK_BYTES, "lines of a row"),
        Constant("kSwizzleRows", 1, "consecutive rows whose chunks are swapped alike"),
        Constant("kPassRows", threads // line_chunks, "rows that all threads copy at a time"),
        Constant("kWarpPassRows", WARP // line_chunks, "rows that a warp stores at a time"),
        *ring,
        *walk_constants(spec),
    )
