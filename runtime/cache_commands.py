"""Implementation of ``codegen cache``."""

from __future__ import annotations

from dataclasses import asdict

from codegen.files import display_path
from codegen.tools.report import report
from codegen.wording import one_line, plural
from runtime.compile.cache import KernelCache


def list_entries(*, as_json: bool) -> None:
    """``codegen cache list``."""
    cache, total = KernelCache(), 0
    with report(as_json=as_json) as told:
        for stored in cache.entries():
            total += stored.size
            of = stored.entry.identity if stored.entry else None
            what = f"{of.stem} ({of.arch} {of.target})" if of else "corrupt; the next use compiles it again"
            fields = {"file": str(stored.path), "bytes": stored.size, **(asdict(of) if of else {"corrupt": True})}
            told.row(fields, f"{one_line(stored.path.name[:16])}  {in_units(stored.size):>9}  {one_line(what)}")
        told.note(
            "bytes", total, f"{plural(len(told.rows), 'entry')}, {in_units(total)} in {display_path(cache.folder)}"
        )


def in_units(size: int) -> str:
    """A number of bytes in the largest unit with at least one digit before the point."""
    value, units = float(size), ["bytes", "KiB", "MiB", "GiB"]
    while value >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{value:.1f} {units[0]}" if units[0] != "bytes" else f"{size} bytes"


def clear(*, as_json: bool) -> None:
    """``codegen cache clear``."""
    with report(as_json=as_json) as told:
        count = KernelCache().clear()
        told.note("removed", count, f"removed {plural(count, 'entry')}")
