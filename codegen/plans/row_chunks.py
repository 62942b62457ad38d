"""Cutting the long block rows of BSR x dense with small blocks into chunks, which several thread blocks multiply."""

from __future__ import annotations

import math
from dataclasses import dataclass

from codegen.dtypes import DTYPES
from codegen.plan import Constant, Param, i32, pointer
from codegen.plans.balance import queue_constants
from codegen.plans.bsr_parts import CONSUMERS
from codegen.spec import BsrSpmmSpec

FLOAT_BYTES = 4
# A chunk leaves its part of C, written and read once through the L2: a 30th of the bytes of B that it reads. For each
# column of a tile a part moves 8 bytes times the rows of a block, a block 2 times its columns: 120 blocks, if square.
PART_SHARE = 30
# There are so few places for parts that they take no more memory than C, or, for a few block rows, as many as give each
# thread block something to do.
FEWEST_PARTS = 128
# Where block rows have tiles for half of the SMs at most, rows are cut though parts are not cheap: it is time that
# counts. In blocks of A: leaving and joining parts takes as long as about so many, and as so many more for each part.
# Measured on an H200 with blocks of 32, a step of which takes 0.3 us where nothing else is on the L2.
JOIN_BLOCKS, JOIN_PART_BLOCKS = 12, 2


@dataclass(frozen=True)
class RowCut:
    """How the block rows of one matrix are cut, as far as its shape tells.

    A block row of more than ``limit`` blocks becomes as few chunks as that allows, nearly equally long and of whole
    steps but for the last.

    Attributes:
        limit: blocks of a chunk at most, whole steps.
        chunks: of all block rows, at most; one without blocks is a chunk too.
        parts: chunks of block rows that have several, at most; 0 where none is long enough.
    """

    limit: int
    chunks: int
    parts: int

    @classmethod
    def of(cls, spec: BsrSpmmSpec, block_rows: int, blocks: int, column_tiles: int = 0, sm_count: int = 0) -> RowCut:
        """Cut a matrix of so many block rows and stored blocks.

        Where the tiles of a block row are given, rows that are too few for so many SMs are cut too.
        """
        part_bytes = 2 * spec.tile.m * spec.tile.n * FLOAT_BYTES
        block_bytes = spec.block.cols * spec.tile.n * DTYPES[spec.dtype].bytes
        cheap = -(-PART_SHARE * part_bytes // block_bytes)
        # A row of limit + 1 blocks has two parts, which is the most parts that a block can have: 2 / (limit + 1).
        modest = -(-2 * blocks // max(block_rows // 2, FEWEST_PARTS))
        limit, mean = max(cheap, modest), -(-blocks // max(1, block_rows))
        pieces = _pieces(mean, block_rows * column_tiles, sm_count)
        if pieces > 1:
            limit = min(limit, -(-mean // pieces))
        step = blocks_of_step(spec)
        return cls.at(-(-limit // step) * step, block_rows, blocks)

    @classmethod
    def at(cls, limit: int, block_rows: int, blocks: int) -> RowCut:
        """Cut a matrix so that a chunk has at most ``limit`` blocks, whole steps."""
        return cls(limit, block_rows + blocks // limit, 2 * blocks // (limit + 1) if blocks > limit else 0)

    def workspace(self, spec: BsrSpmmSpec, column_tiles: int) -> tuple[int, int]:
        """Return the counters of finished chunks, and the bytes for parts.

        The bytes are no more than C's, rounded up to whole tiles, or those of 128 block rows of C in fp32, whichever
        are more; of rows that were cut for so few column tiles, those of two tiles for each SM.
        """
        tiles = self.parts * column_tiles
        return tiles * CONSUMERS, tiles * spec.tile.m * spec.tile.n * FLOAT_BYTES


def _pieces(mean: int, tiles: int, sm_count: int) -> int:
    """Return in how many chunks rows of ``mean`` blocks are cut as they have few tiles: 1 where that does not pay."""
    if tiles == 0:
        return 1
    # P chunks take the time of mean / P blocks and of joining: least with P = sqrt(mean / JOIN_PART_BLOCKS).
    pieces = min(sm_count // tiles, math.isqrt(mean // JOIN_PART_BLOCKS))
    if pieces < 2 or mean - mean // pieces <= JOIN_BLOCKS + JOIN_PART_BLOCKS * pieces:
        return 1
    return pieces


def blocks_of_step(spec: BsrSpmmSpec) -> int:
    """Return how many blocks of A a step has."""
    return spec.tile.k // spec.block.cols


def chunk_params() -> tuple[Param, ...]:
    """Return the parameters that say which unit of work is where, and where parts are left."""
    return (
        pointer("chunks", "int4", "of each chunk: block row, first block, end, first chunk of the row or -1"),
        pointer("chunk_count", "int", "chunks of all block rows"),
        i32("chunk_blocks", "blocks of a chunk, at most"),
        i32("column_tiles", "tiles of a block row"),
        i32("group_tiles", "column tiles whose part of B is meant to be in the L2 at once"),
        pointer("scheduler", "int", "units handed out, thread blocks that ended: both 0 between launches", writes=True),
        pointer("chunks_done", "int", "of each tile of a cut block row and warpgroup: 0 between launches", writes=True),
        pointer("parts", "float", "accumulators of the chunks of cut block rows", writes=True),
    )


def chunk_constants(spec: BsrSpmmSpec) -> tuple[Constant, ...]:
    """Return the constants of the queue of units, and of a part."""
    return (
        *queue_constants(spec),
        Constant("kPartFloats", spec.tile.m * spec.tile.n // CONSUMERS, "floats that a warpgroup leaves of a chunk"),
    )


def chunk_summary(spec: BsrSpmmSpec) -> tuple[tuple[str, str], ...]:
    """Return the lines for ``explain``."""
    blocks = "one thread block per SM" if spec.blocks_per_sm == 1 else f"{spec.blocks_per_sm} thread blocks per SM"
    limit = RowCut.of(spec, 1, 0).limit
    return (
        ("grid", f"{blocks}; units, a chunk of a block row and a column tile, are handed out, columns outermost"),
        (
            "chunk",
            f"{limit} blocks of a block row, more where many rows are long, fewer where tiles are few; parts of C are "
            "joined in order",
        ),
    )
