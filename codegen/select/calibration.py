"""The model of plans, calibrated by measurements.

The model (:mod:`codegen.select.estimate`) knows how sizes change a kernel's time: waves, steps, bytes. How well a
kernel does what the model counts, it does not know; measured rows do: a kernel that took longer than others of a row,
by more than the model says, is taken to do so elsewhere. Near rows count more than far ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from codegen.errors import SpecError
from codegen.library import NamedSpec
from codegen.parse import parse_spec
from codegen.planning import plan_of
from codegen.select.distance import distance
from codegen.select.estimate import estimate
from codegen.select.problem import Problem
from codegen.select.table import Measurement

# Found by leaving out, of 171 tuned problems, each in turn.
REACH = 2.0  # factors of two from a row over which its weight falls to 1 / e
ANOTHER_KEY = 6.0  # factors of two that a row of another pattern, head dimension or block is further away
DOUBT = 0.5  # of a kernel that no row has: as a logarithm, how much slower than the mean of others it is taken to be
DOUBT_WEIGHT = 0.02  # of that, beside the weights of rows
FEWEST = 4  # kernels of a row by which others can be told apart


@dataclass
class _Correction:
    """The weighted mean of what rows say of a kernel."""

    total: float = DOUBT * DOUBT_WEIGHT
    weight: float = DOUBT_WEIGHT

    @property
    def mean(self) -> float:
        return self.total / self.weight


def predicted(problem: Problem, kernels: Mapping[str, NamedSpec], rows: Sequence[Measurement]) -> dict[str, float]:
    """The expected time of each kernel, up to a factor that all have in common.

    Args:
        problem: the problem.
        kernels: specs that compute it, by :attr:`Timing.label`.
        rows: of the same operator and architecture.

    Returns:
        Expected times by label, without kernels that the model cannot estimate: it needs the sizes.
    """
    corrections: dict[str, _Correction] = {label: _Correction() for label in kernels}
    for row in rows:
        found = deviations(row)
        away = distance(problem, row.problem) + ANOTHER_KEY * (row.problem.key() != problem.key())
        weight = math.exp(-away / REACH)
        for label in found.keys() & corrections.keys():
            corrections[label].total += weight * found[label]
            corrections[label].weight += weight
    expected = {}
    for label, named in kernels.items():
        guess = estimate(plan_of(named.spec, "choice"), problem)
        if guess is not None:
            expected[label] = guess.microseconds * math.exp(corrections[label].mean)
    return expected


_known: dict[
    int, tuple[Measurement, dict[str, float]]
] = {}  # by the row's id; the row is kept, so that it stays its own


def deviations(row: Measurement) -> dict[str, float]:
    """Logarithm of each kernel's time over that of the model, beside the mean of its row."""
    if id(row) not in _known:
        _known[id(row)] = row, _deviations(row)
    return _known[id(row)][1]


def _deviations(row: Measurement) -> dict[str, float]:
    found = {}
    for timing, cost in zip(row.kernels, row.costs(), strict=True):
        try:
            spec = parse_spec({**row.problem.fields(), **timing.tuning})
            guess = estimate(plan_of(spec, "row"), row.problem)
        except SpecError:  # of an earlier day
            continue
        if guess is not None:
            found[timing.label] = math.log(cost / guess.microseconds)
    if len(found) < FEWEST:
        return {}
    mean = sum(found.values()) / len(found)
    return {label: value - mean for label, value in found.items()}
