"""Shared by the plans of BSR kernels in which all warps load and compute: copies, parts of a tile, occupancy."""

from __future__ import annotations

from dataclasses import dataclass

from codegen.arch import ARCHS, KIB
from codegen.dtypes import DTYPES
from codegen.plan import Constant, Registers, Ring, SharedLayout, SharedRegion
from codegen.plans.bsr.fp8 import MMA_SYNC_DEPTH, OUTPUT_BYTES, mma_sync_overhead
from codegen.spec import BsrSddmmSpec, BsrSpgemmSpec

COPY_BYTES = 16  # of one cp.async and of one row of an 8 x 8 matrix of ldmatrix
MMA = 16  # rows and depth of one mma.sync; rows, columns and depth of one WMMA product
# With one extra 16-byte chunk, a row has an odd number of chunks, so that eight rows of a fragment use distinct banks.
PADDING_BYTES = 16
# A warp stores 2 floats per lane and 4 rows at a time: rows 8 banks apart do not conflict.
STAGING_PADDING = 8
PADDED = "8 rows lie in distinct banks"
FRAGMENT_REGISTERS = {"mma": 4, "wmma": 8}  # per 16 x 16 elements of A or B
OVERHEAD_REGISTERS = 40  # addresses and loop state: an allowance
FP8_OVERHEAD_REGISTERS = 48  # products in addition to sums; with 40, a tile of 32 x 128 spilled below a limit of 80
MOST_BLOCKS = 16  # most thread blocks per SM on any of these architectures


@dataclass(frozen=True)
class Tiles:
    """Layout and distribution of the tiles of a step: swizzled for mma.sync, with padded rows for WMMA.

    Attributes:
        spec: the spec.
        warps: warps per thread block.
        warp_rows: rows of C per warp.
        warp_columns: columns of C per warp.
        b_shape: rows and columns of a B tile in shared memory.
        sets: number of slices whose fragments a warp holds at a time.
    """

    spec: BsrSddmmSpec | BsrSpgemmSpec
    warps: int
    warp_rows: int
    warp_columns: int
    b_shape: tuple[int, int]
    sets: int

    @property
    def threads(self) -> int:
        """Threads per block."""
        return 32 * self.warps

    @property
    def copy(self) -> int:
        """Elements per 16-byte chunk."""
        return COPY_BYTES // DTYPES[self.spec.dtype].bytes

    @property
    def output_bytes(self) -> int:
        """Bytes per element of C."""
        if self.spec.is_fp8:
            return OUTPUT_BYTES[self.spec.output]
        return DTYPES[self.spec.dtype].bytes

    @property
    def padding(self) -> int:
        """Padding per row of a tile, in elements."""
        return PADDING_BYTES // DTYPES[self.spec.dtype].bytes if self.spec.mma == "wmma" else 0

    @property
    def a_bytes(self) -> int:
        """Bytes of an A tile."""
        return self.spec.tile.m * (self.spec.tile.k + self.padding) * DTYPES[self.spec.dtype].bytes

    @property
    def b_bytes(self) -> int:
        """Bytes of a B tile."""
        rows, columns = self.b_shape
        return rows * (columns + self.padding) * DTYPES[self.spec.dtype].bytes

    @property
    def staging_stride(self) -> int:
        """Row stride of a strip of C, in elements; the elements are floats with WMMA."""
        return self.warp_columns + (STAGING_PADDING if self.spec.mma == "wmma" else 0)

    def shared(self) -> tuple[SharedLayout, SharedRegion]:
        """Ring of tiles, and the staging of C, which overlaps them."""
        spec, (b_rows, b_columns) = self.spec, self.b_shape
        kept = "padded" if self.padding else "swizzled"
        a_doc = f"A tiles, {spec.tile.m} rows of {spec.tile.k} elements, {kept}"
        b_doc = f"B tiles, {b_rows} rows of {b_columns} elements, {kept}"
        ring = SharedLayout()
        ring.add("A", spec.stages * self.a_bytes, a_doc, ring=Ring(spec.stages))
        ring.add("B", spec.stages * self.b_bytes, b_doc, ring=Ring(spec.stages))
        element = 4 if self.spec.mma == "wmma" else self.output_bytes
        staging = SharedRegion(
            "Staging",
            0,
            self.warps * MMA * self.staging_stride * element,
            "strips of C, one per warp; overlap the tiles",
            "A",
            stores=True,
        )
        ring.size = max(ring.size, staging.bytes)
        return ring, staging

    def occupancy(self, shared_bytes: int) -> tuple[int, Registers]:
        """Thread blocks per SM, and the corresponding registers per thread."""
        arch = ARCHS[self.spec.arch]
        overhead = OVERHEAD_REGISTERS
        if self.spec.is_fp8:
            overhead = mma_sync_overhead(self.spec, FP8_OVERHEAD_REGISTERS)
        fragments = (self.warp_rows + self.warp_columns) // MMA * FRAGMENT_REGISTERS[self.spec.mma]
        held = self.warp_rows * self.warp_columns // 32 + self.sets * fragments
        # As many as shared memory (the system reserves 1 KB per block), registers and warps allow.
        blocks = max(
            1,
            min(
                MOST_BLOCKS,
                arch.shared_memory_per_sm // (shared_bytes + KIB),
                arch.blocks_for(self.threads, held + overhead),
                arch.warps_per_sm // self.warps,
            ),
        )
        limit = arch.registers_for(self.threads, blocks)
        return blocks, Registers(accumulators=held, overhead=overhead, limit=limit)

    def constants(self) -> tuple[Constant, ...]:
        """Constants that all of these kernels have."""
        columns = self.spec.tile.n // self.warp_columns
        padded = (
            Constant("kAStride", self.spec.tile.k + self.padding, f"row stride of an A tile, in elements: {PADDED}"),
            Constant("kBStride", self.b_shape[1] + self.padding, f"row stride of a B tile, in elements: {PADDED}"),
            Constant("kStagingStride", self.staging_stride, "row stride of a strip, in floats"),
        )
        return (
            Constant("kStages", self.spec.stages, "depth of the ring of A and B tiles"),
            Constant("kThreads", self.threads, "all load and compute"),
            Constant("kCopy", self.copy, "elements of a chunk, one 16-byte copy"),
            Constant("kATile", self.a_bytes, "bytes of an A tile"),
            Constant("kBTile", self.b_bytes, "bytes of a B tile"),
            *(padded if self.padding else ()),
            Constant("kWarpsN", columns, "warps along a row of C"),
            Constant("kWarpRows", self.warp_rows, "rows of C of one warp"),
            Constant("kWarpColumns", self.warp_columns, "columns of C of one warp"),
        )

    def summary(self) -> tuple[tuple[str, str], ...]:
        """Schedule and pipeline of the tiles, for ``explain``."""
        depth = MMA_SYNC_DEPTH if self.spec.is_fp8 else MMA
        how = "WMMA 16 x 16 x 16" if self.spec.mma == "wmma" else f"mma.sync 16 x 8 x {depth}"
        part = f"{self.warps} warps of {self.warp_rows} x {self.warp_columns}"
        return (
            ("schedule", f"{self.spec.schedule}: all warps load ({self.spec.copy_}) and compute ({how}), {part}"),
            ("pipeline", f"ring of {self.spec.stages} pairs of tiles"),
        )
