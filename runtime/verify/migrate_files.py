"""``codegen migrate`` for each kind of file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import typer

from codegen.errors import CodegenError
from codegen.files import display_path, holds, is_file, write_if_changed
from codegen.library import (
    GENERATED,
    ROOT,
    NamedSpec,
    file_of,
    read_specs,
    shipped_files,
    shown_place,
    spec_text,
)
from codegen.places import home_of, verify_line
from codegen.receipts import MissingReceipt, Receipt, ReceiptError, receipt_path, write_receipt
from codegen.render import render
from codegen.rewriting import rewritten
from codegen.tools.report import Report
from codegen.wording import one_line
from runtime.verify import migration, rows
from runtime.verify.receipts import receipt as receipt_now

ROWS = (".json", ".jsonl")
RESULTS = ROOT / "benchmarks" / "results"


def files(names: Sequence[str] | None, every: bool) -> list[Path]:
    """Files that a command line names.

    Raises:
        CodegenError: if it names none, names files in addition to ``--all``, or names an unknown spec.
    """
    if every == bool(names):
        raise CodegenError("name specs or files, or say --all" if not names else "name specs or say --all, not both")
    if every:
        return [*shipped_files().values(), *sorted(path for path in RESULTS.glob("*") if path.suffix in ROWS)]
    return list(dict.fromkeys(_file(name) for name in names or ()))


def _file(name: str) -> Path:
    path = Path(name)
    if path.suffix in (".yaml", ".yml", *ROWS) or is_file(path):
        return path
    return file_of(name)


@dataclass(frozen=True)
class _Earlier:
    """Receipt, source and spec of a kernel before they are carried over.

    Attributes:
        named: its current spec.
        path: path where its receipt belongs.
        packaged: whether only the installed package has its files.
        place: current path of its receipt.
        source: the source beside the receipt, if it exists.
    """

    named: NamedSpec
    path: Path
    packaged: bool
    place: Path
    source: str | None


class Migration:
    """Migrates files one by one and reports the outcome of each.

    Args:
        told: report that collects the outcomes.
        out: folder of sources and receipts, if not the one of ``codegen render``.
        check: whether to write nothing.

    Attributes:
        changed: whether a file needed a change.
        refused: whether a file could not be migrated.
    """

    def __init__(self, told: Report, out: Path | None = None, *, check: bool = False) -> None:
        self._told = told
        self._out = out
        self._check = check
        self.changed = False
        self.refused = False

    def file(self, path: Path) -> None:
        """Migrate a spec with its receipt, or a file of rows.

        Raises:
            CodegenError: if the file is neither, or the spec is invalid even after renaming fields.
        """
        if path.suffix in ROWS:
            self._rows(path)
        else:
            self._spec(path)

    def _spec(self, path: Path) -> None:
        text, changes = rewritten(spec_text(path), shown_place(path))
        specs = read_specs(path, text)
        for change in changes:
            self._tell(True, display_path(path), f": {change}")
        if changes and not self._check:
            write_if_changed(path, text)
        # All receipts are read before any is written, because they share a source. A twin's receipt is written first:
        # if it has its own file, the receipt of the other dtype may not exist.
        found = [self._earlier(named) for named in reversed(specs)]
        known = [earlier is None or self._is_known(earlier) for earlier in found]
        if not any(known) and not changes:
            self._tell(False, display_path(path))

    def _earlier(self, named: NamedSpec) -> _Earlier | None:
        """Find the receipt of a kernel; None after a report of the reason."""
        folder = home_of(named) if self._out is None else self._out
        path = receipt_path(named, folder)
        packaged = self._out is None and named.is_shipped and folder != GENERATED and not is_file(path)
        try:
            place = migration.place_of(named, GENERATED if packaged else folder)
        except ReceiptError as error:
            self._refuse(named, error)
            return None
        return _Earlier(named, path, packaged, place, migration.earlier_source(named, place))

    def _is_known(self, earlier: _Earlier) -> bool:
        """Migrate a receipt if there is one; return whether a receipt or an error was reported."""
        try:
            return self._receipt(earlier)
        except ReceiptError as error:
            self._refuse(earlier.named, error)
            return True

    def _refuse(self, named: NamedSpec, error: ReceiptError) -> None:
        self.refused = True
        self._told.row({"name": named.stem, "became": "refused", "why": str(error)})
        typer.echo(f"{error}; run: {verify_line(named)}", err=True)

    def _receipt(self, earlier: _Earlier) -> bool:
        """Migrate the receipt of a spec if there is one; return whether there is."""
        named, path = earlier.named, earlier.path
        try:
            old = migration.earlier_receipt(named, earlier.place)
        except MissingReceipt:
            if named.is_shipped:
                raise ReceiptError(f"{named.stem}: has no receipt") from None
            return False
        receipt, source = migration.carried_over(old, named, earlier.source), render(named.main)
        if earlier.packaged and self._is_current(earlier, receipt, source, earlier.place):
            changed = False  # an installed package's own files are current and stay unchanged
        elif self._check:
            changed = not self._is_current(earlier, receipt, source, path)
        else:
            changed = write_receipt(named, receipt, path, partial(receipt_now, named.main, None), source)
            if earlier.place != path and not earlier.packaged:
                earlier.place.with_suffix(".cu").unlink(missing_ok=True)
                earlier.place.unlink()
        self._tell(changed, named.stem)
        return True

    def _is_current(self, earlier: _Earlier, receipt: Receipt, source: str, path: Path) -> bool:
        """Whether the files of a kernel have its current source and receipt."""
        try:
            text = Receipt.read(path).including(earlier.named, receipt).text
        except ReceiptError:
            return False
        return holds(path.with_suffix(".cu"), source) and holds(path, text)

    def _rows(self, path: Path) -> None:
        outcome = rows.carried_over(path)
        if not self._check:
            outcome.write(path)
        counts = f": rows: {len(outcome.carried)} carried over, {outcome.current} up to date"
        self._tell(bool(outcome.carried), display_path(path), counts, otherwise="unchanged")
        self._told.rows[-1] |= {"carried": outcome.carried, "current": outcome.current, "left": outcome.left}
        for reason, names in outcome.left.items():
            self._told.say(f"    unchanged, {reason}: {', '.join(map(one_line, names))}")

    def _tell(self, changed: bool, name: str, more: str = "", *, otherwise: str = "up to date") -> None:
        self.changed |= changed
        verdict = ("would change" if self._check else "carried over") if changed else otherwise
        self._told.row({"name": name, "became": verdict, "more": more.removeprefix(": ")}, f"{verdict}  {name}{more}")
