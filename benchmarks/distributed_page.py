"""The results of benchmarks/distributed.py as a table; needs no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from records import DASH, both, speeds

ALONE = "alone"
CALLS = ("ours", "ours, symmetric", "ours, shared keys", "all-gather", "FA4 all-gather", "torch CP")
UNMEASURED = "Not measured yet."


def table(reports: Sequence[Mapping[str, Any]]) -> str:
    """The table of docs/notebook/scale-out.md; of a row that several reports have, the last one's is shown."""
    if not reports:
        return UNMEASURED
    rows = {(record["name"], record["dtype"]): record for report in reports for record in report["rows"]}
    of_all = {(record["name"], record["dtype"]): record for record in reports[0]["rows"]}
    lines = [["row", "alone, TFLOPS", "aim", *CALLS], ["---", *["---:"] * (len(CALLS) + 2)]]
    for key, record in rows.items():
        lines.append(cells(record))
        if key in of_all and record is not of_all[key]:
            lines.append(cells(of_all[key], " (first run)"))
    first = reports[0]
    link = first["link_bytes_per_second"] / 1e9
    return "\n".join(
        [
            f"{first['ranks']} x {first['device']}, driver {first['driver']}, torch {first['versions']['torch']}, NCCL "
            f"{first['nccl']}, which moves {link:.0f} GB/s each way at once.",
            "",
            *(f"| {' | '.join(line)} |" for line in lines),
        ]
    )


def cells(record: Mapping[str, Any], of: str = "") -> list[str]:
    """A row of the table."""
    results = record["results"]

    def shares(label: str) -> str:
        found = results.get(label)
        return both(found["share"], found["back_to_back_share"], ".2f") if found else DASH

    alone = speeds(results.get(ALONE))
    return [f"{record['name']}, {record['dtype']}{of}", alone, str(record["target"]), *map(shares, CALLS)]
