"""Every query sees every key."""

from __future__ import annotations

from typing import ClassVar, Literal

from codegen.patterns.base import MOST_KEYS, Band, PatternBase
from codegen.patterns.sliding_window import SlidingWindow


class Dense(PatternBase):
    """Every query sees every key."""

    supports_stream_k: ClassVar[bool] = True
    supports_kv_splits: ClassVar[bool] = True
    packs_sequences: ClassVar[bool] = True
    queries: ClassVar[str | None] = "dense"
    dq_order: ClassVar[str | None] = "dense"
    kind: Literal["dense"]

    @property
    def wider(self) -> PatternBase:
        """An equivalent window."""
        return SlidingWindow(kind="sliding_window", left=MOST_KEYS, right=MOST_KEYS)

    @property
    def band(self) -> Band:
        """All keys."""
        return Band(None, None)

    @property
    def never_empty(self) -> bool:
        """Every query sees all key blocks, at least one."""
        return True

    def stream_k_units(self, kv_len: int, rows: int, keys: int, listed: int = 0) -> int:
        """Number of steps."""
        del rows, listed
        return -(-kv_len // keys)

    def describe(self) -> str:
        """Description of the pattern."""
        return "every query sees every key"

    def stem(self) -> str:
        """Short name of the pattern."""
        return "dense"
