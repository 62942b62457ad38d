"""Load of an SM's pipes by the main loop, counted from its machine code: a bound that no schedule can beat."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from codegen.arch import PARTITIONS, WARP, Arch
from runtime.tools.analysis.kinds import kind_of
from runtime.tools.analysis.loops import TENSOR, Loop
from runtime.tools.analysis.sass import Instruction

# A partition of an SM has a share of every pipe, and issues one instruction a clock.
SPECIAL_LANES = 16  # results an SM's special functions give in a clock (CUDA C++ Programming Guide, throughput table)
WARPGROUP_WARPS = 4
_SHAPE = re.compile(r"\.(\d+)x(\d+)x(\d+)\.")
_OLD_SHAPES = {"16816": (16, 8, 16), "1688": (16, 8, 8), "884": (8, 8, 4)}


@dataclass(frozen=True)
class Pipes:
    """Clocks that one warp's iteration of the main loop keeps parts of its partition busy.

    Every instruction of the loop counts, those under conditions too: all but the tensor cores' are upper bounds.

    Attributes:
        tensor: of the tensor cores; None for an architecture whose rate is not known.
        special: of the special functions (ex2, rcp, lg2).
        issue: of the scheduler: an instruction each.
    """

    tensor: float | None
    special: float
    issue: float

    @property
    def longest(self) -> str:
        """The part that is busy longest, which bounds the loop."""
        told = {"tensor cores": self.tensor or 0.0, "special functions": self.special, "issue slots": self.issue}
        return max(told, key=lambda name: told[name])


def pipes_of(loop: Loop, arch: Arch) -> Pipes:
    """The load of the pipes by a loop."""
    specials = sum(kind_of(each.mnemonic) == "special functions" for each in loop.instructions)
    rate = arch.tensor_flops
    flops = tensor_flops(loop.instructions)
    return Pipes(
        tensor=None if rate is None or flops is None else flops / (rate / PARTITIONS),
        special=specials * WARP / (SPECIAL_LANES / PARTITIONS),
        issue=float(len(loop.instructions)),
    )


def tensor_flops(instructions: Sequence[Instruction]) -> float | None:
    """Return the floating-point operations of tensor instructions, a warp's share; None for a shape not known."""
    total = 0.0
    for each in instructions:
        if each.mnemonic not in TENSOR:
            continue
        shape = _shape(each)
        if shape is None:
            return None
        warps = WARPGROUP_WARPS if each.mnemonic.endswith("GMMA") else 1
        total += 2.0 * shape[0] * shape[1] * shape[2] / warps
    return total


def _shape(instruction: Instruction) -> tuple[int, ...] | None:
    """Return m, n and k of a tensor instruction, by its opcode: HGMMA.64x128x16.F32, HMMA.16816.F32."""
    if told := _SHAPE.search(f"{instruction.opcode}."):
        return tuple(int(each) for each in told.groups())
    return next((shape for name, shape in _OLD_SHAPES.items() if f".{name}." in f"{instruction.opcode}."), None)
