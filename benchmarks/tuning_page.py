"""What benchmarks/tuning.py found, as a table; read without torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from records import DASH

UNMEASURED = "No row has been tuned over a space of its own."
HEADINGS = ("kernel", "space", "legal", "timed", "fastest beside the shipped one", "us", "ratio", "model")


def table(report: Mapping[str, Any] | None) -> str:
    """Return the table of docs/select.md, and how the model ranked each space."""
    if report is None:
        return UNMEASURED
    lines = [
        f"{report['device']}, driver {report['driver']}; {report['date']}. Microseconds: geometric mean of both ways "
        "of timing; median (least to greatest) of the repeats. Model: Spearman's rank correlation with measured times.",
        "",
        f"| {' | '.join(HEADINGS)} |",
        "| --- | --- | ---: | ---: | --- | --- | ---: | ---: |",
    ]
    return "\n".join([*lines, *(f"| {' | '.join(cells(row))} |" for row in report["rows"])])


def cells(row: Mapping[str, Any]) -> list[str]:
    """Return a line of the table."""
    ranking = row.get("ranking") or {}
    known = ranking.get("spearman")
    return [
        f"`{row['kernel']}`",
        "; ".join(row["over"]).replace("|", ""),
        f"{row['legal']} of {row['combinations']}",
        str(row["timed"]),
        verdict(row),
        times(row),
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
    return ", ".join(f"{name} {best.get(name, 'off')}" for name in names)


def of(row: Mapping[str, Any], kernel: str) -> list[Mapping[str, Any]]:
    """Return the timing of a kernel of a row."""
    return [each for each in row["rows"] if each["kernel"] == kernel and "tuning" in each][:1]


def flat(tuning: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tuning by dotted names."""
    found: dict[str, Any] = {}
    for name, value in tuning.items():
        found |= {f"{name}.{part}": size for part, size in value.items()} if isinstance(value, dict) else {name: value}
    return found


def times(row: Mapping[str, Any]) -> str:
    """Return the times of both kernels."""
    if "best_us" not in row:
        return DASH
    sides = (row["best_us"], row["current_us"])
    return " beside ".join(f"{each['middle']:.1f} ({each['low']:.1f} to {each['high']:.1f})" for each in sides)
