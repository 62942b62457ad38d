"""A drawing of a kernel's pipeline from its plan: producers, rings with stages and barriers, consumers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from codegen.plan import Param, Plan, Ring, SharedRegion
from runtime.tools.report.memory import size
from runtime.tools.report.svg import WIDTH, Drawing, wrapped

COPIES = {"tma": "TMA", "cp_async": "cp.async", "ld_global": "loads through registers"}
PRODUCTS = {"wgmma": "WGMMA", "mma": "mma.sync", "wmma": "WMMA", "none": "no products"}
LINE, ROW, GAP = 16, 36, 26
LEFT, CELLS = 84, 216  # columns of a ring: its name, its stages; then its barriers
MOST_LINES = 3


@dataclass(frozen=True)
class Workers:
    """Warps with the same role.

    Attributes:
        warps: warps per group.
        groups: number of groups.
        registers: registers per thread after setmaxnreg; 0 without it.
    """

    warps: int
    groups: int = 1
    registers: int = 0


def rings(plan: Plan) -> list[tuple[SharedRegion, Ring]]:
    """Regions of shared memory that are rings."""
    return [(region, region.ring) for region in plan.shared if region.ring is not None]


def workers(plan: Plan) -> tuple[Workers, Workers]:
    """Producer and consumer warps; the same warps unless the schedule is warp-specialized."""
    constants = {constant.name: int(constant.value) for constant in plan.constants}
    warps = plan.threads // 32
    if plan.spec.schedule == "multistage":
        return Workers(warps), Workers(warps)
    groups = constants.get("kConsumerWarpgroups") or constants.get("kConsumers")
    computing = constants.get("kConsumerWarps", 4 * (groups or 0))
    each = 4 if computing % 4 == 0 else computing
    registers = constants.get("kConsumerRegisters", 0)
    loading = Workers(warps - computing, registers=constants.get("kProducerRegisters", 0))
    return loading, Workers(each, computing // each, registers)


def picture(plan: Plan) -> Markup:
    """The pipeline from device memory through shared memory and back, from top to bottom."""
    loading, computing = workers(plan)
    found, same = rings(plan), plan.spec.schedule == "multistage"
    drawing = Drawing(_told(plan, found, computing))
    y = 0.0
    if plan.prologue:
        y = _box(
            drawing, y, [f"before it: {plan.prologue.symbol}", f"{plan.prologue.threads} threads a block"], "other"
        )
        y = _down(drawing, y, "overlapping" if plan.prologue.overlaps else "")
    inputs, outputs = tensors(plan)
    y = _box(drawing, y, ["device memory", *wrapped(inputs, WIDTH - 30, MOST_LINES)], "memory")
    y = _down(drawing, y, COPIES[plan.spec.copy_])
    y = _box(
        drawing,
        y,
        [_words(loading, "all warps load") if same else _producers(plan, loading)],
        "producer",
    )
    if found:
        y = _down(drawing, y, "fills a stage")
        y = _rings(drawing, y, found, same)
        y = _down(drawing, y, "reads it")
    else:
        y = _down(drawing, y, "no ring")
    y = _computing(drawing, y, plan, computing, same)
    staging = [region.name for region in plan.shared if region.stores]
    y = _down(drawing, y, f"through {', '.join(staging)}" if staging else "stores")
    y = _box(drawing, y, ["device memory", *wrapped(outputs, WIDTH - 30, MOST_LINES)], "memory")
    if plan.epilogue:
        y = _down(drawing, y, "")
        behind = [f"behind it: {plan.epilogue.symbol}", f"{plan.epilogue.threads} threads a block"]
        y = _box(drawing, y, behind, "other")
    return drawing.picture(y + 2)


def tensors(plan: Plan) -> tuple[list[str], list[str]]:
    """Names of the tensor parameters that a kernel reads, and of those that it writes."""
    reads = [_name(param) for param in plan.params if _is_tensor(param) and not param.writes]
    writes = [_name(param) for param in plan.params if _is_tensor(param) and param.writes]
    return list(dict.fromkeys(reads)), list(dict.fromkeys(writes))


def _is_tensor(param: Param) -> bool:
    return param.type in ("tensor_map", "pointer")


def _name(param: Param) -> str:
    return param.name.removesuffix("_map")


def _told(plan: Plan, found: Sequence[tuple[SharedRegion, Ring]], computing: Workers) -> str:
    stages = ", ".join(f"{region.name} in {ring.stages}" for region, ring in found) or "none"
    return f"Pipeline: {plan.threads} threads; stages of rings: {stages}; {computing.groups} groups of warps compute"


def _producers(plan: Plan, group: Workers) -> str:
    adding = next((int(constant.value) for constant in plan.constants if constant.name == "kDqWarps"), 0)
    what = "producer warpgroup" if group.warps == 4 else "producer"
    return _words(group, what) + (f"; {adding} add to dQ" if adding else "")


def _words(group: Workers, what: str) -> str:
    registers = f", {group.registers} registers a thread" if group.registers else ""
    return f"{what}: {group.warps} warp{'s' if group.warps > 1 else ''}{registers}"


def _box(drawing: Drawing, y: float, lines: Sequence[str], kind: str) -> float:
    height = LINE * len(lines) + 10
    drawing.rect(1, y + 1, WIDTH - 2, height, f"box {kind}")
    for i, line in enumerate(lines):
        drawing.text(WIDTH / 2, y + 18 + LINE * i, line, "strong" if i == 0 else "", "middle")
    return y + height + 1


def _down(drawing: Drawing, y: float, label: str) -> float:
    drawing.arrow(WIDTH / 2, y + 3, y + GAP - 2)
    drawing.text(WIDTH / 2 + 12, y + 17, label, "small")
    return y + GAP


def _rings(drawing: Drawing, y: float, found: Sequence[tuple[SharedRegion, Ring]], same: bool) -> float:
    height = ROW * len(found) + LINE + 8
    drawing.rect(1, y + 1, WIDTH - 2, height, "box shared")
    drawing.text(10, y + 17, "shared memory", "strong")
    drawing.text(WIDTH - 10, y + 17, "full, then empty", "small", "end")
    for i, (region, ring) in enumerate(found):
        top = y + LINE + 8 + ROW * i
        drawing.text(10, top + 19, region.name)
        width = CELLS / ring.stages
        each = region.bytes // ring.stages
        for stage in range(ring.stages):
            hint = f"{region.name}, stage {stage} of {ring.stages}: {size(each)}; {region.doc}"
            drawing.rect(LEFT + width * stage, top + 4, max(width - 3, 1), ROW - 12, "stage", hint=hint)
            if width > 50:
                drawing.text(LEFT + width * stage + (width - 3) / 2, top + 20, size(each), "small", "middle")
        for k, (name, plain) in enumerate(((ring.full, "wait_group"), (ring.empty, "__syncthreads"))):
            drawing.text(LEFT + CELLS + 8, top + 13 + 14 * k, name or (plain if same else ""), "small code")
    return y + height + 1


def _computing(drawing: Drawing, y: float, plan: Plan, group: Workers, same: bool) -> float:
    product = PRODUCTS[plan.spec.mma]
    if group.groups == 1:
        return _box(drawing, y, [_words(group, "the same warps compute" if same else "consumer"), product], "consumer")
    width, height = (WIDTH - 2) / group.groups, 3 * LINE + 10
    for i in range(group.groups):
        x = 1 + width * i
        drawing.rect(x, y + 1, width - (4 if i + 1 < group.groups else 0), height, "box consumer")
        registers = f"{group.registers} registers" if group.registers else ""
        for k, line in enumerate((f"consumer {i}", f"{group.warps} warps, {product}", registers)):
            drawing.text(x + width / 2 - 2, y + 18 + LINE * k, line, "strong" if k == 0 else "small", "middle")
    return y + height + 1
