"""Machine code (SASS) as nvdisasm prints it, in instructions: address, operation, target, lines of the source."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

_LINE = re.compile(
    r'//## File "(?P<file>[^"]*)", line (?P<line>\d+)(?: inlined at "(?P<at>[^"]*)", line (?P<at_line>\d+))?'
)
_INSTRUCTION = re.compile(r"^\s*/\*(?P<address>[0-9a-f]{4,})\*/\s+(?P<text>[^;]*?)\s*;")
_PARTS = re.compile(r"(?:(?P<guard>@!?U?P\w+)\s+)?(?P<opcode>[A-Z][\w.]*)\s*(?P<operands>.*)", re.DOTALL)
_SECTION = re.compile(r"^\s*\.section\s+\.text\.(?P<name>[\w$.]+)")
_LABEL = re.compile(r"^(?P<name>\.?[\w$.]+):\s*$")
_TARGET = re.compile(r"`\((?P<name>[^)]+)\)")
_SCHEDULING = re.compile(r"\s+(?:&\w+=\S+|\?\w+)")
"""Suffix of instructions on newer architectures: barriers to wait for, and issue options."""


@dataclass(frozen=True)
class Instruction:
    """One instruction.

    Attributes:
        address: bytes from the start of its function.
        guard: predicate of the instruction, such as ``@!P0``; "" for none.
        opcode: opcode with modifiers: ``HGMMA.64x128x16.F32``.
        operands: as printed; labels of the same function are addresses.
        target: address of the label in its operands, if it is in the same function.
        lines: source line, then the lines at which it was inlined; () if unknown.
    """

    address: int
    guard: str
    opcode: str
    operands: str
    target: int | None = None
    lines: tuple[int, ...] = ()

    @property
    def mnemonic(self) -> str:
        """The opcode without modifiers."""
        return self.opcode.partition(".")[0]

    @property
    def text(self) -> str:
        """The instruction as printed, without its address."""
        return " ".join(filter(None, (self.guard, self.opcode, self.operands)))


@dataclass(frozen=True)
class Function:
    """A kernel of a cubin, or a function that it calls."""

    name: str
    instructions: tuple[Instruction, ...]

    @property
    def code(self) -> tuple[tuple[int, str], ...]:
        """Addresses and instructions, which do not depend on line information."""
        return tuple((each.address, each.text) for each in self.instructions)


def parse(text: str, source: str = "") -> tuple[Function, ...]:
    """Functions in the output of nvdisasm.

    Args:
        text: the output of ``nvdisasm -c``, or of ``nvdisasm -gi -c`` if the code has line information.
        source: suffix of the file name whose lines are kept; lines of other files, such as headers, are dropped.
    """
    return tuple(_function(name, lines, source) for name, lines in _sections(text))


def _sections(text: str) -> Iterator[tuple[str, list[str]]]:
    name, lines = "", list[str]()
    for line in text.splitlines():
        if found := _SECTION.match(line):
            if name:
                yield name, lines
            name, lines = found["name"], []
        lines.append(line)
    if name:
        yield name, lines


def _function(name: str, lines: list[str], source: str) -> Function:
    found: list[Instruction] = []
    labels: dict[str, int] = {}
    waiting: list[str] = []  # labels of the next instruction
    chain = _Chain(source)
    for line in lines:
        if told := _LINE.search(line):
            chain.add(told)
        elif label := _LABEL.match(line):
            waiting.append(label["name"])
        elif told := _INSTRUCTION.match(line):
            parts = _PARTS.match(_SCHEDULING.sub("", told["text"]))
            if parts is None:
                continue
            address = int(told["address"], 16)
            labels |= dict.fromkeys(waiting, address)
            waiting = []
            found.append(
                Instruction(
                    address, parts["guard"] or "", parts["opcode"], parts["operands"].strip(), None, chain.lines
                )
            )
            chain.is_open = False
    return Function(name, tuple(_linked(each, labels) for each in found))


def _linked(instruction: Instruction, labels: dict[str, int]) -> Instruction:
    """An instruction with the address of its label."""
    told = _TARGET.search(instruction.operands)
    if told is None or told["name"] not in labels:
        return instruction
    target = labels[told["name"]]
    return replace(instruction, target=target, operands=_TARGET.sub(f"{target:#06x}", instruction.operands))


class _Chain:
    """Line comments before an instruction: the innermost first, each with the location of its inlining."""

    def __init__(self, source: str) -> None:
        self._source, self._next = source, ("", "")
        self._lines: list[int] = []
        self.is_open = False  # whether another line may continue it

    def add(self, told: re.Match[str]) -> None:
        here = (told["file"], told["line"])
        if not (self.is_open and here == self._next):
            self._lines = []
        self.is_open, self._next = True, (told["at"] or "", told["at_line"] or "")
        if told["file"].endswith(self._source):
            self._lines.append(int(told["line"]))

    @property
    def lines(self) -> tuple[int, ...]:
        return tuple(self._lines)
