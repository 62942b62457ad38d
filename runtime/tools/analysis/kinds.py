"""Instructions by kind: which part of an SM works on them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

from runtime.tools.analysis.loops import TENSOR
from runtime.tools.analysis.sass import Instruction

_WORDS = {
    "tensor cores": " ".join(sorted(TENSOR)),
    "special functions": "MUFU",
    "conversions": "F2FP F2F F2I I2F FRND I2FP F2IP I2I",
    "fp32": "FADD2? FMUL2? FFMA2? FMNMX3? FSETP? FSEL FCHK FSWZADD",
    "fp16 and bf16": r"HADD2\w* HMUL2\w* HFMA2\w* HMNMX2 HSETP?2",
    "spills": "LDL STL",
    "copies": r"UTMA\w+ UBLK\w+ LDGSTS LDGDEPBAR",
    "shared memory": "LDS STS LDSM STSM MOVM ATOMS",
    "global memory": r"LDG? STG? ATOMG? REDG? U?CCTL\w*",
    "barriers": r"SYNCS BAR B2R R2B WARPSYNC WARPGROUP\w* DEPBAR ARRIVES MEMBAR FENCE\w* ERRBAR ELECT ENDCOLLECTIVE "
    r"ACQBULK PREEXIT CGAERRBAR UCGABAR_\w+ USETMAXREG BSSY BSYNC YIELD NANOSLEEP",
    "lanes": "SHFL VOTEU? MATCH C?REDUX",
    "branches": "BRA BRX JMP JMX EXIT RET CALL KILL BREAK BMOV BPT",
    "no operation": "NOP",
    "constants": "U?LDCU?",
    "uniform registers": r"U[A-Z]\w* R2UR S2UR",
    "integers and moves": r"I\w+ LOP3? LEA SH[FLR] PRMT P?SEL MOV PLOP3 PSETP P2R R2P C?S2R POPC FLO BREV BMSK SGXT "
    r"VIADD\w* VIMNMX\w* VABSDIFF\w* LEPC",
}
KINDS = {name: re.compile("|".join(words.split())) for name, words in _WORDS.items()}
"""Kinds in the order of matching, each with patterns that match whole mnemonics."""
OTHER = "other"


def kind_of(mnemonic: str) -> str:
    """The kind of an instruction, from its mnemonic."""
    return next((name for name, pattern in KINDS.items() if pattern.fullmatch(mnemonic)), OTHER)


def by_kind(instructions: Iterable[Instruction]) -> dict[str, int]:
    """Counts of instructions by kind, the largest first."""
    return counted(kind_of(each.mnemonic) for each in instructions)


def by_opcode(instructions: Iterable[Instruction]) -> dict[str, int]:
    """Counts of instructions by opcode with its modifiers, the largest first."""
    return counted(each.opcode for each in instructions)


def counted(names: Iterable[str]) -> dict[str, int]:
    """Counts of names, the largest first; ties in alphabetical order."""
    return dict(sorted(Counter(names).items(), key=lambda item: (-item[1], item[0])))
