"""Queries see the first keys and a band of keys around their own position."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field

from codegen.patterns.base import NO_VALUES, PatternBase

OFFSET = "(kv_idx - (q_idx + kv_len - q_len))"  # of a key from the query's own position


class SinkWindow(PatternBase):
    """Query i sees key j if j <= c + right and (j < sink or j >= c - left), where c = i + kv_len - q_len.

    That is a sliding window and the first ``sink`` keys; these do not reach beyond the window's right end, so that a
    causal window stays causal.
    """

    queries: ClassVar[str | None] = "sink_window"
    kind: Literal["sink_window"]
    sink: int = Field(ge=1, le=1 << 24, description="keys at the beginning that every later query sees")
    left: int = Field(ge=0, le=1 << 24, description="keys seen before the query's own position")
    right: int = Field(ge=0, le=1 << 24, description="keys seen after the query's own position; 0 is causal")

    @property
    def masks_pairs(self) -> bool:
        """Blocks at the end of the sinks and at both edges of the band are partly visible."""
        return True

    @property
    def ramps_up(self) -> bool:
        """Windows of the first queries begin before the first key."""
        return True

    def seen_keys(self, kv_len: int, queries: int) -> tuple[float, float]:
        """The number of keys that a tile sees: the mean one, and the last one."""
        band = float(min(kv_len, self.sink + self.left + self.right + queries))
        return band, band

    def visible(self, q: Any, k: Any, q_len: int, kv_len: int, values: Mapping[str, Any] = NO_VALUES) -> Any:
        """Whether query ``q`` sees key ``k``."""
        centre = q + (kv_len - q_len)
        inside = super().visible(q, k, q_len, kv_len, values) & (k <= centre + self.right)
        return inside & ((k < self.sink) | (k >= centre - self.left))

    @property
    def pair_mask(self) -> str:
        """The condition of a visible pair, as the text of an expression."""
        return f"(kv_idx < kSink or {OFFSET} >= -kWindowLeft) and {OFFSET} <= kWindowRight"

    def constants(self) -> dict[str, tuple[int, str]]:
        """Return the number of sinks and the reach of the window."""
        return {
            "kSink": (self.sink, "keys at the beginning that every later query sees"),
            "kWindowLeft": (self.left, "keys seen before the query's own position"),
            "kWindowRight": (self.right, "keys seen after it"),
        }

    def describe(self) -> str:
        """Return the pattern in words."""
        return (
            f"query i sees the first {self.sink} keys and those from i - {self.left} to i + {self.right} "
            "(positions aligned at the end), none after i + right"
        )

    def stem(self) -> str:
        """Return a short name."""
        return f"sink{self.sink}_window{self.left}_{self.right}"
