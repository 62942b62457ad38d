"""Requirements of a receipt: the cases of its spec, and the largest tolerance of a case.

This module has only names. Inputs and oracles are in ``runtime/verify``; tests check that its tables match these names.
"""

from __future__ import annotations

from codegen.operators import operator_of
from codegen.plan import Plan

RANDOM_SHAPES = "random_shapes"
"""The attention case that stands for all random shapes."""

# Largest absolute error allowed on normal inputs. The rounding step of bf16 is 8 times that of fp16.
ABSOLUTE = {"fp16": 2e-3, "bf16": 1.6e-2}
BEYOND_FP8 = 1.0
"""Tolerance of FP8, a sanity bound: results are about 1. Emulations of FP8 check the errors more tightly."""


def case_names(plan: Plan) -> list[str]:
    """Names of the cases that ``codegen verify`` runs for a kernel; the random shapes are one case."""
    operator = operator_of(plan.spec)
    return [*operator.cases(plan, plan.spec), *((RANDOM_SHAPES,) if operator.random_shapes else ())]


def most_allowed(plan: Plan) -> float:
    """Largest tolerance over the cases of a kernel, for any inputs."""
    tolerance = operator_of(plan.spec).tolerance
    if tolerance is not None:
        return tolerance
    return BEYOND_FP8 if plan.spec.is_fp8 else ABSOLUTE[plan.output]
