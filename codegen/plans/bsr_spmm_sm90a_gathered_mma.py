"""Plan of the sm_90a BSR x dense kernel that gathers block rows and multiplies by mma.sync: for blocks of 16 rows.

A block is as high as an mma.sync: nothing is transposed, and where a warp finds its rows of B is an address
in an ordinary register. What it has in common with the kernel that multiplies by WGMMA is in
:mod:`codegen.plans.gathered`.
"""

from __future__ import annotations

from codegen.dtypes import DTYPES
from codegen.plan import Constant, Plan, Prologue, Registers, TensorMap, check_budget
from codegen.plans import gathered
from codegen.plans.bsr_parts import SWIZZLE, WARPGROUP
from codegen.plans.gathered import COLUMNS, CONSUMERS, GROUP_COLUMNS, ROUND_COLUMNS, ROWS
from codegen.spec import BsrSpmmSpec

MMA_COLUMNS, MMA_DEPTH = 8, 16  # of C, and of A, of one mma.sync
WARPS = CONSUMERS * WARPGROUP // 32  # that compute


def plan(spec: BsrSpmmSpec, stem: str) -> Plan:
    """Work out every number of the kernel."""
    gathered.check_fields(spec)
    rows, cols = spec.block.rows, spec.block.cols
    shared = gathered.layout(spec)
    warp_slots = gathered.slots(spec) // WARPS
    registers = Registers(
        accumulators=warp_slots * rows * COLUMNS // 32, overhead=32, limit=gathered.CONSUMER_REGISTERS
    )
    check_budget(spec, shared.size, registers)
    constants = (
        *gathered.constants(spec),
        Constant("kConsumerWarps", WARPS, "warps that compute"),
        Constant("kWarpSlots", warp_slots, "block rows of a warp"),
        Constant("kSteps", cols // MMA_DEPTH, "steps of 16 columns of a block of A"),
        Constant("kStepBytes", rows * MMA_DEPTH * DTYPES[spec.dtype].bytes, "bytes of one of them"),
        Constant("kGroupTiles", GROUP_COLUMNS // MMA_COLUMNS, "tiles of 8 columns of a column group"),
        Constant("kCGroupBytes", rows * SWIZZLE, "bytes of one column group of a block row of C"),
    )
    return Plan(
        spec=spec,
        stem=stem,
        template="bsr_spmm/sm90a_gathered_mma.cu.j2",
        threads=gathered.THREADS,
        blocks_per_sm=1,
        persistent=True,
        shared=tuple(shared.regions),
        shared_bytes=shared.size,
        registers=registers,
        params=gathered.params(spec, "uint32"),
        tensor_maps={
            "b_map": TensorMap((GROUP_COLUMNS, cols), SWIZZLE),
            "b_groups_map": TensorMap((GROUP_COLUMNS, cols, COLUMNS // GROUP_COLUMNS), SWIZZLE),
            "c_map": TensorMap((GROUP_COLUMNS, rows), SWIZZLE),
        },
        constants=constants,
        values={},
        summary=gathered.summary(spec, f"{ROWS} x {COLUMNS} of C", f"{WARPS} consumer warps (mma.sync)"),
        flops=2 * ROWS * COLUMNS * cols,
        bytes=gathered.packet_bytes(spec) // spec.cluster + ROUND_COLUMNS * gathered.column_bytes(spec),
        cluster=spec.cluster,
        prologue=Prologue(f"{stem}_pack_a", gathered.PACK_THREADS),
    )
