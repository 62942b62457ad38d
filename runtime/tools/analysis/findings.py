"""Bounds of a kernel in words, from its plan and SASS, and from profiler counters if available."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from codegen.arch import KIB
from codegen.tools.explain import occupancy
from runtime.tools.analysis.bounds import pipes_of
from runtime.tools.analysis.disassembly import Disassembly
from runtime.tools.analysis.ncu import Counters

STALLS = 3  # number of stall reasons listed
LEAST_STALL = 0.1  # minimum warps of a listed reason
CONFLICTS = 0.05  # minimum share of shared-memory wavefronts for conflicts to be reported
BALANCED = 0.1  # relative distance from the machine balance below which both sides are reported
_PCT = "avg.pct_of_peak_sustained_active"
_STALL = re.compile(r"smsp__average_warps_issue_stalled_(?P<name>\w+)_per_issue_active\.ratio")
REASONS = {
    "barrier": "waiting at a barrier of the thread block",
    "branch_resolving": "waiting for a branch",
    "dispatch_stall": "held back by the dispatcher",
    "drain": "waiting for stores at the end",
    "gmma": "waiting for wgmma",
    "imc_miss": "waiting for constants",
    "lg_throttle": "the queue of global memory is full",
    "long_scoreboard": "waiting for global memory or the L2",
    "math_pipe_throttle": "a pipe of arithmetic is busy",
    "membar": "waiting at a memory fence",
    "mio_throttle": "the queue of shared memory and special functions is full",
    "no_instruction": "waiting for instructions: the code does not fit the cache, or jumps",
    "not_selected": "ready, but another warp was selected",
    "selected": "issuing",
    "short_scoreboard": "waiting for shared memory or special functions",
    "sleeping": "sleeping",
    "tex_throttle": "the queue of the L1 is full",
    "wait": "waiting for an instruction of fixed latency",
    "warpgroup_arrive": "waiting for the warps of a warpgroup",
}
"""Warp stall reasons (Nsight Compute's Kernel Profiling Guide, "Warp Stall Reasons")."""
NO_STALLS = ("selected", "not_selected")


@dataclass(frozen=True)
class Finding:
    """One finding.

    Attributes:
        about: subject of the finding.
        text: the finding in words.
        counted: whether it comes from counters; otherwise from the plan and the SASS.
    """

    about: str
    text: str
    counted: bool = False


def static_findings(found: Disassembly) -> Iterator[Finding]:
    """Findings from the plan and the SASS."""
    plan, used = found.compiled.plan, found.usage
    if plan.flops:
        yield _roofline(found)
    yield from _pipes(found)
    yield Finding("occupancy", occupancy(plan))
    moves = f"; by setmaxnreg {' and '.join(map(str, found.register_moves))}" if found.register_moves else ""
    spills = "no spills" if not used.spill_bytes else f"{used.spill_bytes} bytes of spills, which cost loads and stores"
    yield Finding("registers", f"{used.registers} per thread at launch{moves}; {spills}")
    room = plan.arch.shared_memory_per_block
    free = room - plan.shared_bytes
    yield Finding(
        "shared memory",
        f"{plan.shared_bytes / KIB:.1f} of {room / KIB:.0f} KB per thread block, {free / KIB:.1f} KB free; "
        f"{plan.spec.stages} stages",
    )


def _roofline(found: Disassembly) -> Finding:
    plan = found.compiled.plan
    machine = plan.arch.machine
    intensity, balance = plan.flops / plan.bytes, machine.flops / machine.bytes
    if abs(intensity / balance - 1) <= BALANCED:
        side = "both bound it"
    else:
        side = f"the {'tensor cores bound' if intensity > balance else 'L2 bounds'} it"
    return Finding(
        "roofline",
        f"{intensity:.0f} FLOP per byte loaded by a step. An SM sustains {machine.flops / 1e6:.1f} TFLOPS and "
        f"{machine.bytes / 1e3:.0f} GB/s from the L2 (model of codegen.select): {balance:.0f} FLOP per byte, {side}",
    )


def _pipes(found: Disassembly) -> Iterator[Finding]:
    if found.main is None:
        return
    pipes = pipes_of(found.main, found.compiled.plan.arch)
    others = f"{pipes.special:.0f} clocks of the special functions and {pipes.issue:.0f} issue slots"
    if not found.main.tensor:
        yield Finding("main loop", f"an iteration of a warp takes at most {others}; no tensor cores")
    elif pipes.tensor is None:
        told = f"an iteration of a warp takes at most {others}"
        yield Finding("main loop", f"{told}; the rate of the tensor cores is unknown or not a single number")
    else:
        share = pipes.tensor / max(pipes.tensor, pipes.special, pipes.issue)
        yield Finding(
            "main loop",
            f"an iteration of a warp takes {pipes.tensor:.0f} clocks of the tensor cores, at most {others}: "
            f"{pipes.longest} are the busiest; without stalls, the tensor cores work {100 * share:.0f}% of the time",
        )


def counted_findings(counters: Counters, flops: float | None = None) -> Iterator[Finding]:
    """Findings from counters; missing counters are skipped.

    Args:
        counters: counters of one launch.
        flops: floating-point operations of that launch, if known.
    """
    for about, text in (*_time(counters, flops), *_pipe_use(counters), *_memory(counters), *_stalls(counters)):
        yield Finding(about, text, counted=True)


def _time(counters: Counters, flops: float | None) -> Iterator[tuple[str, str]]:
    nanoseconds = counters.first("gpu__time_duration.sum")
    if nanoseconds:
        rate = f", {flops / nanoseconds / 1e3:.0f} TFLOPS under the profiler" if flops else ""
        yield "time", f"{nanoseconds / 1e3:.1f} us{rate}"
    clock = counters.first("gpc__cycles_elapsed.avg.per_second", "smsp__cycles_elapsed.avg.per_second")
    if clock:
        yield "clock", f"{clock / 1e6:.0f} MHz of the SMs"
    active = counters.first("sm__warps_active.avg.pct_of_peak_sustained_active")
    if active is not None:
        yield "occupancy", f"{active:.0f}% of the warp slots of an active SM"


def _pipe_use(counters: Counters) -> Iterator[tuple[str, str]]:
    tensor = counters.first(
        f"sm__pipe_tensor_cycles_active.{_PCT}",
        f"sm__pipe_tensor_op_gmma_cycles_active.{_PCT}",
        f"sm__pipe_tensor_op_hmma_cycles_active.{_PCT}",
        f"sm__inst_executed_pipe_tensor_op_gmma.{_PCT}",
        f"sm__inst_executed_pipe_tensor_op_hmma.{_PCT}",
        f"sm__inst_executed_pipe_tensor.{_PCT}",
    )
    if tensor is not None:
        yield "tensor pipe", f"{tensor:.0f}% of its peak while SMs are busy"
    special = counters.first(f"sm__inst_executed_pipe_xu.{_PCT}")
    if special is not None:
        yield "special functions", f"{special:.0f}% of their peak (pipe xu, conversions too)"
    for name, what in (("fma", "fp32 multiply and add"), ("alu", "comparisons, logic, maxima")):
        value = counters.first(f"sm__inst_executed_pipe_{name}.{_PCT}")
        if value is not None:
            yield f"pipe {name}", f"{value:.0f}% of its peak ({what})"


def _memory(counters: Counters) -> Iterator[tuple[str, str]]:
    elapsed = "avg.pct_of_peak_sustained_elapsed"
    l2, hits = counters.first(f"lts__throughput.{elapsed}"), counters.first("lts__t_sector_hit_rate.pct")
    if l2 is not None:
        yield "L2", f"{l2:.0f}% of its peak" + (f", {hits:.0f}% of sectors were there" if hits is not None else "")
    dram = counters.first(f"gpu__dram_throughput.{elapsed}", f"dram__throughput.{elapsed}")
    if dram is not None:
        yield "DRAM", f"{dram:.0f}% of its peak"
    for kind, what in (("ld", "loads"), ("st", "stores")):
        conflicts = counters.first(f"l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_{kind}.sum")
        wavefronts = counters.first(f"l1tex__data_pipe_lsu_wavefronts_mem_shared_op_{kind}.sum")
        if conflicts is not None and wavefronts:
            share = conflicts / wavefronts
            told = f"{100 * share:.1f}% of the wavefronts of {what} from shared memory"
            yield "bank conflicts", told + (": a layout of its own would save them" if share > CONFLICTS else ": few")


def _stalls(counters: Counters) -> Iterator[tuple[str, str]]:
    found = {told["name"]: value for name, value in counters.values.items() if (told := _STALL.fullmatch(name))}
    waits = {name: value for name, value in found.items() if name not in NO_STALLS and not name.endswith("not_issued")}
    most = sorted(waits.items(), key=lambda item: (-item[1], item[0]))[:STALLS]
    for name, value in most:
        if value >= LEAST_STALL:
            yield f"stall {name}", f"{value:.2f} warps on average at each issue: {REASONS.get(name, 'no word for it')}"
