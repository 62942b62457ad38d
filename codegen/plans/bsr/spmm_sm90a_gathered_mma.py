"""Plan of the sm_90a BSR x dense kernel that gathers block rows and multiplies by mma.sync: for blocks of 16 rows.

A block has as many rows as an mma.sync: nothing is transposed, and a warp addresses its rows of B through an ordinary
register. Its common parts with the WGMMA kernel are in :mod:`codegen.plans.bsr.gathered`.
"""

from __future__ import annotations

from codegen.dtypes import DTYPES
from codegen.flags import SpmmGatheredMmaFlags
from codegen.plan import Constant, Plan
from codegen.plans.bsr import gathered
from codegen.plans.bsr.gathered import COLUMNS, CONSUMERS, GROUP_COLUMNS, ROWS
from codegen.plans.bsr.parts import SWIZZLE, WARPGROUP
from codegen.spec import BsrSpmmSpec

MMA_COLUMNS, MMA_DEPTH = 8, 16  # columns of C, and of A, per mma.sync
WARPS = CONSUMERS * WARPGROUP // 32  # consumer warps
WORD_BYTES = 4  # of A, the unit of reads; of a packet, per warp and round: flags of its slots, in halves

TILE = gathered.TILE


def plan(spec: BsrSpmmSpec, stem: str) -> Plan:
    """Plan of the kernel of a spec."""
    gathered.check_fields(spec)
    rows, warp_slots = spec.block.rows, gathered.slots(spec) // WARPS
    step_bytes = rows * MMA_DEPTH * DTYPES[spec.dtype].bytes
    assert step_bytes == 32 * gathered.CHUNK_BYTES, "a lane packs a chunk of a step"
    return gathered.build(
        spec,
        stem,
        template="bsr_spmm/sm90a_gathered_mma.cu.j2",
        accumulators=warp_slots * rows * COLUMNS // 32,
        constants=(
            Constant("kConsumerWarps", WARPS, "warps that compute"),
            Constant("kWarpSlots", warp_slots, "slots of a warp"),
            Constant("kSteps", spec.block.cols // MMA_DEPTH, "steps of 16 columns of a block of A"),
            Constant("kStepBytes", step_bytes, "bytes per such step"),
            Constant("kGroupTiles", GROUP_COLUMNS // MMA_COLUMNS, "mma.syncs across a column group, 8 columns each"),
            Constant("kARowWords", spec.block.cols * DTYPES[spec.dtype].bytes // WORD_BYTES, "words of a row of A"),
            Constant("kCGroupBytes", rows * SWIZZLE, "bytes of one column group of a block row of C"),
        ),
        flags=SpmmGatheredMmaFlags(words_bytes=2 * WARPS * WORD_BYTES),  # for a round and the next one
        a_element="uint32",
        tile=f"{ROWS} x {COLUMNS} of C",
        consumers=f"{WARPS} consumer warps (mma.sync)",
    )
