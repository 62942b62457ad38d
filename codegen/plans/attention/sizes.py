"""Sizes of an sm_90a attention kernel, derived from the tile of its spec."""

from __future__ import annotations

from dataclasses import dataclass

from codegen.dtypes import DTYPES
from codegen.patterns import Block
from codegen.plans.attention.rows import SWIZZLE, WARPGROUP_ROWS, Rows
from codegen.spec import AttentionSpec

WARPGROUP = 128  # threads


@dataclass(frozen=True)
class Sizes:
    """Sizes derived from the tile of a spec.

    Attributes:
        spec: the spec.
        rows: assignment of queries to the rows of a tile.
        sub_tiles: parts of a tile with their own key blocks.
        consumers: warpgroups that compute.
    """

    spec: AttentionSpec
    rows: Rows
    sub_tiles: int
    consumers: int

    @classmethod
    def of(cls, spec: AttentionSpec) -> Sizes:
        """Sizes for the tile of a spec."""
        rows = Rows.of(spec)
        consumers = spec.tile.m // WARPGROUP_ROWS * spec.kv_splits
        return cls(spec, rows, max(rows.sub_tiles, spec.kv_splits), consumers)

    @property
    def block(self) -> Block | None:
        """Block shape of the index lists, if there are any."""
        return self.spec.pattern.fixed_block

    @property
    def columns(self) -> int:
        """Columns per column group."""
        return SWIZZLE // DTYPES[self.spec.dtype].bytes

    @property
    def groups(self) -> int:
        """Column groups per head. TMA zero-fills a group beyond the head, and does not store that part."""
        return -(-self.spec.head_dim // self.columns)

    @property
    def fills_groups(self) -> bool:
        """Whether no column group extends beyond the head."""
        return self.spec.head_dim % self.columns == 0

    @property
    def q_rows(self) -> int:
        """Contiguous rows of Q in shared memory: those of a warpgroup or of a tile."""
        return WARPGROUP_ROWS if self.spec.share_kv_loads else self.spec.tile.m

    @property
    def kv_bytes(self) -> int:
        """Bytes of K, or of V, per step."""
        return self.spec.tile.n * self.groups * SWIZZLE

    @property
    def block_steps(self) -> int:
        """Steps per listed block; also 1 if a step has several blocks."""
        return 1 if self.block is None else max(1, self.block.kv // self.spec.tile.n)

    @property
    def step_blocks(self) -> int:
        """Loads per step: its listed blocks, if it has several."""
        return 1 if self.block is None else max(1, self.spec.tile.n // self.block.kv)

    @property
    def partial_floats(self) -> int:
        """Floats of a warpgroup's partial result: O, and two maxima and two sums per thread."""
        return WARPGROUP * (WARPGROUP_ROWS * self.spec.head_dim // WARPGROUP + 4)

    @property
    def skip_masked(self) -> bool:
        """Whether warpgroups skip steps of their tile without visible keys.

        With ping_pong all warpgroups take part in each step. A step wider than the distance between the first and the
        last warpgroup is hardly ever fully masked for one of them.
        """
        spec, apart = self.spec, self.spec.tile.m - WARPGROUP_ROWS
        alone = self.rows.sub_tiles == spec.kv_splits == 1 and not self.rows.packed and spec.schedule == "cooperative"
        return spec.pattern.banded and alone and spec.tile.n <= apart
