"""Why a step of an sm_90a attention kernel is not wider: the registers of a consumer thread, in words."""

from __future__ import annotations

from codegen.plan import Registers
from codegen.spec import AttentionSpec

STEP_KEYS = 16  # a step has a multiple of this
WIDEST_STEP = 256  # N of the widest wgmma


def register_sum(spec: AttentionSpec, registers: Registers, *, holds_q: bool) -> str:
    """Uses of the registers, in words, and the registers of a wider step if they exceed the budget.

    Args:
        spec: the spec.
        registers: the budget of a consumer thread.
        holds_q: whether some of them hold Q, which a wider step would leave in shared memory.
    """
    held = "s, p_frag, o, q" if holds_q else "s, p_frag, o"
    taken = f"{registers.accumulators} of {held} + {registers.overhead} = {registers.needed} of {registers.limit}"
    wider = spec.tile.n + STEP_KEYS
    # A thread has half a column of S and of O, and of P a quarter, in 16 bits.
    needed = wider // 2 + wider // 4 + spec.head_dim // 2 + registers.overhead
    free = spec.pattern.block_keys is None and wider <= WIDEST_STEP
    return f"{taken} ({wider} keys: {needed})" if free and needed > registers.limit else taken
