"""Instructions that a warp issues in one step of an sm_89 attention kernel, by kind: counted, not measured.

    python benchmarks/step_counts.py                                    # the kernels of docs/notebook/ada.md
    python benchmarks/step_counts.py --page                             # and rewrites the rows "now" there
    python benchmarks/step_counts.py --branches generated/l4_dense.cu   # and the branches of each path
    python benchmarks/step_counts.py /tmp/old/generated/l4_dense.cu     # a source of another commit

No GPU: a source is compiled for sm_89 and disassembled. The main loop is the basic blocks from which HMMA can be
reached and that it reaches. Counted is what lies on a path through them, from the loop's entry back to it:

- of all paths those with the most copies (LDGSTS): any step but the last ones;
- at each vote of the warp both ways: where butterfly shuffles follow before the next vote, the maxima of a row's four
  lanes, it raises `row_max` and rescales O. Told are the path of no raise, that of the first vote's alone, that of all;
- of paths with the same raises the shortest: a step without a mask.

An instruction whose predicate is false takes an issue slot too, and is counted. The script stops where a path has not
as many HMMA as the products have tiles of 16 x 8 x 16, and where one without a raise has not as many MUFU.EX2 as a
step has exponentials. Not counted are kernels with a softcap, which have more, and with a branch for each masked pair,
which have too many paths.
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path

from codegen.library import GENERATED, ROOT
from runtime.compile.compiler import OPTIONS, run_nvrtc
from runtime.compile.inspection import disassemble

PAGE = ROOT / "docs" / "notebook" / "ada.md"
KERNELS = ("l4_dense", "l4_causal", "l4_dense_d64", "l4_topk32", "l4_topk32_d64")
# Kind -> its opcodes, without what follows the first point. An opcode of no kind is an error.
KINDS = {
    "HMMA": "HMMA",
    "LDSM": "LDSM",
    "MUFU": "MUFU",
    "FMNMX": "FMNMX",
    "FADD, FMUL, FFMA": "FADD FMUL FFMA",
    "F2FP": "F2FP",
    "SHFL, VOTE": "SHFL VOTE",
    "integers, moves, predicates": "CS2R FSEL FSETP I2FP IABS IADD3 IMAD IMNMX ISETP LEA LOP3 MOV PLOP3 PRMT R2UR S2R"
    " SEL SHF UIADD3 UIMAD UISETP ULDC ULEA ULOP3 UMOV USEL USHF",
    "control": "BAR BRA BSSY BSYNC CALL DEPBAR LDGDEPBAR NOP WARPSYNC",
    "memory": "LDG LDGSTS LDS STG STS",
}
HEADINGS = ("kernel", "keys", "raises", *KINDS, "issue slots", "a key", "HMMA share")
KIND_OF = {opcode: kind for kind, opcodes in KINDS.items() for opcode in opcodes.split()}
JUMPS = ("BRA", "CALL.REL.NOINC")  # by the latter the compiler leaves a loop
OTHER_JUMPS = ("BRA", "BREAK", "BRX", "BRXU", "CALL", "JMP", "JMX", "JMXU", "RET")  # with other modifiers: an error
MOST_PATHS = 4096


@dataclass(frozen=True)
class Instruction:
    """A SASS instruction; its predicate is "" if it has none."""

    address: int
    predicate: str
    mnemonic: str
    operands: str

    @property
    def opcode(self) -> str:
        return self.mnemonic.partition(".")[0]


Block = Sequence[Instruction]


@dataclass(frozen=True)
class Step:
    """A path through the main loop, and of each of its votes whether it raises ``row_max``."""

    blocks: tuple[Block, ...]
    raises: tuple[bool, ...]

    @property
    def instructions(self) -> list[Instruction]:
        return [instruction for block in self.blocks for instruction in block]

    def count(self, mnemonic: str) -> int:
        return sum(instruction.mnemonic.startswith(mnemonic) for instruction in self.instructions)

    def kinds(self) -> dict[str, int]:
        opcodes = Counter(instruction.opcode for instruction in self.instructions)
        if unknown := sorted(opcodes.keys() - KIND_OF.keys()):
            raise ValueError(f"opcodes of no kind: {', '.join(unknown)}; KINDS has {', '.join(sorted(KIND_OF))}")
        return {kind: sum(opcodes[name] for name in names.split()) for kind, names in KINDS.items()}


def parse(sass: str) -> list[Instruction]:
    """The instructions of a disassembly."""
    lines = re.findall(r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][\w.]*)\s*([^;]*?)\s*;", sass, re.M)
    return [Instruction(int(address, 16), *rest) for address, *rest in lines]


def target(instruction: Instruction) -> int | None:
    """Possible jump targets of an instruction."""
    if instruction.mnemonic in JUMPS:
        return int(instruction.operands.split()[-1], 16)
    if instruction.opcode in OTHER_JUMPS:
        raise ValueError(f"{instruction.mnemonic} at {instruction.address:#x} is none of {', '.join(JUMPS)}")
    return None


def basic_blocks(instructions: Sequence[Instruction]) -> dict[int, Block]:
    """The basic blocks by the address of their first instruction."""
    ends = [i + 1 for i, found in enumerate(instructions) if target(found) is not None or found.opcode == "EXIT"]
    targets = {target(instruction) for instruction in instructions}
    starts = {0, *ends, *(i for i, found in enumerate(instructions) if found.address in targets)} - {len(instructions)}
    edges = [*sorted(starts), len(instructions)]
    return {instructions[a].address: instructions[a:b] for a, b in pairwise(edges)}


def successors(blocks: Mapping[int, Block]) -> dict[int, list[int]]:
    """The blocks that may follow each block: the next one first."""
    found = {}
    for (start, block), after in zip(blocks.items(), [*list(blocks)[1:], None], strict=True):
        last = block[-1]
        always = not last.predicate and "," not in last.operands  # BRA P0, 0x40: another predicate
        ends = always and (last.mnemonic in JUMPS or last.opcode == "EXIT")
        found[start] = [to for to in (None if ends else after, target(last)) if to is not None]
    return found


def reached(start: int, following: Mapping[int, Sequence[int]]) -> set[int]:
    """The blocks that may run after a block."""
    found: set[int] = set()
    waiting = [*following[start]]
    while waiting:
        block = waiting.pop()
        if block not in found:
            found.add(block)
            waiting += following[block]
    return found


def paths(instructions: Sequence[Instruction]) -> Iterator[tuple[Block, ...]]:
    """All paths through the main loop, from its entry back to it."""
    blocks = basic_blocks(instructions)
    following = successors(blocks)
    after = {start: reached(start, following) for start in blocks}
    products = [start for start, block in blocks.items() if any(found.opcode == "HMMA" for found in block)]
    loop = {start for start in blocks if products and products[0] in after[start] and start in after[products[0]]}
    entries = {to for start in blocks if start not in loop for to in following[start] if to in loop}
    if len(entries) != 1 or not loop.issuperset(products):
        raise ValueError(f"not one loop with one entry has all HMMA: {len(products)} blocks have, entries {entries}")
    (entry,) = entries

    def walk(path: tuple[int, ...]) -> Iterator[tuple[Block, ...]]:
        for to in following[path[-1]]:
            if to == entry:
                yield tuple(blocks[start] for start in path)
            elif to in path:
                raise ValueError(f"the main loop has another in it, at {to:#x}")
            elif to in loop:
                yield from walk((*path, to))

    return walk((entry,))


def votes(path: Sequence[Block]) -> tuple[bool, ...]:
    """Whether butterfly shuffles follow each vote on a path before the next vote."""
    mnemonics = " ".join(instruction.mnemonic for block in path for instruction in block)
    return tuple("SHFL.BFLY" in part for part in mnemonics.split("VOTE.")[1:])


def steps(sass: str) -> list[Step]:
    """The reported paths of a kernel: no raise, the first vote alone raises, all raise."""
    found = [Step(path, votes(path)) for path in islice(paths(parse(sass)), MOST_PATHS + 1)]
    if len(found) > MOST_PATHS:
        raise ValueError(f"the main loop has more than {MOST_PATHS} paths")
    copies = max(step.count("LDGSTS") for step in found)
    shortest: dict[tuple[bool, ...], Step] = {}
    for step in sorted(found, key=lambda step: len(step.instructions)):
        if step.count("LDGSTS") == copies:
            shortest.setdefault(step.raises, step)
    of = len(min(shortest))
    told = dict.fromkeys(((False,) * of, *((True,) + (False,) * (of - 1),) * bool(of), (True,) * of))
    if missing := [raises for raises in told if raises not in shortest]:
        raise ValueError(f"no path has the raises {missing}")
    return [shortest[raises] for raises in told]


def constant(source: str, name: str) -> int:
    """A constant of a generated source."""
    found = re.search(rf"^constexpr int {name} = (\d+);", source, re.M)
    if found is None:
        raise ValueError(f"the source has no constant {name}")
    return int(found[1])


def check(found: Sequence[Step], source: str) -> None:
    """Compare the paths of a kernel with the arithmetic of its products and exponentials.

    Raises:
        ValueError: where they differ.
    """
    rows, keys, columns = (constant(source, name) for name in ("kWarpRows", "kTileN", "kHeadDim"))
    products = 2 * (rows // 16) * (keys // 8) * (columns // 16)  # S and O
    for step in found:
        if step.count("HMMA") != products:
            raise ValueError(f"{step.count('HMMA')} HMMA on the path of raises {step.raises}, not {products}")
    exponentials = rows * keys // 32
    if found[0].count("MUFU.EX2") != exponentials:
        raise ValueError(f"{found[0].count('MUFU.EX2')} MUFU.EX2 on the path of no raise, not {exponentials}")


def row(name: str, step: Step, keys: int) -> str:
    """A line of the table."""
    kinds, slots = step.kinds(), len(step.instructions)
    raised = f"{sum(step.raises)} of {len(step.raises)}"
    cells = [name, keys, raised, *kinds.values(), slots, f"{slots / keys:.1f}", f"{kinds['HMMA'] / slots:.1%}"]
    return f"| {' | '.join(map(str, cells))} |"


def updated(page: str, rows: Sequence[str]) -> str:
    """A page whose rows "now" of the same kernel and raises are these."""
    lines = page.splitlines()
    for told in rows:
        same = "|".join(("| now ", *told.split("|")[1:4], ""))
        lines = [f"| now {told}" if line.startswith(same) else line for line in lines]
    return "\n".join(lines) + "\n"


def branches(step: Step) -> str:
    """The branches of a path: address, predicate, whether it is taken."""
    told = []
    for block, after in zip(step.blocks, (*step.blocks[1:], step.blocks[0]), strict=True):
        last = block[-1]
        if last.mnemonic in JUMPS:
            way = "taken" if target(last) == after[0].address else "not taken"
            told.append(f"    {last.address:#06x} {last.predicate or 'always'} {last.mnemonic} {last.operands}: {way}")
    return "\n".join(told)


def counted(path: Path) -> dict[str, Step]:
    """The steps of a generated source by their rows of the table.

    Raises:
        ToolchainError, CompileError: where it cannot be compiled.
        ValueError: where its main loop is none that can be counted.
    """
    source = path.read_text(encoding="utf-8")
    code, _ = run_nvrtc(source, path.name, "cubin", ("--gpu-architecture=sm_89", *OPTIONS))
    found = steps(disassemble(code))
    check(found, source)
    return {row(path.stem, step, constant(source, "kTileN")): step for step in found}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--branches", action="store_true", help="print the branches of each path too")
    parser.add_argument("--page", action="store_true", help="rewrite the rows of docs/notebook/ada.md")
    parser.add_argument("sources", nargs="*", type=Path, help="generated sources of attention by mma.sync for sm_89")
    chosen = parser.parse_args(arguments)
    rows: list[str] = []
    print(f"| {' | '.join(HEADINGS)} |\n| --- |{' ---: |' * (len(HEADINGS) - 1)}")
    for path in chosen.sources or [GENERATED / f"{stem}.cu" for stem in KERNELS]:
        for told, step in counted(path).items():
            print(told)
            rows.append(told)
            if chosen.branches:
                print(branches(step))
    if chosen.page:
        PAGE.write_text(updated(PAGE.read_text(encoding="utf-8"), rows), encoding="utf-8")


if __name__ == "__main__":
    main()
