"""Plan of the gradients of attention on sm_90a: dQ by query tiles, dK and dV by key tiles, without atomics."""

from __future__ import annotations

from codegen.arch import ARCHS, KIB
from codegen.dtypes import DTYPES
from codegen.flags import AttentionBackwardSm90aFlags
from codegen.plan import (
    Constant,
    Param,
    Plan,
    Prologue,
    Registers,
    SharedLayout,
    TensorMap,
    check_budget,
    require,
    tensor_map,
)
from codegen.plans.attention_backward_parts import (
    PIECES,
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
from codegen.plans.attention_params import options_summary
from codegen.plans.attention_rows import SWIZZLE, WARPGROUP_ROWS
from codegen.spec import AttentionBackwardSpec

WARPGROUP = 128  # threads
# By consumer warpgroups: registers of a producer and of a consumer thread; the first split that fits is taken. Those
# of one consumer are for two thread blocks on an SM.
REGISTER_SPLITS = {1: ((40, 216), (24, 232)), 2: ((40, 232), (24, 240))}
# Addresses, loop state, statistics: an allowance with which nothing spills, and ptxas need not wait behind each wgmma.
# dQ has S of a step and dS of the one before at once, which the sum of its accumulators leaves out.
OVERHEAD_REGISTERS = {"dq": 40, "dkdv": 12}
OPERANDS = (
    tensor_map("q_map", "Q (head_dim, q_len, heads, batch)"),
    tensor_map("k_map", "K (head_dim, kv_len, kv_heads, batch)"),
    tensor_map("v_map", "V, as K"),
    tensor_map("dout_map", "dO, as Q"),
)
RUNS_REGISTERS = 8  # more, in dQ, for masks of patterns that show several runs of keys: more bounds are compared with
STEPS = {"dq": range(64, 161, 16), "dkdv": range(16, 129, 16)}  # keys, or queries, of a step


def plan(spec: AttentionBackwardSpec, stem: str) -> Plan:
    """Work out every number of the kernel."""
    _check(spec)
    arch, columns = ARCHS[spec.arch], SWIZZLE // DTYPES[spec.dtype].bytes
    groups, m, n = -(-spec.head_dim // columns), spec.tile.m, spec.tile.n
    is_dq = spec.gradients == "dq"
    resident, step = (m, n) if is_dq else (n, m)
    consumers = resident // WARPGROUP_ROWS
    q_bytes, kv_bytes = m * groups * SWIZZLE, n * groups * SWIZZLE
    shared = _shared(spec, q_bytes, kv_bytes)
    # A thread has half a column of what 64 rows of a product have, and of an operand in 16 bits a quarter.
    sums = spec.head_dim // 2 * (1 if is_dq else 2)
    operand = 0 if is_dq else step // 4  # P^T beside S^T and dP^T; dS takes their place
    accumulators = sums + 2 * (step // 2) + operand
    splits, overhead = REGISTER_SPLITS[consumers], OVERHEAD_REGISTERS[spec.gradients]
    runs = spec.pattern.masks_pairs and not spec.pattern.banded and spec.pattern.fixed_block is None
    overhead += RUNS_REGISTERS if is_dq and runs else 0
    producer, consumer = next((s for s in splits if accumulators + overhead <= s[1]), splits[-1])
    registers = Registers(accumulators=accumulators, overhead=overhead, limit=consumer)
    check_budget(spec, shared.size, registers)
    fits_twice = 2 * (shared.size + KIB) <= arch.shared_memory_per_sm
    return Plan(
        spec=spec,
        stem=stem,
        template=f"{PIECES}/{spec.gradients}.cu.j2",
        threads=WARPGROUP * (1 + consumers),
        ctas_per_sm=2 if consumers == 1 and fits_twice else 1,
        persistent=False,
        shared=tuple(shared.regions),
        shared_bytes=shared.size,
        registers=registers,
        params=params(spec, _tensor_map_params(spec)),
        tensor_maps=_tensor_maps(spec, columns),
        constants=_constants(spec, groups, columns, producer=producer, consumer=consumer),
        flags=_flags(spec, consumers),
        grid_summary="one thread block for each tile",
        summary=(
            ("tile", f"{resident} {'queries' if is_dq else 'keys'}, {step} {'keys' if is_dq else 'queries'} of a step"),
            ("schedule", f"{spec.schedule}: a TMA producer, {consumers} consumer warpgroup{'s' * (consumers > 1)}"),
            *options_summary(spec.forward),
        ),
        flops=2 * spec.head_dim * m * n * (3 if is_dq else 4),
        bytes=2 * (kv_bytes if is_dq else q_bytes),
        arguments=arguments,
        tile_queries=m if is_dq else 0,
        prologue=Prologue(f"{stem}_prologue", PROLOGUE_THREADS),
    )


def _check(spec: AttentionBackwardSpec) -> None:
    """Refuse a pattern and a tile that the kernels are not written for."""
    m, n = spec.tile.m, spec.tile.n
    check_pattern(spec)
    field, resident, step = ("tile.m", m, n) if spec.gradients == "dq" else ("tile.n", n, m)
    other = "tile.n" if field == "tile.m" else "tile.m"
    require(resident in (64, 128), field, f"is {resident}; allowed: 64, 128 (warpgroups of 64 rows)")
    steps = STEPS[spec.gradients]
    allowed = f"allowed: {steps[0]} to {steps[-1]}, multiples of {steps.step}"
    require(step in steps, other, f"is {step}; {allowed}")
    check_blocks(spec)


def _shared(spec: AttentionBackwardSpec, q_bytes: int, kv_bytes: int) -> SharedLayout:
    """Lay out the shared memory: what a tile keeps, and the ring of what its steps need."""
    stages, rows = spec.stages, spec.tile.m
    shared = SharedLayout()
    if spec.gradients == "dq":
        shared.add("Q", q_bytes, "Q of the tile in column groups; then dQ on its way out")
        shared.add("Dout", q_bytes, "dO of the tile")
        shared.add("K", stages * kv_bytes, "K ring")
        shared.add("V", stages * kv_bytes, "V ring")
        barriers = 2 * stages + 1
    else:
        shared.add("K", kv_bytes, "K of the tile in column groups; then dK on its way out")
        shared.add("V", kv_bytes, "V of the tile; then dV on its way out")
        shared.add("Q", stages * q_bytes, "Q ring")
        shared.add("Dout", stages * q_bytes, "dO ring")
        shared.add("Stats", stages * rows * STATS_BYTES, "statistics of the queries in the ring", align=16)
        barriers = 2 * stages + 1
    shared.add("Barriers", 8 * barriers, "mbarriers", align=8)
    if spec.gradients == "dkdv" and spec.pattern.masks_by_bits:
        shared.add("StepBits", 8 * stages, "where the bits of the steps in the ring are", align=8)
    elif spec.gradients == "dq" or spec.pattern.masks_pairs:
        shared.add("StepMeta", 4 * stages, "metadata of the steps in the ring", align=4)
    return shared


def _tensor_map_params(spec: AttentionBackwardSpec) -> tuple[Param, ...]:
    """Return the operands and the gradients, as TMA reads and writes them."""
    gradients = {
        "dq": (tensor_map("dq_map", "dQ, as Q"),),
        "dkdv": (tensor_map("dk_map", "dK, as K"), tensor_map("dv_map", "dV, as K")),
    }[spec.gradients]
    return (*OPERANDS, *gradients)


def _tensor_maps(spec: AttentionBackwardSpec, columns: int) -> dict[str, TensorMap]:
    """Return how the tensor maps address their tensors: gradients leave by 64 rows of a warpgroup."""
    q, kv, out = (TensorMap((columns, rows, 1, 1), SWIZZLE) for rows in (spec.tile.m, spec.tile.n, WARPGROUP_ROWS))
    gradients = {"dq_map": out} if spec.gradients == "dq" else {"dk_map": out, "dv_map": out}
    return {"q_map": q, "k_map": kv, "v_map": kv, "dout_map": q, **gradients}


def _constants(
    spec: AttentionBackwardSpec, groups: int, columns: int, *, producer: int, consumer: int
) -> tuple[Constant, ...]:
    """Return the named values at the top of the source."""
    is_dq, m, n = spec.gradients == "dq", spec.tile.m, spec.tile.n
    consumers = (m if is_dq else n) // WARPGROUP_ROWS
    return (
        *size_constants(spec),
        Constant("kConsumerWarpgroups", consumers, "warpgroups that compute, 64 rows each"),
        Constant("kThreads", WARPGROUP * (1 + consumers), "warpgroup 0 produces, the others consume"),
        Constant("kProducerRegisters", producer, "registers a producer thread keeps"),
        Constant("kConsumerRegisters", consumer, "registers a consumer thread takes"),
        Constant("kGroupColumns", columns, "columns of a group: one 128-byte swizzled row"),
        Constant("kGroups", groups, "column groups of a head"),
        Constant("kQGroupBytes", m * SWIZZLE, "bytes of one column group of Q, or of dO"),
        Constant("kKvGroupBytes", n * SWIZZLE, "bytes of one column group of K or V"),
        Constant("kQBytes", m * SWIZZLE * groups, "bytes of Q, or of dO, of a tile or step"),
        Constant("kKvBytes", n * SWIZZLE * groups, "bytes of K, or of V, of a step or tile"),
        *(() if is_dq else (Constant("kStatsBytes", m * STATS_BYTES, "bytes of the statistics of a step"),)),
        *walk_constants(spec),
    )


def _flags(spec: AttentionBackwardSpec, consumers: int) -> AttentionBackwardSm90aFlags:
    """Return what the templates ask."""
    rows = "queries" if spec.gradients == "dq" else "keys"
    return AttentionBackwardSm90aFlags(
        walk=walk_flags(spec),
        consumer_warpgroups="warpgroup 1    " if consumers == 1 else "warpgroups 1.. ",
        consumers_own=f"consumer. It owns the tile's 64 {rows}"
        if consumers == 1
        else f"consumers. Each owns 64 {rows}",
        other_workers="the SM's other thread block, if it has one," if consumers == 1 else "the other warpgroup",
    )
