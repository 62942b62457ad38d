"""Output of ``codegen disasm``: a summary of a kernel, the histogram of its main loop, its instructions by stages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from runtime.compile import toolchain
from runtime.tools.analysis.disassembly import Disassembly
from runtime.tools.analysis.kinds import by_kind, by_opcode, counted
from runtime.tools.analysis.loops import Loop
from runtime.tools.analysis.options import Show
from runtime.tools.analysis.sass import Instruction

UNKNOWN = "not told"
"""Stage of an instruction without a source line."""
OPCODES = 12  # number of most frequent opcodes listed for the main loop
STAGES = 8


def fields_of(found: Disassembly, show: Show) -> dict[str, Any]:
    """A disassembly as JSON."""
    used, plan = found.usage, found.compiled.plan
    return {
        "kernel": found.own.name,
        "arch": plan.arch.name,
        "compiler": toolchain.compiler_version()[1],
        "instructions": len(found.own.instructions),
        "has_stages": found.has_stages,
        "registers": {"launch": used.registers, "setmaxnreg": list(found.register_moves)},
        "spill_bytes": used.spill_bytes,
        "shared_bytes": {"static": used.static_shared_bytes, "dynamic": used.dynamic_shared_bytes},
        "barriers": {"named": found.named_barriers, "mbarriers": found.mbarriers},
        "kinds": by_kind(found.own.instructions),
        "main_loop": None if found.main is None else _loop_fields(found, found.main),
        "functions": [
            {"name": function.name, "listing": [_instruction_fields(found, each) for each in listed]}
            for function, listed in _listed(found, show)
        ],
    }


def _loop_fields(found: Disassembly, loop: Loop) -> dict[str, Any]:
    return {
        "begin": loop.begin,
        "end": loop.end,
        "instructions": len(loop.instructions),
        "out_of_line": loop.out_of_line,
        "kinds": by_kind(loop.instructions),
        "opcodes": by_opcode(loop.instructions),
        "stages": by_stage(found, loop.instructions),
    }


def by_stage(found: Disassembly, instructions: Sequence[Instruction]) -> dict[str, int]:
    """Counts of instructions by stage, the largest first; {} if the stages are not known."""
    stages = (found.stage(each) for each in instructions)
    return counted(stage.name if stage else UNKNOWN for stage in stages) if found.has_stages else {}


def _instruction_fields(found: Disassembly, instruction: Instruction) -> dict[str, Any]:
    stage = found.stage(instruction)
    told = {"stage": stage.name, "line": stage.line} if stage else {}
    return {"address": instruction.address, "text": instruction.text, **told}


def _listed(found: Disassembly, show: Show) -> list[tuple[Any, Sequence[Instruction]]]:
    """Functions, each with its listed instructions."""
    if show is Show.SUMMARY:
        return []
    if show is Show.LOOP:
        return [] if found.main is None else [(found.own, found.main.instructions)]
    return [(function, function.instructions) for function in found.functions]


def lines_of(found: Disassembly, show: Show) -> Iterator[str]:
    """Lines of a disassembly, as plain text."""
    yield from summary(found)
    for function, listed in _listed(found, show):
        yield f"\n{function.name}:"
        yield from _listing(found, listed)


def summary(found: Disassembly) -> Iterator[str]:
    """Lines with the resources of a kernel, and the instructions of its main loop."""
    used, moves = found.usage, " and ".join(map(str, found.register_moves))
    yield f"{found.own.name}: {len(found.own.instructions)} instructions for {found.compiled.plan.arch.name}"
    yield f"  registers  {used.registers} per thread at launch{f'; by setmaxnreg {moves}' if moves else ''}"
    yield f"  spills     {used.spill_bytes} bytes"
    yield f"  shared     {used.dynamic_shared_bytes} bytes at launch, {used.static_shared_bytes} static"
    yield f"  barriers   {found.named_barriers} named, {found.mbarriers} mbarriers in shared memory"
    if not found.has_stages:
        yield "  stages     unknown: with line information, the compiler generates different instructions"
    if found.main is None:
        yield "  main loop  none; all instructions by kind"
        yield from _table(by_kind(found.own.instructions))
        return
    loop = found.main
    yield (
        f"  main loop  {loop.begin:#06x} to {loop.end:#06x}: {len(loop.instructions)} instructions, "
        f"{loop.out_of_line} more out of line"
    )
    yield from _histogram("by kind", by_kind(loop.instructions))
    yield from _histogram("by stage", by_stage(found, loop.instructions), STAGES)
    yield from _histogram("by opcode", by_opcode(loop.instructions), OPCODES)


def _histogram(title: str, counts: Mapping[str, int], most: int | None = None) -> Iterator[str]:
    if counts:
        yield f"  {title}"
        yield from _table(counts, most)


def _table(counts: Mapping[str, int], most: int | None = None) -> Iterator[str]:
    """Lines of the most frequent names, and the number of others."""
    shown = list(counts.items())[:most]
    total, widest = sum(counts.values()), max((len(name) for name, _ in shown), default=0)
    for name, count in shown:
        yield f"    {count:>6}  {100 * count / total:4.1f}%  {name.ljust(widest)}".rstrip()
    if others := len(counts) - len(shown):
        yield f"    {total - sum(count for _, count in shown):>6}  in {others} others"


def _listing(found: Disassembly, instructions: Sequence[Instruction]) -> Iterator[str]:
    """Lines of instructions, with a line at the start of each stage and of the main loop."""
    before, loop = "", found.main
    for each in instructions:
        if loop is not None and each.address == loop.begin and each in loop.instructions:
            yield "  ==== main loop"
        stage = found.stage(each)
        name = stage.name if stage else UNKNOWN if found.has_stages else ""
        if name != before:
            yield f"  ---- {name}{f', line {stage.line}' if stage else ''}"
        before = name
        yield f"  {each.address:04x}  {each.text}"
        if loop is not None and each.address == loop.end and each in loop.instructions:
            yield "  ==== end of the main loop"
            before = ""
