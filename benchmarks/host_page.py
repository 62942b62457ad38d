"""The results of benchmarks/host.py as a table; needs no torch."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from records import DASH

COUNT, LEAST = "python_calls", "us"  # of benchmarks/host_calls.py
HOST, LOOP, GRAPH = "host_us", "loop_us", "graph_us"
HEADINGS = ("workload", "call", "host us", "of the peer's", "in a loop, us", "in a graph, us")
ALIGNMENT = ("---", "---", "---:", "---:", "---:", "---:")
CALLS_HEADINGS = ("call", "Python calls", "of the kernel object", "us", "of the kernel object")
CALLS_ALIGNMENT = ("---", *["---:"] * 4)
UNMEASURED = "The host time of calls has not been measured."


def processor() -> str:
    """The name of the processor."""
    info = Path("/proc/cpuinfo")
    names = [line for line in info.read_text().splitlines() if line.startswith("model name")] if info.is_file() else []
    return names[0].partition(":")[2].strip() if names else platform.processor() or platform.machine()


def machine(report: Mapping[str, Any]) -> str:
    """The conditions of the measurement, in words."""
    versions = report["versions"]
    packages = ", ".join(
        f"{name} {versions[name]}" for name in ("python", "torch", "cuda-bindings") if name in versions
    )
    return f"{report['device']}, driver {report['driver']}; {report['processor']}; {packages}; {report['date']}"


def rows(report: Mapping[str, Any]) -> list[list[str]]:
    """The cells of the table, a line for each call."""
    lines = []
    for record in report["rows"]:
        peer = record["results"].get(record["peer"], {}).get(HOST)
        for label, result in record["results"].items():
            times = [f"{result[key]:.1f}" if key in result else DASH for key in (HOST, LOOP, GRAPH)]
            ratio = f"{result[HOST] / peer:.2f}" if peer and label != record["peer"] else DASH
            lines.append([record["name"], label, times[0], ratio, *times[1:]])
    return lines


def table(report: Mapping[str, Any] | None) -> str:
    """The table of docs/notebook/measuring.md."""
    if report is None:
        return UNMEASURED
    lines = [HEADINGS, ALIGNMENT, *rows(report)]
    return "\n".join([f"{machine(report)}.", "", *(f"| {' | '.join(cells)} |" for cells in lines)])


def calls_rows(report: Mapping[str, Any]) -> list[list[str]]:
    """The cells of the table of benchmarks/host_calls.py."""
    lines = []
    for row in report["rows"]:
        both = row["function"], row["object"]
        counts, times = [str(of[COUNT]) for of in both], [f"{of[LEAST]:.1f}" for of in both]
        lines.append([row["name"], *counts, *times])
    return lines


def calls_table(report: Mapping[str, Any] | None) -> str:
    """The table of what calls cost the host up to the driver."""
    if report is None:
        return UNMEASURED
    versions = report["versions"]
    first = f"No GPU: a driver that takes launches and runs none; {report['processor']}"
    first += f"; python {versions['python']}, torch {versions['torch']}; {report['date']}."
    lines = [CALLS_HEADINGS, CALLS_ALIGNMENT, *calls_rows(report)]
    return "\n".join([first, "", *(f"| {' | '.join(cells)} |" for cells in lines)])
