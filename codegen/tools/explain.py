"""A plan in words and numbers."""

from __future__ import annotations

import json
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from codegen.arch import KIB
from codegen.patterns.base import IndexTensor
from codegen.plan import Plan, Registers
from codegen.provenance import Provenance, differences
from codegen.select.choice import Choice
from codegen.select.problem import tuning_of
from codegen.spec import AttentionSpec, QuantizeSpec

SYSTEM_SHARED_BYTES = KIB  # reserved by the system per thread block (CUDA C++ Programming Guide, 8.0 and later)


def blocks_by_shared_memory(plan: Plan) -> int:
    """Thread blocks that fit the shared memory of an SM."""
    return plan.arch.shared_memory_per_sm // (plan.shared_bytes + SYSTEM_SHARED_BYTES)


def blocks_by_threads(plan: Plan) -> int:
    """Thread blocks that fit the warp slots of an SM."""
    return plan.arch.warps_per_sm * 32 // plan.threads


def blocks_by_registers(plan: Plan) -> int:
    """Thread blocks that fit the registers of an SM, with the registers per thread of the plan.

    The compiler can fit that number, although it uses more if they are free; ``plan.ctas_per_sm`` limits it. Warps that
    hand over registers all start with the same number.
    """
    each = plan.registers.needed if plan.spec.schedule == "multistage" else launch_registers(plan)
    return plan.arch.blocks_for(plan.threads, each)


def occupancy(plan: Plan) -> str:
    """Resident warps of an SM and the limiting resource, in words."""
    fits = {
        "shared memory": blocks_by_shared_memory(plan),
        "registers": blocks_by_registers(plan),
        "warp slots": blocks_by_threads(plan),
    }
    warps, most = plan.ctas_per_sm * plan.threads // 32, plan.arch.warps_per_sm
    limits = [name for name, blocks in fits.items() if blocks == min(fits.values())]
    return f"{warps} of {most} warps ({100 * warps / most:.0f}%), limited by {' and '.join(limits)}"


def launch_registers(plan: Plan) -> int:
    """Most registers per thread at launch with which ``plan.ctas_per_sm`` blocks fit an SM."""
    return plan.arch.registers_for(plan.threads, plan.ctas_per_sm)


def explain(plan: Plan, provenance: Provenance, choice: Choice | None = None) -> RenderableType:
    """Printable description of a plan, for rich.

    Args:
        plan: the plan.
        provenance: receipt and source of the kernel.
        choice: kernel that codegen.select chooses for the given problem.
    """
    spec = plan.spec
    facts = [*_facts(plan), ("receipt", provenance.receipt), ("source", provenance.source)]
    parts: list[RenderableType] = [Text(plan.stem, style="bold"), _rows(facts), Text(), *_shared(plan)]
    if choice is not None:
        parts += [Text(), *_choice(plan, choice)]
    if isinstance(spec, AttentionSpec):
        parts += [Text(), *_index_tensors(spec)]
    return Group(*parts, Text(), *_params(plan))


def explained(plan: Plan, provenance: Provenance | None = None, choice: Choice | None = None) -> dict[str, Any]:
    """The same, as JSON data."""
    told: dict[str, Any] = {
        "kernel": plan.stem,
        "spec": json.loads(plan.spec.canonical_json()),
        "spec_hash": plan.spec.hash,
        "facts": dict(_facts(plan)),
        **({} if provenance is None else provenance.facts()),
        "threads": plan.threads,
        "ctas_per_sm": plan.ctas_per_sm,
        "registers": {
            "accumulators": plan.registers.accumulators,
            "limit": plan.registers.limit,
            "launch": launch_registers(plan),
        },
        "step": {"flops": plan.flops, "bytes": plan.bytes},
        "shared_memory": {
            "bytes": plan.shared_bytes,
            "limit": plan.arch.shared_memory_per_block,
            "regions": [
                {"name": region.name, "offset": region.offset, "bytes": region.bytes, "holds": region.doc}
                for region in plan.shared
            ],
        },
        "params": [{"name": param.name, "type": param.ctype, "what": param.doc} for param in plan.params],
    }
    if isinstance(plan.spec, AttentionSpec):
        told["index_tensors"] = [
            {"name": tensor.name, "dims": dims, "optional": tensor.optional, "what": tensor.doc}
            for tensor, dims in _dims(plan.spec)
        ]
    if choice is not None:
        told["choice"] = {
            "kernel": choice.named.stem,
            "spec": json.loads(choice.spec.canonical_json()),
            "rule": choice.rule,
            "why": choice.reason,
            "dense": choice.dense,
            "timed": _timed(choice),
        }
    return told


def _short_of(registers: Registers) -> str:
    """Warning about a large expression, as the end of a sentence; "" for others."""
    return f"; its expression needs about {registers.expression}: some bytes may spill" if registers.may_spill else ""


def _facts(plan: Plan) -> list[tuple[str, str]]:
    """Facts of a plan, each with a name and a line."""
    spec, arch, registers = plan.spec, plan.arch, plan.registers
    written = spec.codes if isinstance(spec, QuantizeSpec) else plan.output
    out = "and out" if written == spec.dtype else f"and {written} out"
    return [
        ("operator", f"{spec.op}, {spec.dtype} in {out}" + (", fp32 accumulation" if plan.flops else "")),
        ("architecture", f"{arch.name} (compute capability {arch.compute_capability[0]}.{arch.compute_capability[1]})"),
        ("instructions", f"mma: {spec.mma}, copy: {spec.copy_}, schedule: {spec.schedule}, stages: {spec.stages}"),
        *plan.summary,
        ("grid", plan.grid_summary),
        ("threads", f"{plan.threads} per block ({plan.threads // 32} warps)"),
        (
            "blocks per SM",
            f"{plan.ctas_per_sm} required; shared memory fits {blocks_by_shared_memory(plan)}, "
            f"registers fit {blocks_by_registers(plan)}, warps fit {blocks_by_threads(plan)}",
        ),
        ("occupancy", occupancy(plan)),
        (
            "registers",
            f"accumulators and fragments take {registers.accumulators} of {registers.limit} per computing thread, "
            f"the rest is for the compiler; at most {launch_registers(plan)} at launch{_short_of(registers)}",
        ),
        (
            "one step",
            f"{plan.flops / 1e6:.2f} MFLOP for {plan.bytes / KIB:.1f} KB loaded: "
            f"{plan.flops / plan.bytes:.0f} FLOP/byte",
        ),
        ("template", f"templates/{plan.template}"),
        ("spec hash", spec.hash),
    ]


def _dims(spec: AttentionSpec) -> list[tuple[IndexTensor, list[str]]]:
    """Index tensors of a kernel, with the sizes of their dimensions."""
    packs = "heads" if spec.pack_gqa == 1 else f"heads / {spec.pack_gqa}"
    return [(tensor, [packs if dim == "heads" else str(dim) for dim in tensor.dims]) for tensor in spec.index_tensors]


def _timed(choice: Choice) -> dict[str, Any] | None:
    """The kernel whose time the reason quotes, as JSON data."""
    timed = choice.timed
    if timed is None:
        return None
    differ = differences(choice.spec, timed.named.spec)
    return {
        "kernel": timed.named.stem,
        "chosen": timed.chosen,
        "earlier_source": timed.earlier_source,
        "differences": [difference._asdict() for difference in differ],
    }


def _choice(plan: Plan, choice: Choice) -> list[RenderableType]:
    """The chosen kernel for a problem, and the reason."""
    chosen = choice.named.stem
    if choice.spec == plan.spec:
        chosen = f"this one ({chosen})" if chosen != plan.stem else "this one"
    elif choice.named.path is None:
        chosen = f"{chosen}: {json.dumps(tuning_of(choice.spec))}"
    rows = [("chosen", chosen), ("rule", choice.rule), ("why", choice.reason)]
    if choice.dense:
        rows.append(("dense", f"a dense product is faster there: {choice.dense}"))
    title = Text("Choice", style="bold")
    title.append(" for its problem; docs/reference/select.md", style="not bold")
    return [title, _rows(rows)]


def _rows(rows: list[tuple[str, str]]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    for label, text in rows:
        table.add_row(f"  {label}", Text(text))
    return table


def _shared(plan: Plan) -> list[RenderableType]:
    limit = plan.arch.shared_memory_per_block
    title = Text("Shared memory", style="bold")
    title.append(
        f": {plan.shared_bytes} of {limit} bytes ({plan.shared_bytes / KIB:.1f} of {limit // KIB} KB)", style="not bold"
    )
    table = Table.grid(padding=(0, 2))
    table.add_column(justify="right")
    table.add_column(justify="right")
    table.add_row("  offset", "bytes", "name", "holds", style="cyan")
    for region in plan.shared:
        table.add_row(str(region.offset), str(region.bytes), region.name, Text(region.doc))
    return [title, table]


def _index_tensors(spec: AttentionSpec) -> list[RenderableType]:
    tensors = spec.index_tensors
    title = Text("Index tensors", style="bold")
    if not tensors:
        title.append(": none", style="not bold")
        return [title]
    title.append(", int32, in addition to q, k and v", style="not bold")
    rows = []
    for tensor, dims in _dims(spec):
        rows.append((tensor.name, f"({', '.join(dims)}){' optional' if tensor.optional else ''}: {tensor.doc}"))
    return [title, _rows(rows)]


def _params(plan: Plan) -> list[RenderableType]:
    rows = [(param.name, f"{param.ctype}: {param.doc}") for param in plan.params]
    return [Text("Kernel parameters", style="bold"), _rows(rows)]
