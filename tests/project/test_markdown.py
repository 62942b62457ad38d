"""Markdown that renders as it was meant, and prose without numbers that change behind its back."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import snippets
from each import for_each, looped

PROJECT = Path(__file__).resolve().parents[2]
DOCUMENTS = snippets.DOCUMENTS
PROSE = [path for path in DOCUMENTS if "notebook" not in path.parts and path.name != "CHANGELOG.md"]
ITEM = re.compile(r"(?P<indent> *)(?P<mark>[-+*•]|\d+[.)]) +\S")
WRITTEN = re.compile(
    r"<!-- (?P<name>[\w-]+):begin -->.*?<!-- (?P=name):end -->|<!-- modes: .*?<!-- end of modes -->", re.DOTALL
)
NUMBER = r"(?:\d[\d,]*|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|dozens of)"
COUNTED = r"(?:kernels|specs|sources|receipts|commands|operators)"
COUNTS = re.compile(
    rf"(?<!more than )(?<![\d,])\b(?:\d[\d,]*\d {COUNTED}"
    rf"|{NUMBER} (?:shipped|committed|verified) {COUNTED}|{NUMBER} minutes? on)\b",
    re.IGNORECASE,
)
FULL_RUNS = PROJECT / "docs" / "notebook" / "full-runs.md"
GUARANTEES = PROJECT / "docs" / "reference" / "guarantees.md"


def path_name(path: Path) -> str:
    return path.relative_to(PROJECT).as_posix()


def accidental_items(text: str) -> list[str]:
    """Lines that a renderer takes for an item of a list, in the midst of a paragraph.

    An item after a paragraph has an empty line before it; one inside of another item, a colon.
    """
    found, open_items, before = list[str](), list[int](), ""
    for line in snippets.FENCE.sub("", text).splitlines():
        if not line.strip() or line.startswith(("#", "|", "<!--")):
            open_items = open_items if not line.strip() else []
        elif item := ITEM.match(line):
            indent = len(item["indent"])
            opens = not before or before.startswith(("#", "|", "<!--")) or (open_items and before.endswith(":"))
            if not opens and indent not in open_items:
                found.append(line.strip())
            open_items = [each for each in open_items if each < indent] + [indent]
        elif not line.startswith(" "):
            open_items = []
        before = line.strip() and line
    return found


@for_each("path", lambda: DOCUMENTS, path_name)
def test_no_line_of_a_paragraph_begins_as_an_item(path: Path) -> None:
    assert not accidental_items(path.read_text(encoding="utf-8"))


@looped
@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("keys from i\n- left to i + right", ["- left to i + right"]),
        ("bits, block queries\n* block keys / 8", ["* block keys / 8"]),
        ("64, 96, 192 and\n256. It is", ["256. It is"]),
        ("- an item\n  - its second line", ["- its second line"]),
        ("text:\n\n- one\n  goes on\n- two\n\n  more\n- three", []),
        ("- one\n\n  - inner\n  - other\n- two:\n  - inner", []),
        ("1. one\n2. two\n\ntext\n\n<!-- a:begin -->\n- item", []),
        ("# Heading\n- item\n\n```text\na\n- b\n```", []),
    ],
)
def test_an_accidental_item_is_found(text: str, found: list[str]) -> None:
    assert accidental_items(text) == found


def counts_in(text: str) -> list[str]:
    """Numbers of kernels and the like, and minutes of tests, that no script wrote."""
    return [match[0] for match in COUNTS.finditer(WRITTEN.sub("", text))]


@for_each("path", lambda: PROSE, path_name)
def test_prose_counts_nothing_that_grows(path: Path) -> None:
    """Scripts write such numbers between markers; the lab notebook has them with device and date."""
    assert not counts_in(path.read_text(encoding="utf-8"))


@looped
@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("those of 207 shipped kernels have", 1),
        ("Six shipped kernels have receipts", 1),
        ("the 40,000 specs", 1),
        ("about 20 minutes on two cores", 1),
        ("two kernels, of dQ and of dK", 0),
        ("refused are more than 1,000 operators", 0),
        ("<!-- a:begin -->\n207 kernels\n<!-- a:end -->", 0),
    ],
)
def test_a_count_is_found(text: str, count: int) -> None:
    assert len(counts_in(text)) == count


def test_pages_whose_python_has_not_run_on_a_gpu_are_named() -> None:
    """The log names the pages of its runs of snippets; what is newer stands under what is not promised."""
    log, page = (path.read_text(encoding="utf-8") for path in (FULL_RUNS, GUARANTEES))
    (named,) = re.findall(r"^The run \*snippets\* .*?\n\n", log, re.MULTILINE | re.DOTALL)
    newer = re.findall(r"^\| Python of pages .*$", page, re.MULTILINE)
    assert len(newer) <= 1
    ran, waiting = (set(re.findall(r"`([\w-]+\.md)`", text)) for text in (named, "".join(newer)))
    assert not ran & waiting
    assert ran | waiting | {"README.md"} == {path.name for path in snippets.pages()}
