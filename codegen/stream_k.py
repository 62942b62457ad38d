"""Dividing the tiles that would not fill a last round of thread blocks between all of them."""

from __future__ import annotations

import math
from dataclasses import dataclass

# Shares: about what a second piece's start, writing its part and taking parts together cost beside its steps. Measured:
# 12 us on an H100, where a share of 128 x 128 pairs of heads of 128 takes 1.6 us.
PART_COST = 8
INDEX_RANGE = 2**32  # the kernel multiplies shares by thread blocks in 32 bits


@dataclass(frozen=True)
class StreamK:
    """How the kernel divides tiles ("stream-K", Osama et al. 2023, for the last round only).

    A tile's key blocks are its shares. Thread blocks first do parts of tiles, each a run of shares, then whole tiles.

    Attributes:
        counters: counters of finished shares for each divided tile, one for each warpgroup; 0 between launches.
        part_bytes: what a thread block leaves in global memory of a part.
    """

    counters: int
    part_bytes: int

    def divide(self, tiles: int, shares: int, slots: int) -> tuple[int, int]:
        """Choose how many tiles are divided, and between how many thread blocks: (0, 0) where that would not pay.

        Args:
            tiles: tiles of the problem.
            shares: shares of a tile.
            slots: thread blocks that run at once.
        """
        left = tiles % slots
        total = left * shares
        # Smaller parts are done sooner, but more of them have to be taken together, by one thread block.
        blocks = min(slots, total // max(2, math.isqrt(shares)))
        if blocks == 0 or total * blocks >= INDEX_RANGE or -(-total // blocks) + PART_COST >= shares:
            return 0, 0
        return left, blocks

    def workspace(self, stream_k_tiles: int, stream_k_ctas: int) -> tuple[int, int]:
        """Return the counters, and the bytes for parts (a thread block has parts of two tiles at most)."""
        return stream_k_tiles * self.counters, 2 * stream_k_ctas * self.part_bytes
