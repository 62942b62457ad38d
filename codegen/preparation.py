"""Layouts of prepared matrices, shared by kernels and host: chunks and clusters of block rows.

A plan has the numbers of its kernel (``Plan.row_cutting``, ``Plan.gathered``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

# Least number of partial sums of C with memory. They take at most the memory of C itself or, with few block rows,
# enough to give each thread block work.
FEWEST_PARTS = 128
# Cost of splitting a row along K, in blocks of A: fixed, and per partial sum that is added. If the tiles of block rows
# occupy at most half of the SMs, rows are split if that takes less time, although it is not cheap. Measured on an H200
# with blocks of 32, where a step takes 0.3 us if the L2 is otherwise idle.
JOIN_BLOCKS, JOIN_PART_BLOCKS = 12, 2

RECORD_WORDS = 16  # per round: its block columns, then a StepHeader
ROUND_COLUMNS = RECORD_WORDS - 1  # most block columns per record of a round
COUNT_BITS = 8  # per number in a record's last word: columns, their ring position, blocks, ring positions still needed
ROUNDS_IN_RING = 3  # least rounds that fit the ring: one is multiplied while the next ones load
FEWEST_KEPT = 3  # least rounds for which columns of B stay in the ring, if any stay: 1 or 2 did not pay off
TILE_ROWS = 16  # fixed cost of a tile, in block rows


@dataclass(frozen=True)
class RowCut:
    """Split of the block rows of a matrix, derived from its shape only.

    A block row of more than ``limit`` blocks is split into the fewest chunks, of nearly equal length and, except for
    the last, of whole steps.

    Attributes:
        limit: most blocks per chunk, in whole steps.
        chunks: upper bound of the chunks of all block rows; an empty block row is a chunk too.
        parts: upper bound of the chunks of split block rows; 0 if no block row can be long enough.
    """

    limit: int
    chunks: int
    parts: int

    @classmethod
    def at(cls, limit: int, block_rows: int, blocks: int) -> RowCut:
        """Split of a matrix into chunks of at most ``limit`` blocks, in whole steps."""
        return cls(limit, block_rows + blocks // limit, 2 * blocks // (limit + 1) if blocks > limit else 0)


@dataclass(frozen=True)
class RowCutting:
    """Split-K of long block rows between thread blocks.

    Attributes:
        step: blocks of A per step.
        cheap: blocks per chunk from which storing and adding its partial sum of C is cheap.
        counters: counters of finished chunks per partial sum, one per warpgroup.
        part_bytes: bytes per partial sum of C, a tile in fp32.
    """

    step: int
    cheap: int
    counters: int
    part_bytes: int

    def cut(self, block_rows: int, blocks: int, column_tiles: int = 0, sm_count: int = 0) -> RowCut:
        """Split of a matrix with this number of block rows and stored blocks.

        If the column tiles are given, rows are also split if they are too few for the SMs.
        """
        # A row of limit + 1 blocks has two parts, the most parts per block: 2 / (limit + 1).
        modest = -(-2 * blocks // max(block_rows // 2, FEWEST_PARTS))
        limit, mean = max(self.cheap, modest), -(-blocks // max(1, block_rows))
        chunks = _chunks(mean, block_rows * column_tiles, sm_count)
        if chunks > 1:
            limit = min(limit, -(-mean // chunks))
        return RowCut.at(-(-limit // self.step) * self.step, block_rows, blocks)

    def workspace(self, cut: RowCut, column_tiles: int) -> tuple[int, int]:
        """Number of counters of finished chunks, and bytes of partial sums.

        The bytes are at most those of C, rounded up to whole tiles, or of 128 block rows of C in fp32, if those are
        more. If rows are split because column tiles are few, the bytes are at most those of two tiles per SM.
        """
        tiles = cut.parts * column_tiles
        return tiles * self.counters, tiles * self.part_bytes


def _chunks(mean: int, tiles: int, sm_count: int) -> int:
    """Chunks of a row of ``mean`` blocks if there are few tiles; 1 if splitting does not pay off."""
    if tiles == 0:
        return 1
    # P chunks take the time of mean / P blocks plus additions, with the minimum at P = sqrt(mean / JOIN_PART_BLOCKS).
    chunks = min(sm_count // tiles, math.isqrt(mean // JOIN_PART_BLOCKS))
    if chunks < 2 or mean - mean // chunks <= JOIN_BLOCKS + JOIN_PART_BLOCKS * chunks:
        return 1
    return chunks


@dataclass(frozen=True)
class GatheredLayout:
    """Layout of a matrix for a kernel whose tiles gather block rows.

    Attributes:
        slots: block rows per tile.
        ring_columns: block columns whose rows of B fit shared memory.
        packet_bytes: bytes of a round's packed blocks of A.
    """

    slots: int
    ring_columns: int
    packet_bytes: int


def round_columns(ring_columns: int) -> int:
    """Most block columns per round, for a ring of ``ring_columns``."""
    return min(ROUND_COLUMNS, max(1, ring_columns // ROUNDS_IN_RING))


def kept_rounds(ring_columns: int, columns: int, rounds: int) -> int:
    """Further rounds for which block columns stay in the ring, with room for the next ones; or 0.

    Args:
        ring_columns: block columns that fit the ring.
        columns: distinct block columns that a group needs.
        rounds: least number of rounds of the group.
    """
    kept = ring_columns * rounds // columns - ROUNDS_IN_RING if columns else 0
    return kept if kept >= FEWEST_KEPT else 0


def count_groups(block_rows: int, slots: int, clusters: int = 0, at_once: int = 0) -> int:
    """Number of groups of a matrix's block rows: the fewest that leave no SM idle for long.

    Args:
        block_rows: block rows of the matrix.
        slots: most block rows per group.
        clusters: clusters of column tiles of B, each multiplied by every group; 0 for the fewest groups.
        at_once: number of concurrent clusters; 0 for the fewest groups.
    """
    fewest = -(-block_rows // slots)
    if fewest == 0 or clusters <= 0 or at_once <= 0:
        return fewest

    def duration(groups: int) -> int:
        waves = -(-groups * clusters // at_once)
        return waves * (-(-block_rows // groups) + TILE_ROWS)

    return min(range(fewest, min(2 * fewest, block_rows) + 1), key=duration)
