"""Report of ``codegen compile`` on a kernel: lines of at most 80 columns, or JSON fields."""

from __future__ import annotations

from typing import Any

from runtime.compile.compiler import Compiled
from runtime.compile.inspection import INSTRUCTIONS, Usage

NAMES = "kernel"
"""Title of the column of names."""
_TITLES = ("arch", "regs", "spill B", "stack B", "smem KB", "from")
_WIDTHS = (6, 4, 7, 7, 7, 5)
_MOST_NAMES = 80 - sum(_WIDTHS) - 2 * len(_WIDTHS)  # letters of a name; a longer name has its own line


def header(names: int) -> str:
    """Header line for names of at most ``width`` letters."""
    return _line(NAMES, _TITLES, names)


def lines_of(compiled: Compiled, used: Usage, names: int) -> str:
    """Resources of a kernel: a line of numbers and a line of instruction counts."""
    told = (
        compiled.named.spec.arch,
        str(used.registers),
        str(used.spill_bytes),
        str(used.stack_bytes),
        f"{used.dynamic_shared_bytes / 1024:.1f}",
        "cache" if compiled.was_cached else "NVRTC",
    )
    counts = ", ".join(f"{used.instructions[name]} {name}" for name in INSTRUCTIONS if used.instructions.get(name))
    return _line(compiled.named.stem, told, names) + f"\n    {counts or 'none of the counted instructions'}"


def fields_of(compiled: Compiled, used: Usage) -> dict[str, Any]:
    """The same as JSON fields."""
    return {
        "kernel": compiled.named.stem,
        "arch": compiled.named.spec.arch,
        "key": compiled.key,
        "was_cached": compiled.was_cached,
        "registers": used.registers,
        "spill_bytes": used.spill_bytes,
        "stack_bytes": used.stack_bytes,
        "static_shared_bytes": used.static_shared_bytes,
        "dynamic_shared_bytes": used.dynamic_shared_bytes,
        "instructions": used.instructions,
    }


def _line(name: str, cells: tuple[str, ...], names: int) -> str:
    first, *numbers, last = (
        cell.ljust(width) if title in ("arch", "from") else cell.rjust(width)
        for title, cell, width in zip(_TITLES, cells, _WIDTHS, strict=True)
    )
    names = min(names, _MOST_NAMES)
    above, name = ("", name) if len(name) <= names else (f"{name}\n", "")
    return above + "  ".join((name.ljust(names), first, *numbers, last)).rstrip()
