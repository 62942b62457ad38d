"""The loops of a kernel in its SASS, and the choice of the main loop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from runtime.tools.analysis.sass import Instruction

TENSOR = frozenset({"HGMMA", "QGMMA", "IGMMA", "BGMMA", "HMMA", "QMMA", "IMMA", "BMMA", "DMMA", "OMMA"})
"""Mnemonics of tensor-core instructions."""
_JUMPS = frozenset({"BRA", "JMP"})
_ENDS = frozenset({"EXIT", "RET", "BRX", "JMX", "KILL"})


@dataclass(frozen=True)
class Loop:
    """A loop.

    Attributes:
        begin: address of the first instruction, the loop's entry.
        end: address of the last branch back to the entry.
        instructions: instructions from begin to end, in order, without those that the compiler placed out of line, such
            as waits that do not succeed at once.
        out_of_line: number of out-of-line instructions.
    """

    begin: int
    end: int
    instructions: tuple[Instruction, ...]
    out_of_line: int

    @property
    def tensor(self) -> int:
        """Number of tensor-core instructions."""
        return sum(each.mnemonic in TENSOR for each in self.instructions)

    def has(self, other: Loop) -> bool:
        """Whether another loop is inside this one."""
        return self != other and self.begin <= other.begin and other.end <= self.end


def main_loop(instructions: Sequence[Instruction]) -> Loop | None:
    """The innermost loop with the most tensor-core instructions; without any, the one with the most instructions."""
    every = loops(instructions)
    working = [loop for loop in every if loop.tensor] or every
    innermost = [loop for loop in working if not any(loop.has(other) for other in working)]
    return max(innermost, key=lambda loop: (loop.tensor, len(loop.instructions), -loop.begin), default=None)


def loops(instructions: Sequence[Instruction]) -> list[Loop]:
    """Natural loops of a function by their headers: back edges to a dominator."""
    graph = _Graph(instructions)
    above = graph.dominators()
    latches: dict[int, list[int]] = {}
    for block in graph.reached:
        for header in graph.after[block]:
            if _dominates(above, header, block):
                latches.setdefault(header, []).append(block)
    return [graph.loop(header, ends) for header, ends in sorted(latches.items())]


def _dominates(above: Sequence[int | None], over: int, block: int) -> bool:
    """Whether all paths to a block pass another block."""
    at: int | None = block
    while at is not None and at != over:
        at = None if at == 0 else above[at]
    return at == over


class _Graph:
    """Control-flow graph of a function."""

    def __init__(self, instructions: Sequence[Instruction]) -> None:
        self.instructions = instructions
        place = {each.address: number for number, each in enumerate(instructions)}
        targets = {place[each.target] for each in instructions if each.target is not None}
        behind = {number + 1 for number, each in enumerate(instructions) if each.mnemonic in _JUMPS | _ENDS}
        self.starts = sorted({0} | targets | behind - {len(instructions)})
        number_of = {start: number for number, start in enumerate(self.starts)}
        self.after: list[list[int]] = []
        for number in range(len(self.starts)):
            last = instructions[self._end(number) - 1]
            after = [number + 1] if _goes_on(last) and number + 1 < len(self.starts) else []
            if last.mnemonic in _JUMPS and last.target is not None:
                after.append(number_of[place[last.target]])
            self.after.append(after)
        self.reached = self._reverse_postorder()
        self.before: list[list[int]] = [[] for _ in self.after]
        for block in self.reached:
            for each in self.after[block]:
                self.before[each].append(block)

    def _end(self, block: int) -> int:
        return self.starts[block + 1] if block + 1 < len(self.starts) else len(self.instructions)

    def dominators(self) -> list[int | None]:
        """Immediate dominator of each block (Cooper, Harvey and Kennedy); None for unreachable blocks."""
        place = {block: number for number, block in enumerate(self.reached)}
        above: list[int | None] = [None] * len(self.after)
        above[0] = 0
        changed = True
        while changed:
            changed = False
            for block in self.reached[1:]:
                known = [each for each in self.before[block] if above[each] is not None]
                found = known[0]
                for each in known[1:]:
                    found = _meet(found, each, above, place)
                changed |= above[block] != found
                above[block] = found
        return above

    def _reverse_postorder(self) -> list[int]:
        seen, done = {0}, list[int]()
        stack = [(0, iter(self.after[0]))]
        while stack:
            block, rest = stack[-1]
            following = next((each for each in rest if each not in seen), None)
            if following is None:
                done.append(block)
                stack.pop()
            else:
                seen.add(following)
                stack.append((following, iter(self.after[following])))
        return done[::-1]

    def loop(self, header: int, latches: Sequence[int]) -> Loop:
        """The natural loop of a header: the blocks that reach one of the back edges without passing the header."""
        body, waiting = {header}, list(latches)
        while waiting:
            block = waiting.pop()
            if block not in body:
                body.add(block)
                waiting += self.before[block]
        begin = self.instructions[self.starts[header]].address
        inside = sorted(number for block in body for number in range(self.starts[block], self._end(block)))
        end = self._last_branch(body, header, latches)
        between = tuple(each for number in inside if begin <= (each := self.instructions[number]).address <= end)
        return Loop(begin, end, between, len(inside) - len(between))

    def _last_branch(self, body: set[int], header: int, latches: Sequence[int]) -> int:
        """Address of the back edge that ends the loop.

        Instructions after it are not part of the loop. The compiler also places rarely executed code after the end of
        the kernel, with branches back to the loop; those branches come later.
        """
        behind = sorted(block for block in latches if block >= header) or [header]
        last = next((block for block in behind if block + 1 not in body), behind[-1])
        return self.instructions[self._end(last) - 1].address


def _goes_on(last: Instruction) -> bool:
    """Whether control may fall through an instruction: it is predicated, or not a branch."""
    if last.mnemonic not in _JUMPS | _ENDS:
        return True
    conditional = bool(last.guard) or "," in last.operands or last.opcode.startswith(("BRA.DIV", "BRA.CONV"))
    return conditional and last.guard != "@PT"


def _meet(one: int, other: int, above: Sequence[int | None], place: dict[int, int]) -> int:
    """The nearest common dominator."""
    while one != other:
        if place[one] > place[other]:
            one = above[one] or 0
        else:
            other = above[other] or 0
    return one
