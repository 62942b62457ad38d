"""Freshness of the generated sources: a byte comparison with the sources that specs and templates render to."""

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
    """A problem of one file.

    Attributes:
        path: the file.
        kind: keyword of the problem.
        message: the problem in words.
        fix: the command that fixes it.
    """

    path: Path
    kind: Kind
    message: str
    fix: str

    def __str__(self) -> str:
        """The problem in one line."""
        return f"{display_path(self.path)}: {self.message}; run: {self.fix}"


def render_to(folder: Path, specs: Sequence[NamedSpec]) -> dict[Path, bool]:
    """Render specs into ``folder`` with the layout of specs/; return each file and whether it changed.

    A twin gets its own file, unlike in folders of committed sources. Nothing is written unless all specs render.

    Raises:
        CodegenError: for a spec that cannot be rendered, or two specs with the same name.
        FileError: if the folder cannot be written.
    """
    texts: dict[Path, str] = {}
    for named in specs:
        path = folder / named.subfolder / f"{named.stem}.cu"
        if path in texts:
            raise CodegenError(f"two specs are named {named.stem}: both would be written to {display_path(path)}")
        texts[path] = render(named)
    return {path: write_if_changed(path, text) for path, text in texts.items()}


def check_sources(folder: Path, specs: Iterable[NamedSpec]) -> list[Problem]:
    """Problems of the committed sources of ``specs`` in ``folder``, including the sources of twins."""
    specs = list(specs)
    return check_files(folder, [named for named in specs if named.twin_of is None]) + check_twins(folder, specs)


def check_files(folder: Path, specs: Iterable[NamedSpec]) -> list[Problem]:
    """Problems of the files of ``specs`` in ``folder``, one file per spec."""
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
            message = "was edited by hand (its seal is broken); edit the spec or a template instead"
            problems.append(Problem(path, "hand_edited", message, fix))
    return problems


def check_twins(folder: Path, specs: Iterable[NamedSpec]) -> list[Problem]:
    """Problems of twins: the sources in ``folder``, with words replaced, differ from the rendered specs of twins.

    Sources that are not up to date are skipped, as they are problems themselves.
    """
    problems = []
    for named in specs:
        source, path = render(named.main), folder / named.subfolder / f"{named.main.stem}.cu"
        if named.twin_of is not None and holds(path, source) and twin_source(source, named.main.stem) != render(named):
            message = f"with its words replaced, it differs from the rendered spec of {named.stem}"
            fix = f"diff <(codegen render {named.main.argument} --out -) <(codegen render {named.argument} --out -)"
            problems.append(Problem(path, "stale", message, fix))
    return problems


def check_orphans(folder: Path, specs: Iterable[NamedSpec]) -> list[Problem]:
    """Problems of sources and receipts in ``folder`` without a spec."""
    known = {folder / named.subfolder / named.main.stem for named in specs}
    found = sorted(path for suffix in ("cu", "json") for path in folder.rglob(f"*.{suffix}"))
    return [
        Problem(path, "orphaned", f"there is no spec {path.stem}.yaml", f"rm {in_shell(relative_to_here(path))}")
        for path in found
        if path.with_suffix("") not in known
    ]


def check_receipts(folder: Path, specs: Iterable[NamedSpec]) -> list[Problem]:
    """Problems of receipts in ``folder`` that are not valid for the current source."""
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
    """Problems of a folder of generated sources.

    Args:
        folder: the folder of sources and receipts.
        specs: all specs that the folder is generated from.
        strict: whether receipts are checked too.
    """
    problems = check_sources(folder, specs) + check_orphans(folder, specs)
    return problems + (check_receipts(folder, specs) if strict else [])


def render_command(named: NamedSpec) -> str:
    """Command that renders a spec."""
    return f"codegen render {named.argument}"


def _fix(named: NamedSpec, folder: Path) -> str:
    """Command that renders the source of a spec in a folder again."""
    if folder == GENERATED:
        return render_command(named) if IN_SOURCE_TREE else reinstall_command()
    return f"{render_command(named)} --out {in_shell(relative_to_here(folder))}"
