"""Freshness of the generated sources: they are what specs and templates render to, byte for byte."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from codegen.errors import CodegenError
from codegen.files import display_path, holds, is_file, read_bytes, relative_to_here, write_if_changed
from codegen.installation import reinstall_command
from codegen.library import GENERATED, IN_SOURCE_TREE, NamedSpec
from codegen.receipts import Receipt, ReceiptState, ReceiptStatus, receipt_path, state
from codegen.render import render, seal_is_intact
from codegen.twins import twin_source
from codegen.wording import in_shell

Kind = Literal[
    "missing",
    "stale",
    "hand_edited",
    "orphaned",
    "receipt_missing",
    "receipt_unreadable",
    "receipt_stale",
    "receipt_unverified",
    "receipt_failed",
]


@dataclass(frozen=True)
class Problem:
    """One file that is not what it should be.

    Attributes:
        path: the file.
        kind: what is wrong with it.
        message: the same in words.
        fix: the command that mends it.
    """

    path: Path
    kind: Kind
    message: str
    fix: str

    def __str__(self) -> str:
        """Return one line."""
        return f"{display_path(self.path)}: {self.message}; run: {self.fix}"


def render_to(folder: Path, specs: Sequence[NamedSpec]) -> dict[Path, bool]:
    """Render specs into ``folder``, laid out as specs/ is; return each file and whether it changed.

    A twin gets a file of its own name, which no folder of committed sources has.

    Nothing is written unless all of them render.

    Raises:
        CodegenError: for a spec that cannot be rendered, or two specs of one name.
        FileError: when the folder cannot be written.
    """
    texts: dict[Path, str] = {}
    for named in specs:
        path = folder / named.subfolder / f"{named.stem}.cu"
        if path in texts:
            raise CodegenError(
                f"two of the specs are called {named.stem}: both would be written to {display_path(path)}"
            )
        texts[path] = render(named)
    return {path: write_if_changed(path, text) for path, text in texts.items()}


def check_sources(folder: Path, specs: Iterable[NamedSpec]) -> list[Problem]:
    """Check the committed sources of ``specs`` in ``folder``, and what they say of twins; return their problems."""
    specs = list(specs)
    return check_files(folder, [named for named in specs if named.twin_of is None]) + check_twins(folder, specs)


def check_files(folder: Path, specs: Iterable[NamedSpec]) -> list[Problem]:
    """Check the files of ``specs`` in ``folder``, each by its own name; return their problems."""
    problems = []
    for named in specs:
        path = folder / named.subfolder / f"{named.stem}.cu"
        fresh = render(named)
        fix = _fix(named, folder)
        if not is_file(path):
            problems.append(Problem(path, "missing", "was not generated", fix))
        elif holds(path, fresh):
            continue
        elif seal_is_intact(read_bytes(path).decode("utf-8", "replace")):
            problems.append(Problem(path, "stale", "its spec or templates changed after it was generated", fix))
        else:
            message = "was edited by hand (its seal is broken); edits belong into the spec or a template"
            problems.append(Problem(path, "hand_edited", message, fix))
    return problems


def check_twins(folder: Path, specs: Iterable[NamedSpec]) -> list[Problem]:
    """Compare the sources in ``folder``, with words replaced, with what the specs of twins render to.

    A source that is not up to date is left out: it has a problem of its own.
    """
    problems = []
    for named in specs:
        source, path = render(named.main), folder / named.subfolder / f"{named.main.stem}.cu"
        if named.twin_of is not None and holds(path, source) and twin_source(source, named.main.stem) != render(named):
            message = f"with its words replaced it is not what the spec of {named.stem} renders to"
            fix = f"diff <(codegen render {named.main.argument} --out -) <(codegen render {named.argument} --out -)"
            problems.append(Problem(path, "stale", message, fix))
    return problems


def check_orphans(folder: Path, specs: Iterable[NamedSpec]) -> list[Problem]:
    """Return the sources and receipts in ``folder`` that belong to none of the specs."""
    known = {folder / named.subfolder / named.main.stem for named in specs}
    found = sorted(path for suffix in ("cu", "json") for path in folder.rglob(f"*.{suffix}"))
    return [
        Problem(path, "orphaned", f"there is no spec {path.stem}.yaml", f"rm {in_shell(relative_to_here(path))}")
        for path in found
        if path.with_suffix("") not in known
    ]


def check_receipts(folder: Path, specs: Iterable[NamedSpec]) -> list[Problem]:
    """Return the receipts in ``folder`` that do not vouch for the present source."""
    problems = []
    kinds: dict[ReceiptStatus, Kind] = {
        ReceiptStatus.MISSING: "receipt_missing",
        ReceiptStatus.UNREADABLE: "receipt_unreadable",
        ReceiptStatus.STALE: "receipt_stale",
        ReceiptStatus.UNVERIFIED: "receipt_unverified",
        ReceiptStatus.FAILED: "receipt_failed",
    }
    for named in specs:
        found = state(named, render(named), folder)
        if found.standing is ReceiptStatus.OK and _has_receipt_of_no_type(named, folder):
            found = ReceiptState(ReceiptStatus.STALE, "has a receipt of a type that its spec does not list")
        if found.standing in kinds:
            fix = f"codegen verify {named.stem} (on a GPU)"
            if folder == GENERATED and not IN_SOURCE_TREE:
                fix = reinstall_command()
            elif found.standing is ReceiptStatus.STALE:
                fix = f"codegen migrate {named.stem} (if only comments or names changed), or {fix}"
            explanation = found.explanation if named.twin_of is None else f"of {named.stem}: {found.explanation}"
            problems.append(Problem(receipt_path(named, folder), kinds[found.standing], explanation, fix))
    return problems


def _has_receipt_of_no_type(named: NamedSpec, folder: Path) -> bool:
    return named.twin_of is None and not named.has_twin and bool(Receipt.read(receipt_path(named, folder)).twins)


def check(folder: Path, specs: Sequence[NamedSpec], *, strict: bool = False) -> list[Problem]:
    """Compare a folder with everything that its specs render to.

    Args:
        folder: holds the sources and their receipts.
        specs: all specs the folder is generated from.
        strict: whether receipts count too.
    """
    problems = check_sources(folder, specs) + check_orphans(folder, specs)
    return problems + (check_receipts(folder, specs) if strict else [])


def render_command(named: NamedSpec) -> str:
    """Return the command that renders a spec."""
    return f"codegen render {named.argument}"


def _fix(named: NamedSpec, folder: Path) -> str:
    """The command that renders the source of a spec in a folder anew."""
    if folder == GENERATED:
        return render_command(named) if IN_SOURCE_TREE else reinstall_command()
    return f"{render_command(named)} --out {in_shell(relative_to_here(folder))}"
