"""Queries see the first keys and a band of keys around their own position."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field

from codegen.patterns.base import MOST_KEYS, NO_VALUES, Band, PatternBase, PatternNumber
from codegen.patterns.sliding_window import LEFT, OFFSET, RIGHT

SINK = PatternNumber("sink", "sink_keys", "kSink", "sink_keys", "keys at the beginning that every later query sees", 64)


class SinkWindow(PatternBase):
    """Query i sees key j if j <= c + right and (j < sink or j >= c - left), where c = i + kv_len - q_len.

    This is a sliding window plus the first ``sink`` keys, limited by the window's right end, so that a causal window
    stays causal. A spec without ``sink``, ``left`` and ``right`` takes them from the call.
    """

    packs_sequences: ClassVar[bool] = True
    queries: ClassVar[str | None] = "sink_window"
    call_numbers: ClassVar[tuple[PatternNumber, ...]] = (SINK, LEFT, RIGHT)
    kind: Literal["sink_window"]
    sink: int | None = Field(
        default=None,
        ge=1,
        le=MOST_KEYS,
        description="keys at the beginning that every later query sees; omit sink, left and right to pass them "
        "in the call",
    )
    left: int | None = Field(default=None, ge=0, le=MOST_KEYS, description="keys seen before the query's own position")
    right: int | None = Field(
        default=None, ge=0, le=MOST_KEYS, description="keys seen after the query's own position; 0 is causal"
    )

    @property
    def band(self) -> Band | None:
        """The keys of a window and the first ones; None if the call sets the numbers."""
        if self.left is None or self.right is None or self.sink is None:
            return None
        return Band(self.left, self.right, self.sink)

    @property
    def masks_pairs(self) -> bool:
        """Blocks at the end of the sinks and at both edges of the band are partly visible."""
        return True

    @property
    def ramps_up(self) -> bool:
        """Windows of the first queries start before the first key."""
        return True

    def seen_keys(self, kv_len: int, queries: int) -> tuple[float, float]:
        """Keys that a tile sees: mean over tiles, and for the last tile."""
        if self.is_general:
            return super().seen_keys(kv_len, queries)
        assert self.sink is not None and self.left is not None and self.right is not None
        band = float(min(kv_len, self.sink + self.left + self.right + queries))
        return band, band

    def visible(self, q: Any, k: Any, q_len: int, kv_len: int, values: Mapping[str, Any] = NO_VALUES) -> Any:
        """Whether query ``q`` sees key ``k``."""
        center = q + (kv_len - q_len)
        inside = super().visible(q, k, q_len, kv_len, values) & (k <= center + self.right)
        return inside & ((k < self.sink) | (k >= center - self.left))

    @property
    def pair_mask(self) -> str:
        """Condition of a visible pair, as the text of an expression."""
        sink, left, right = map(self.name_of, ("sink", "left", "right"))
        return f"(kv_idx < {sink} or {OFFSET} >= -{left}) and {OFFSET} <= {right}"

    def describe(self) -> str:
        """Description of the pattern."""
        numbers = self.sink, self.left, self.right
        sink, left, right = ("sink", "left", "right") if self.is_general else numbers
        return (
            f"query i sees the first {sink} keys and those from i - {left} to i + {right} "
            "(positions aligned at the end), none after i + right"
        )

    def stem(self) -> str:
        """Short name of the pattern."""
        return "sink_window" if self.is_general else f"sink{self.sink}_window{self.left}_{self.right}"
