"""Plan of the sm_90a BSR x dense kernel that gathers block rows and multiplies by WGMMA: for blocks of 32 rows.

The product is computed transposed, as in :mod:`codegen.plans.bsr_spmm_sm90a_narrow`. What it has in common with the
kernel that multiplies by mma.sync is in :mod:`codegen.plans.gathered`.
"""

from __future__ import annotations

from codegen.dtypes import DTYPES
from codegen.plan import Constant, Plan, Prologue, Registers, TensorMap, check_budget
from codegen.plans import gathered
from codegen.plans.bsr_parts import SWIZZLE, WARPGROUP
from codegen.plans.gathered import COLUMNS, CONSUMERS, GROUP_COLUMNS, ROUND_COLUMNS, ROWS
from codegen.spec import BsrSpmmSpec


def plan(spec: BsrSpmmSpec, stem: str) -> Plan:
    """Work out every number of the kernel."""
    gathered.check_fields(spec)
    dtype = DTYPES[spec.dtype]
    rows, cols = spec.block.rows, spec.block.cols
    shared = gathered.layout(spec)
    warpgroup_slots = gathered.slots(spec) // CONSUMERS
    staged = gathered.STAGING_BYTES // (rows * COLUMNS * dtype.bytes)
    groups, accumulators = COLUMNS // GROUP_COLUMNS, rows * GROUP_COLUMNS // WARPGROUP
    registers = Registers(
        accumulators=warpgroup_slots * groups * accumulators, overhead=32, limit=gathered.CONSUMER_REGISTERS
    )
    check_budget(spec, shared.size, registers)
    constants = (
        *gathered.constants(spec),
        Constant("kConsumers", CONSUMERS, "warpgroups that compute"),
        Constant("kSlots", warpgroup_slots, "block rows of a warpgroup"),
        Constant("kStagingSlots", staged, "of these, how many leave at a time"),
        Constant("kAccumulators", accumulators, "accumulators of a thread for one block row and column group"),
        Constant("kARowBytes", cols * dtype.bytes, "bytes of a row of a block of A"),
        Constant("kCGroupBytes", rows * SWIZZLE, "bytes of one column group of a block row of C"),
    )
    return Plan(
        spec=spec,
        stem=stem,
        template="bsr_spmm/sm90a_gathered.cu.j2",
        threads=gathered.THREADS,
        blocks_per_sm=1,
        persistent=True,
        shared=tuple(shared.regions),
        shared_bytes=shared.size,
        registers=registers,
        params=gathered.params(spec, "uint4"),
        tensor_maps={
            "b_map": TensorMap((GROUP_COLUMNS, cols), SWIZZLE),
            "b_groups_map": TensorMap((GROUP_COLUMNS, cols, groups), SWIZZLE),
            "c_map": TensorMap((GROUP_COLUMNS, rows), SWIZZLE),
        },
        constants=constants,
        values={"mma_n": rows, "a_row_bytes": cols * dtype.bytes},
        summary=gathered.summary(
            spec, f"{ROWS} x {COLUMNS} of C, computed transposed", f"{CONSUMERS} consumer warpgroups (WGMMA)"
        ),
        flops=2 * ROWS * COLUMNS * cols,
        bytes=gathered.packet_bytes(spec) // spec.cluster + ROUND_COLUMNS * gathered.column_bytes(spec),
        cluster=spec.cluster,
        prologue=Prologue(f"{stem}_pack_a", gathered.PACK_THREADS),
    )
