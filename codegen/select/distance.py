"""Distance of two problems."""

from __future__ import annotations

from codegen.dtypes import FP8
from codegen.select.problem import Problem

OPTIONS_APART = 4.0  # additional distance of a measured problem with other options, in factors of two
ANOTHER_TYPE = 64.0  # larger than any distance within a type
NEAR = 1e-6  # rows at distances that differ by less count together
TWIN_TYPE = 2 * NEAR  # of the other 16-bit type, whose kernels take about the same time: after rows of the own type
MEASURED = 3 * NEAR  # up to it a row is of the same problem


def distance(problem: Problem, measured: Problem) -> float:
    """Distance of a measured problem: factors of two, summed over the axes on which both are known."""
    axes, others = problem.places(), measured.places()
    away = sum(abs(a - b) for name, a in axes.items() if a is not None and (b := others.get(name)) is not None)
    away += OPTIONS_APART * (problem.options() != measured.options())
    if problem.dtype == measured.dtype:
        return away
    return away + (ANOTHER_TYPE if {problem.dtype, measured.dtype} & set(FP8) else TWIN_TYPE)
