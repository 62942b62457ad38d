"""Prints the rows of committed results that were measured with an earlier source of their kernel.

    python benchmarks/stale_rows.py                # rows by file, and how many of each file are of earlier sources
    python benchmarks/stale_rows.py --check        # exits 1 if there are any
    python benchmarks/stale_rows.py results.jsonl  # of these files alone

A row is stale if the spec that it was measured with renders to another source today, or is no legal spec any more. A
file whose rows have no hash of a source cannot be checked: its name is printed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from codegen.errors import CodegenError
from codegen.library import ROOT, find_spec, shipped_names
from codegen.migrations import migrated
from codegen.parse import parse_spec
from codegen.receipts import source_sha256
from codegen.render import render
from runtime.result_rows import documents, rows_in

RESULTS = ROOT / "benchmarks" / "results"
UNCHECKED = "cannot be checked, no row has the hash of a source"


@cache
def sources_today(spec: str, name: str) -> set[str]:
    """Hashes of the sources of a spec, given as JSON: under the name that is made of it, and of the shipped kernel of
    that name. Empty for a spec that has no kernel today."""
    try:
        unnamed = find_spec(parse_spec(migrated(json.loads(spec))[0]))
        shipped = [find_spec(name)] if name in shipped_names() else []
        kernels = [unnamed, *(named for named in shipped if named.spec == unnamed.spec)]
        return {source_sha256(render(named)) for named in kernels}
    except CodegenError:
        return set()


def is_current(record: Mapping[str, Any]) -> bool:
    """Whether the spec of a record renders to the source that was measured."""
    spec = json.dumps(record["spec"], sort_keys=True)
    return record["source_sha256"] in sources_today(spec, record.get("name", ""))


def stale(path: Path) -> tuple[list[str], int]:
    """Names of a file's stale rows, and how many of its rows have the hash of a source."""
    names: list[str] = []
    number = 0
    if path.suffix not in (".json", ".jsonl"):
        return names, number
    for place, document in documents(path.name, path.read_text(encoding="utf-8"), path.suffix == ".jsonl"):
        for found in rows_in(place, document):
            row = found.kernel_row()
            if row is None or row.source_sha256 is None:
                continue
            number += 1
            if not is_current({**found.node, **found.kernel_node()}):
                words = (row.title, *(found.node[key] for key in ("data", "dtype") if found.node.get(key)))
                names.append(", ".join(map(str, words)))
    return names, number


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help="by default all of benchmarks/results")
    parser.add_argument("--check", action="store_true", help="exit 1 if there are stale rows")
    options = parser.parse_args(arguments)
    total = 0
    for path in options.files or sorted(RESULTS.iterdir()):
        names, rows = stale(path)
        total += len(names)
        if not rows:
            print(f"{path.name}: {UNCHECKED}")
        else:
            print(f"{path.name}: {len(names)} of {rows} rows are stale")
            print("\n".join(f"  {name}" for name in names), end="\n" if names else "")
    return int(bool(total and options.check))


if __name__ == "__main__":
    raise SystemExit(main())
