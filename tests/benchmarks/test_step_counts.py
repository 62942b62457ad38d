"""The script that counts the instructions of a step, on a disassembly made up for it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from types import ModuleType

import pytest
from scripts import imported

SOURCE = "constexpr int kWarpRows = 16;  // rows\nconstexpr int kTileN = 8;\nconstexpr int kHeadDim = 16;\n"
# A loop from 0x10 on. Block by block: a copy that the last steps skip, scores, a mask, a shuffle that is of no maximum,
# the vote, a raise out of line, exponentials, output, the way out.
SASS = """
        Function : made_up
        /*0000*/                   MOV R1, c[0x0][0x28] ;              /* 0x00000a00ff017624 */
                                                                       /* 0x000fe400078e00ff */
        /*0010*/              @!P1 BRA P0, 0x30 ;
        /*0020*/                   LDGSTS.E.BYPASS.128 [R4], [R2.64], P2 ;
        /*0030*/                   HMMA.16816.F32 R8, R4, R6, R8 ;
        /*0040*/               @P0 BRA 0x60 ;
        /*0050*/                   FSEL R8, R8, -INF, P1 ;
        /*0060*/                   SHFL.IDX PT, R3, R3, R2, 0x1f ;
        /*0070*/                   FMNMX R5, R8, R9, !PT ;
        /*0080*/                   VOTE.ANY P0, P0 ;
        /*0090*/               @P0 BRA 0x0100 ;
        /*00a0*/                   MUFU.EX2 R8, R8 ;
        /*00b0*/              @!P3 MUFU.EX2 R9, R9 ;
        /*00c0*/                   MUFU.EX2 R10, R10 ;
        /*00d0*/                   MUFU.EX2 R11, R11 ;
        /*00e0*/                   HMMA.16816.F32 R12, R8, R6, R12 ;
        /*00f0*/                   BRA 0x0140 ;
        /*0100*/                   SHFL.BFLY PT, R6, R5, 0x1, 0x1f ;
        /*0110*/                   MUFU.EX2 R7, R7 ;
        /*0120*/                   FMUL R12, R12, R7 ;
        /*0130*/                   BRA 0xa0 ;
        /*0140*/               @P4 CALL.REL.NOINC 0x0160 ;
        /*0150*/                   BRA 0x10 ;
        /*0160*/                   EXIT ;
        /*0170*/                   BRA 0x170;
"""


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    with imported("step_counts") as module:
        yield module


def without(pattern: str) -> str:
    """The disassembly without the lines in which a pattern is."""
    return "\n".join(line for line in SASS.splitlines() if not re.search(pattern, line))


def test_instructions_are_read_with_predicates_and_operands(script: ModuleType) -> None:
    found = script.parse(SASS)
    assert [instruction.address for instruction in found] == list(range(0, 0x180, 0x10))
    assert found[1] == script.Instruction(0x10, "!P1", "BRA", "P0, 0x30")
    assert found[14] == script.Instruction(0xE0, "", "HMMA.16816.F32", "R12, R8, R6, R12")
    assert found[-1] == script.Instruction(0x170, "", "BRA", "0x170")


def test_all_ways_through_the_loop_are_found(script: ModuleType) -> None:
    paths = list(script.paths(script.parse(SASS)))
    assert len(paths) == 8  # copy or not, mask or not, raise or not
    assert all(path[0][0].address == 0x10 and path[-1][-1].address == 0x150 for path in paths)


def test_a_step_copies_and_has_no_mask(script: ModuleType) -> None:
    calm, raised = script.steps(SASS)
    assert (calm.raises, raised.raises) == ((False,), (True,))
    addresses = [instruction.address for instruction in calm.instructions]
    assert addresses == [*range(0x10, 0x50, 0x10), *range(0x60, 0x100, 0x10), 0x140, 0x150]
    more = [instruction.address for instruction in raised.instructions if instruction not in calm.instructions]
    assert more == [0x100, 0x110, 0x120, 0x130]


def test_each_instruction_is_of_one_kind(script: ModuleType) -> None:
    calm, raised = (step.kinds() for step in script.steps(SASS))
    counts = {"HMMA": 2, "MUFU": 4, "FMNMX": 1, "SHFL, VOTE": 2, "control": 6, "memory": 1}
    assert calm == dict.fromkeys(script.KINDS, 0) | counts
    assert {kind: raised[kind] - calm[kind] for kind in raised if raised[kind] != calm[kind]} == {
        **{"MUFU": 1, "FADD, FMUL, FFMA": 1, "SHFL, VOTE": 1, "control": 1}
    }
    assert len({opcode for names in script.KINDS.values() for opcode in names.split()}) == sum(
        len(names.split()) for names in script.KINDS.values()
    )


def test_an_opcode_of_no_kind_is_refused(script: ModuleType) -> None:
    with pytest.raises(ValueError, match="opcodes of no kind: FANCY"):
        script.steps(SASS.replace("FMNMX", "FANCY"))[0].kinds()


@pytest.mark.parametrize("jump", ["BRX R4 -0x20", "BRA.DIV UR4, 0x60", "CALL.ABS.NOINC 0x60"])
def test_a_jump_of_another_kind_is_refused(script: ModuleType, jump: str) -> None:
    with pytest.raises(ValueError, match=r"at 0x60 is none of BRA, CALL\.REL\.NOINC"):
        script.steps(SASS.replace("SHFL.IDX PT, R3, R3, R2, 0x1f", jump))


def test_a_kernel_whose_products_are_not_in_one_loop_is_refused(script: ModuleType) -> None:
    with pytest.raises(ValueError, match="not one loop"):
        script.steps(without("BRA 0x10 "))


def test_a_loop_within_the_loop_is_refused(script: ModuleType) -> None:
    with pytest.raises(ValueError, match="another in it, at 0x30"):
        script.steps(SASS.replace("BRA 0xa0 ", "BRA 0x30 "))


def test_counts_are_held_to_the_arithmetic(script: ModuleType) -> None:
    script.check(script.steps(SASS), SOURCE)
    with pytest.raises(ValueError, match=r"2 HMMA on the path of raises .*, not 4"):
        script.check(script.steps(SASS), SOURCE.replace("kHeadDim = 16", "kHeadDim = 32"))
    with pytest.raises(ValueError, match=r"3 MUFU\.EX2 on the path of no raise, not 4"):
        script.check(script.steps(without("R11, R11")), SOURCE)
    with pytest.raises(ValueError, match="no constant kTileN"):
        script.check(script.steps(SASS), SOURCE.replace("kTileN", "kOther"))


def test_a_row_of_the_table_has_a_cell_for_each_kind(script: ModuleType) -> None:
    calm, raised = script.steps(SASS)
    assert script.row("made_up", calm, 8) == (
        "| made_up | 8 | 0 of 1 | 2 | 0 | 4 | 1 | 0 | 0 | 2 | 0 | 6 | 1 | 16 | 2.0 | 12.5% |"
    )
    assert script.branches(raised).splitlines()[2] == "    0x0090 P0 BRA 0x0100: taken"


def test_the_page_takes_the_rows_of_now_and_no_others(script: ModuleType) -> None:
    page = "| before | a | 8 | 0 of 1 | 5 |\n| now | a | 8 | 0 of 1 | 6 |\n| now | a | 8 | 1 of 1 | 7 |\nText.\n"
    rows = ["| a | 8 | 0 of 1 | 9 |", "| b | 8 | 1 of 1 | 9 |"]
    assert script.updated(page, rows) == page.replace("| 6 |", "| 9 |")
