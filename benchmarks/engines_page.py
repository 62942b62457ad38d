"""Tables of benchmarks/engines.py in docs/guide, written from a file of JSON lines; read without torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from models_page import (
    BACK_TO_BACK,
    GRAPH,
    NO_RECEIPT,
    OLDER,
    SINGLE,
    is_current,
    microseconds,
    read,
    table,
    wrapped,
    written,
)
from records import DASH, OURS, failures
from results_table import update

__all__ = ["BACK_TO_BACK", "GRAPH", "SINGLE", "line", "text_of", "write"]
Record = Mapping[str, Any]
GUIDE = Path(__file__).resolve().parents[1] / "docs" / "guide"
PAGES = {
    "vllm": "vllm.md",
    "sglang": "sglang.md",
    "sglang-diffusion": "sglang.md",
    "transformers": "integrations.md",
    "diffusers": "integrations.md",
}
"""Page of each table. ``measured-NAME`` are its markers."""
HEADINGS = ["layer", "ours, us", "tokens/s", "other", "other, us", "ratio", "eager, us: ours / other"]
STALE = "its table differs from the measurements; run: python benchmarks/engines.py --page FILE"
UNMEASURED = "This layer has not been measured yet."


def figure_of(record: Record, label: str, figure: str) -> float | None:
    """A time of a call in milliseconds, if it has one."""
    found: float | None = record["results"].get(label, {}).get(figure)
    return found


def ratio(record: Record, label: str, figure: str = GRAPH) -> float | None:
    """Time of another call over ours; None if one of both has no time."""
    own, other = figure_of(record, OURS, figure), figure_of(record, label, figure)
    return None if own is None or other is None else other / own


def shown_ratio(record: Record, label: str) -> str:
    """The ratio; bold if it is below 1."""
    value = ratio(record, label)
    return f"**{written(value)}**" if value is not None and value < 1 else written(value)


def tokens_per_second(record: Record, label: str) -> str:
    """Queries of a call over its time in a graph."""
    milliseconds = figure_of(record, label, GRAPH)
    if milliseconds is None:
        return DASH
    rate = 1e3 * record["tokens"] / milliseconds
    return f"{float(f'{rate:.3g}'):,.0f}"  # three digits


def others(record: Record) -> list[str]:
    """Labels of the other calls, the fastest first; those without a time in a graph are last."""
    labels = [label for label in record["results"] if label != OURS]
    return sorted(labels, key=lambda label: figure_of(record, label, GRAPH) or float("inf"))


def marked(record: Record, is_current: Callable[[Record], bool]) -> str:
    """The row's text, marked if it is of an earlier source, or of a kernel without a receipt."""
    older = OLDER if not is_current(record) else ""
    unverified = NO_RECEIPT if not all(kernel["receipt"] for kernel in record["kernels"]) else ""
    return f"{record['model']}: {record['text']}{older}{unverified}"


def rows_of(record: Record, is_current: Callable[[Record], bool]) -> list[list[str]]:
    """Rows of the table: one for each other call, or one without any."""
    own = [microseconds(figure_of(record, OURS, GRAPH)), tokens_per_second(record, OURS)]
    eager = microseconds(figure_of(record, OURS, BACK_TO_BACK))
    rows = []
    for number, label in enumerate(others(record)):
        times = [microseconds(figure_of(record, label, figure)) for figure in (GRAPH, BACK_TO_BACK)]
        first = [marked(record, is_current), *own] if number == 0 else ["", "", ""]
        rows.append([*first, label, times[0], shown_ratio(record, label), f"{eager} / {times[1]}"])
    return rows or [[marked(record, is_current), *own, DASH, DASH, DASH, f"{eager} / {DASH}"]]


def line(record: Record) -> str:
    """A record in a line, as the benchmark prints it."""
    parts = [record["name"]]
    for label in (OURS, *others(record)):
        times = " / ".join(microseconds(figure_of(record, label, figure)) for figure in (GRAPH, BACK_TO_BACK))
        parts.append(f"{label} {times} us, {tokens_per_second(record, label)} tokens/s")
    parts += [f"ratio {written(ratio(record, label))}" for label in others(record)[:1]]
    parts += [f"{label}: {why}" for label, why in record["failed"].items()]
    return "; ".join([*parts, f"{record.get('seconds', 0)} s"])


def models_of(records: Sequence[Record]) -> str:
    """Models of the rows with their sizes and sources."""
    found = {}
    for record in records:
        if "heads" not in record:
            continue
        heads, kv_heads, head_dim = record["heads"]
        shared = "" if kv_heads == heads else f", {kv_heads} of K and V"
        layers = "" if record["layers"] is None else f", {record['layers']} layers"
        found[record["model"]] = (
            f"[{record['model']}]({record['source']}) ({heads} heads of {head_dim}{shared}{layers})"
        )
    return ", ".join(found.values())


def text_of(records: Sequence[Record], is_current: Callable[[Record], bool]) -> str:
    """A table with what is above and below it.

    Raises:
        SystemExit: if the records are of several machines.
    """
    if not records:
        return UNMEASURED
    about = {f"{record['device']}, driver {record['driver']}, {record['date']}" for record in records}
    if len(about) != 1:
        raise SystemExit(f"error: the rows are of {' and of '.join(sorted(about))}: of one, please")
    shown = [row for record in records for row in rows_of(record, is_current)]
    entries = sorted({record["adapter"] for record in records if record["adapter"]})
    parts = [
        wrapped(f"{about.pop()}; {', '.join(sorted({record['dtype'] for record in records}))}. {models_of(records)}."),
        "\n".join(table(HEADINGS, shown)),
        wrapped(f"Timed as ours: {'; '.join(entries)}."),
    ]
    marks = {
        OLDER: "measured with an earlier source of the kernel.",
        NO_RECEIPT: "the kernel has no receipt: only the result of this row was compared.",
    }
    cells = " ".join(row[0] for row in shown)
    parts += [f"{mark}: {means}" for mark, means in marks.items() if mark in cells]
    missing = failures({"rows": records})
    parts += [wrapped(f"No time: {label} in {', '.join(rows)}: `{why}`.") for (label, why), rows in missing.items()]
    return "\n\n".join(parts)


def texts(records: Sequence[Record], is_current: Callable[[Record], bool]) -> dict[str, dict[str, str]]:
    """Texts between the markers of each page."""
    found: dict[str, dict[str, str]] = {}
    for name, page in PAGES.items():
        own = [record for record in records if record["page"] == name]
        found.setdefault(page, {})[f"measured-{name}"] = text_of(own, is_current)
    return found


def write(source: Path, folder: Path = GUIDE, *, check: bool = False) -> int:
    """Write the tables; return 0 if all is well."""
    records = read(source) if source.is_file() else []
    one = partial(update, check=check, stale=STALE)
    return max(one(folder / page, named) for page, named in texts(records, is_current).items())
