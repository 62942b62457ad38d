"""The part of Q that consumers of an sm_90a attention kernel keep in registers."""

from __future__ import annotations

from codegen.plan import Constant
from codegen.plans.attention.share_kv import has_long_tiles
from codegen.spec import AttentionSpec

SLICE_COLUMNS = 16  # of Q: the depth of one wgmma
SLICE_REGISTERS = 4  # per thread, for 64 rows


def q_slices(spec: AttentionSpec, registers: int) -> int:
    """Number of slices of Q in registers, if registers do not suffice for all slices.

    With kv_splits, tiles are too short to gain. With softcap, the compiler needs some of the apparently free registers
    and would spill.
    """
    if spec.kv_splits > 1 or (spec.share_kv_loads and not has_long_tiles(spec)):
        return 0
    registers -= SLICE_REGISTERS * (spec.softcap is not None)
    return max(0, min(registers // SLICE_REGISTERS, spec.head_dim // SLICE_COLUMNS - 1))


def q_slice_constants(spec: AttentionSpec, slices: int) -> list[Constant]:
    """Constant of the part of Q in registers, unless it is all of Q or nothing."""
    comment = "slices of 16 columns of Q in registers; the others stay in shared memory"
    return [Constant("kQSlices", slices, comment)] if 0 < slices < spec.head_dim // SLICE_COLUMNS else []
