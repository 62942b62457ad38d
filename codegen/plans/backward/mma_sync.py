"""Plan of the gradients of attention on sm_89: like sm_90a, but by mma.sync with a cp.async ring."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from codegen.arch import ARCHS, WARP
from codegen.dtypes import DTYPES
from codegen.flags import AttentionBackwardMmaSyncFlags
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
    require,
)
from codegen.plans.attention.expressions import expression_registers
from codegen.plans.attention.mma_sync import RESERVED, TILE_ROWS
from codegen.plans.attention.mma_sync_operands import BANK_BYTES, CHUNK
from codegen.plans.attention.params import options_summary
from codegen.plans.backward.parts import (
    OF_BLOCKS,
    PROLOGUE_THREADS,
    STATS_BYTES,
    arguments,
    check_blocks,
    check_pattern,
    gradient_params,
    input_params,
    params,
    size_constants,
    step_meta,
    step_places,
    tile_segment,
    walk_constants,
    walk_flags,
)
from codegen.problem import AttentionShape, LaunchArgs
from codegen.spec import AttentionBackwardSpec
from codegen.tile_rules import OneOf, Rule, check_tile, listed, multiples

HEAD_DIMS = (64, 128, 192, 256)
LARGEST_WHOLE = 128  # largest head_dim for which 16 rows of dK and dV, or of dQ, Q and dO, fit a thread's registers
RESIDENT = (64, 128)  # rows per tile, 16 per warp
STEPS = range(16, 129, 16)  # keys or queries per step
BITS_OF_WORD = 32
# Addresses, loop state, statistics, operands in flight: an allowance that avoids spills.
OVERHEAD_REGISTERS = 50


def plan(spec: AttentionBackwardSpec, stem: str) -> Plan:
    """Plan of the kernel of a spec."""
    _check(spec)
    arch, m, n, d = ARCHS[spec.arch], spec.tile.m, spec.tile.n, spec.head_dim
    is_dq, whole = spec.gradients == "dq", _is_whole(spec)
    resident, step = (m, n) if is_dq else (n, m)
    warps = resident // TILE_ROWS
    threads = warps * WARP
    row_bytes = d * DTYPES[spec.dtype].bytes
    pass_rows = threads // (BANK_BYTES // CHUNK)
    other, given = ("tile.n", n) if is_dq else ("tile.m", m)
    reason = f"is {given}; expected a multiple of the {pass_rows} rows that {warps} warps copy at a time"
    require(step % pass_rows == 0, other, reason)
    regions, shared_bytes = _shared(spec, row_bytes)
    expression = expression_registers(spec.forward, gradients=True)
    accumulators, overhead = _accumulators(spec), OVERHEAD_REGISTERS + expression
    ctas_per_sm = max(
        1,
        min(
            arch.shared_memory_per_sm // (shared_bytes + RESERVED),
            arch.blocks_for(threads, accumulators + overhead),
            arch.warps_per_sm // warps,
        ),
    )
    registers = Registers(accumulators, overhead, arch.registers_for(threads, ctas_per_sm), expression)
    check_budget(spec, shared_bytes, registers)
    tile, step_rows = ("queries", "keys") if is_dq else ("keys", "queries")
    blocks, products = _blocks_and_products(spec)
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
            divides_sums=not whole,
            q_in_registers=whole,
        ),
        grid_summary=f"{'two thread blocks' if blocks > 1 else 'one thread block'} for each tile, "
        f"{ctas_per_sm} at a time on an SM",
        summary=(
            ("tile", f"{resident} {tile}, {step} {step_rows} of a step"),
            ("schedule", f"{spec.schedule}: {warps} warps load (cp.async) and compute (mma.sync, 16 rows each)"),
            *options_summary(spec.forward),
        ),
        flops=2 * d * m * n * products,
        bytes=blocks * 2 * step * row_bytes,
        arguments=arguments if blocks == 1 else _arguments_of_two,
        tile_queries=m if is_dq else 0,
        prologue=Prologue(f"{stem}_prologue", PROLOGUE_THREADS),
    )


def _is_whole(spec: AttentionBackwardSpec) -> bool:
    """Whether registers hold a whole tile; otherwise dK and dV have separate thread blocks."""
    return spec.head_dim <= LARGEST_WHOLE


def _blocks_and_products(spec: AttentionBackwardSpec) -> tuple[int, int]:
    """Thread blocks per tile, and products per step; with two thread blocks, both compute S."""
    if spec.gradients == "dq":
        return 1, 3
    return (1, 4) if _is_whole(spec) else (2, 5)


def _arguments_of_two(plan: Plan, shape: AttentionShape, slots: int) -> LaunchArgs:
    """Launch arguments, with two thread blocks per tile."""
    of_tiles = arguments(plan, shape, slots)
    return replace(of_tiles, tiles=2 * of_tiles.tiles)


def _accumulators(spec: AttentionBackwardSpec) -> int:
    """Registers of sums and operands. Per column of 16 rows: half a register for products, a quarter for 16 bits."""
    d, whole = spec.head_dim, _is_whole(spec)
    if spec.gradients == "dq":
        step, sums, operands = spec.tile.n, d // 2, 2 * (d // 4) if whole else 0  # Q and dO, if they stay in registers
    else:
        step, sums, operands = spec.tile.m, d // 2 * (2 if whole else 1), 0
    return sums + operands + 2 * (step // 2) + step // 4


def _words(sizes: Sequence[int]) -> str:
    if isinstance(sizes, range):
        return f"allowed: {multiples(sizes)}"
    return f"allowed: {listed(sizes)} (warps of {TILE_ROWS} rows)"


def _rows(spec: AttentionBackwardSpec) -> Sequence[int]:
    """Queries per tile, or per step."""
    return RESIDENT if spec.gradients == "dq" else STEPS


def _keys(spec: AttentionBackwardSpec) -> Sequence[int]:
    """Keys per step, or per tile."""
    return STEPS if spec.gradients == "dq" else RESIDENT


SIZES: tuple[Rule[AttentionBackwardSpec], ...] = (
    OneOf("m", _rows, lambda spec, sizes: _words(_rows(spec))),
    OneOf("n", _keys, lambda spec, sizes: _words(_keys(spec))),
)
TILE = (*SIZES, *OF_BLOCKS)


def _check(spec: AttentionBackwardSpec) -> None:
    """Reject a pattern and a tile that the kernels cannot support."""
    check_pattern(spec)
    require(spec.gradients != "dq_dkdv", "gradients", f"is dq_dkdv; allowed on {spec.arch}: dq, dkdv")
    d = spec.head_dim
    require(
        d in HEAD_DIMS, "head_dim", f"is {d}; allowed in a gradient on {spec.arch}: {', '.join(map(str, HEAD_DIMS))}"
    )
    check_tile(spec, SIZES)
    require(spec.stages >= 2, "stages", f"is {spec.stages}; allowed: 2 to 8 (one stage fills while another is read)")
    check_blocks(spec)


def _shared(spec: AttentionBackwardSpec, row_bytes: int) -> tuple[tuple[SharedRegion, ...], int]:
    """Shared memory layout: operands of the tile, and the ring of its steps."""
    stages, shared = spec.stages, SharedLayout()
    q_bytes, kv_bytes = spec.tile.m * row_bytes, spec.tile.n * row_bytes
    over: tuple[SharedRegion, ...] = ()
    at_end = "at the end, staging of dQ"
    ring_holds = f"{stages} stages, each K and V of a step"
    if spec.gradients == "dkdv":
        last, first = ("dK", "dV") if _is_whole(spec) else ("dK or dV", "")
        shared.add("K", kv_bytes, f"K of the tile; then staging of {last}", stores=True)
        v_doc = f"V of the tile; then staging of {first}" if first else "V of the tile"
        shared.add("V", kv_bytes, v_doc, stores=bool(first))
        shared.add("Q", stages * q_bytes, "Q ring", ring=Ring(stages))
        shared.add("Dout", stages * q_bytes, "dO ring", ring=Ring(stages))
        shared.add("Stats", stages * spec.tile.m * STATS_BYTES, "statistics of the queries in the ring", align=16)
    elif _is_whole(spec):
        # Q and dO, which stay in registers, are loaded to the ring's memory before the ring is used.
        ring = shared.add("Ring", max(stages * 2 * kv_bytes, 2 * q_bytes), ring_holds, ring=Ring(stages))
        over = (
            SharedRegion("Q", ring.offset, q_bytes, f"Q of the tile, initially; {at_end}", "Ring", stores=True),
            SharedRegion("Dout", ring.offset + q_bytes, q_bytes, "dO of the tile, initially", "Ring"),
        )
    else:
        shared.add("Q", q_bytes, f"Q of the tile; {at_end}", stores=True)
        shared.add("Dout", q_bytes, "dO of the tile")
        shared.add("Ring", stages * 2 * kv_bytes, ring_holds, ring=Ring(stages))
    step_meta(shared, spec)
    if spec.score is not None and spec.gradients == "dkdv":
        step_places(shared, spec)
    tile_segment(shared, spec)
    return (*shared.regions, *over), shared.size


def _operands(spec: AttentionBackwardSpec) -> tuple[Param, ...]:
    """Parameters of the operands and the gradients."""
    return (*input_params(spec), *gradient_params(spec))


def _constants(spec: AttentionBackwardSpec, threads: int, row_bytes: int) -> tuple[Constant, ...]:
    """Constants of the source."""
    line_chunks, m, n = BANK_BYTES // CHUNK, spec.tile.m, spec.tile.n
    if spec.gradients == "dq":
        ring = [Constant("kKvBytes", n * row_bytes, "bytes of K, or of V, of a step")]
        if spec.pattern.masks_by_bits:
            words = max(1, n // BITS_OF_WORD)
            ring.append(Constant("kStepWords", words, f"words of {BITS_OF_WORD} bits for a query and a step"))
    else:
        ring = [
            Constant("kQBytes", m * row_bytes, "bytes of Q, or of dO, of a step"),
            Constant("kStatsBytes", m * STATS_BYTES, "bytes of the statistics of a step"),
        ]
    return (
        *size_constants(spec),
        Constant("kThreads", threads, f"{threads // WARP} warps of {TILE_ROWS} rows"),
        Constant("kRowBytes", row_bytes, "bytes of a row of a head"),
        Constant("kLineChunks", line_chunks, "16-byte chunks per line, the part of a row that adjacent lanes copy"),
        Constant("kRowLines", row_bytes // BANK_BYTES, "lines per row"),
        Constant("kSwizzleRows", 1, "consecutive rows with the same swizzle"),
        Constant("kPassRows", threads // line_chunks, "rows that all threads copy at a time"),
        Constant("kWarpPassRows", WARP // line_chunks, "rows that a warp stores at a time"),
        *ring,
        *walk_constants(spec),
    )
