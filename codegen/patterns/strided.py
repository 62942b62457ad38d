"""Queries see every n-th block of keys and the blocks next to their own position."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from codegen.patterns.base import NO_VALUES, PatternBase, StrictInt


class Strided(PatternBase):
    """Query i sees key j if the block of key j is local to it or a stripe, and j is not in its future.

    Key j is in block b = j // block. The query's own block contains the diagonal: o = (i + kv_len - q_len) // block.
    With // rounding down,

    - local: o - b <= ``local``; if not causal, b - o <= ``local`` too;
    - stripe: b % ``stride`` == 0, the same blocks for all queries, including the first block (an attention sink);
    - future, if causal: j > i + kv_len - q_len.

    The definition applies to single queries and does not depend on the tile.
    """

    queries: ClassVar[str | None] = "strided"
    kind: Literal["strided"]
    stride: int = Field(
        ge=2, le=1 << 16, description="distance between stripes, in blocks; all queries share the stripes"
    )
    local: int = Field(ge=0, le=1 << 16, description="blocks next to its own block that a query also sees")
    block: Annotated[Literal[64, 128], StrictInt] = Field(description="keys per block")
    causal: bool = Field(default=True, description="mask the keys after the query's own position")

    @property
    def block_keys(self) -> int:
        """Stripes align with steps, or lie in a step with no other stripe."""
        return self.block

    @property
    def masks_pairs(self) -> bool:
        """Blocks on the diagonal are partly visible, and so are local blocks if a tile has several own blocks."""
        return True

    @property
    def load_imbalanced(self) -> bool:
        """Late queries see more stripes."""
        return self.causal

    def seen_keys(self, kv_len: int, queries: int) -> tuple[float, float]:
        """Keys that a tile sees: mean over tiles, and for the last tile."""
        near = (self.local + 1) * self.block + queries
        last = near + kv_len / self.stride
        mean = near + kv_len / self.stride / 2 if self.causal else last
        return min(kv_len, mean), min(kv_len, last)

    def visible(self, q: Any, k: Any, q_len: int, kv_len: int, values: Mapping[str, Any] = NO_VALUES) -> Any:
        """Whether query ``q`` sees key ``k``."""
        position = q + (kv_len - q_len)
        before = position // self.block - k // self.block
        inside = super().visible(q, k, q_len, kv_len, values)
        stripe = k // self.block % self.stride == 0
        if self.causal:
            return inside & (k <= position) & ((before <= self.local) | stripe)
        return inside & ((before <= self.local) & (before >= -self.local) | stripe)

    def constants(self) -> dict[str, tuple[int, str]]:
        """Lengths of the pattern, in keys."""
        sides = "before" if self.causal else "on either side of"
        return {
            "kBlock": (self.block, "keys of a block of the pattern, and of a stripe"),
            "kPeriod": (self.stride * self.block, "distance between the starts of adjacent stripes, in keys"),
            "kLocalKeys": (self.local * self.block, f"keys of the local blocks {sides} a query's own block"),
        }

    def describe(self) -> str:
        """Description of the pattern."""
        sides, limit = ("before it", ", none after i") if self.causal else ("on either side", "")
        return (
            f"query i sees its own block of {self.block} keys, {self.local} {sides}, and one block in {self.stride} "
            f"from the first one on{limit} (positions aligned at the end)"
        )

    def stem(self) -> str:
        """Short name of the pattern."""
        return f"strided{self.stride}_local{self.local}_b{self.block}" + ("" if self.causal else "_both")
