"""The results of benchmarks/selection.py as a table; needs no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from records import DASH, both

CLOSE = (1.05, 1.15)
HEADINGS = ("problem", "chosen", "rule", "us", "best", "best, us", "ratio", "dense, us")
UNMEASURED = "Choices have not been compared with the best."


def table(report: Mapping[str, Any] | None) -> str:
    """The table of docs/reference/select.md, the worst choice first, and the remarks."""
    if report is None:
        return UNMEASURED
    rows = sorted(report["rows"], key=lambda row: -(row["ratios"] or {"both": math.inf})["both"])
    shown = [i for i, name in enumerate(HEADINGS) if name not in ("chosen", "rule", "best")]  # the JSON has names
    lines = [[each[i] for i in shown] for each in (HEADINGS, ["---"] * len(HEADINGS), *map(cells, rows))]
    return "\n".join(
        [
            f"{report['device']}, driver {report['driver']}; single calls / back to back.",
            "",
            *(f"- {text}" for text in remarks(report)),
            "",
            *(f"| {' | '.join(each)} |" for each in lines),
        ]
    )


def cells(row: Mapping[str, Any]) -> list[str]:
    """A row of the printed table."""

    def times(entry: Mapping[str, Any] | None) -> str:
        return both(entry["single_us"], entry["back_to_back_us"], ".1f") if entry else DASH

    choice, best, ratios, dense = row["choice"], row["best"], row["ratios"], row["dense"]
    return [
        row["words"],
        choice["stem"] if choice else DASH,
        row["rule"],
        times(choice),
        best["stem"] if best else DASH,
        times(best),
        both(ratios["single"], ratios.get("back_to_back"), ".2f") if ratios else DASH,
        times(dense),
    ]


def summary(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Summary of the quality of choices, overall and by rule; rows without ratios are skipped."""
    timed = [row for row in rows if row["ratios"]]
    lines = []
    for name in ("all", *dict.fromkeys(row["rule"] for row in timed)):
        ratios = [row["ratios"]["both"] for row in timed if name in ("all", row["rule"])]
        if ratios:
            mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
            shares = ", ".join(f"{sum(each <= close for each in ratios)} within {close - 1:.0%}" for close in CLOSE)
            spread = f"choice / best {mean:.3f} (geometric mean), at worst {max(ratios):.2f}"
            lines.append(f"{name}: {len(ratios)} problems; {shares}; {spread}")
    return lines


def remarks(report: Mapping[str, Any]) -> list[str]:
    """Summary of the quality of choices, of problems without a time, and of problems that were not run."""
    rows = [row for row in report["rows"] if row["ratios"]]
    lines = summary(rows)
    slower = [row["words"] for row in rows if row["dense"] and row["dense"]["single_us"] < row["best"]["single_us"]]
    lines += [f"a dense product is faster: {words}" for words in slower]
    for row in report["rows"]:
        lines += [f"{row['words']}: no time: {stem} {why.splitlines()[0]}" for stem, why in row["failed"].items()]
    return [*lines, *(f"not run: {words}" for words in report["not_run"])]
