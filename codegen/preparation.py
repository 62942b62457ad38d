"""Layout of prepared matrices that kernels and host share: chunks, and clusters, of block rows.

A plan has the numbers of its kernel (``Plan.row_cutting``, ``Plan.gathered``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

# Least number of partial sums of C that have memory. They take no more memory than C itself, or for a few block rows as
# much as gives each thread block work.
FEWEST_PARTS = 128
# Cost of splitting a row along K, in blocks of A: fixed, and for each partial sum that is added. Where block rows have
# tiles for half of the SMs at most, rows are split if that takes less time, though it is not cheap. Measured on an H200
# with blocks of 32, a step of which takes 0.3 us where nothing else is on the L2.
JOIN_BLOCKS, JOIN_PART_BLOCKS = 12, 2

RECORD_WORDS = 16  # of a round: its block columns, then a StepHeader
ROUND_COLUMNS = RECORD_WORDS - 1  # block columns of a round that its record has room for
COUNT_BITS = 8  # of a number in a record's last word: columns, their place in the ring, blocks, places still needed
ROUNDS_IN_RING = 3  # that fit the ring at least: one is multiplied while the next ones come
FEWEST_KEPT = 3  # rounds for which B columns stay resident, or none at all: 1 or 2 did not pay
TILE_ROWS = 16  # fixed cost of a tile, in block rows


@dataclass(frozen=True)
class RowCut:
    """Split of the block rows of one matrix, from its shape alone.

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
    def at(cls, limit: int, block_rows: int, blocks: int) -> RowCut:
        """Cut a matrix so that a chunk has at most ``limit`` blocks, whole steps."""
        return cls(limit, block_rows + blocks // limit, 2 * blocks // (limit + 1) if blocks > limit else 0)


@dataclass(frozen=True)
class RowCutting:
    """Split-K of long block rows between thread blocks.

    Attributes:
        step: blocks of A of a step.
        cheap: blocks of a chunk from which storing and adding its partial sum of C costs little.
        counters: counters of finished chunks for each partial sum, one for each warpgroup.
        part_bytes: bytes of a partial sum of C, a tile in fp32.
    """

    step: int
    cheap: int
    counters: int
    part_bytes: int

    def cut(self, block_rows: int, blocks: int, column_tiles: int = 0, sm_count: int = 0) -> RowCut:
        """Cut a matrix of so many block rows and stored blocks.

        Where the tiles of a block row are given, rows that are too few for so many SMs are cut too.
        """
        # A row of limit + 1 blocks has two parts, which is the most parts that a block can have: 2 / (limit + 1).
        modest = -(-2 * blocks // max(block_rows // 2, FEWEST_PARTS))
        limit, mean = max(self.cheap, modest), -(-blocks // max(1, block_rows))
        chunks = _chunks(mean, block_rows * column_tiles, sm_count)
        if chunks > 1:
            limit = min(limit, -(-mean // chunks))
        return RowCut.at(-(-limit // self.step) * self.step, block_rows, blocks)

    def workspace(self, cut: RowCut, column_tiles: int) -> tuple[int, int]:
        """Counters of finished chunks, and the bytes for parts.

        The bytes are no more than C's, rounded up to whole tiles, or those of 128 block rows of C in fp32, whichever
        are more; of rows that were cut for so few column tiles, those of two tiles for each SM.
        """
        tiles = cut.parts * column_tiles
        return tiles * self.counters, tiles * self.part_bytes


def _chunks(mean: int, tiles: int, sm_count: int) -> int:
    """Chunks of a row of ``mean`` blocks where tiles are few: 1 where splitting does not pay."""
    if tiles == 0:
        return 1
    # P chunks take the time of mean / P blocks and of adding: least with P = sqrt(mean / JOIN_PART_BLOCKS).
    chunks = min(sm_count // tiles, math.isqrt(mean // JOIN_PART_BLOCKS))
    if chunks < 2 or mean - mean // chunks <= JOIN_BLOCKS + JOIN_PART_BLOCKS * chunks:
        return 1
    return chunks


@dataclass(frozen=True)
class GatheredLayout:
    """What a kernel whose tiles gather block rows takes of a matrix.

    Attributes:
        slots: block rows of a tile.
        ring_columns: block columns whose rows of B have a place in shared memory.
        packet_bytes: bytes of a round's blocks of A, as they are packed.
    """

    slots: int
    ring_columns: int
    packet_bytes: int


def round_columns(ring_columns: int) -> int:
    """The largest number of block columns that a round loads, for a ring of that many."""
    return min(ROUND_COLUMNS, max(1, ring_columns // ROUNDS_IN_RING))


def kept_rounds(ring_columns: int, columns: int, rounds: int) -> int:
    """Further rounds for which block columns stay in the ring and leave room for the next ones, or 0.

    Args:
        ring_columns: block columns that have room.
        columns: different ones that a group needs.
        rounds: that it has at least.
    """
    kept = ring_columns * rounds // columns - ROUNDS_IN_RING if columns else 0
    return kept if kept >= FEWEST_KEPT else 0


def count_groups(block_rows: int, slots: int, clusters: int = 0, at_once: int = 0) -> int:
    """Number of groups of a matrix's block rows: the fewest that leave no SM idle for long.

    Args:
        block_rows: of the matrix.
        slots: rows of a group, at most.
        clusters: of tiles of B's columns, each multiplied by every group; 0 for the fewest groups.
        at_once: clusters that run at once; 0 for the fewest groups.
    """
    fewest = -(-block_rows // slots)
    if fewest == 0 or clusters <= 0 or at_once <= 0:
        return fewest

    def duration(groups: int) -> int:
        waves = -(-groups * clusters // at_once)
        return waves * (-(-block_rows // groups) + TILE_ROWS)

    return min(range(fewest, min(2 * fewest, block_rows) + 1), key=duration)
