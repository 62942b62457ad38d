"""The performance model of plans, calibrated by measurements.

The model (:mod:`codegen.select.estimate`) predicts how sizes change a kernel's time: waves, steps, bytes. It does not
know the efficiency of a kernel. Measured rows provide it: a kernel that was slower than others of a row, by more than
the model predicts, is assumed to be slower elsewhere too. Near rows have more weight than distant ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from codegen.errors import SpecError
from codegen.library import NamedSpec
from codegen.parse import parse_spec
from codegen.plan import Plan
from codegen.planning import plan_of
from codegen.select.distance import distance
from codegen.select.estimate import estimate
from codegen.select.problem import Problem
from codegen.select.table import Measurement
from codegen.spec import Spec

# Fitted by leave-one-out cross-validation over 171 tuned problems.
REACH = 2.0  # distance, in factors of two, at which the weight of a row falls to 1 / e
ANOTHER_KEY = 6.0  # additional distance, in factors of two, of a row with another pattern, head dimension or block
DOUBT = 0.5  # log of the slowdown, against the mean of others, that is assumed for a kernel without rows
DOUBT_WEIGHT = 0.02  # weight of that assumption, relative to the weights of rows
FEWEST = 2  # least kernels per row for a comparison; 4 is as good in cross-validation, worse in 2 of 3 models' shapes


@dataclass
class _Correction:
    """The weighted mean of a kernel's deviations in rows."""

    total: float = DOUBT * DOUBT_WEIGHT
    weight: float = DOUBT_WEIGHT

    @property
    def mean(self) -> float:
        return self.total / self.weight


@lru_cache(maxsize=256)  # those of one choice: planned once to see whether they are legal, once to estimate them
def candidate_plan(spec: Spec) -> Plan:
    """Plan of a kernel that may be chosen.

    Raises:
        SpecError: if the spec cannot work on its architecture.
    """
    return plan_of(spec, "choice")


def predicted(problem: Problem, kernels: Mapping[str, NamedSpec], rows: Sequence[Measurement]) -> dict[str, float]:
    """Expected time of each kernel, up to a common factor.

    Args:
        problem: the problem.
        kernels: specs that compute it, by :attr:`Timing.label`.
        rows: rows of the same operator and architecture.

    Returns:
        Expected times by label, without kernels that the model cannot estimate because sizes are missing.
    """
    corrections: dict[str, _Correction] = {label: _Correction() for label in kernels}
    for row in rows:
        found = deviations(row)
        common = found.keys() & corrections.keys()
        if not common:
            continue
        away = distance(problem, row.problem) + ANOTHER_KEY * (row.problem.key() != problem.key())
        weight = math.exp(-away / REACH)
        for label in common:
            corrections[label].total += weight * found[label]
            corrections[label].weight += weight
    expected = {}
    for label, named in kernels.items():
        guess = estimate(candidate_plan(named.spec), problem)
        if guess is not None:
            expected[label] = guess.microseconds * math.exp(corrections[label].mean)
    return expected


_known: dict[
    int, tuple[Measurement, dict[str, float]]
] = {}  # by id of the row; the row is kept alive, so that its id is not reused


def deviations(row: Measurement) -> dict[str, float]:
    """Log of the ratio of measured and modeled time of each kernel, relative to the mean of its row."""
    if id(row) not in _known:
        _known[id(row)] = row, _deviations(row)
    return _known[id(row)][1]


def _deviations(row: Measurement) -> dict[str, float]:
    found = {}
    for timing, cost in zip(row.kernels, row.costs(), strict=True):
        try:
            spec = parse_spec({**row.problem.fields(), **timing.tuning})
            guess = estimate(candidate_plan(spec), row.problem)
        except SpecError:  # an older row that is no longer legal
            continue
        if guess is not None:
            found[timing.label] = math.log(cost / guess.microseconds)
    if len(found) < FEWEST:
        return {}
    mean = sum(found.values()) / len(found)
    return {label: value - mean for label, value in found.items()}
