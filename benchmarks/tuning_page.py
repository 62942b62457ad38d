"""The results of benchmarks/tuning.py as a table; needs no torch."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping
from typing import Any

from records import DASH, both

UNMEASURED = "No row has been tuned over a space of its own."
HEADINGS = ("kernel", "timed", "fastest", "its us", "next, or the shipped one", "its us", "ratio", "model")
ITSELF = "the current spec is the fastest"
WIDTH = 120


def table(report: Mapping[str, Any] | None) -> str:
    """The table of docs/reference/select.md, and how the model ranked each space."""
    if report is None:
        return UNMEASURED
    count, seconds = (sum(row[name] for row in report["rows"]) for name in ("timed", "seconds"))
    intro = (
        f"{report['device']}, driver {report['driver']}; {report['date']}: {count} candidates in {seconds:.0f} s, "
        "compilation included. Microseconds of single calls / back to back; kernels have their differences from "
        "the shipped one. Ratio: of the geometric means of both; where a kernel other than the shipped one is fastest, "
        "that of the medians of five more repeats. Model: Spearman's rank correlation of its estimates with the times "
        "of all that were timed."
    )
    lines = [textwrap.fill(intro, WIDTH), "", f"| {' | '.join(HEADINGS)} |"]
    lines += [f"| {' | '.join(['---', '---:', '---', '---:', '---', '---:', '---:', '---:'])} |"]
    lines += [f"| {' | '.join(cells(row))} |" for row in report["rows"]]
    lines += ["", "The spaces:", ""]
    for row in report["rows"]:
        text = f"- `{row['kernel']}` ({row['sizes'].replace(',', ', ')}): {space(row['over'])}"
        lines.append(textwrap.fill(text, WIDTH, subsequent_indent="  "))
    return "\n".join(lines)


def spelt(value: Any) -> str:
    """A value of a field in words."""
    if isinstance(value, dict):
        return " x ".join(map(str, value.values()))
    return str(value).lower() if isinstance(value, bool) else str(value)


def space(over: Mapping[str, list[Any]]) -> str:
    """The values of a space in words."""
    return "; ".join(f"{name} {', '.join(map(spelt, values))}" for name, values in over.items())


def cells(row: Mapping[str, Any]) -> list[str]:
    """A line of the table."""
    timed = [each for each in row["rows"] if "tuning" in each]  # the fastest first
    shipped = next(each for each in timed if each["kernel"] == row["current"])
    first = timed[0]
    second = timed[1] if first is shipped else shipped
    ratio = f"{row.get('ratio', cost(second) / cost(first)):.3f}"
    known = (row.get("ranking") or {}).get("spearman")
    return [
        f"`{row['kernel']}`",
        f"{row['timed']} of {row['combinations']}",
        changes(first, shipped),
        both(first["single_us"], first["back_to_back_us"]),
        changes(second, shipped),
        both(second["single_us"], second["back_to_back_us"]),
        ratio if row["verdict"] in ("faster", ITSELF) else f"{ratio}, {row['verdict']}",
        DASH if known is None else f"{known:.2f}",
    ]


def cost(timing: Mapping[str, float]) -> float:
    """The cost that ranks kernels."""
    return math.sqrt(timing["single_us"] * timing["back_to_back_us"])


def changes(timing: Mapping[str, Any], shipped: Mapping[str, Any]) -> str:
    """Fields in which a kernel's tuning differs from the shipped kernel's."""
    one, other = flat(timing["tuning"]), flat(shipped["tuning"])
    names = [name for name in {**one, **other} if one.get(name) != other.get(name)]
    return ", ".join(f"{name} {spelt(one.get(name, 'off'))}" for name in names) or "the shipped one"


def flat(tuning: Mapping[str, Any]) -> dict[str, Any]:
    """A tuning by dotted names."""
    found: dict[str, Any] = {}
    for name, value in tuning.items():
        found |= {f"{name}.{part}": size for part, size in value.items()} if isinstance(value, dict) else {name: value}
    return found
