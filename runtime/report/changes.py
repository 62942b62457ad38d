"""What two commits differ in: of each kernel spec, source, cubin, receipt, and what was measured."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from codegen.errors import CodegenError
from codegen.plain import json_value
from codegen.render import spec_json_of
from codegen.spec import canonical
from codegen.wording import one_line
from runtime import git
from runtime.report.measurements import RESULTS, Found, by_spec, hash_of, row_of

PARTS = ("spec", "source", "cubin", "receipt")


@dataclass(frozen=True)
class RowChange:
    """A measurement that differs.

    Attributes:
        name: workload, data set and device.
        before: single calls, then back to back, as the first commit has them; "none" where it has no such row.
        after: likewise of the second one.
        change: of single calls, in percent; "" where there is nothing to compare.
    """

    name: str
    before: str
    after: str
    change: str


@dataclass(frozen=True)
class Change:
    """A kernel that differs.

    Attributes:
        stem: its name.
        told: ``added`` or ``removed``; "" for one that both commits have.
        parts: hashes in both commits, by PARTS; "" for what is not there.
        verified: in both commits, what the receipt says in a few words.
        rows: measurements that differ.
    """

    stem: str
    told: str
    parts: Mapping[str, tuple[str, str]]
    verified: tuple[str, str]
    rows: tuple[RowChange, ...]


@dataclass(frozen=True)
class Changes:
    """What two commits differ in.

    Attributes:
        labels: the commits as they were asked for, and
        commits: their hashes.
        count: kernels that one of them has.
        changed: those that differ.
    """

    labels: tuple[str, str]
    commits: tuple[str, str]
    count: int
    changed: tuple[Change, ...]


@dataclass(frozen=True)
class _Facts:
    """What a commit has of a kernel; empty where it has none."""

    parts: Mapping[str, str]
    verified: str = "no such kernel"
    rows: Mapping[str, tuple[float | None, float | None]] = field(default_factory=dict)


NOTHING = _Facts(dict.fromkeys(PARTS, ""))


def changes(labels: tuple[str, str], folder: Path) -> Changes:
    """Compare two commits of the repository that a folder is in.

    Raises:
        CodegenError: for what is no commit, or has a file that cannot be read.
        ToolchainError: without git.
    """
    commits = git.commit_of(labels[0], folder), git.commit_of(labels[1], folder)
    before, after = (_kernels(commit, folder) for commit in commits)
    stems = sorted({*before, *after})
    found = (_change(stem, before.get(stem, NOTHING), after.get(stem, NOTHING)) for stem in stems)
    told = one_line(labels[0]), one_line(labels[1])
    return Changes(told, commits, len(stems), tuple(each for each in found if each))


def _change(stem: str, before: _Facts, after: _Facts) -> Change | None:
    """Return what a kernel differs in; None if in nothing."""
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
    """Return the kernels of a commit: those whose source it has below generated/."""
    texts = git.texts_of(commit, "generated", (".cu", ".json"), folder)
    measured = by_spec(git.texts_of(commit, RESULTS.as_posix(), (".json", ".jsonl"), folder))
    return {
        PurePosixPath(path).stem: _facts(text, texts.get(f"{path.removesuffix('.cu')}.json", ""), measured)
        for path, text in texts.items()
        if path.endswith(".cu")
    }


def _facts(source: str, receipt: str, measured: Found) -> _Facts:
    spec = json_value(spec_json_of(source) or "null")
    fields = spec if isinstance(spec, dict) else {}
    told = _receipt(receipt)
    cubin, verification = told.get("cubin"), told.get("verification")
    parts = {
        "spec": _sha256(canonical(fields)) if fields else "",
        "source": _sha256(source),
        "cubin": str(cubin.get("sha256", "")) if isinstance(cubin, dict) else "",
        "receipt": _sha256(receipt) if receipt else "",
    }
    rows = {}
    for file, row in measured.get(hash_of(fields), ()):
        one = row_of(file, row, is_current=True)
        name = ", ".join(filter(None, (one.name, one.shape, one.data, one.device)))
        rows[f"{name} ({one.unit})"] = (one.ours.single, one.ours.back_to_back) if one.ours else (None, None)
    return _Facts(parts, _verified(verification) if receipt else "no receipt", rows)


def _receipt(text: str) -> Mapping[str, Any]:
    """Return the fields of a receipt of whatever version; none of what is no receipt."""
    try:
        told = json_value(text or "null")
    except CodegenError:
        return {}
    return told if isinstance(told, dict) else {}


def _verified(verification: Any) -> str:
    """Return in a few words what a receipt says of a GPU."""
    cases = verification.get("cases") if isinstance(verification, dict) else None
    if not isinstance(cases, list):
        return "compiled, never run on a GPU"
    passed = sum(isinstance(case, dict) and case.get("passed") is True for case in cases)
    return one_line(f"{passed} of {len(cases)} cases passed on {verification.get('device')}")


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
