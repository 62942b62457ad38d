"""The results of benchmarks/fp8.py as tables; needs no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fp8_rows import ATTENTION, PRODUCTS, RMSE
from records import BACK_TO_BACK, DASH, PLAIN, SINGLE, both, speeds

UNMEASURED = "Not measured yet."
TARGET_HEADINGS = ("row", "data", "call", "target", "reached")
REACHED = (
    "The last column is the fraction of a target that was reached: speed / target, or target / error. If cuDNN has "
    "several calls, the best one counts."
)
Results = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Part:
    """One table: its headings, and the cells of each line."""

    headings: tuple[str, ...]
    cells: list[list[str]]


def data_of(record: Mapping[str, Any]) -> dict[str, Results]:
    """A row's results by data set; products have one."""
    return record["data"] or {PLAIN: record["results"]}


def cell(result: Mapping[str, Any] | None) -> str:
    """Both speeds and the error of a call."""
    return f"{speeds(result)}, {result[RMSE]:.2%}" if result else DASH


def part(records: Sequence[Mapping[str, Any]], labels: Sequence[str]) -> Part:
    """The table of rows of one kind; a call that no row has is no column."""
    lines = [(record["name"], name, results) for record in records for name, results in data_of(record).items()]
    shown = [label for label in labels if any(label in results for *_, results in lines)]
    cells = [[name, data, *(cell(results.get(label)) for label in shown)] for name, data, results in lines]
    return Part(("row", "data", *shown), cells)


def parts(report: Mapping[str, Any]) -> list[Part]:
    """The tables that were measured: of attention without lists, with lists, and of products."""
    kinds = {"attention": ATTENTION, "lists": ATTENTION, "product": PRODUCTS}
    chosen = {kind: [record for record in report["rows"] if record["kind"] == kind] for kind in kinds}
    return [part(records, kinds[kind]) for kind, records in chosen.items() if records]


def reached(results: Results, target: Mapping[str, Any], figure: str) -> float | None:
    """Achieved / target of a call; None if a required figure was not measured."""
    own = results.get(target["call"], {}).get(figure)
    peers = [results[label][figure] for label in target["of"] if figure in results.get(label, {})]
    if not own or (target["of"] and not peers):
        return None
    if target["figure"] == RMSE:
        return float(target["least"] * min(peers) / own)
    return float(own / (target["least"] * (max(peers) if peers else 1.0)))


def told(target: Mapping[str, Any]) -> str:
    """Description of a target."""
    if not target["of"]:
        return f"{target['least']:.0f} TFLOPS"
    if target["figure"] == RMSE:
        return f"error of {target['of'][0]}, at most {target['least']:g} times"
    return f"{target['least']:g} times {target['of'][0]}"


def target_cells(report: Mapping[str, Any]) -> list[list[str]]:
    """A line for each target of a row and each data set."""
    found = []
    for record in report["rows"]:
        for data, results in data_of(record).items():
            for target in record["targets"]:
                if target["figure"] == RMSE:
                    value = reached(results, target, RMSE)
                    ratio = DASH if value is None else f"{value:.2f}"
                else:
                    ratio = both(*(reached(results, target, figure) for figure in (SINGLE, BACK_TO_BACK)), ".2f")
                found.append([record["name"], data, target["call"], told(target), ratio])
    return found


def lines(headings: Sequence[str], rows: Sequence[Sequence[str]], words: int) -> list[str]:
    """A Markdown table whose first columns are words and whose others are figures."""
    alignment = ("---",) * words + ("---:",) * (len(headings) - words)
    return [f"| {' | '.join(each)} |" for each in (headings, alignment, *rows)]


def table(report: Mapping[str, Any] | None) -> str:
    """The tables of docs/notebook/fp8.md."""
    if report is None:
        return UNMEASURED
    begin = (
        f"{report['device']}, driver {report['driver']}, {report['date']}; TFLOPS, single calls / back to back; error."
    )
    text = [begin]
    for each in parts(report):
        text += ["", *lines(each.headings, each.cells, 2)]
    text += ["", REACHED, ""]
    return "\n".join([*text, *lines(TARGET_HEADINGS, target_cells(report), 4)])
