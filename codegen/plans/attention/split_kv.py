"""Split-KV across thread blocks: parts of a tile's keys, for calls whose tiles are too few to fill the GPU."""

from __future__ import annotations

import math

from codegen.plan import Constant, Param, i32, pointer
from codegen.problem import AttentionShape
from codegen.spec import AttentionSpec

MOST_PARTS = 16
"""Parts of a tile at most: the last one to end adds the results of all."""
LEAST_KEYS = 512
"""Keys of a part at least. The length of a request is known on the device alone."""
FLOAT = 4
PARAMS = (
    pointer("partials", "float", "partial results: unnormalized O and softmax state of parts", writes=True),
    pointer("parts_done", "int", "finished parts of each tile, by warpgroup; 0 between launches", writes=True),
    i32("splits", "work tiles of a tile: parts of its keys, or nothing if it has few"),
)
SUMMARY = ("split KV", f"up to {MOST_PARTS} parts of the keys of a tile, in thread blocks of their own")


def split_params(spec: AttentionSpec) -> tuple[Param, ...]:
    """Parameters of the parts."""
    return PARAMS if spec.split_kv else ()


def split_constants(spec: AttentionSpec, partial_floats: int) -> list[Constant]:
    """Constants of the parts."""
    if not spec.split_kv:
        return []
    return [
        Constant("kPartialFloats", partial_floats, "floats of a warpgroup's partial result"),
        Constant("kLeastPartSteps", -(-LEAST_KEYS // spec.tile.n), "steps of a part at least"),
    ]


def splits_of(spec: AttentionSpec, shape: AttentionShape, tile_queries: int, slots: int) -> int:
    """Parts of each tile of a call: as many as run concurrently, if all requests have the same number of queries.

    Args:
        spec: of the kernel.
        shape: of the call.
        tile_queries: queries of a tile.
        slots: number of concurrent thread blocks.
    """
    if not spec.split_kv:
        return 1
    full = shape.q_len / tile_queries
    of_head = math.ceil(full) if shape.sequences == 1 else full + shape.sequences / 2
    tiles = of_head * (shape.heads // spec.pack_gqa)
    return max(1, min(MOST_PARTS, int(slots / tiles), shape.kv_len // LEAST_KEYS))


def split_memory(warpgroups: int, partial_floats: int, slots: int, splits: int) -> tuple[int, int]:
    """Counters of finished parts, and bytes of their results: the same for all calls with split tiles.

    Tiles may be twice as many as ``splits_of`` expects, if the last one of each request is empty. Then there are up to
    twice as many parts as run concurrently, two of a tile or more.

    Args:
        warpgroups: warpgroups of a thread block that compute.
        partial_floats: floats of a warpgroup's partial result.
        slots: number of concurrent thread blocks.
        splits: parts of each tile.
    """
    if splits == 1:
        return 0, 0
    return slots * warpgroups, 2 * slots * warpgroups * partial_floats * FLOAT
