"""Writes the lists of ladder-attention.md and ladder-bsr.md in docs/notebook/ from the records in ladder/ there.

    python benchmarks/ladder_page.py            # rewrites what is between the markers
    python benchmarks/ladder_page.py --check    # exits 1 if that would change a page

docs/notebook/ladder/README.md says what the fields of a record are. benchmarks/ladder.py has tables of its own in
the second page.
"""

from __future__ import annotations

import argparse
import json
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from results_table import update

from codegen.library import ROOT

Record = Mapping[str, Any]
DOCS = ROOT / "docs" / "notebook"
RECORDS = {name: DOCS / "ladder" / f"{name}.jsonl" for name in ("attention", "bsr", "ada", "gradients")}
REQUIRED = frozenset({"step", "title", "what", "prediction", "measured", "kept", "in_todays_kernels"})
OPTIONAL = frozenset({"operator", "prediction_in_short", "how", "remark", "where", "because", "gain", "notes"})
OF_AN_ENTRY = frozenset({"row", "of", "how", "device", "figures"})
STALE = "its lists are not those of docs/notebook/ladder/; run: python benchmarks/ladder_page.py"
SUPERSEDED = "superseded by "
WIDTH = 120


def read(path: Path) -> list[Record]:
    """The records of a file, in its order.

    Raises:
        ValueError: if one is not as docs/notebook/ladder/README.md has it.
    """
    records: list[Record] = [json.loads(text) for text in path.read_text(encoding="utf-8").splitlines()]
    for record in records:
        if found := faults(record):
            raise ValueError(f"{path.name}, step {record.get('step')}: {', '.join(found)}")
    return records


def faults(record: Record) -> list[str]:
    """Errors of a record."""
    found = [f"no {field}" for field in sorted(REQUIRED - record.keys())]
    found += [f"unknown field {field}" for field in sorted(record.keys() - REQUIRED - OPTIONAL)]
    if found:
        return found
    kept, measured = record["kept"], record["measured"]
    if not (isinstance(kept, bool) or (isinstance(kept, str) and kept.startswith(SUPERSEDED))):
        found.append(f"kept is {kept!r}")
    if record["in_todays_kernels"] and kept is not True:
        found.append("in current kernels, but not kept")
    if not isinstance(measured, str) and not all(
        "figures" in entry and entry.keys() <= OF_AN_ENTRY for entry in measured
    ):
        found.append("measured is neither a text nor a list of figures")
    return found


def item(text: str) -> str:
    """An item of a list, in lines of the pages' width; notes that it names become links."""
    linked = re.sub(r"(?:see )?(notes-[a-z]+\.md#[\w-]+)", r"[notes](ladder/\1)", text)
    wrapped = textwrap.wrap(linked, WIDTH - 2, break_long_words=False, break_on_hyphens=False)
    return "- " + "\n  ".join(wrapped)


def named(record: Record) -> str:
    """A step and its title."""
    return f"{record['step']}: {record['title']}"


def gained(record: Record) -> str:
    """A step of the current kernels, with its expected and its measured gain."""
    prediction = record.get("prediction_in_short", record["prediction"])
    parts = [
        f"**{record['step']}**: {record['title']}.",
        *([f"Expected: {prediction}."] if prediction else []),
        f"Gained: {record['gain']}.",
        *([record["notes"]] if "notes" in record else []),
    ]
    return item(" ".join(parts))


def kept(record: Record) -> str:
    """A step of current kernels, and the kernels that have it."""
    return item(named(record) + (f". Kept: {record['where']}" if "where" in record else ""))


def replaced(record: Record) -> str:
    """A step that was kept once, and what took its place."""
    return item(f"{named(record)}. {record['notes'] if record['kept'] is True else record['kept'].capitalize()}")


def not_kept(record: Record) -> str:
    """A step that was tried, in one line, with the first of its figures if it has rows."""
    measured = record["measured"]
    first = measured[0] if measured and not isinstance(measured, str) else {}
    figures = " ".join(first[key] for key in ("row", "figures") if key in first)
    line = f"- {named(record)}{': ' if figures else ''}{figures}"
    return line if len(line) <= WIDTH else f"- {named(record)}"


# Which records a list has, and how one of them is told.
LISTS: dict[str, tuple[Callable[[Record], bool], Callable[[Record], str]]] = {
    "gained": (lambda record: record["in_todays_kernels"] and "gain" in record, gained),
    "kept": (lambda record: record["in_todays_kernels"] and "gain" not in record, kept),
    "replaced": (lambda record: bool(record["kept"]) and not record["in_todays_kernels"], replaced),
    "not-kept": (lambda record: record["kept"] is False, not_kept),
}


def lists(records: Iterable[Record], prefix: str = "") -> dict[str, str]:
    """Lists of records by the names of their markers."""
    records = [*records]
    return {
        prefix + name: "\n".join(told(record) for record in records if chosen(record))
        for name, (chosen, told) in LISTS.items()
    }


def pages() -> dict[Path, dict[str, str]]:
    """Text between the markers of each page."""
    attention, bsr, ada, gradients = (read(path) for path in RECORDS.values())
    of_attention = [record for record in ada if record["operator"] == "attention"]
    of_products = [record for record in ada if record["operator"] != "attention"]
    return {
        DOCS / "ladder-attention.md": lists(attention) | lists(of_attention, "sm_89-") | lists(gradients, "gradients-"),
        DOCS / "ladder-bsr.md": lists(bsr) | lists(of_products, "sm_89-"),
    }


def with_markers(page: Path, texts: Mapping[str, str]) -> dict[str, str]:
    """The lists that a page is to have: one that is empty needs no markers."""
    found = page.read_text(encoding="utf-8")
    return {name: text for name, text in texts.items() if text or f"<!-- {name}:begin -->" in found}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a page is not up to date")
    check = parser.parse_args(arguments).check
    found = pages().items()
    return max([update(page, with_markers(page, texts), check=check, stale=STALE) for page, texts in found])


if __name__ == "__main__":
    raise SystemExit(main())
