"""Queries see a band of keys around their own position."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field

from codegen.patterns.base import MOST_KEYS, NO_VALUES, Band, PatternBase, PatternNumber

OFFSET = "(kv_idx - (q_idx + kv_len - q_len))"  # of a key relative to the query's own position
LEFT = PatternNumber("left", "window", "kWindowLeft", "window_left", "keys seen before the query's own position", 2047)
RIGHT = PatternNumber("right", "window", "kWindowRight", "window_right", "keys seen after the query's own position", 0)


class SlidingWindow(PatternBase):
    """Query i sees key j if -left <= j - (i + kv_len - q_len) <= right (FlashAttention's window_size).

    A spec without ``left`` and ``right`` takes them from the call.
    """

    supports_stream_k: ClassVar[bool] = True
    supports_kv_splits: ClassVar[bool] = True
    packs_sequences: ClassVar[bool] = True
    queries: ClassVar[str | None] = "sliding_window"
    dq_order: ClassVar[str | None] = "sliding_window"
    call_numbers: ClassVar[tuple[PatternNumber, ...]] = (LEFT, RIGHT)
    kind: Literal["sliding_window"]
    left: int | None = Field(
        default=None,
        ge=0,
        le=MOST_KEYS,
        description="keys seen before the query's own position; omit left and right to pass them in the call",
    )
    right: int | None = Field(
        default=None, ge=0, le=MOST_KEYS, description="keys seen after the query's own position; 0 is causal"
    )

    @property
    def band(self) -> Band | None:
        """The keys of a window; None if the call sets the numbers."""
        if self.left is None or self.right is None:
            return None
        return Band(self.left, self.right)

    @property
    def masks_pairs(self) -> bool:
        """Blocks at both edges of the band are partly visible."""
        return True

    @property
    def banded(self) -> bool:
        """Ranges start and end later from query to query."""
        return True

    @property
    def left_bounded(self) -> bool:
        """Windows of late queries start after the first key."""
        return True

    @property
    def shift_invariant(self) -> bool:
        """Visibility of a pair depends only on the distance between key and query."""
        return True

    @property
    def ramps_up(self) -> bool:
        """Windows of the first queries start before the first key."""
        return True

    @property
    def window(self) -> int | None:
        """Keys of the window; None if the call sets it."""
        return None if self.is_general else self._around + 1

    @property
    def _around(self) -> int:
        """Keys of the window other than the query's own position."""
        assert self.left is not None and self.right is not None
        return self.left + self.right

    def seen_keys(self, kv_len: int, queries: int) -> tuple[float, float]:
        """Keys that a tile sees: mean over tiles, and for the last tile."""
        if self.is_general:
            return super().seen_keys(kv_len, queries)
        band = float(min(kv_len, self._around + queries))
        return band, band

    def visible(self, q: Any, k: Any, q_len: int, kv_len: int, values: Mapping[str, Any] = NO_VALUES) -> Any:
        """Whether query ``q`` sees key ``k``."""
        center = q + (kv_len - q_len)
        return super().visible(q, k, q_len, kv_len, values) & (k >= center - self.left) & (k <= center + self.right)

    def stream_k_units(self, kv_len: int, rows: int, keys: int, listed: int = 0) -> int:
        """Most steps that the windows of adjacent queries touch."""
        del listed
        return min(-(-kv_len // keys), (self._around + rows + keys - 2) // keys + 1)

    @property
    def pair_mask(self) -> str:
        """Condition of a visible pair, as the text of an expression."""
        return f"{OFFSET} >= -{self.name_of('left')} and {OFFSET} <= {self.name_of('right')}"

    def describe(self) -> str:
        """Description of the pattern."""
        left, right = ("left", "right") if self.is_general else (self.left, self.right)
        return f"query i sees the keys from i - {left} to i + {right} (positions aligned at the end)"

    def stem(self) -> str:
        """Short name of the pattern."""
        return "window" if self.is_general else f"window{self.left}_{self.right}"
