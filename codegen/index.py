"""The index of shipped kernels: ``generated/index.jsonl``, one JSON object a line.

``codegen render`` writes it (``codegen.indexing``). ``codegen list`` and shell completion read it instead of every
spec. This module imports nothing else of the package, so that these commands start quickly.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from codegen.errors import CodegenError, FileError
from codegen.files import read_bytes
from codegen.project import GENERATED, SPECS

NAME = "index.jsonl"
MOST_BYTES = 16 << 20
REMEDY = "codegen render --all"
"""Command that writes the index of a source tree."""
OWN_FIELDS = ("file", "digest")
"""Internal fields of a row, which ``codegen list --json`` omits."""

Row = Mapping[str, Any]


def read(folder: Path = GENERATED) -> list[dict[str, Any]]:
    """Rows of the index, sorted by name; an empty list if the folder has no index.

    Raises:
        CodegenError: for an index that cannot be read.
    """
    path = folder / NAME
    if not path.is_file():
        return []
    try:
        rows = [json.loads(line) for line in read_bytes(path, MOST_BYTES).splitlines()]
    except FileError:
        raise
    except (ValueError, RecursionError):
        rows = [None]
    if not all(isinstance(row, dict) and isinstance(row.get("spec"), str) for row in rows):
        raise CodegenError(f"{NAME}: is not an index of kernels; run: {REMEDY}")
    return rows


def text_of(rows: Iterable[Row]) -> str:
    """Text of an index: one line per row, sorted by name."""
    return "".join(json.dumps(row) + "\n" for row in sorted(rows, key=lambda row: str(row["spec"])))


def digest_of(file: Path, folder: Path = GENERATED) -> str:
    """Hash of a spec file and of the receipt next to its source, as 16 hexadecimal digits.

    Args:
        file: the spec file, relative to ``specs/``.
        folder: a folder of generated sources.
    """
    found = hashlib.sha256()
    for path in (SPECS / file, (folder / file).with_suffix(".json")):
        data = path.read_bytes() if path.is_file() else b""
        found.update(b"%d:%s" % (len(data), data))
    return found.hexdigest()[:16]


def stale_files(rows: Iterable[Row], folder: Path = GENERATED) -> tuple[list[Path], set[str]]:
    """Spec files whose rows are missing or older than the file or its receipt, and all spec files, as names."""
    known = {str(row["file"]): str(row["digest"]) for row in rows}
    files = {path.relative_to(SPECS).as_posix() for path in SPECS.rglob("*.yaml")}
    stale = [Path(name) for name in sorted(files) if known.get(name) != digest_of(Path(name), folder)]
    return stale, files


def names() -> list[str]:
    """Names in the index, sorted; an empty list if it cannot be read."""
    try:
        return [row["spec"] for row in read()]
    except CodegenError:
        return []
