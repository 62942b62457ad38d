"""Plan of the gradients of attention on sm_90a: dQ by query tiles, dK and dV by key tiles, without atomics."""

from __future__ import annotations

from collections.abc import Sequence

from codegen.arch import ARCHS, KIB
from codegen.flags import AttentionBackwardSm90aFlags
from codegen.plan import (
    Constant,
    Param,
    Plan,
    Prologue,
    TensorMap,
    check_budget,
    require,
    tensor_map,
)
from codegen.plans.attention.params import options_summary
from codegen.plans.attention.rows import KV_DIMS, Q_DIMS, SWIZZLE, WARPGROUP_ROWS
from codegen.plans.backward.parts import (
    OF_BLOCKS,
    PIECES,
    PROLOGUE_THREADS,
    STATS_BYTES,
    arguments,
    check_blocks,
    check_pattern,
    gradient_params,
    is_packed,
    params,
    size_constants,
    walk_constants,
    walk_flags,
)
from codegen.plans.backward.sizes import Sizes, divides_products
from codegen.spec import AttentionBackwardSpec
from codegen.tile_rules import OneOf, Rule, check_tile, listed, multiples

WARPGROUP = 128  # threads
OPERANDS = (
    tensor_map("q_map", "Q", Q_DIMS),
    tensor_map("k_map", "K", KV_DIMS),
    tensor_map("v_map", "V", KV_DIMS, like="K"),
    tensor_map("dout_map", "dO", Q_DIMS, like="Q"),
)
DKDV_MAPS = (
    tensor_map("dk_map", "dK", KV_DIMS, like="K", writes=True),
    tensor_map("dv_map", "dV", KV_DIMS, like="K", writes=True),
)
HEAD_DIMS = (64, 96, 128, 192, 256)
STEPS = {"dq": range(64, 161, 16), "dkdv": range(16, 129, 16)}  # keys or queries per step
NARROWEST_OF_WIDE_HEADS = 32  # keys per step of dQ with heads of more than 128, whose steps fill shared memory


def plan(spec: AttentionBackwardSpec, stem: str) -> Plan:
    """Plan of the kernel of a spec."""
    _check(spec)
    arch, sizes, m, n = ARCHS[spec.arch], Sizes.of(spec), spec.tile.m, spec.tile.n
    is_dq, shared, consumers = spec.gradients == "dq", sizes.shared, sizes.consumers
    resident, step = (m, n) if is_dq else (n, m)
    check_budget(spec, shared.size, sizes.registers)
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
        registers=sizes.registers,
        params=params(spec, _tensor_map_params(spec)),
        tensor_maps=_tensor_maps(spec, sizes.columns),
        constants=_constants(spec, sizes),
        flags=_flags(spec, sizes),
        grid_summary="one thread block for each tile",
        summary=(
            ("tile", f"{resident} {'queries' if is_dq else 'keys'}, {step} {'keys' if is_dq else 'queries'} of a step"),
            ("schedule", f"{spec.schedule}: a TMA producer, {consumers} consumer warpgroup{'s' * (consumers > 1)}"),
            *options_summary(spec.forward),
        ),
        flops=2 * spec.head_dim * m * n * (3 if is_dq else 4),
        bytes=2 * (sizes.kv_bytes if is_dq else sizes.q_bytes),
        arguments=arguments,
        tile_queries=m if is_dq else 0,
        prologue=Prologue(f"{stem}_prologue", PROLOGUE_THREADS),
    )


def _steps(spec: AttentionBackwardSpec) -> range:
    """Legal keys per step of dQ, or queries per step of dK and dV."""
    steps = STEPS[spec.gradients]
    is_wide = spec.gradients == "dq" and spec.head_dim > 128
    return range(NARROWEST_OF_WIDE_HEADS, steps.stop, steps.step) if is_wide else steps


def _rows(spec: AttentionBackwardSpec) -> Sequence[int]:
    """Queries per tile, or per step."""
    return (64, 128) if spec.gradients == "dq" else _steps(spec)


def _keys(spec: AttentionBackwardSpec) -> Sequence[int]:
    """Keys per step, or per tile."""
    if spec.gradients == "dq":
        return _steps(spec)
    return (64,) if divides_products(spec) else (64, 128)


def _words(spec: AttentionBackwardSpec, sizes: Sequence[int]) -> str:
    if isinstance(sizes, range):
        return f"allowed: {multiples(sizes)}"
    if divides_products(spec):
        return f"allowed with head_dim {spec.head_dim}: {listed(sizes)} (rows of a warpgroup)"
    return f"allowed: {listed(sizes)} (warpgroups of 64 rows)"


SIZES: tuple[Rule[AttentionBackwardSpec], ...] = (
    OneOf("m", _rows, lambda spec, sizes: _words(spec, _rows(spec))),
    OneOf("n", _keys, lambda spec, sizes: _words(spec, _keys(spec))),
)
TILE = (*SIZES, *OF_BLOCKS)


def _check(spec: AttentionBackwardSpec) -> None:
    """Reject a pattern and a tile that the kernels cannot support."""
    check_pattern(spec)
    sizes = ", ".join(map(str, HEAD_DIMS))
    reason = f"is {spec.head_dim}; allowed with gradients {spec.gradients}: {sizes}"
    require(spec.head_dim in HEAD_DIMS, "head_dim", reason)
    check_tile(spec, SIZES)
    if spec.gradients == "dq" or divides_products(spec):
        # A step is issued before the previous step has ended and freed its stage.
        require(spec.stages > 1, "stages", f"is {spec.stages}; allowed: 2 or more (two steps are in flight)")
    check_blocks(spec)


def _tensor_map_params(spec: AttentionBackwardSpec) -> tuple[Param, ...]:
    """Tensor maps of the operands and the gradients; addresses of gradients whose rows are also stored one by one."""
    gradients = {
        "dq": (tensor_map("dq_map", "dQ", Q_DIMS, like="Q", writes=True),),
        "dkdv": DKDV_MAPS,
    }[spec.gradients]
    return (*OPERANDS, *gradients, *(gradient_params(spec) if is_packed(spec) else ()))


def _tensor_maps(spec: AttentionBackwardSpec, columns: int) -> dict[str, TensorMap]:
    """Tensor maps of the operands and gradients; a warpgroup stores gradients 64 rows at a time."""
    q, kv, out = (TensorMap((columns, rows, 1, 1), SWIZZLE) for rows in (spec.tile.m, spec.tile.n, WARPGROUP_ROWS))
    gradients = {"dq_map": out} if spec.gradients == "dq" else {"dk_map": out, "dv_map": out}
    return {"q_map": q, "k_map": kv, "v_map": kv, "dout_map": q, **gradients}


def _constants(spec: AttentionBackwardSpec, sizes: Sizes) -> tuple[Constant, ...]:
    """Constants of the source."""
    is_dq, m, n = spec.gradients == "dq", spec.tile.m, spec.tile.n
    groups, columns, consumers = sizes.groups, sizes.columns, sizes.consumers
    rows = "queries" if is_dq else "keys"
    work = "for the same 64 keys: one accumulates dV, one dK" if sizes.divides_products else f"64 {rows} each"
    of_q, of_kv = ("a tile", "a step") if is_dq else ("a step", "a tile")
    filled = "; TMA zero-fills the last" if spec.head_dim % columns else ""
    return (
        *size_constants(spec),
        *((Constant("kVStages", sizes.v_stages, "depth of the ring of V"),) if sizes.v_stages < spec.stages else ()),
        Constant("kConsumerWarpgroups", consumers, f"warpgroups that compute, {work}"),
        Constant("kThreads", WARPGROUP * (1 + consumers), "warpgroup 0 produces, the others consume"),
        Constant("kProducerRegisters", sizes.producer, "registers per producer thread"),
        Constant("kConsumerRegisters", sizes.registers.limit, "registers per consumer thread"),
        Constant("kGroupColumns", columns, "columns of a group: one 128-byte swizzled row"),
        Constant("kGroups", groups, f"column groups of a head{filled}"),
        Constant("kQGroupBytes", m * SWIZZLE, "bytes of one column group of Q, or of dO"),
        Constant("kKvGroupBytes", n * SWIZZLE, "bytes of one column group of K or V"),
        Constant("kQBytes", sizes.q_bytes, f"bytes of Q, or of dO, of {of_q}"),
        Constant("kKvBytes", sizes.kv_bytes, f"bytes of K, or of V, of {of_kv}"),
        *(() if is_dq else (Constant("kStatsBytes", m * STATS_BYTES, "bytes of the statistics of a step"),)),
        *walk_constants(spec),
    )


def _flags(spec: AttentionBackwardSpec, sizes: Sizes) -> AttentionBackwardSm90aFlags:
    """Template parameters."""
    return AttentionBackwardSm90aFlags(
        walk=walk_flags(spec),
        consumers=sizes.consumers,
        divides_products=sizes.divides_products,
        short_v_ring=sizes.v_stages < spec.stages,
    )
