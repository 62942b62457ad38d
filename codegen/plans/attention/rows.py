"""Assignment of queries to the rows of an sm_90a attention tile."""

from __future__ import annotations

from dataclasses import dataclass

from codegen.patterns.base import Block
from codegen.plan import Constant
from codegen.plans.attention.params import asks_heads
from codegen.spec import AttentionSpec

WARPGROUP_ROWS = 64  # rows of one wgmma
SWIZZLE = 128  # bytes: width of one column group in shared memory
Q_DIMS = ("head_dim", "q_len", "heads", "batch")
"""Dimensions of the tensor maps of Q, O and their gradients, innermost first."""
KV_DIMS = ("head_dim", "kv_len", "kv_heads", "batch")
"""Dimensions of the tensor maps of K, V and their gradients, innermost first."""


@dataclass(frozen=True)
class Rows:
    """Assignment of queries to the rows of a tile.

    The warpgroups of a sub-tile belong to one query block: they share a list, hence K and V. If a query block does not
    fill a warpgroup, the remaining rows of the warpgroup are padding.

    Attributes:
        heads: query heads packed into the rows of a query.
        sub_tiles: query blocks per tile, each with its own list.
        sub_tile_queries: queries per sub-tile.
        warpgroup_queries: queries per warpgroup.
        boxes: copies per column group of Q: one, or one per sub-tile if there is padding.
        packed: whether rows are not consecutive queries of one head.
        asks_heads: whether the kernel needs the head of a row.
    """

    heads: int
    sub_tiles: int
    sub_tile_queries: int
    warpgroup_queries: int
    boxes: int
    packed: bool
    asks_heads: bool

    @classmethod
    def of(cls, spec: AttentionSpec) -> Rows:
        """Rows of the tile of a spec."""
        block, heads, m = spec.pattern.fixed_block, spec.pack_gqa, spec.tile.m
        block_rows = m if block is None else min(m, block.q * heads)
        sub_tiles = m // max(block_rows, WARPGROUP_ROWS)
        padded = block_rows < WARPGROUP_ROWS
        return cls(
            heads=heads,
            sub_tiles=sub_tiles,
            sub_tile_queries=block_rows // heads,
            warpgroup_queries=min(block_rows, WARPGROUP_ROWS) // heads,
            boxes=sub_tiles if padded else 1,
            packed=heads > 1 or padded,
            asks_heads=asks_heads(spec),
        )

    @property
    def dims(self) -> tuple[str, ...]:
        """Dimensions of the tensor maps of Q and O, innermost first."""
        return ("head_dim", "heads of a pack", "q_len", "packs", "batch") if self.packed else Q_DIMS

    @property
    def tile_queries(self) -> int:
        """Queries per tile."""
        return self.sub_tiles * self.sub_tile_queries

    @property
    def box_queries(self) -> int:
        """Queries per copy of Q."""
        return self.tile_queries // self.boxes

    def box(self, queries: int) -> tuple[int, ...]:
        """Box of ``queries`` queries in a tensor map, without the columns."""
        return (self.heads, queries, 1, 1) if self.packed else (queries, 1, 1)

    def constants(self, groups: int, block: Block | None) -> list[Constant]:
        """Constants of packed rows."""
        load_bytes = groups * self.boxes * self.box_queries * self.heads * SWIZZLE
        listed = [] if block is None else [Constant("kBlockQueries", block.q, "queries that share a list")]
        padding = "" if self.warpgroup_queries * self.heads == WARPGROUP_ROWS else "; its other rows are padding"
        heads = Constant("kPackGqa", self.heads, "query heads of a pack: row = query * kPackGqa + head")
        return [
            *([heads] if self.asks_heads else []),
            Constant("kTileQueries", self.tile_queries, "queries of a tile"),
            Constant("kWarpgroupQueries", self.warpgroup_queries, f"queries of a warpgroup{padding}"),
            Constant("kQBoxes", self.boxes, "copies that fill a column group of Q, one for each warpgroup's rows"),
            Constant("kQLoadBytes", load_bytes, "bytes that the copies of a Q tile load"),
            *listed,
        ]
