"""Removes unused definitions of a rendered source, like a linker removes unreferenced sections.

Templates may define all constants, functions and structs that any of their kernels needs; a source keeps those that its
kernel uses. Only definitions at the start of a line are considered, as are all of the project's.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

_DEFINITION = re.compile(r"constexpr |using |struct |template |__device__ ")
_CONSTANT = re.compile(r"\b(\w+)(?:\[[^\]]*\])*\s*=[^=]")
_ALIAS = re.compile(r"using (\w+) =")
_STRUCT = re.compile(r"struct (?:alignas\(\w+\) )?(\w+)")
_FUNCTION = re.compile(r"\b(\w+)\(")
_COMMENT = re.compile(r"//[^\n]*")
_STRING = re.compile(r'"(?:[^"\\\n]|\\.)*"')
_LITERAL_OR_COMMENT = re.compile(rf"{_STRING.pattern}|'(?:[^'\\\n]|\\.)'|(?P<comment>//[^\n]*|/\*.*?\*/)", re.DOTALL)
_HEADING_OF_NOTHING = re.compile(r"\n(?://[^\n]*\n)*//[^\n]*:\n(?=\n)")
_WORD = re.compile(r"[A-Za-z_]\w*")


@dataclass
class _Item:
    """A definition with the comment above it, or other lines.

    Attributes:
        lines: its lines, without newlines.
        words: words outside its comments and strings.
        names: defined names; empty if it is not a definition.
        heading: number of leading lines that also introduce the following items: a comment that ends in a colon.
    """

    lines: list[str]
    words: frozenset[str]
    names: frozenset[str] = frozenset()
    heading: int = 0


def prune(text: str) -> str:
    """Source without definitions that its kernels do not use, directly or indirectly."""
    items = list(_items(text.split("\n")))
    defining: dict[str, list[_Item]] = {}
    for item in items:
        for name in item.names:
            defining.setdefault(name, []).append(item)
    reached = [item for item in items if not item.names]
    used = {id(item) for item in reached}
    while reached:
        for word in reached.pop().words & defining.keys():
            for item in defining[word]:
                if id(item) not in used:
                    used.add(id(item))
                    reached.append(item)
    kept: list[str] = []
    for item in items:
        kept += item.lines if id(item) in used else item.lines[: item.heading]
    return _without_headings_of_nothing("\n".join(kept))


def _items(lines: list[str]) -> Iterator[_Item]:
    """Items of a source; a definition and the comment directly above it are one item."""
    code = _code("\n".join(lines)).split("\n")
    at = begin = 0  # begin: where the lines after the last definition begin
    while at < len(lines):
        if not _DEFINITION.match(lines[at]):
            at += 1
            continue
        start = head = at
        while start > begin and lines[start - 1].startswith("//"):
            start -= 1
        yield _Item(lines[begin:start], _words("\n".join(code[begin:start])))
        at = begin = _end(code, head)
        heading = head - start if head > start and lines[head - 1].endswith(":") else 0
        yield _Item(lines[start:at], *_words_and_names("\n".join(code[head:at])), heading)
    yield _Item(lines[begin:], _words("\n".join(code[begin:])))


def _words(code: str) -> frozenset[str]:
    return frozenset(_WORD.findall(code))


@lru_cache(maxsize=4096)  # kernels share most definitions
def _words_and_names(definition: str) -> tuple[frozenset[str], frozenset[str]]:
    return _words(definition), _names(definition)


def _end(code: list[str], at: int) -> int:
    """Index of the line after a definition, once its braces and parentheses are closed."""
    depth = 0
    while True:
        line = code[at]
        opened = line.count("(") + line.count("{") + line.count("[")
        depth += opened - line.count(")") - line.count("}") - line.count("]")
        at += 1
        if depth == 0 and line.rstrip().endswith((";", "}")):
            return at


def _names(code: str) -> frozenset[str]:
    """Names that a definition introduces; a kernel's entry and its parameters introduce none."""
    code = re.sub(r"^template <[^>]*>\s*", "", code)
    if code.startswith("constexpr "):
        return frozenset(_CONSTANT.findall(code))
    for begin, pattern in (("using ", _ALIAS), ("struct ", _STRUCT), ("__device__ ", _FUNCTION)):
        match = pattern.search(code) if code.startswith(begin) else None
        if match:
            return frozenset(match.groups())
    return frozenset()


def _code(text: str) -> str:
    """Text without comments and the contents of strings; neither spans lines, so their number stays."""
    return _STRING.sub('""', _COMMENT.sub("", text))


def _without_headings_of_nothing(text: str) -> str:
    """Text without comments at the start of a line that end in a colon and introduce nothing any more."""
    return _HEADING_OF_NOTHING.sub("\n", f"\n{text}")[1:]


def without_comments(source: str) -> str:
    """A source without comments, blank lines and trailing blanks: the part that determines its machine code."""
    code = _LITERAL_OR_COMMENT.sub(lambda match: " " if match["comment"] else match[0], source)
    return "\n".join(line.rstrip() for line in code.split("\n") if line.strip())


def same_code(one: str, other: str) -> bool:
    """Whether two sources differ only in comments and line breaks, so that their machine code is the same."""
    return _unbroken(one) == _unbroken(other)


def _unbroken(source: str) -> list[str]:
    """A source without comments, with the lines between preprocessor directives joined."""
    lines: list[str] = [""]
    for line in without_comments(source).split("\n"):
        if line.startswith("#"):
            lines += [line, ""]
        else:
            gap = "" if lines[-1].endswith("(") else " "  # a line may break after a parenthesis
            lines[-1] += gap + line.strip()
    return lines
