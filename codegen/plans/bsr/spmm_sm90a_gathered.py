"""Plan of the sm_90a BSR x dense kernel that gathers block rows and multiplies by WGMMA: for blocks of 32 rows.

The product is computed transposed, as in :mod:`codegen.plans.bsr.spmm_sm90a_swap_ab`. Its common parts with
the mma.sync kernel are in :mod:`codegen.plans.bsr.gathered`.
"""

from __future__ import annotations

from codegen.dtypes import DTYPES
from codegen.flags import SpmmGatheredFlags
from codegen.plan import Constant, Plan
from codegen.plans.bsr import gathered
from codegen.plans.bsr.gathered import COLUMNS, CONSUMERS, GROUP_COLUMNS, ROWS
from codegen.plans.bsr.parts import SWIZZLE, WARPGROUP
from codegen.spec import BsrSpmmSpec

TILE = gathered.TILE


def plan(spec: BsrSpmmSpec, stem: str) -> Plan:
    """Plan of the kernel of a spec."""
    gathered.check_fields(spec)
    rows, bytes_of_element = spec.block.rows, DTYPES[spec.dtype].bytes
    warpgroup_slots = gathered.slots(spec) // CONSUMERS
    staged = gathered.STAGING_BYTES // (rows * COLUMNS * bytes_of_element)
    accumulators, a_row_bytes = rows * GROUP_COLUMNS // WARPGROUP, spec.block.cols * bytes_of_element
    return gathered.build(
        spec,
        stem,
        template="bsr_spmm/sm90a_gathered.cu.j2",
        accumulators=warpgroup_slots * COLUMNS // GROUP_COLUMNS * accumulators,
        constants=(
            Constant("kConsumers", CONSUMERS, "warpgroups that compute"),
            Constant("kSlots", warpgroup_slots, "slots of a warpgroup"),
            Constant("kStagingSlots", staged, "slots stored at a time"),
            Constant("kAccumulators", accumulators, "accumulators per thread, block row and column group"),
            Constant("kARowBytes", a_row_bytes, "bytes of a row of a block of A"),
            Constant("kARowChunks", a_row_bytes // gathered.CHUNK_BYTES, "16-byte chunks of such a row"),
            Constant("kCGroupBytes", rows * SWIZZLE, "bytes of one column group of a block row of C"),
        ),
        flags=SpmmGatheredFlags(mma_n=rows, a_row_bytes=a_row_bytes),
        a_element="uint4",
        tile=f"{ROWS} x {COLUMNS} of C, computed transposed",
        consumers=f"{CONSUMERS} consumer warpgroups (WGMMA)",
    )
