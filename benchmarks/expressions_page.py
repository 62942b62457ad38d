"""What benchmarks/expressions.py measured, as a table; read without torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from records import DASH, both, speeds

LABELS = OURS, BUILT_IN, FLEX, FA4 = "expression", "built in", "FlexAttention", "FA4"
HEADINGS = ("mask or score", *LABELS, *(f"over {label}" for label in LABELS[1:]))
UNMEASURED = "The speed of expressions has not been measured."


def over(results: Mapping[str, Any], label: str) -> str:
    """Return how many times as fast as another call the expression is, one call at a time and back to back."""
    if label not in results or OURS not in results:
        return DASH
    keys = ("milliseconds", "back_to_back_milliseconds")
    single, back_to_back = (results[label][key] / results[OURS][key] for key in keys)
    return both(single, back_to_back, ".2f")


def cells(record: Mapping[str, Any]) -> list[str]:
    """Return a row of the table."""
    results = record["results"]
    ratios = [over(results, label) for label in LABELS[1:]]
    return [record["name"], *(speeds(results.get(label)) for label in LABELS), *ratios]


def table(report: Mapping[str, Any] | None) -> str:
    """Return the table of docs/expressions.md."""
    if report is None:
        return UNMEASURED
    told = f"{report['device']}, driver {report['driver']}, {report['date']}; TFLOPS, single calls / back to back."
    lines = [HEADINGS, ("---", *("---:",) * (len(HEADINGS) - 1)), *map(cells, report["rows"])]
    return "\n".join([told, "", *(f"| {' | '.join(each)} |" for each in lines)])
