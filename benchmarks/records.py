"""Records of a benchmark's report; needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

OURS = "ours"
DASH = "-"
DETERMINISTIC = "FA4 deterministic"  # a peer of gradients
PLAIN = "std1"  # the data set of rows that name none
SINGLE, BACK_TO_BACK = "tflops", "back_to_back_tflops"  # the figures of a result; older ones have the first alone


def best_peer(record: Mapping[str, Any], figure: str = SINGLE) -> str | None:
    """The fastest peer of a row by one of its figures, if any has it."""
    found = {label: result[figure] for label, result in record["results"].items() if label != OURS and figure in result}
    return max(found, key=lambda label: found[label], default=None)


def ratio_to_best(record: Mapping[str, Any], figure: str) -> float | None:
    """Speedup over the best peer; None if either figure is missing."""
    own, peer = record["results"].get(OURS, {}), best_peer(record, figure)
    if peer is None or figure not in own:
        return None
    ratio: float = own[figure] / record["results"][peer][figure]
    return ratio


def both(single: float | None, back_to_back: float | None, form: str = ".0f") -> str:
    """Two formatted figures, single calls first; a dash for a missing figure."""
    if single is None and back_to_back is None:
        return DASH
    return " / ".join(DASH if value is None else f"{value:{form}}" for value in (single, back_to_back))


def speeds(result: Mapping[str, Any] | None) -> str:
    """Both TFLOPS of a result."""
    return both(result.get(SINGLE), result.get(BACK_TO_BACK)) if result else DASH


def failures(report: Mapping[str, Any]) -> dict[tuple[str, str], list[str]]:
    """The names of the rows in which a call has no time, by its label and the reason."""
    found: dict[tuple[str, str], list[str]] = {}
    for record in report["rows"]:
        for label, why in record["failed"].items():
            found.setdefault((label, why), []).append(record["name"])
    return found


def absent_peers(report: Mapping[str, Any]) -> dict[str, list[str]]:
    """The names of the rows whose peer was requested but not installed, by the peer's name."""
    found: dict[str, list[str]] = {}
    for record in report["rows"]:
        for name in record.get("not_installed", ()):
            found.setdefault(name, []).append(record["name"])
    return found
