"""Stream-K tail: all thread blocks share the tiles of a partial last wave."""

from __future__ import annotations

import math
from dataclasses import dataclass

from codegen.problem import COUNTER_BYTES

# Fixed cost of splitting a tile, in work units: start of a second work tile, store of partial O, combination. Measured:
# 12 us on an H100, where a unit of 128 x 128 pairs with heads of 128 takes 1.6 us.
SPLIT_COST = 8
INDEX_RANGE = 2**32  # the kernel multiplies units and thread blocks in 32 bits


@dataclass(frozen=True)
class StreamK:
    """Division of tiles into work units ("stream-K", Osama et al. 2023, for the last wave only).

    The units of a tile are its steps or listed blocks. Thread blocks first process ranges of units, then whole tiles.

    Attributes:
        counters: counters of finished units per split tile, one per warpgroup; 0 between launches.
        partial_bytes: bytes of a thread block's partial O and softmax state in global memory.
    """

    counters: int
    partial_bytes: int

    def divide(self, tiles: int, units: int, slots: int) -> tuple[int, int]:
        """Number of split tiles and of the thread blocks that share them; (0, 0) if splitting does not pay off.

        Args:
            tiles: tiles of the problem.
            units: work units per tile.
            slots: number of concurrent thread blocks.
        """
        left = tiles % slots
        total = left * units
        # Shorter ranges finish sooner, but a thread block combines more of them.
        blocks = min(slots, total // max(2, math.isqrt(units)))
        if blocks == 0 or total * blocks >= INDEX_RANGE or -(-total // blocks) + SPLIT_COST >= units:
            return 0, 0
        return left, blocks

    def workspace(self, stream_k_tiles: int, stream_k_ctas: int) -> tuple[int, int]:
        """Number of counters, and bytes of partial results (at most two tiles per thread block)."""
        return stream_k_tiles * self.counters, 2 * stream_k_ctas * self.partial_bytes

    @property
    def workspace_bytes(self) -> dict[str, str]:
        """Bytes of counters and partial results, as expressions of a launch's parameters."""
        return {
            "units_done": f"stream_k_tiles * {COUNTER_BYTES * self.counters}",
            "partials": f"stream_k_ctas * {2 * self.partial_bytes}",
        }
