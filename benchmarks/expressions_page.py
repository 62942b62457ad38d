"""The results of benchmarks/expressions.py as a table; needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from records import DASH, PLAIN, both, speeds

LABELS = OURS, BUILT_IN, FLEX, FA4 = "expression", "built in", "FlexAttention", "FA4"
HEADINGS = ("mask or score", *LABELS, *(f"over {label}" for label in LABELS[1:]))
WORST = "worst over the data"
UNMEASURED = "The speed of expressions has not been measured."


def over(results: Mapping[str, Any], label: str) -> str:
    """Speedup of the expression over another call, for single calls and back to back."""
    if label not in results or OURS not in results:
        return DASH
    keys = ("milliseconds", "back_to_back_milliseconds")
    single, back_to_back = (results[label][key] / results[OURS][key] for key in keys)
    return both(single, back_to_back, ".2f")


def worst(record: Mapping[str, Any]) -> str:
    """The least of what ``over`` says of FlexAttention and FlashAttention 4, over all data sets of a row."""
    sets = [record["results"], *record.get("data", {}).values()]
    found = [
        [results[label][key] / results[OURS][key] for results in sets for label in (FLEX, FA4) if label in results]
        for key in ("milliseconds", "back_to_back_milliseconds")
        if all(OURS in results for results in sets)
    ]
    return both(*map(min, found), ".2f") if found and found[0] and len(sets) > 1 else DASH


def cells(record: Mapping[str, Any]) -> list[str]:
    """A row of the table."""
    results = record["results"]
    ratios = [over(results, label) for label in LABELS[1:]]
    return [record["name"], *(speeds(results.get(label)) for label in LABELS), *ratios]


def data_of(report: Mapping[str, Any]) -> list[str]:
    """The data sets of a report beside plain normal ones."""
    return list(dict.fromkeys(name for record in report["rows"] for name in record.get("data", ())))


def headings_and_cells(report: Mapping[str, Any]) -> tuple[tuple[str, ...], list[list[str]]]:
    """The table; a report of one data set has no column of the worst."""
    if not data_of(report):
        return HEADINGS, [cells(record) for record in report["rows"]]
    return (*HEADINGS, WORST), [[*cells(record), worst(record)] for record in report["rows"]]


def table(report: Mapping[str, Any] | None) -> str:
    """The table of docs/reference/expressions.md."""
    if report is None:
        return UNMEASURED
    told = f"{report['device']}, driver {report['driver']}, {report['date']}; TFLOPS, single calls / back to back."
    if sets := data_of(report):
        told += f" Worst: the least over FlexAttention and FA4, of {', '.join([PLAIN, *sets])}."
    headings, rows = headings_and_cells(report)
    lines = [headings, ("---", *("---:",) * (len(headings) - 1)), *rows]
    return "\n".join([told, "", *(f"| {' | '.join(each)} |" for each in lines)])
