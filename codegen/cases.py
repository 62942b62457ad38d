"""Requirements of a receipt: the cases of its spec, and the largest tolerance of a case.

Names alone: inputs and oracles are in ``runtime/verify``, whose tests hold its tables to these names.
"""

from __future__ import annotations

from codegen.operators import operator_of
from codegen.plan import Plan

RANDOM_SHAPES = "random_shapes"
"""The case of attention that is many: all its random shapes."""

# Largest absolute difference allowed on normal inputs. bf16 has 8 times fewer digits than fp16.
ABSOLUTE = {"fp16": 2e-3, "bf16": 1.6e-2}
BEYOND_FP8 = 1.0
"""Of FP8, whose errors are held to emulations: results are about 1, and one that is off by as much is no result."""


def case_names(plan: Plan) -> list[str]:
    """Names of a kernel's cases, as ``codegen verify`` runs them; the random shapes count as one."""
    operator = operator_of(plan.spec)
    return [*operator.cases(plan, plan.spec), *((RANDOM_SHAPES,) if operator.random_shapes else ())]


def most_allowed(plan: Plan) -> float:
    """The largest tolerance that a case of a kernel has, whatever its inputs are."""
    tolerance = operator_of(plan.spec).tolerance
    if tolerance is not None:
        return tolerance
    return BEYOND_FP8 if plan.spec.is_fp8 else ABSOLUTE[plan.output]
