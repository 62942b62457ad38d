"""What the documents show to be copied: fenced Python, and commands of ``codegen``."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

PROJECT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted([*PROJECT.glob("*.md"), *(PROJECT / "docs").rglob("*.md")])
LANGUAGES = ("python", "sh", "text", "yaml", "c", "json")
"""What a fence may be of. Only python is run, and only commands of codegen are parsed."""
FENCE = re.compile(r"^(?P<indent> *)```(?P<language>[^\n]*)\n(?P<text>.*?)^(?P=indent)```$", re.MULTILINE | re.DOTALL)


class Fence(NamedTuple):
    """A fenced block of a document.

    Attributes:
        path: the document.
        line: number of its first line of text.
        language: what stands behind the backticks.
        text: what is to be copied.
    """

    path: Path
    line: int
    language: str
    text: str

    def code(self) -> Any:
        """Return Python as code whose errors name the document and the line."""
        return compile("\n" * (self.line - 1) + self.text, str(self.path), "exec")


def fences(path: Path, text: str | None = None) -> list[Fence]:
    """Return the fenced blocks of a document, or of a text in its place."""
    text = path.read_text(encoding="utf-8") if text is None else text
    found = []
    for match in FENCE.finditer(text):
        line = text.count("\n", 0, match.start("text")) + 1
        lines = match["text"].splitlines(keepends=True)
        inner = "".join(each.removeprefix(match["indent"]) for each in lines)
        found.append(Fence(path, line, match["language"], inner))
    return found


def python_of(path: Path) -> list[Fence]:
    """Return the Python of a document, in its order."""
    return [fence for fence in fences(path) if fence.language == "python"]


def pages() -> list[Path]:
    """Return the documents that have Python."""
    return [path for path in DOCUMENTS if python_of(path)]


def page_name(path: Path) -> str:
    """Return the name of a document, for a test's."""
    return path.relative_to(PROJECT).as_posix()


def optional_packages() -> set[str]:
    """Return the packages of pyproject.toml that not everyone installs, as they are imported."""
    told: Mapping[str, Any] = tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))
    every = [line for extra in told["project"]["optional-dependencies"].values() for line in extra]
    return {re.split(r"[^\w.-]", line, maxsplit=1)[0].replace("-", "_") for line in every}


def absent_packages(path: Path) -> list[str]:
    """Return the optional packages that a document's Python imports and that are not installed."""
    text = "\n".join(fence.text for fence in python_of(path))
    imported = set(re.findall(r"^\s*(?:import|from) (\w+)", text, re.MULTILINE))
    return sorted(name for name in imported & optional_packages() if find_spec(name) is None)


def commands(path: Path) -> Iterator[str]:
    """Return the commands of ``codegen`` that a document shows: in a block of their own, or between backticks."""
    text = path.read_text(encoding="utf-8").replace("\\\n", " ")
    shown = [match["text"] for match in FENCE.finditer(text) if match["language"] == "sh"]
    text = FENCE.sub("", text)
    shown += re.findall(r"^ {4,}\S.*$", text, re.MULTILINE)
    for line in "\n".join(shown).splitlines():
        for part in re.split(r"&&|;|\|", line.partition(" #")[0]):
            if part.split()[:1] and part.split()[0].rpartition("/")[2] == "codegen":
                yield part.strip()
    yield from re.findall(r"`(codegen [a-z-][^`\n]*)`", text)
