"""Quality of the model's ranking, compared to measured times."""

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
"""Least kernels of a ranking: with two, any order is perfect or reversed."""


@dataclass(frozen=True)
class Ranking:
    """Comparison of a model's order with that of measured times.

    Attributes:
        kernels: number of kernels with an estimate and a time.
        spearman: Spearman's rank correlation: 1 for the same order, 0 for none, -1 for the reverse; None for fewer than
            three kernels, or if all have the same estimate or time.
        first: number of kernels that the model ranks first; several may have the same estimate.
        loss: ratio of their mean time to that of the fastest kernel.
    """

    kernels: int
    spearman: float | None
    first: int
    loss: float

    def told(self) -> str:
        """The comparison in words."""
        known = "not defined" if self.spearman is None else f"{self.spearman:.2f}"
        first = "its first one takes" if self.first == 1 else f"its first {self.first}, ranked equal, take"
        loss = f"{first} {self.loss:.3f} x the time of the fastest"
        return f"rank correlation (Spearman) {known} over {self.kernels} kernels; {loss}"


def spearman(one: Sequence[float], other: Sequence[float]) -> float | None:
    """Spearman's rank correlation, with mean ranks for equal values.

    None for fewer than three values, or if all values of one side are equal, where it is undefined.
    """
    if len(one) < FEWEST or len(set(one)) == 1 or len(set(other)) == 1:
        return None
    return statistics.correlation(_ranks(one), _ranks(other))


def _ranks(values: Sequence[float]) -> list[float]:
    ordered = sorted(values)
    # For equal values, the mean of the first and the last rank.
    return [ordered.index(value) + (ordered.count(value) - 1) / 2 for value in values]


def ranking(problem: Problem, named: Sequence[NamedSpec], costs: Sequence[float]) -> Ranking | None:
    """Comparison of the model's estimates with measured costs.

    Args:
        problem: problem of the kernels.
        named: the kernels.
        costs: cost of each kernel, in any unit.

    Returns:
        The comparison; None if the model has no estimates.
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
