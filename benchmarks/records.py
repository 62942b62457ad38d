"""What the records of a benchmark's report say, read without torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

OURS = "ours"


def best_peer(record: Mapping[str, Any]) -> str | None:
    """Return the fastest peer of a row, if any ran."""
    tflops = {label: result["tflops"] for label, result in record["results"].items() if label != OURS}
    return max(tflops, key=lambda label: tflops[label], default=None)


def failures(report: Mapping[str, Any]) -> dict[tuple[str, str], list[str]]:
    """Return the names of the rows in which a call has no time, by its label and the reason."""
    found: dict[tuple[str, str], list[str]] = {}
    for record in report["rows"]:
        for label, why in record["failed"].items():
            found.setdefault((label, why), []).append(record["name"])
    return found


def absent_peers(report: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the names of the rows that a peer was asked for and not installed, by its name."""
    found: dict[str, list[str]] = {}
    for record in report["rows"]:
        for name in record.get("not_installed", ()):
            found.setdefault(name, []).append(record["name"])
    return found
