"""The record of the gradients of attention."""

from __future__ import annotations

from codegen import varlen_cases
from codegen.attention_cases import Case, gradient_cases_of
from codegen.combinations import check_gradients, check_score
from codegen.operators.record import Kernel, Operator
from codegen.plan import Plan
from codegen.plans.backward import daux as attention_backward_daux
from codegen.plans.backward import dq_dkdv as attention_backward_dq_dkdv
from codegen.plans.backward import mma_sync as attention_backward_mma_sync
from codegen.plans.backward import wgmma as attention_backward
from codegen.problem import AttentionShape
from codegen.select.default_tables import ATTENTION_BACKWARD
from codegen.select.defaults import attention_backward_features
from codegen.spec import AttentionBackwardSpec


def _kernel(spec: AttentionBackwardSpec) -> Kernel:
    if spec.gradients == "daux":
        return attention_backward_daux
    if spec.mma == "mma":
        return attention_backward_mma_sync
    if spec.gradients == "dq_dkdv":
        return attention_backward_dq_dkdv
    return attention_backward


def _check(spec: AttentionBackwardSpec) -> None:
    check_score(spec)
    check_gradients(spec)


def _cases(spec: AttentionBackwardSpec) -> tuple[Case | varlen_cases.VarlenCase, ...]:
    return varlen_cases.gradient_cases_of(spec) if spec.layout == "varlen" else gradient_cases_of(spec)


def _counts(plan: Plan, spec: AttentionBackwardSpec) -> tuple[str, ...]:
    del plan
    transposes = not spec.by_queries and spec.pattern.fixed_block is not None
    return ("list_batches", "list_heads", "list_length") if transposes else ()


ATTENTION_BACKWARD_OPERATOR = Operator(
    model=AttentionBackwardSpec,
    shape=AttentionShape,
    kernel=_kernel,
    rows=ATTENTION_BACKWARD,
    features=attention_backward_features,
    check=_check,
    stem=lambda spec: [spec.gradients, f"d{spec.head_dim}", spec.pattern.stem()],
    title=lambda spec: f"{spec.gradients} of {spec.pattern.stem()}, d {spec.head_dim}",
    computes=lambda spec: ("dtype", "gradients", "head_dim", "pattern"),
    units=lambda spec, sizes: [("heads", sizes["kv_heads"], "the heads of K")],
    counts=_counts,
    smallest=lambda plan, spec: {
        **{"list_batches": 1, "list_heads": 1, "list_length": 1},
        **dict.fromkeys(spec.pattern.number_params, 0),
    },
    cases=lambda plan, spec: [case.name for case in _cases(spec)],
    random_shapes=True,
    tolerance=1.0,  # errors are fractions of the allowed error
)
