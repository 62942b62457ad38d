"""Queries see a band of keys around their own position."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field

from codegen.patterns.base import NO_VALUES, PatternBase

LONGEST = 1 << 24
"""Keys of the longest reach of a window to either side."""
OFFSET = "(kv_idx - (q_idx + kv_len - q_len))"  # of a key from the query's own position


class SlidingWindow(PatternBase):
    """Query i sees key j if -left <= j - (i + kv_len - q_len) <= right (FlashAttention's window_size)."""

    supports_stream_k: ClassVar[bool] = True
    supports_kv_splits: ClassVar[bool] = True
    queries: ClassVar[str | None] = "sliding_window"
    dq_order: ClassVar[str | None] = "sliding_window"
    kind: Literal["sliding_window"]
    left: int = Field(ge=0, le=LONGEST, description="keys seen before the query's own position")
    right: int = Field(ge=0, le=LONGEST, description="keys seen after the query's own position; 0 is causal")

    @property
    def masks_pairs(self) -> bool:
        """Blocks at both edges of the band are partly visible."""
        return True

    @property
    def banded(self) -> bool:
        """Keys begin and end later from query to query."""
        return True

    @property
    def left_bounded(self) -> bool:
        """Late queries see a window that begins after the first key."""
        return True

    @property
    def shift_invariant(self) -> bool:
        """Whether a pair is hidden depends on the distance of key and query."""
        return True

    @property
    def ramps_up(self) -> bool:
        """Windows of the first queries begin before the first key."""
        return True

    @property
    def window(self) -> int:
        """Keys of the window."""
        return self.left + self.right + 1

    def seen_keys(self, kv_len: int, queries: int) -> tuple[float, float]:
        """The number of keys that a tile sees: the mean one, and the last one."""
        band = float(min(kv_len, self.left + self.right + queries))
        return band, band

    def visible(self, q: Any, k: Any, q_len: int, kv_len: int, values: Mapping[str, Any] = NO_VALUES) -> Any:
        """Whether query ``q`` sees key ``k``."""
        centre = q + (kv_len - q_len)
        return super().visible(q, k, q_len, kv_len, values) & (k >= centre - self.left) & (k <= centre + self.right)

    def stream_k_units(self, kv_len: int, rows: int, keys: int, listed: int = 0) -> int:
        """Return the most steps that the windows of neighbouring queries touch."""
        del listed
        return min(-(-kv_len // keys), (self.left + rows + self.right + keys - 2) // keys + 1)

    @property
    def pair_mask(self) -> str:
        """The condition of a visible pair, as the text of an expression."""
        return f"{OFFSET} >= -kWindowLeft and {OFFSET} <= kWindowRight"

    def constants(self) -> dict[str, tuple[int, str]]:
        """Return the reach of the window."""
        return {
            "kWindowLeft": (self.left, "keys seen before the query's own position"),
            "kWindowRight": (self.right, "keys seen after it"),
        }

    def describe(self) -> str:
        """Return the pattern in words."""
        return f"query i sees the keys from i - {self.left} to i + {self.right} (positions aligned at the end)"

    def stem(self) -> str:
        """Return a short name."""
        return f"window{self.left}_{self.right}"
