"""What benchmarks/tuning.py found, as a table; read without torch."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Any

from records import DASH

UNMEASURED = "No row has been tuned over a space of its own."
HEADINGS = ("kernel", "timed", "fastest beside the shipped one", "its us", "shipped, us", "ratio", "model")
WIDTH = 120


def table(report: Mapping[str, Any] | None) -> str:
    """Return the table of docs/select.md, and how the model ranked each space."""
    if report is None:
        return UNMEASURED
    intro = (
        f"{report['device']}, driver {report['driver']}; {report['date']}. Microseconds: geometric mean of both ways of "
        "timing, median (least to greatest) of five repeats in turns. Model: Spearman's rank correlation of its "
        "estimates with the times of all that were timed."
    )
    lines = [textwrap.fill(intro, WIDTH), "", f"| {' | '.join(HEADINGS)} |"]
    lines += [f"| {' | '.join(['---', '---:', '---', '---:', '---:', '---:', '---:'])} |"]
    lines += [f"| {' | '.join(cells(row))} |" for row in report["rows"]]
    lines += ["", "The spaces:", ""]
    for row in report["rows"]:
        text = f"- `{row['kernel']}` ({row['sizes'].replace(',', ', ')}): {space(row['over'])}"
        lines.append(textwrap.fill(text, WIDTH, subsequent_indent="  "))
    return "\n".join(lines)


def spelt(value: Any) -> str:
    """Return a value of a field in words."""
    if isinstance(value, dict):
        return " x ".join(map(str, value.values()))
    return str(value).lower() if isinstance(value, bool) else str(value)


def space(over: Mapping[str, list[Any]]) -> str:
    """Return the values of a space in words."""

    return "; ".join(f"{name} {', '.join(map(spelt, values))}" for name, values in over.items())


def cells(row: Mapping[str, Any]) -> list[str]:
    """Return a line of the table."""
    known = (row.get("ranking") or {}).get("spearman")
    new, old = (times(row.get(name)) for name in ("best_us", "current_us"))
    return [
        f"`{row['kernel']}`",
        f"{row['timed']} of {row['combinations']}",
        verdict(row),
        new,
        old,
        f"{row['ratio']:.3f}" if "ratio" in row else DASH,
        DASH if known is None else f"{known:.2f}",
    ]


def verdict(row: Mapping[str, Any]) -> str:
    """Return which kernel is the best of a space, in words."""
    if row["verdict"] == "the current spec is the fastest":
        return "the shipped one itself"
    if row["verdict"] == "within noise":
        return f"{changes(row)}: within noise"
    return changes(row) if row["verdict"] == "faster" else str(row["verdict"])


def changes(row: Mapping[str, Any]) -> str:
    """Return in which fields the fastest kernel's tuning differs from the shipped one's."""
    best, current = ({**flat(each["tuning"])} for name in (row["best"], row["current"]) for each in of(row, name))
    names = [name for name in {**best, **current} if best.get(name) != current.get(name)]
    return ", ".join(f"{name} {spelt(best.get(name, 'off'))}" for name in names)


def of(row: Mapping[str, Any], kernel: str) -> list[Mapping[str, Any]]:
    """Return the timing of a kernel of a row."""
    return [each for each in row["rows"] if each["kernel"] == kernel and "tuning" in each][:1]


def flat(tuning: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tuning by dotted names."""
    found: dict[str, Any] = {}
    for name, value in tuning.items():
        found |= {f"{name}.{part}": size for part, size in value.items()} if isinstance(value, dict) else {name: value}
    return found


def times(interval: Mapping[str, float] | None) -> str:
    """Return a median with its interval."""
    if interval is None:
        return DASH
    return f"{interval['middle']:.1f} ({interval['low']:.1f} to {interval['high']:.1f})"
