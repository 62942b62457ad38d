"""What benchmarks/host.py measured, as a table; read without torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from records import DASH

HOST, LOOP, GRAPH = "host_us", "loop_us", "graph_us"
HEADINGS = ("workload", "call", "host us", "of the peer's", "in a loop, us", "in a graph, us")
ALIGNMENT = ("---", "---", "---:", "---:", "---:", "---:")
UNMEASURED = "The host time of calls has not been measured."


def machine(report: Mapping[str, Any]) -> str:
    """Return in words what the times depend on."""
    versions = report["versions"]
    packages = ", ".join(
        f"{name} {versions[name]}" for name in ("python", "torch", "cuda-bindings") if name in versions
    )
    return f"{report['device']}, driver {report['driver']}; {report['processor']}; {packages}; {report['date']}"


def rows(report: Mapping[str, Any]) -> list[list[str]]:
    """Return the cells of the table, a line for each call."""
    lines = []
    for record in report["rows"]:
        peer = record["results"].get(record["peer"], {}).get(HOST)
        for label, result in record["results"].items():
            times = [f"{result[key]:.1f}" if key in result else DASH for key in (HOST, LOOP, GRAPH)]
            ratio = f"{result[HOST] / peer:.2f}" if peer and label != record["peer"] else DASH
            lines.append([record["name"], label, times[0], ratio, *times[1:]])
    return lines


def table(report: Mapping[str, Any] | None) -> str:
    """Return the table of docs/notebook/measuring.md."""
    if report is None:
        return UNMEASURED
    lines = [HEADINGS, ALIGNMENT, *rows(report)]
    return "\n".join([f"{machine(report)}.", "", *(f"| {' | '.join(cells)} |" for cells in lines)])
