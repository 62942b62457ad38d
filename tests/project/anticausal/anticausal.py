"""Queries see the keys from their own position on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from codegen.patterns.base import NO_VALUES, PatternBase


class Anticausal(PatternBase):
    """Query i sees key j if j >= i + kv_len - q_len."""

    queries: ClassVar[str | None] = "anticausal"
    kind: Literal["anticausal"]

    @property
    def masks_pairs(self) -> bool:
        """Blocks on the diagonal are partly visible."""
        return True

    @property
    def load_imbalanced(self) -> bool:
        """Rows differ in length."""
        return True

    def seen_keys(self, kv_len: int, queries: int) -> tuple[float, float]:
        """Number of keys that a tile sees: the mean, and that of the last tile."""
        return (kv_len + queries) / 2, float(queries)

    def visible(self, q: Any, k: Any, q_len: int, kv_len: int, values: Mapping[str, Any] = NO_VALUES) -> Any:
        """Whether query ``q`` sees key ``k``."""
        return super().visible(q, k, q_len, kv_len, values) & (k >= q + (kv_len - q_len))

    @property
    def pair_mask(self) -> str:
        """Condition of a visible pair, as the text of an expression."""
        return "kv_idx >= q_idx + (kv_len - q_len)"

    def describe(self) -> str:
        """The pattern in words."""
        return "query i sees the keys from its own position on (positions aligned at the end)"

    def stem(self) -> str:
        """Short name."""
        return "anticausal"
