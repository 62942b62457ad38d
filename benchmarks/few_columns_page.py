"""The results of benchmarks/few_columns.py as a table; needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from records import DASH

COLD, WARM = "cold_us", "warm_us"
UNMEASURED = "Products with few columns have not been measured."


def target(report: Mapping[str, Any], record: Mapping[str, Any]) -> float:
    """The microseconds that a row should take: a launch, and its stored blocks at a share of the bandwidth."""
    microseconds: float = report["launch_us"] + record["stored_bytes"] / (record["share"] * report["copy_bytes_per_us"])
    return microseconds


def table(report: Mapping[str, Any] | None) -> str:
    """The table, a line for each layer and number of columns."""
    if report is None:
        return UNMEASURED
    labels = list(dict.fromkeys(label for record in report["rows"] for label in record["results"]))
    lines = [
        f"{report['device']}, driver {report['driver']}, torch {report['versions']['torch']}; {report['date']}; a copy "
        f"moves {report['copy_bytes_per_us'] / 1e6:.2f} TB/s.",
        "",
        f"| layer | N | should take | {' | '.join(labels)} |",
        f"| --- | ---: | ---: | {' | '.join(['---:'] * len(labels))} |",
    ]
    for record in report["rows"]:
        cells = [times(record["results"].get(label)) for label in labels]
        lines.append(
            f"| {record['layer']} | {record['columns']} | {target(report, record):.1f} | {' | '.join(cells)} |"
        )
    return "\n".join(lines)


def times(result: Mapping[str, float] | None) -> str:
    """A cell: cold, and in brackets warm."""
    return f"{result[COLD]:.1f} ({result[WARM]:.1f})" if result else DASH
