"""Queries see a prefix of the keys, and the keys up to their own position."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from codegen.patterns.base import NO_VALUES, IndexTensor, PatternBase

MEAN_SHARE = 0.625  # fraction of the keys that a query sees on average, if the prefix is half of the keys


class PrefixLM(PatternBase):
    """Query i of batch b sees key j if j < prefix_len[b] or j <= i + kv_len - q_len."""

    supports_kv_splits: ClassVar[bool] = True
    has_last_key: ClassVar[bool] = True
    queries: ClassVar[str | None] = "prefix_lm"
    kind: Literal["prefix_lm"]

    @property
    def index_tensors(self) -> tuple[IndexTensor, ...]:
        """The lengths of the prefixes."""
        return (IndexTensor("prefix_len", ("batch",), "keys that every query of a batch sees", upper="kv_len"),)

    @property
    def masks_pairs(self) -> bool:
        """Blocks on the diagonal and at the end of the prefix are partly visible."""
        return True

    @property
    def banded(self) -> bool:
        """Ranges start at the first key and never end earlier from query to query."""
        return True

    @property
    def load_imbalanced(self) -> bool:
        """Queries after the prefix see different numbers of keys."""
        return True

    @property
    def surplus_first(self) -> bool:
        """The first queries see the fewest keys."""
        return True

    def seen_keys(self, kv_len: int, queries: int) -> tuple[float, float]:
        """Keys that a tile sees: mean over tiles, and for the last tile."""
        del queries
        return MEAN_SHARE * kv_len, float(kv_len)

    def visible(self, q: Any, k: Any, q_len: int, kv_len: int, values: Mapping[str, Any] = NO_VALUES) -> Any:
        """Whether query ``q`` sees key ``k``."""
        inside = super().visible(q, k, q_len, kv_len, values)
        return inside & ((k < values["prefix_len"]) | (k <= q + (kv_len - q_len)))

    @property
    def pair_mask(self) -> str:
        """Condition of a visible pair, as the text of an expression."""
        return "kv_idx < prefix_len[batch] or kv_idx <= q_idx + kv_len - q_len"

    def describe(self) -> str:
        """Description of the pattern."""
        return "query i sees the keys of its batch's prefix and those up to i (positions aligned at the end)"

    def stem(self) -> str:
        """Short name of the pattern."""
        return "prefix_lm"
