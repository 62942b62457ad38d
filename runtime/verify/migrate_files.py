"""``codegen migrate`` of each kind of file."""

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
    """Return the files that a command line names.

    Raises:
        CodegenError: when it names none, or names some and says ``--all`` too, or for a name that no spec has.
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
        named: its spec of today.
        path: where its receipt belongs.
        packaged: whether only the installed package has files of it.
        place: where its receipt is.
        source: the source beside that, if there is one.
    """

    named: NamedSpec
    path: Path
    packaged: bool
    place: Path
    source: str | None


class Migration:
    """Carries files over, one after another, and tells what became of each.

    Args:
        told: called with the outcome of each.
        out: where sources and receipts are, if not where ``codegen render`` puts them.
        check: whether nothing is written.

    Attributes:
        changed: whether something was to be written.
        refused: whether something could not be carried over.
    """

    def __init__(self, told: Report, out: Path | None = None, *, check: bool = False) -> None:
        self._told = told
        self._out = out
        self._check = check
        self.changed = False
        self.refused = False

    def file(self, path: Path) -> None:
        """Carry over a spec with its receipt, or a file of rows.

        Raises:
            CodegenError: for a file that is neither, or a spec that is none of today under any name.
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
        # All are found before any is written, for they share a source. The receipt of a twin is written first: where it
        # is in a file of its own, there may be none of the other type.
        found = [self._earlier(named) for named in reversed(specs)]
        known = [earlier is None or self._is_known(earlier) for earlier in found]
        if not any(known) and not changes:
            self._tell(False, display_path(path))

    def _earlier(self, named: NamedSpec) -> _Earlier | None:
        """Find the receipt of a kernel, or tell why not, and return None."""
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
        """Carry a receipt over, if there is one; return whether there is, or why not was told."""
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
        """Carry the receipt of a spec over, if it has one; return whether it has."""
        named, path = earlier.named, earlier.path
        try:
            old = migration.earlier_receipt(named, earlier.place)
        except MissingReceipt:
            if named.is_shipped:
                raise ReceiptError(f"{named.stem}: has no receipt") from None
            return False
        receipt, source = migration.carried_over(old, named, earlier.source), render(named.main)
        if earlier.packaged and self._is_current(earlier, receipt, source, earlier.place):
            changed = False  # an installed package's own files say so, and stay where they are
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
        """Whether source and receipt of a kernel are in files as they are today."""
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
            self._told.say(f"    left as they are, {reason}: {', '.join(map(one_line, names))}")

    def _tell(self, changed: bool, name: str, more: str = "", *, otherwise: str = "up to date") -> None:
        self.changed |= changed
        verdict = ("would change" if self._check else "carried over") if changed else otherwise
        self._told.row({"name": name, "became": verdict, "more": more.removeprefix(": ")}, f"{verdict}  {name}{more}")
