"""Shared by the plans of BSR kernels: parameters; on sm_90a, warpgroups, their parts of a tile, and its layout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from codegen.arch import ARCHS, KIB
from codegen.dtypes import DTYPES
from codegen.flags import SpmmFlags
from codegen.plan import (
    Constant,
    Param,
    Registers,
    Ring,
    SharedLayout,
    TensorMap,
    check_budget,
    i32,
    pointer,
    require,
    tensor_map,
)
from codegen.plans.bsr.balance import queue, queue_barriers
from codegen.plans.bsr.epilogue import barriers, epilogue_flags
from codegen.spec import BsrSddmmSpec, BsrSpmmSpec
from codegen.tile_rules import OneOf

WARPGROUP = 128  # threads
WARPGROUP_ROWS = 64  # rows of one wgmma
CONSUMERS = 2  # warpgroups that compute
THREADS = WARPGROUP * (1 + CONSUMERS)  # if a warpgroup produces
# 168 registers x 3 warpgroups at launch = 40 + 2 x 232 afterwards (PTX ISA, "setmaxnreg").
PRODUCER_REGISTERS = 40
CONSUMER_REGISTERS = 232
CONSUMERS_TAKE = "registers per consumer thread; 40 + 2 x 232 equals the 3 x 168 at launch"
SMALL_BLOCK_REGISTERS = 224  # per thread, if 288 threads have an SM to themselves
SWIZZLE = 128  # bytes: width of one column group in shared memory
MOST_BOX = 256  # most elements per side of a box of a tensor map
C_GROUP_BYTES = WARPGROUP_ROWS * SWIZZLE  # per column group of a warpgroup's C

INDEX_PARAMS = (
    pointer("crow_indices", "int", "row offsets: first block of each block row, then the end of the last"),
    pointer("col_indices", "int", "block column of each stored block"),
    i32("index_words", "32-bit words per index, 1 or 2; the kernel reads the low word"),
)
INTERSECTION_PARAMS = (
    pointer("a_crow_indices", "int", "row offsets of A: first block of each block row, then the end of the last"),
    pointer("a_col_indices", "int", "block column of each stored block of A"),
    pointer("b_crow_indices", "int", "row offsets of B: first block of each block row, then the end of the last"),
    pointer("b_col_indices", "int", "block column of each stored block of B, ascending in each row"),
    i32("a_index_words", "32-bit words per index of A, 1 or 2; the kernel reads the low word"),
    i32("b_index_words", "32-bit words per index of B"),
    i32("inner_blocks", "block columns of A, block rows of B"),
)
RUN_PARAMS = (
    i32("column_blocks", "block columns of C"),
    i32("row_runs", "runs per block row: column_blocks / kRunTiles, rounded up"),
    i32("runs", "block rows of C * row_runs"),
)
BLOCK_DIMS = ("cols", "rows", "nnz")
"""Dimensions of the tensor map of a matrix in block-sparse rows."""
A_MAP = tensor_map("a_map", "stored blocks of A", BLOCK_DIMS)
C_MAP = tensor_map("c_map", "C", ("N", "M"), writes=True)
C_BLOCKS_MAP = tensor_map("c_map", "stored blocks of C", BLOCK_DIMS, writes=True)
SDDMM_MAPS = (
    tensor_map("a_map", "A", ("K", "M")),
    tensor_map("b_map", "B", ("K", "N")),
    C_BLOCKS_MAP,
)


def sddmm_maps(spec: BsrSddmmSpec) -> tuple[Param, ...]:
    """Tensor maps of a sampled product whose operands may be stored by columns."""
    found = []
    for name, rows, layout in (("A", "M", spec.a_layout), ("B", "N", spec.b_layout)):
        by_columns = layout == "column_major"
        what, dims = (f"{name}, by columns", (rows, "K")) if by_columns else (name, ("K", rows))
        found.append(tensor_map(f"{name.lower()}_map", what, dims))
    return (*found, C_BLOCKS_MAP)


COLUMNS_PARAM = i32("n", "columns of B and C")


@dataclass(frozen=True)
class Part:
    """A warpgroup's part of a C tile: two warpgroups split a tile of 128 rows by rows, and others by columns.

    Attributes:
        by_rows: whether the tile is split by rows.
        columns: columns per part.
        groups: column groups per part.
    """

    by_rows: bool
    columns: int
    groups: int

    @classmethod
    def of(cls, spec: BsrSpmmSpec | BsrSddmmSpec) -> Part:
        """Part of the tile of a spec."""
        by_rows = spec.tile.m == CONSUMERS * WARPGROUP_ROWS
        columns = spec.tile.n if by_rows else spec.tile.n // CONSUMERS
        return cls(by_rows, columns, columns // group_columns(spec))

    @property
    def registers(self) -> Registers:
        """Register budget per thread of a warpgroup that computes 64 rows of these columns."""
        accumulators = WARPGROUP_ROWS * self.columns // WARPGROUP
        return Registers(accumulators=accumulators, overhead=40, limit=CONSUMER_REGISTERS)

    def constants(self, staging_groups: int) -> tuple[Constant, ...]:
        """Constants of a part and of the staging of its store."""
        rows = Constant("kWarpgroupRows", WARPGROUP_ROWS, "rows of a warpgroup's part")
        return (
            rows if self.by_rows else Constant("kWarpgroupColumns", self.columns, "columns of a warpgroup's part"),
            Constant("kWarpgroupGroups", self.groups, "column groups of a warpgroup's part"),
            Constant("kStagingGroups", staging_groups, "column groups that a warpgroup may have in flight"),
            Constant("kAccumulators", self.registers.accumulators, "accumulators per thread"),
        )


def group_columns(spec: BsrSpmmSpec | BsrSddmmSpec) -> int:
    """Columns per column group."""
    return SWIZZLE // DTYPES[spec.dtype].bytes


def warpgroup_constants(spec: BsrSpmmSpec | BsrSddmmSpec, *own: Constant) -> tuple[Constant, ...]:
    """Constants of a ring that one warpgroup fills for two others, with the kernel's ``own`` constants in between."""
    return (
        Constant("kStages", spec.stages, "depth of the ring of A and B tiles"),
        Constant("kThreads", THREADS, "warpgroup 0 produces, the others consume"),
        *own,
        Constant("kConsumerWarps", CONSUMERS * WARPGROUP // 32, "warps that compute"),
        Constant("kProducerRegisters", PRODUCER_REGISTERS, "registers per producer thread"),
        Constant("kConsumerRegisters", CONSUMER_REGISTERS, CONSUMERS_TAKE),
        Constant("kGroupColumns", group_columns(spec), "columns of a group: one 128-byte swizzled row"),
    )


def small_block_registers(spec: BsrSpmmSpec | BsrSddmmSpec, threads: int, accumulators: int, shared: int) -> Registers:
    """Register budget of a kernel for small blocks with ``ctas_per_sm`` thread blocks on an SM.

    Raises:
        SpecError: if registers or shared memory do not suffice; the system reserves 1 KB per thread block.
    """
    arch, resident = ARCHS[spec.arch], spec.ctas_per_sm
    limit = min(SMALL_BLOCK_REGISTERS, arch.registers_for(threads, resident))
    overhead = 32 + (_further_registers(spec, accumulators) if isinstance(spec, BsrSpmmSpec) else 0)
    registers = Registers(accumulators=accumulators, overhead=overhead, limit=limit)
    check_budget(spec, shared, registers)
    require(
        resident * (shared + KIB) <= arch.shared_memory_per_sm,
        "ctas_per_sm",
        f"is {resident}; thread blocks of {-(-shared // KIB)} KB and 1 KB each do not fit the "
        f"{arch.shared_memory_per_sm // KIB} KB of an SM; use fewer stages or a smaller tile.n",
    )
    return registers


def _further_registers(spec: BsrSpmmSpec, accumulators: int) -> int:
    """Registers for options, besides addresses and loop state, without which the compiler spilled.

    Most are for NVRTC 13.5, which needs a few more than 13.0.
    """
    gelu = spec.epilogue is not None and spec.epilogue.activation == "gelu"
    slim = (spec.block.rows, spec.block.cols) == (32, 16)  # its addresses need more
    further = 8 if spec.is_dynamic else 0  # the scheduler's units, rows split along K
    if spec.accumulate and (spec.is_dynamic or slim or (spec.epilogue is not None and accumulators >= 64)):
        further += 8
    return further + (16 if gelu and accumulators > 64 else 0)


def copies_b(spec: BsrSpmmSpec) -> bool:
    """Whether a prologue copies B, stored by columns, to rows: for the small blocks of wgmma.

    8-bit operands are K-major, like columns, and need no copy.
    """
    by_columns = spec.b_layout == "column_major" and not spec.is_fp8
    return by_columns and spec.mma == "wgmma" and spec.block.rows < WARPGROUP_ROWS


def reads_columns(spec: BsrSpmmSpec) -> bool:
    """Whether the product reads columns of B."""
    return spec.b_layout == "column_major" and not copies_b(spec)


def spmm_params(spec: BsrSpmmSpec) -> tuple[Param, ...]:
    """Parameters of A, B and C."""
    return (A_MAP, *b_params(spec, "K"), C_MAP, *INDEX_PARAMS)


def b_params(spec: BsrSpmmSpec, rows: str) -> tuple[Param, ...]:
    """Parameters of the layout of B; ``rows`` names its number of rows."""
    if reads_columns(spec):
        return (tensor_map("b_map", "B, by columns", (rows, "N")),)
    b = "the copy of B" if copies_b(spec) else "B"
    # If one copy loads whole rows, the last group may extend beyond B.
    whole = "column groups" if spec.block.rows < WARPGROUP_ROWS else "whole column groups"
    groups = tensor_map("b_groups_map", f"{whole} of {b}", ("columns of a group", rows, "groups"))
    return (tensor_map("b_map", b, ("N", rows)), groups)


def spmm_flags(spec: BsrSpmmSpec, mma_n: int) -> SpmmFlags:
    """Template parameters of the main loop of kernels in which a wgmma is as high as a C tile.

    Args:
        spec: the spec.
        mma_n: N of a wgmma.
    """
    return SpmmFlags(mma_n=mma_n, by_columns=spec.b_layout == "column_major", epilogue=epilogue_flags(spec))


ONE_ROW_OF_A = "a step is one 128-byte swizzled row of A deep"
ONE_ROW = "a step is one 128-byte swizzled row deep"


def one_block_row() -> OneOf[Any]:
    """Rule for tiles of one block row."""
    why = "a tile is one block row high: block.rows is"
    return OneOf("m", lambda spec: (spec.block.rows,), lambda spec, sizes: f"{why} {sizes}")


def one_block() -> tuple[OneOf[Any], OneOf[Any]]:
    """Rules for tiles of one square block."""
    return (
        OneOf("m", lambda spec: (spec.block.rows,), lambda spec, sizes: f"a tile is one block: block.rows is {sizes}"),
        OneOf("n", lambda spec: (spec.block.rows,), lambda spec, sizes: f"a tile is one block: block.cols is {sizes}"),
    )


def stage_ring(stages: int) -> Ring:
    """Ring of tiles between the producer and the consumers."""
    return Ring(stages, "full[i]", "empty[i]")


def column_groups(number: int) -> str:
    """A number of column groups, in words."""
    return f"{number} column group{'s' if number > 1 else ''}"


def spmm_staging_groups(spec: BsrSpmmSpec) -> int:
    """Column groups of C that a warpgroup can stage in shared memory."""
    # One is filled while the other is stored; more would cost a stage of the ring. The addend arrives all at once.
    groups = Part.of(spec).groups
    return groups if spec.accumulate else min(2, groups)


def spmm_shared(
    spec: BsrSpmmSpec, a_bytes: int, a_doc: str, c_group_bytes: int = C_GROUP_BYTES, step_blocks: int = 1
) -> SharedLayout:
    """Shared memory of a BSR x dense kernel with ``a_bytes`` bytes of A per stage of its ring.

    A step may have up to ``step_blocks`` blocks of A, each with its own rows of B.
    """
    k, groups, staging_groups = spec.tile.k, spec.tile.n // group_columns(spec), spmm_staging_groups(spec)
    b_bytes = groups * k * SWIZZLE
    shared = SharedLayout()
    shared.add("A", spec.stages * a_bytes, a_doc, ring=stage_ring(spec.stages))
    times = f"{step_blocks} x " if step_blocks > 1 else ""
    b_doc = f"ring of B tiles, {times}{column_groups(groups)} of {k // step_blocks} rows of 128 bytes"
    if reads_columns(spec):
        b_doc = f"ring of B tiles, {spec.tile.n} columns of {k * DTYPES[spec.dtype].bytes} bytes"
    shared.add("B", spec.stages * b_bytes, b_doc, ring=stage_ring(spec.stages))
    c_doc = f"{column_groups(staging_groups)} of C of each warpgroup"
    shared.add("C", CONSUMERS * staging_groups * c_group_bytes, c_doc, stores=True)
    shared.add("Barriers", *barriers(spec, CONSUMERS), align=8)
    if spec.is_dynamic:
        shared.add("QueueBarriers", *queue_barriers(), align=8)
        shared.add("Queue", *queue(spec), 16)
    return shared


def spmm_b_maps(spec: BsrSpmmSpec, step_blocks: int = 1) -> dict[str, TensorMap]:
    """Tensor maps of B: by column group, and of all column groups of a tile; a single map if B is stored by columns.

    One copy loads the rows for one of a step's ``step_blocks`` blocks of A.
    """
    columns, rows = group_columns(spec), spec.tile.k // step_blocks
    if reads_columns(spec):
        return {"b_map": TensorMap((rows, spec.tile.n), SWIZZLE)}
    return {
        "b_map": TensorMap((columns, rows), SWIZZLE),
        "b_groups_map": TensorMap((columns, rows, spec.tile.n // columns), SWIZZLE),
    }
