"""Load of an SM's pipes by the main loop, counted from its SASS: a lower bound on the time of any schedule."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from codegen.arch import PARTITIONS, WARP, Arch
from runtime.tools.analysis.kinds import kind_of
from runtime.tools.analysis.loops import TENSOR, Loop
from runtime.tools.analysis.sass import Instruction

# A partition of an SM has a share of every pipe, and issues one instruction per clock.
SPECIAL_LANES = 16  # special-function results per clock and SM (CUDA C++ Programming Guide, throughput table)
WARPGROUP_WARPS = 4
_SHAPE = re.compile(r"\.(\d+)x(\d+)x(\d+)\.")
_OLD_SHAPES = {"16816": (16, 8, 16), "1688": (16, 8, 8), "884": (8, 8, 4)}


@dataclass(frozen=True)
class Pipes:
    """Clocks for which one warp's iteration of the main loop occupies parts of its partition.

    Every instruction of the loop counts, including predicated ones, so all values except ``tensor`` are upper bounds.

    Attributes:
        tensor: clocks of the tensor cores; None for an architecture with an unknown rate.
        special: clocks of the special-function unit (ex2, rcp, lg2).
        issue: clocks of the scheduler, one per instruction.
    """

    tensor: float | None
    special: float
    issue: float

    @property
    def longest(self) -> str:
        """The busiest part, which bounds the loop."""
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
    """Floating-point operations of tensor instructions per warp; None for an unknown shape."""
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
    """m, n and k of a tensor instruction, from its opcode: HGMMA.64x128x16.F32, HMMA.16816.F32."""
    if told := _SHAPE.search(f"{instruction.opcode}."):
        return tuple(int(each) for each in told.groups())
    return next((shape for name, shape in _OLD_SHAPES.items() if f".{name}." in f"{instruction.opcode}."), None)
