"""Rows of the index of shipped kernels, from their specs, sources and receipts."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from codegen import index
from codegen.files import holds, write_if_changed
from codegen.freshness import Problem
from codegen.installation import reinstall_command
from codegen.library import NamedSpec, shipped_specs
from codegen.operators import operator_of
from codegen.project import GENERATED, IN_SOURCE_TREE
from codegen.receipts import ReceiptState, state
from codegen.render import render
from codegen.score import Score
from codegen.spec import Epilogue, Spec

BY_DEFAULT = ("stream_k_tail", "warp_rows")  # options that follow from other fields, unless a spec sets them
_DIGEST_IN_NAME = re.compile(r"(mask|score)[0-9a-f]{6}\b")


def row_of(named: NamedSpec, found: ReceiptState) -> dict[str, Any]:
    """Fields of a kernel in a listing."""
    spec = named.spec
    return {
        "spec": named.stem,
        "operator": spec.op,
        "arch": spec.arch,
        "type": spec.dtype,
        "what": what(spec),
        "tile": " x ".join(map(str, spec.tile.model_dump().values())),
        "how": f"{spec.mma}, {spec.copy_}, {spec.schedule}",
        "receipt": found.standing.value,
        "receipt_says": found.explanation,
        "fields": json.loads(spec.canonical_json()),
    }


def what(spec: Spec) -> str:
    """Description of a kernel's computation and its options."""
    words = [_DIGEST_IN_NAME.sub(r"\1", operator_of(spec).title(spec))]
    for name in spec.options:
        value = getattr(spec, name)
        if value == type(spec).model_fields[name].default or name in BY_DEFAULT:
            continue
        if isinstance(value, tuple):
            value = " ".join(value)
        if isinstance(value, Epilogue):
            value = " ".join(["bias"] * value.bias + [value.activation] * (value.activation != "none"))
        words.append(name if value is True or isinstance(value, Score) else f"{name} {value}")
    return ", ".join(words)


def index_row(named: NamedSpec, folder: Path) -> dict[str, Any]:
    """Row of a shipped kernel in the index of a folder of generated sources."""
    file = named.subfolder / f"{named.main.stem}.yaml"
    own = {"file": file.as_posix(), "digest": index.digest_of(file, folder)}
    return row_of(named, state(named, render(named), folder)) | own


def update(folder: Path, renewed: Iterable[NamedSpec] | None = None) -> bool:
    """Write the index of a folder of generated sources; return whether it changed.

    Args:
        folder: the folder. Only the source tree's own ``generated/`` has an index: for others, nothing is written.
        renewed: kernels whose rows are recomputed; None for all. Rows that are missing or older than their spec file or
            receipt are recomputed too, and rows of removed specs are dropped.
    """
    if folder != GENERATED or not IN_SOURCE_TREE:
        return False
    kept: dict[str, index.Row] = {}
    if renewed is not None:
        earlier = index.read(folder)
        stale, _ = index.stale_files(earlier, folder)
        anew = {named.main.stem for named in renewed} | {path.stem for path in stale}
        kept = {row["spec"]: row for row in earlier if Path(row["file"]).stem not in anew}
    rows = [kept.get(named.stem) or index_row(named, folder) for named in shipped_specs()]
    return write_if_changed(folder / index.NAME, index.text_of(rows))


def problems(folder: Path, specs: Iterable[NamedSpec]) -> list[Problem]:
    """Problem of a missing or stale index; an empty list if it is up to date."""
    path = folder / index.NAME
    if holds(path, index.text_of(index_row(named, folder) for named in specs)):
        return []
    fix = index.REMEDY if IN_SOURCE_TREE else reinstall_command()
    if not path.is_file():
        return [Problem(path, "missing", "was not written", fix)]
    return [Problem(path, "stale", "a spec, a source or a receipt changed after it was written", fix)]
