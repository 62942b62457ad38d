"""Quality of the model's ranking of kernels that were timed since."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from codegen.errors import SpecError
from codegen.library import NamedSpec
from codegen.planning import plan_of
from codegen.select.estimate import estimate
from codegen.select.problem import Problem

FEWEST = 3
"""Kernels of a ranking: of two, every order is a perfect one, or its reverse."""


@dataclass(frozen=True)
class Ranking:
    """A model's order beside that of measured times.

    Attributes:
        kernels: how many have both.
        spearman: Spearman's rank correlation: 1 for the same order, 0 for none, -1 for the reverse; None for fewer than
            three kernels, or where all have the same estimate or time.
        first: kernels that the model puts first: several may have the same estimate.
        loss: what those take, in the mean, over the fastest.
    """

    kernels: int
    spearman: float | None
    first: int
    loss: float

    def told(self) -> str:
        """Return it in words."""
        known = "not defined" if self.spearman is None else f"{self.spearman:.2f}"
        first = "its first one takes" if self.first == 1 else f"its first {self.first}, which it ranks alike, take"
        return f"rank correlation (Spearman) {known} over {self.kernels} kernels; {first} {self.loss:.3f} x the fastest"


def spearman(one: Sequence[float], other: Sequence[float]) -> float | None:
    """Spearman's rank correlation: that of the ranks, equal values having the mean of theirs.

    None for fewer than three values, or where all values of one side are equal: it is not defined there.
    """
    if len(one) < FEWEST or len(set(one)) == 1 or len(set(other)) == 1:
        return None
    return statistics.correlation(_ranks(one), _ranks(other))


def _ranks(values: Sequence[float]) -> list[float]:
    ordered = sorted(values)
    # Of equal values: the middle between the first place that one has and the last.
    return [ordered.index(value) + (ordered.count(value) - 1) / 2 for value in values]


def ranking(problem: Problem, named: Sequence[NamedSpec], costs: Sequence[float]) -> Ranking | None:
    """Compare the model's estimates with measured costs.

    Args:
        problem: what the kernels computed.
        named: the kernels.
        costs: of each, in any unit.

    Returns:
        The comparison; None if the model has no estimate of any of them.
    """
    pairs = []
    for each, cost in zip(named, costs, strict=True):
        guess = _guess(each, problem)
        if guess is not None:
            pairs.append((guess, cost))
    if not pairs:
        return None
    guesses, times = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    first = [time for guess, time in pairs if guess == min(guesses)]
    return Ranking(len(pairs), spearman(guesses, times), len(first), statistics.mean(first) / min(times))


def _guess(named: NamedSpec, problem: Problem) -> float | None:
    try:
        guess = estimate(plan_of(named.spec, named.stem), problem)
    except SpecError:
        return None
    return None if guess is None else guess.microseconds
