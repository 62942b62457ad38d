"""Split-K of the long block rows of BSR x dense with small blocks, into chunks for several thread blocks."""

from __future__ import annotations

from codegen.dtypes import DTYPES
from codegen.plan import Constant, Param, i32, pointer
from codegen.plans.bsr.balance import queue_constants
from codegen.plans.bsr.parts import CONSUMERS
from codegen.preparation import RowCutting
from codegen.spec import BsrSpmmSpec

FLOAT_BYTES = 4
# The partial sums of a chunk, written and read once through the L2, are a 30th of the bytes of B that it reads. Per
# column of a tile, they are 8 bytes per row of a block, compared to 2 bytes per block column: 120 square blocks.
PART_SHARE = 30


def row_cutting(spec: BsrSpmmSpec) -> RowCutting:
    """Split of long block rows."""
    part_bytes = spec.tile.m * spec.tile.n * FLOAT_BYTES
    block_bytes = spec.block.cols * spec.tile.n * DTYPES[spec.dtype].bytes
    cheap = -(-PART_SHARE * 2 * part_bytes // block_bytes)
    return RowCutting(blocks_of_step(spec), cheap, CONSUMERS, part_bytes)


def blocks_of_step(spec: BsrSpmmSpec) -> int:
    """Blocks of A per step."""
    return spec.tile.k // spec.block.cols


def chunk_params() -> tuple[Param, ...]:
    """Parameters of work units and of partial sums."""
    return (
        pointer("chunks", "int4", "for each chunk: block row, first block, end block, first chunk of the row or -1"),
        pointer("chunk_count", "int", "number of chunks of all block rows"),
        i32("chunk_blocks", "most blocks per chunk"),
        i32("column_tiles", "tiles per block row"),
        i32("group_tiles", "column tiles whose parts of B fit the L2 together"),
        pointer("scheduler", "int", "units taken, finished thread blocks; both are 0 between launches", writes=True),
        pointer(
            "chunks_done",
            "int",
            "finished chunks of each tile of a split block row, by warpgroup; 0 between launches",
            writes=True,
        ),
        pointer("parts", "float", "partial sums of C: accumulators of the chunks of split block rows", writes=True),
    )


def chunk_constants(spec: BsrSpmmSpec) -> tuple[Constant, ...]:
    """Constants of the queue of units, and of a partial sum."""
    return (
        *queue_constants(spec),
        Constant("kPartialFloats", spec.tile.m * spec.tile.n // CONSUMERS, "floats of a warpgroup's partial sum"),
    )


def chunk_order(spec: BsrSpmmSpec) -> str:
    """Description of the thread blocks of a launch and the order of their units."""
    blocks = "one thread block per SM" if spec.ctas_per_sm == 1 else f"{spec.ctas_per_sm} thread blocks per SM"
    return f"{blocks}; dynamic scheduler of units (chunk of a block row, column tile), columns outermost"


def chunk_summary(spec: BsrSpmmSpec) -> tuple[tuple[str, str], ...]:
    """Line for ``explain``."""
    limit = row_cutting(spec).cut(1, 0).limit
    return (
        (
            "chunk",
            f"{limit} blocks of a block row, more if many rows are long, fewer if there are few tiles; partial sums "
            "of C are added in order",
        ),
    )
