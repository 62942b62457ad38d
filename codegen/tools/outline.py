"""Functions of a generated source by line, which assign machine code to stages."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_NO_CODE = re.compile(r'"(?:\\.|[^"\\])*"|//.*')
"""Strings and comments, whose braces are ignored."""
_FUNCTION = re.compile(r"\b__(?:device|global)__\b(?!.*;\s*$)")
_TYPE = re.compile(r"^struct (?:alignas\(\d+\) )?(\w+)")


@dataclass(frozen=True)
class Function:
    """A function of a source.

    Attributes:
        name: name, such as ``consume``; members have their type: ``Tile::at``.
        first: number of its first line, counted from 1.
        last: number of its last line.
        is_instruction: whether it wraps a PTX instruction: its body is inline assembly.
    """

    name: str
    first: int
    last: int
    is_instruction: bool


def functions(source: str) -> tuple[Function, ...]:
    """Functions of a generated source, in source order."""
    lines = source.splitlines()
    bare = [_NO_CODE.sub("", line) for line in lines]
    return tuple(_functions(lines, bare))


def _functions(lines: Sequence[str], bare: Sequence[str]) -> Iterator[Function]:
    owner, number = "", 0
    while number < len(bare):
        if told := _TYPE.match(bare[number]):
            owner = told[1]
        elif bare[number].startswith("};"):
            owner = ""
        if not _FUNCTION.search(bare[number]):
            number += 1
            continue
        last = _end(bare, number)
        name = _name("\n".join(bare[number : last + 1]))
        inside = owner and bare[number].startswith(" ")
        text = "\n".join(lines[number : last + 1])
        yield Function(f"{owner}::{name}" if inside else name, number + 1, last + 1, bool(re.search(r"\basm\b", text)))
        number = last + 1


def _end(bare: Sequence[str], first: int) -> int:
    """Index of the line with the closing brace of a function, or of the last line."""
    depth, opened = 0, False
    for number in range(first, len(bare)):
        depth += bare[number].count("{") - bare[number].count("}")
        opened = opened or "{" in bare[number]
        if opened and depth <= 0:
            return number
    return len(bare) - 1


def _name(text: str) -> str:
    """Name of a function: the text before its first parenthesis, without launch bounds."""
    header = re.sub(r"\b__(?:launch_bounds|maxnreg|cluster_dims)__\([^)]*\)", "", text)
    found = re.search(r"(\w+)\s*\(", header)
    return found[1] if found else "?"


@dataclass(frozen=True)
class Stage:
    """Origin of an instruction in a source.

    Attributes:
        name: at most two functions through which it was inlined, outer one first: ``consume / apply_mask``.
        line: line in the inner one.
    """

    name: str
    line: int


class Outline:
    """The functions of a source, by line."""

    def __init__(self, source: str) -> None:
        self.functions = functions(source)

    def at(self, line: int) -> Function | None:
        """Function of a line."""
        return next((each for each in self.functions if each.first <= line <= each.last), None)

    def stage(self, lines: Sequence[int]) -> Stage | None:
        """Stage of an instruction.

        Args:
            lines: its line, followed by the lines at which it was inlined, outermost last.

        Returns:
            The stage; None if no function has the lines. Wrappers of PTX instructions are not stages, and the kernel is
            one only if there is no other.
        """
        known = [(found, line) for line in reversed(lines) if (found := self.at(line))]
        # A lambda of the kernel has lines of the kernel too.
        inner = [pair for pair in known if pair[0] is not known[0][0] and not pair[0].is_instruction][:2] or known[:1]
        if not inner:
            return None
        return Stage(" / ".join(found.name for found, _ in inner), inner[-1][1])
