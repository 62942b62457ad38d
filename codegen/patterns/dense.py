"""Every query sees every key."""

from __future__ import annotations

from typing import Literal

from codegen.patterns.base import PatternBase


class Dense(PatternBase):
    """Every query sees every key."""

    kind: Literal["dense"]

    def describe(self) -> str:
        """Return the pattern in words."""
        return "every query sees every key"

    def stem(self) -> str:
        """Return a short name."""
        return "dense"
