"""Lines of ``codegen list``, one per kernel."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any

import typer

from codegen import index
from codegen.errors import CodegenError
from codegen.index import Row
from codegen.project import GENERATED, IN_SOURCE_TREE, SPECS
from codegen.wording import alternatives

NAME_COLUMNS = 36
"""Columns of names; longer names shift the rest of their lines."""
_COLORS = {"ok": "green", "failed": "red", "unreadable": "red"}


def selected(rows: Iterable[Row], globs: Sequence[str], **fields: str | None) -> list[Row]:
    """Rows whose names match a glob, if any is given, and whose fields have the given values.

    Raises:
        CodegenError: for a name that matches no kernel, or a value that no kernel has.
    """
    found = list(rows)
    for field, value in fields.items():
        known = sorted({str(row[field]) for row in found})
        if value is not None and value not in known:
            option = {"operator": "op", "type": "dtype"}.get(field, field)
            raise CodegenError(f"--{option}: no listed kernel has {value!r}; values: {', '.join(known)}")
        found = [row for row in found if value in (None, row[field])]
    names = [str(row["spec"]) for row in found]
    for glob in globs:
        if not any(fnmatchcase(name, glob) for name in names):
            hint = "quote a pattern, such as 'h100_topk*'" if any(each in glob for each in "*?[") else ""
            raise CodegenError(f"no kernel matches {glob!r}; {hint or alternatives(glob, names)}")
    return [row for row in found if not globs or any(fnmatchcase(str(row["spec"]), glob) for glob in globs)]


def lines_of(rows: Sequence[Row], width: int | None, *, verbose: bool = False) -> list[str]:
    """Lines of a listing.

    Args:
        rows: rows of the index.
        width: columns of the terminal, to which lines are cut. None for a file or a pipe: fields are complete and
            separated by tabs.
        verbose: whether tile, instructions and the receipt's summary are listed too.
    """
    if width is None:
        return ["\t".join(_fields(row, verbose=verbose)) for row in rows]
    names = min(NAME_COLUMNS, max((len(row["spec"]) for row in rows), default=0))
    status = max((len(row["receipt"]) for row in rows), default=0)
    lines = []
    for row in rows:
        name = typer.style(f"{row['spec']:{names}}", bold=True)
        receipt = typer.style(f"{row['receipt']:{status}}", fg=_COLORS.get(row["receipt"], "yellow"))
        room = width - len(f"{row['spec']:{names}}") - status - 4
        what = _cut(f"{row['type']}, {row['what']}", room)
        lines.append(f"{name}  {receipt}  {what}".rstrip())
        if verbose:
            more = (f"{row['operator']} for {row['arch']}, tile {row['tile']}, {row['how']}", row["receipt_says"])
            lines += [f"    {_cut(each, width - 4)}" for each in more]
    return lines


def _fields(row: Row, *, verbose: bool) -> list[str]:
    names = ("spec", "receipt", "operator", "arch", "type", "what", *(("tile", "how", "receipt_says") * verbose))
    return [str(row[name]) for name in names]


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: max(width - 3, 0)] + "..."


def public(row: Row) -> dict[str, Any]:
    """Fields of a row for ``--json``, without internal ones."""
    return {name: value for name, value in row.items() if name not in index.OWN_FIELDS}


def current_rows() -> list[Row]:
    """Rows of the index. In a source tree, rows of changed specs and receipts are recomputed.

    Raises:
        CodegenError: for an index or a spec that cannot be read.
    """
    rows = index.read()
    if not IN_SOURCE_TREE:
        return [*rows]
    stale, files = index.stale_files(rows)
    kept = [row for row in rows if row["file"] in files and row["file"] not in {path.as_posix() for path in stale}]
    if not stale:
        return [*kept]
    from codegen.indexing import index_row  # noqa: PLC0415 - slow to import
    from codegen.library import read_specs  # noqa: PLC0415

    anew = [index_row(named, GENERATED) for file in stale for named in read_specs(SPECS / file)]
    return sorted([*kept, *anew], key=lambda row: str(row["spec"]))


def terminal_width() -> int | None:
    """Columns of the terminal; None if standard output is not a terminal."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None
