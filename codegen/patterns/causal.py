"""Queries see the keys up to their own position."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field

from codegen.patterns.base import MOST_KEYS, NO_VALUES, Band, PatternBase
from codegen.patterns.sliding_window import SlidingWindow


class Causal(PatternBase):
    """Query i sees key j if j <= i + shift; shift is kv_len - q_len (bottom_right) or 0 (top_left)."""

    supports_kv_splits: ClassVar[bool] = True
    packs_sequences: ClassVar[bool] = True
    queries: ClassVar[str | None] = "causal"
    unordered_dq: ClassVar[bool] = True
    dq_order: ClassVar[str | None] = "causal"
    kind: Literal["causal"]
    align: Literal["bottom_right", "top_left"] = Field(
        default="bottom_right",
        description="alignment of the diagonal: bottom_right, as in FlashAttention (the last query sees every "
        "key), or top_left, as in torch's is_causal",
    )

    @property
    def wider(self) -> PatternBase | None:
        """An equivalent window; None if the diagonal is not aligned like a window's."""
        if self.align != "bottom_right":
            return None
        return SlidingWindow(kind="sliding_window", left=MOST_KEYS, right=0)

    @property
    def band(self) -> Band | None:
        """The keys up to a query's position; None if the diagonal is not aligned like a band's."""
        return Band(None, 0) if self.align == "bottom_right" else None

    @property
    def masks_pairs(self) -> bool:
        """Blocks on the diagonal are partly visible."""
        return True

    @property
    def banded(self) -> bool:
        """Ranges start at the first key and end later from query to query."""
        return True

    @property
    def shift_invariant(self) -> bool:
        """Visibility of a pair depends only on the distance between key and query."""
        return True

    @property
    def load_imbalanced(self) -> bool:
        """Rows have different lengths."""
        return True

    @property
    def surplus_first(self) -> bool:
        """The first queries see the fewest keys."""
        return True

    def seen_keys(self, kv_len: int, queries: int) -> tuple[float, float]:
        """Keys that a tile sees: mean over tiles, and for the last tile."""
        return min(float(kv_len), (kv_len + queries) / 2), float(kv_len)

    def visible(self, q: Any, k: Any, q_len: int, kv_len: int, values: Mapping[str, Any] = NO_VALUES) -> Any:
        """Whether query ``q`` sees key ``k``."""
        shift = kv_len - q_len if self.align == "bottom_right" else 0
        return super().visible(q, k, q_len, kv_len, values) & (k <= q + shift)

    @property
    def pair_mask(self) -> str:
        """Condition of a visible pair, as the text of an expression."""
        return f"kv_idx <= q_idx{' + (kv_len - q_len)' if self.align == 'bottom_right' else ''}"

    def describe(self) -> str:
        """Description of the pattern."""
        return f"query i sees the keys up to its own position, diagonal aligned {self.align}"

    def stem(self) -> str:
        """Short name of the pattern."""
        return "causal"
