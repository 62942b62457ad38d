"""Loops in machine code."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.tools.analysis.kinds import KINDS, OTHER, by_kind, by_opcode, kind_of
from runtime.tools.analysis.loops import loops, main_loop
from runtime.tools.analysis.sass import Instruction, parse

LISTING = """\
	.section	.text.kernel,"ax",@progbits
kernel:
.text.kernel:
	//## File "/there/generated/kernel.cu", line 10
        /*0000*/                   S2R R0, SR_TID.X ;
.L_x_1:
	//## File "/there/generated/kernel.cu", line 3 inlined at "/there/generated/kernel.cu", line 12
	//## File "/there/generated/kernel.cu", line 12
        /*0010*/                   HMMA.16816.F32 R4, R8, R12, R4 ;
	//## File "/there/include/mma.h", line 77 inlined at "/there/generated/kernel.cu", line 13
	//## File "/there/generated/kernel.cu", line 13
        /*0020*/              @!P0 BRA `(.L_x_2) ;
	//## File "/there/generated/kernel.cu", line 14
        /*0030*/               @P1 BRA `(.L_x_1) ;
        /*0040*/                   EXIT ;
.L_x_2:
        /*0050*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R4+URZ], R11 ;
        /*0060*/              @!P0 BRA `(.L_x_2) ;
        /*0070*/                   BRA `(.L_x_1) ;
.L_x_3:
        /*0080*/                   BRA `(.L_x_3);
	.section	.text.other,"ax",@progbits
        /*0000*/                   LDC R1, c[0x0][0x37c] &wr=0x1 ?trans1 ;
"""


def test_a_listing_is_read() -> None:
    kernel, other = parse(LISTING, "generated/kernel.cu")
    assert (kernel.name, other.name) == ("kernel", "other")
    assert [each.address for each in kernel.instructions] == list(range(0, 0x90, 16))
    assert [each.lines for each in kernel.instructions[:4]] == [(10,), (3, 12), (13,), (14,)]
    branch = kernel.instructions[2]
    assert (branch.guard, branch.mnemonic, branch.operands, branch.target) == ("@!P0", "BRA", "0x0050", 0x50)
    assert kernel.instructions[1].opcode == "HMMA.16816.F32"
    assert other.instructions[0].text == "LDC R1, c[0x0][0x37c]"  # how it is issued is left out


def test_line_information_changes_nothing_else() -> None:
    bare = "\n".join(line for line in LISTING.splitlines() if "//##" not in line).replace(".L_x_", ".L_y_")
    assert [each.code for each in parse(bare)] == [each.code for each in parse(LISTING)]


def test_the_main_loop_is_what_lies_between_its_branch_and_its_target() -> None:
    found = main_loop(parse(LISTING)[0].instructions)
    assert found is not None
    assert (found.begin, found.end, found.tensor, len(found.instructions)) == (0x10, 0x30, 1, 3)
    assert found.out_of_line == 3  # the wait behind the kernel's end, from where it branches back


def code(*instructions: str) -> list[Instruction]:
    """Instructions of 16 bytes; `BRA 3` goes to the third."""
    found = []
    for number, text in enumerate(instructions):
        guard, rest = text.split(" ", 1) if text.startswith("@") else ("", text)
        opcode, _, operands = rest.partition(" ")
        target = 16 * int(operands) if opcode == "BRA" else None
        found.append(Instruction(16 * number, guard, opcode, operands, target))
    return found


def test_of_nested_loops_the_innermost_with_products_is_the_main_one() -> None:
    found = main_loop(code("HMMA", "HMMA", "HMMA", "IADD3", "@P0 BRA 3", "HMMA", "@P1 BRA 5", "@P2 BRA 1", "EXIT"))
    assert found is not None and (found.begin, found.end) == (0x50, 0x60)


def test_without_products_it_is_the_longest_innermost_one() -> None:
    found = main_loop(code("MOV", "@P0 BRA 0", "IADD3", "FADD", "@P1 BRA 2", "EXIT"))
    assert found is not None and (found.begin, found.end) == (0x20, 0x40)


def test_a_kernel_without_loops_has_none() -> None:
    assert main_loop(code("MOV", "@P0 BRA 3", "FADD", "EXIT")) is None


def test_what_nothing_leads_to_is_no_loop() -> None:
    assert loops(code("EXIT", "MOV", "BRA 1")) == []


@given(st.integers(0, 2**32))
def test_loops_begin_where_all_ways_to_their_ends_pass(seed: int) -> None:
    """Against the definition: without the target what leads back there is reached no more."""
    draw = random.Random(seed)
    size = draw.randint(1, 12)
    kinds = ["MOV"] * 3 + [f"{guard}BRA {draw.randrange(size)}" for guard in ("", "@P0 ", "@P1 ")] + ["EXIT"]
    instructions = code(*(draw.choice(kinds) for _ in range(size)))

    def after(number: int) -> list[int]:
        each = instructions[number]
        told = [] if each.target is None else [each.target // 16]
        goes_on = each.mnemonic == "MOV" or bool(each.guard)
        return told + ([number + 1] if goes_on and number + 1 < size else [])

    def reached(without: int | None = None) -> set[int]:
        seen, waiting = set[int](), [0]
        while waiting:
            number = waiting.pop()
            if number not in seen and number != without:
                seen.add(number)
                waiting += after(number)
        return seen

    headers = {
        16 * target for number in reached() for target in after(number) if number in reached() - reached(without=target)
    }
    assert {loop.begin for loop in loops(instructions)} == headers


@pytest.mark.parametrize(
    ("mnemonic", "kind"),
    [
        ("HGMMA", "tensor cores"),
        ("HMMA", "tensor cores"),
        ("MUFU", "special functions"),
        ("FFMA", "fp32"),
        ("F2FP", "conversions"),
        ("UTMALDG", "copies"),
        ("LDGSTS", "copies"),
        ("LDG", "global memory"),
        ("LDS", "shared memory"),
        ("SYNCS", "barriers"),
        ("ULDC", "constants"),
        ("UIADD3", "uniform registers"),
        ("IADD3", "integers and moves"),
        ("STL", "spills"),
        ("XYZZY", OTHER),
    ],
)
def test_instructions_have_a_kind(mnemonic: str, kind: str) -> None:
    assert kind_of(mnemonic) == kind
    assert kind in {*KINDS, OTHER}


def test_counts_begin_with_the_most_frequent() -> None:
    instructions = code("MOV", "HMMA", "HMMA", "EXIT")
    assert list(by_opcode(instructions).items()) == [("HMMA", 2), ("EXIT", 1), ("MOV", 1)]
    assert by_kind(instructions)["tensor cores"] == 2
