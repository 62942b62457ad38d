"""Noise between timings: the range of repeats."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

REPEATS = 5
"""Repeats of each timing. The true median lies between the least and the greatest of five in 15 of 16 cases."""
Change = Literal["faster", "slower", "noise"]


@dataclass(frozen=True)
class Interval:
    """Repeats of a timing: minimum, median, maximum."""

    low: float
    middle: float
    high: float

    @property
    def spread(self) -> float:
        """Half the width, relative to the median."""
        return (self.high - self.low) / 2 / self.middle


def interval(samples: Sequence[float]) -> Interval:
    """The interval of repeats."""
    return Interval(min(samples), statistics.median(samples), max(samples))


def change(now: Interval, before: Interval) -> Change:
    """Compare two intervals of repeats. A timing has changed if they are disjoint."""
    if now.high < before.low:
        return "faster"
    return "slower" if now.low > before.high else "noise"
