"""Differences between two commits: spec, source, cubin, receipt and measurements of each kernel."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from pydantic import BaseModel, ConfigDict

from codegen.errors import CodegenError
from codegen.library import OF_TWIN
from codegen.plain import json_model, json_value
from codegen.receipts import Sha256, twin_receipt
from codegen.render import spec_json_of
from codegen.spec import canonical
from codegen.twins import twin_source
from codegen.wording import one_line
from runtime import git
from runtime.tools.report.measurements import RESULTS, Found, by_spec, hash_of, row_of

PARTS = ("spec", "source", "cubin", "receipt")


@dataclass(frozen=True)
class RowChange:
    """A changed measurement.

    Attributes:
        name: workload, data set and device.
        before: figures of the first commit, single calls, then back to back; "none" without such a row.
        after: figures of the second commit.
        change: change of single calls, in percent; "" if they cannot be compared.
    """

    name: str
    before: str
    after: str
    change: str


@dataclass(frozen=True)
class Change:
    """A changed kernel.

    Attributes:
        stem: name of the kernel.
        told: ``added`` or ``removed``; "" if both commits have the kernel.
        parts: hashes in both commits, by PARTS; "" for a missing part.
        verified: summaries of the receipts in both commits.
        rows: changed measurements.
    """

    stem: str
    told: str
    parts: Mapping[str, tuple[str, str]]
    verified: tuple[str, str]
    rows: tuple[RowChange, ...]


@dataclass(frozen=True)
class Changes:
    """Differences between two commits.

    Attributes:
        labels: the caller's names of the commits.
        commits: their hashes.
        count: number of kernels in either commit.
        changed: changed kernels.
    """

    labels: tuple[str, str]
    commits: tuple[str, str]
    count: int
    changed: tuple[Change, ...]


@dataclass(frozen=True)
class _Facts:
    """Data of a kernel in a commit; empty if the commit does not have it."""

    parts: Mapping[str, str]
    verified: str = "no such kernel"
    rows: Mapping[str, tuple[float | None, float | None]] = field(default_factory=dict)


class _Read(BaseModel):
    """Part of a receipt of any version; other fields are ignored."""

    model_config = ConfigDict(frozen=True, strict=True)


class _Case(_Read):
    passed: bool


class _Verification(_Read):
    device: str
    cases: tuple[_Case, ...]


class _Cubin(_Read):
    sha256: Sha256


class _Receipt(_Read):
    cubin: _Cubin
    verification: _Verification | None = None


NOTHING = _Facts(dict.fromkeys(PARTS, ""))


def changes(labels: tuple[str, str], folder: Path) -> Changes:
    """Compare two commits of the repository that a folder is in.

    Raises:
        CodegenError: for an unknown commit, or an unreadable file in it.
        ToolchainError: without git.
    """
    commits = git.commit_of(labels[0], folder), git.commit_of(labels[1], folder)
    before, after = (_kernels(commit, folder) for commit in commits)
    stems = sorted({*before, *after})
    found = (_change(stem, before.get(stem, NOTHING), after.get(stem, NOTHING)) for stem in stems)
    told = one_line(labels[0]), one_line(labels[1])
    return Changes(told, commits, len(stems), tuple(each for each in found if each))


def _change(stem: str, before: _Facts, after: _Facts) -> Change | None:
    """The changes of a kernel; None without any."""
    if before == after:
        return None
    told = "added" if before is NOTHING else "removed" if after is NOTHING else ""
    parts = {part: (before.parts[part], after.parts[part]) for part in PARTS}
    names = dict.fromkeys([*before.rows, *after.rows])
    rows = [
        RowChange(name, _spelt(before.rows.get(name)), _spelt(after.rows.get(name)), _share(name, before, after))
        for name in names
        if before.rows.get(name) != after.rows.get(name)
    ]
    return Change(stem, told, parts, (before.verified, after.verified), tuple(rows))


def _spelt(figures: tuple[float | None, float | None] | None) -> str:
    if figures is None:
        return "none"
    return " / ".join("-" if figure is None else f"{figure:g}" for figure in figures)


def _share(name: str, before: _Facts, after: _Facts) -> str:
    one, other = (side.rows.get(name, (None, None))[0] for side in (before, after))
    return f"{100 * (other / one - 1):+.1f}%" if one and other else ""


def _kernels(commit: str, folder: Path) -> dict[str, _Facts]:
    """The kernels of a commit with a source under generated/, and their twins.

    Raises:
        CodegenError: for an unreadable banner, and for rows of results as in ``by_spec``.
    """
    texts = git.texts_of(commit, "generated", (".cu", ".json"), folder)
    measured = by_spec(git.texts_of(commit, RESULTS.as_posix(), (".json", ".jsonl"), folder))
    found: dict[str, _Facts] = {}
    for path, text in texts.items():
        if path.endswith(".cu"):
            stem, receipt = PurePosixPath(path).stem, texts.get(f"{path.removesuffix('.cu')}.json", "")
            found[stem] = _facts(path, text, receipt, measured)
            if (twin := twin_receipt(receipt)) is not None:
                found[f"{stem}{OF_TWIN}"] = _facts(path, twin_source(text, stem), twin, measured)
    return found


def _facts(path: str, source: str, receipt: str, measured: Found) -> _Facts:
    try:
        spec = json_value(spec_json_of(source) or "null")
    except CodegenError as error:
        raise CodegenError(f"{one_line(path)}: the spec in its banner {error}") from None
    fields = spec if isinstance(spec, dict) else {}
    cubin, verified = _of_receipt(receipt) if receipt else ("", "no receipt")
    parts = {
        "spec": _sha256(canonical(fields)) if fields else "",
        "source": _sha256(source),
        "cubin": cubin,
        "receipt": _sha256(receipt) if receipt else "",
    }
    rows = {}
    for file, row in measured.get(hash_of(fields), ()):
        one = row_of(file, row, is_current=True)
        name = ", ".join(filter(None, (one.name, one.shape, one.data, one.device)))
        rows[f"{name} ({one.unit})"] = (one.ours.single, one.ours.back_to_back) if one.ours else (None, None)
    return _Facts(parts, verified, rows)


def _of_receipt(text: str) -> tuple[str, str]:
    """The hash of the cubin and a summary of the verification, from a receipt of any version."""
    try:
        receipt = json_model(_Receipt, text)
    except CodegenError as error:
        return "", f"a receipt that cannot be read: {error}"
    if receipt.verification is None:
        return receipt.cubin.sha256, "compiled, never run on a GPU"
    cases = receipt.verification.cases
    passed = sum(case.passed for case in cases)
    verified = f"{passed} of {len(cases)} cases passed on {one_line(receipt.verification.device)}"
    return receipt.cubin.sha256, verified


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
