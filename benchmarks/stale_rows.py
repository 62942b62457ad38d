"""Prints the rows of committed results that were measured with an earlier source of their kernel.

    python benchmarks/stale_rows.py                # rows by file, and how many of each file are of today's sources
    python benchmarks/stale_rows.py --check        # exits 1 if there are any
    python benchmarks/stale_rows.py results.jsonl  # of these files alone

A row is stale if the spec that it was measured with renders to another source today, or is no legal spec any more.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from codegen.errors import CodegenError
from codegen.library import ROOT, find_spec
from codegen.migrations import migrated
from codegen.parse import parse_spec
from codegen.receipts import source_sha256
from codegen.render import render

RESULTS = ROOT / "benchmarks" / "results"


@cache
def source_today(spec: str) -> str | None:
    """The hash of the source of a spec, given as JSON; None for a spec with a field that there is no longer."""
    try:
        named = find_spec(parse_spec(migrated(json.loads(spec))[0]))
    except CodegenError:
        return None
    return source_sha256(render(named))


def kernels_of(record: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """What a record says of the kernels that it ran: specs and hashes of sources."""
    found = record.get("kernels", [record])
    return [kernel for kernel in found if isinstance(kernel, Mapping) and "source_sha256" in kernel]


def is_current(record: Mapping[str, Any]) -> bool:
    """Whether all kernels of a record render to the sources that were measured."""
    return all(
        source_today(json.dumps(kernel["spec"], sort_keys=True)) == kernel["source_sha256"]
        for kernel in kernels_of(record)
    )


def records_of(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Names and records of a file of results that say which sources they are of."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".jsonl":
        found = [json.loads(line) for line in text.splitlines() if line.strip()]
    else:
        document = json.loads(text)
        found = document.get("rows", []) if isinstance(document, dict) else []
    for record in found:
        if isinstance(record, Mapping) and kernels_of(record):
            words = [str(record["name"]), *(str(record[key]) for key in ("data", "dtype") if record.get(key))]
            yield ", ".join(words), record


def stale(path: Path) -> tuple[list[str], int]:
    """Names of a file's stale rows, and how many of its rows say which sources they are of."""
    found = list(records_of(path))
    return [name for name, record in found if not is_current(record)], len(found)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help="by default all of benchmarks/results")
    parser.add_argument("--check", action="store_true", help="exit 1 if there are stale rows")
    options = parser.parse_args(arguments)
    total = 0
    for path in options.files or sorted([*RESULTS.glob("*.json"), *RESULTS.glob("*.jsonl")]):
        names, rows = stale(path)
        total += len(names)
        if rows:
            print(f"{path.name}: {len(names)} of {rows} rows are stale")
            print("\n".join(f"  {name}" for name in names), end="\n" if names else "")
    return int(bool(total and options.check))


if __name__ == "__main__":
    raise SystemExit(main())
