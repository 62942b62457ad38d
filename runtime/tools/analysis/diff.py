"""Differences between two kernels: specs, plans, sources and SASS."""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from codegen.tools.explain import explained
from runtime.tools.analysis.kinds import by_opcode
from runtime.tools.analysis.loops import main_loop
from runtime.tools.analysis.options import Section
from runtime.tools.analysis.sides import Code, Side, code_of

ABSENT = "-"
CONTEXT = 2  # lines around a change
NOT_OF_THE_PLAN = ("kernel", "spec", "spec_hash", "facts.spec hash")
_CONSTANT = re.compile(r"^constexpr [\w ]+? (k\w+) = (.+?);", re.MULTILINE)


def compare(one: Side, other: Side, section: Section) -> dict[str, Any]:
    """Compare one section of two kernels.

    Returns:
        ``same``; ``values``: named values that differ, as [name, first, second]; ``lines``: a unified diff; ``note``: a
        remark.
    """
    if section is Section.SPEC:
        return _told(_differing(one.fields, other.fields))
    if section is Section.PLAN:
        return _plans(one, other)
    if section is Section.SOURCE:
        note = "without the banner, with the kernel's name replaced by KERNEL"
        return _told((), _unified(one.body, other.body, one.label, other.label), note)
    return _codes(code_of(one), code_of(other), one.label, other.label)


def _told(values: Sequence[Sequence[Any]], lines: Sequence[str] = (), note: str = "") -> dict[str, Any]:
    found = not values and not lines
    return {"same": found, "values": [*map(list, values)], "lines": [*lines], "note": "" if found else note}


def _plans(one: Side, other: Side) -> dict[str, Any]:
    if one.plan is None or other.plan is None:
        note = "constants of the sources; the planner of a commit is not available"
        return _told(_differing(dict(_CONSTANT.findall(one.source)), dict(_CONSTANT.findall(other.source))), (), note)
    return _told(_differing(explained(one.plan), explained(other.plan), NOT_OF_THE_PLAN))


def _differing(
    one: Mapping[str, Any], other: Mapping[str, Any], leave_out: Sequence[str] = ()
) -> list[tuple[str, Any, Any]]:
    """Names whose values differ between two mappings, in the order of the first."""
    flat, flat_other = dict(_flat(one)), dict(_flat(other))
    names = [*flat, *(name for name in flat_other if name not in flat)]
    told = [(name, flat.get(name, ABSENT), flat_other.get(name, ABSENT)) for name in names]
    return [each for each in told if each[1] != each[2] and not any(_is_below(each[0], outer) for outer in leave_out)]


def _is_below(name: str, outer: str) -> bool:
    return name == outer or name.startswith(f"{outer}.")


def _flat(value: Any, outer: str = "") -> Iterator[tuple[str, Any]]:
    """Plain values by dotted names; list items by their own name, or their index."""
    if isinstance(value, Mapping):
        pairs = list(value.items())
    elif isinstance(value, list):
        pairs = [(each.get("name", i) if isinstance(each, Mapping) else i, each) for i, each in enumerate(value)]
    else:
        yield outer, value
        return
    for name, inner in pairs:
        yield from _flat(inner, f"{outer}.{name}" if outer else str(name))


def _unified(one: Sequence[str], other: Sequence[str], label: str, other_label: str) -> list[str]:
    return list(difflib.unified_diff(one, other, label, other_label, lineterm="", n=CONTEXT))


def _codes(one: Code, other: Code, label: str, other_label: str) -> dict[str, Any]:
    """Compare SASS: resources, counts of opcodes, and the main loop in order."""
    if [each.code for each in one.functions] == [each.code for each in other.functions]:
        return _told(())
    loops = [main_loop(code.functions[0].instructions) for code in (one, other)]
    facts = [
        {
            "instructions": len(code.functions[0].instructions),
            "registers": code.usage.registers,
            "spill bytes": code.usage.spill_bytes,
            "main loop, instructions": len(loop.instructions) if loop else 0,
        }
        for code, loop in zip((one, other), loops, strict=True)
    ]
    opcodes = [by_opcode(loop.instructions) if loop else {} for loop in loops]
    counts = [{f"main loop, {name}": each[name] for name in each} for each in opcodes]
    order = [_in_runs(each.opcode for each in loop.instructions) if loop else [] for loop in loops]
    values = [*_differing(facts[0], facts[1]), *_counted(*counts)]
    note = "opcodes of the main loop, in order" if order[0] != order[1] else "the main loop has the same opcodes"
    return {**_told(values, _unified(order[0], order[1], label, other_label)), "same": False, "note": note}


def _in_runs(opcodes: Iterable[str]) -> list[str]:
    """Opcodes in order, run-length encoded."""
    runs = [(name, len([*group])) for name, group in itertools.groupby(opcodes)]
    return [name if number == 1 else f"{name} x {number}" for name, number in runs]


def _counted(one: Mapping[str, int], other: Mapping[str, int]) -> list[tuple[str, int, int]]:
    """Names with different counts."""
    names = dict.fromkeys([*one, *other])
    return [(name, one.get(name, 0), other.get(name, 0)) for name in names if one.get(name, 0) != other.get(name, 0)]


def lines_of(section: Section, found: Mapping[str, Any]) -> Iterator[str]:
    """Lines of a comparison, as plain text."""
    title = f"{section.value}: {'the same' if found['same'] else 'differs'}"
    yield f"{title}; {found['note']}" if found["note"] else title
    widest = max((len(name) for name, _, _ in found["values"]), default=0)
    for name, one, other in found["values"]:
        yield f"  {name.ljust(widest)}  {one} -> {other}"
    yield from (f"  {line}".rstrip() for line in found["lines"])
