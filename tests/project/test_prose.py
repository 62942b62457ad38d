"""Prose keeps the rules of ``styles/Plain``, which have Vale's format; docs/reference/style.md explains them."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import snippets
import yaml
from each import for_each, looped

PROJECT = snippets.PROJECT
PAGES = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "docs")
"""Documents that keep the rules, and folders of some."""
CODE = ("benchmarks", "codegen", "examples", "runtime", "scripts", "sparse_kernel_codegen")
"""Folders whose docstrings and messages keep the rules."""
RECORDS = PROJECT / "docs" / "notebook" / "ladder"
"""Folder of the ladders' records, files of JSON lines whose texts keep the rules: pages are made of them."""
NO_PROSE = re.compile(
    r"<!-- vale off -->.*?<!-- vale on -->|<!-- (?P<name>[\w-]+):begin -->.*?<!-- (?P=name):end -->|<!--.*?-->"
    r"|`[^`]*`|(?<=\])\([^)]*\)|^ {4,}[^-* ].*?$",
    re.DOTALL | re.MULTILINE,
)

NO_PROSE_OF_DOCSTRINGS = re.compile(r"``.*?``|`[^`]*`|^ +\w+(?:, \w+)*(?=: )", re.MULTILINE)
"""Code, and names of arguments that have an item."""


class Rule(NamedTuple):
    """A rule of Vale: phrases, and a message about a phrase that was found.

    Attributes:
        message: with a place for the phrase, and for its replacement in front if there is one.
        phrases: regular expression of the phrase, and its replacement or None.
    """

    message: str
    phrases: dict[re.Pattern[str], str | None]

    def breaches(self, text: str) -> Iterator[tuple[int, str]]:
        """Line from 0 on, and message, of each phrase in a text."""
        for phrase, better in self.phrases.items():
            for found in phrase.finditer(text):
                words = " ".join(found[0].split())
                given = (words,) if better is None else (better, words)
                yield text.count("\n", 0, found.start()), self.message % given


def read_rule(told: dict[str, Any]) -> Rule:
    """The rule of one YAML file."""
    kinds = {"existence": "tokens", "substitution": "swap"}
    given = told[kinds[told["extends"]]]
    better = given if isinstance(given, dict) else dict.fromkeys(given)
    flags = re.IGNORECASE if told.get("ignorecase") else re.NOFLAG
    return Rule(
        told["message"],
        {re.compile(rf"\b(?:{each})\b".replace(" ", r"\s+"), flags): word for each, word in better.items()},
    )


@cache
def rules() -> tuple[Rule, ...]:
    files = sorted((PROJECT / "styles" / "Plain").glob("*.yml"))
    return tuple(read_rule(yaml.safe_load(path.read_text(encoding="utf-8"))) for path in files)


def breaches(text: str, line: int = 1) -> list[str]:
    """``line: message`` of each phrase in a text that begins at a line."""
    return [f"{line + at}: {message}" for rule in rules() for at, message in rule.breaches(text)]


def prose(page: str) -> str:
    """A Markdown page whose code, addresses and tables written by scripts are blank, line by line."""
    for pattern in (snippets.FENCE, NO_PROSE):
        page = pattern.sub(lambda found: "x" + "\n" * found[0].count("\n"), page)
    return page


def texts(source: str) -> Iterator[tuple[int, str]]:
    """Line and text of each docstring and message of a Python module; single words are no prose."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value.strip():
            yield node.lineno, NO_PROSE_OF_DOCSTRINGS.sub("x", node.value)


def texts_of_record(value: object) -> Iterator[str]:
    """Each text of a record, at any depth."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (dict, list)):
        for each in value.values() if isinstance(value, dict) else value:
            yield from texts_of_record(each)


def documents() -> list[Path]:
    return [path for name in PAGES for path in ([PROJECT / name] if name.endswith(".md") else markdown_in(name))]


def markdown_in(folder: str) -> list[Path]:
    return sorted((PROJECT / folder).rglob("*.md"))


def modules() -> list[Path]:
    return sorted(path for folder in CODE for path in (PROJECT / folder).rglob("*.py"))


@for_each("path", documents, snippets.page_name)
def test_pages_keep_the_rules(path: Path) -> None:
    found = breaches(prose(path.read_text(encoding="utf-8")))
    assert not found, "; ".join(found)


@for_each("path", modules, snippets.page_name)
def test_docstrings_and_messages_keep_the_rules(path: Path) -> None:
    found = [breach for line, text in texts(path.read_text(encoding="utf-8")) for breach in breaches(text, line)]
    assert not found, "; ".join(found)


def test_records_of_the_ladders_keep_the_rules() -> None:
    files = sorted(RECORDS.glob("*.jsonl"))
    assert len(files) >= 4
    found = [
        f"{path.name}: step {record['step']}: {breach.partition(': ')[2]}"
        for path in files
        for record in map(json.loads, path.read_text(encoding="utf-8").splitlines())
        for text in texts_of_record(record)
        for breach in breaches(text)
    ]
    assert not found, "; ".join(found)


def test_phrases_at_any_depth_of_a_record_are_found() -> None:
    record = {"title": "a stage handed back", "kept": True, "measured": [{"row": "as they come", "figures": "1 -> 2"}]}
    found = [breach for text in texts_of_record(record) for breach in breaches(text)]
    assert len(found) == 2 and "'released'" in found[0] and "'as they come'" in found[1]


@looped
@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("A caller is told.", 1),
        ("Two lines.\nThe kernel is\ntold.", 2),
        ("The Behaviour of a kernel", 1),
        ("a quantised copy", 1),
        ("| a | b |\n| --- | --- |\n| one, of\n", None),
        ("blocks of\nwhich three are full", 1),
        ("the kernel is at 639", 1),
        ("an offset is at 16 bytes, and a value is at most 448", None),
        ("It returns a tensor; the error names the argument. Whatever the mask, a neighbor.", None),
        ("```text\nis told\n```\n\n    is told\n\n`is told`, [here](what-it-is.md)", None),
        ("<!-- vale off -->\nis told\n<!-- vale on -->\n\n- an item\n  whoever", 6),
        ("<!-- a:begin -->\nis told\n<!-- a:end -->", None),
    ],
)
def test_a_phrase_is_found_on_its_line(text: str, line: int | None) -> None:
    assert [breach.partition(":")[0] for breach in breaches(prose(text))] == ([] if line is None else [str(line)])


def test_phrases_of_docstrings_and_messages_are_found() -> None:
    source = 'def f(x):\n    """Return what is left."""\n    raise ValueError(f"{x} is told to\\n whoever")\n'
    found = [breach for line, text in texts(source) for breach in breaches(text, line)]
    assert len(found) == 3 and found[0].startswith("2: 'Return what'")


def test_the_style_page_shows_phrases_that_the_rules_find() -> None:
    """Four at least of its examples, so that neither file forgets the other."""
    page = (PROJECT / "docs" / "reference" / "style.md").read_text(encoding="utf-8")
    examples = re.findall(r"^\| (.+?) \| (.+?) \|$", page, re.MULTILINE)[2:]
    assert len(examples) == 10
    assert sum(bool(breaches(worse)) for worse, _ in examples) >= 4
    assert not [better for _, better in examples if breaches(better)]
