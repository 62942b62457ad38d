"""``codegen migrate`` of each kind of file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import typer

from codegen.cli import home_of, verify_line
from codegen.errors import CodegenError
from codegen.files import holds, is_file, read_bytes, write_all, write_if_changed
from codegen.freshness import display_path
from codegen.library import (
    GENERATED,
    ROOT,
    NamedSpec,
    find_spec,
    read_spec,
    shipped_files,
    shown_place,
    spec_text,
)
from codegen.receipts import MissingReceipt, Receipt, ReceiptError, receipt_path
from codegen.render import render
from codegen.rewriting import rewritten
from codegen.tools.report import Report
from codegen.wording import one_line
from runtime.verify import migration, rows

ROWS = (".json", ".jsonl")
RESULTS = ROOT / "benchmarks" / "results"


def files(names: Sequence[str] | None, every: bool) -> list[Path]:
    """Return the files that a command line names.

    Raises:
        CodegenError: when it names none, or names some and says ``--all`` too, or for a name that no spec has.
    """
    if every == bool(names):
        raise CodegenError("name specs or files, or say --all" if not names else "name specs or say --all, not both")
    shipped = shipped_files()
    if every:
        return [*shipped.values(), *sorted(path for path in RESULTS.glob("*") if path.suffix in ROWS)]
    return [_file(name, shipped) for name in dict.fromkeys(names or ())]


def _file(name: str, shipped: dict[str, Path]) -> Path:
    path = Path(name)
    if path.suffix in (".yaml", ".yml", *ROWS) or is_file(path):
        return path
    if name not in shipped:
        find_spec(name)  # says which specs there are
    return shipped[name]


class Migration:
    """Carries files over, one after another, and tells what became of each.

    Args:
        told: is told what became of each.
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
        named = read_spec(path, text)
        for change in changes:
            self._tell(True, display_path(path), f": {change}")
        if changes and not self._check:
            write_if_changed(path, text)
        folder = home_of(named) if self._out is None else self._out
        try:
            known = self._receipt(named, folder)
        except ReceiptError as error:
            self.refused = True
            self._told.row({"name": named.stem, "became": "refused", "why": str(error)})
            typer.echo(f"{error}; run: {verify_line(named)}", err=True)
        else:
            if not known and not changes:
                self._tell(False, display_path(path))

    def _receipt(self, named: NamedSpec, folder: Path) -> bool:
        """Carry the receipt of a spec over, if it has one; return whether it has."""
        path = receipt_path(named.stem, folder / named.subfolder)
        packaged = self._out is None and named.is_shipped and folder != GENERATED and not is_file(path)
        earlier_path = migration.place_of(named, GENERATED if packaged else folder)
        try:
            earlier = Receipt.read(earlier_path)
        except MissingReceipt:
            if named.is_shipped:
                raise ReceiptError(f"{named.stem}: has no receipt") from None
            return False
        old_source = earlier_path.with_suffix(".cu")
        told = read_bytes(old_source).decode("utf-8", "replace") if is_file(old_source) else None
        texts = {path.with_suffix(".cu"): render(named), path: migration.carried_over(earlier, named, told).text}
        if packaged and all(holds(earlier_path.with_suffix(p.suffix), text) for p, text in texts.items()):
            changed = False  # an installed package's own files say so, and stay where they are
        elif self._check:
            changed = not all(holds(p, text) for p, text in texts.items())
        else:
            changed = any(write_all(texts).values())
            if earlier_path != path and not packaged:
                old_source.unlink(missing_ok=True)
                earlier_path.unlink()
        self._tell(changed, named.stem)
        return True

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
