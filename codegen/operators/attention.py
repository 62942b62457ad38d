"""The record of attention."""

from __future__ import annotations

from codegen import paged_cases, varlen_cases
from codegen.attention_cases import Case, cases_of
from codegen.combinations import check_options, check_score
from codegen.operators.record import Kernel, Operator, Sizes, Unit
from codegen.plans.attention import mma_sync as attention_mma_sync
from codegen.plans.attention import sm90a as attention_sm90a
from codegen.plans.attention import wmma as attention_wmma
from codegen.problem import AttentionShape
from codegen.select.default_tables import ATTENTION
from codegen.select.defaults import attention_features
from codegen.select.variations import attention_variations
from codegen.spec import AttentionSpec


def _kernel(spec: AttentionSpec) -> Kernel:
    if spec.mma == "wgmma":
        return attention_sm90a
    return attention_wmma if spec.mma == "wmma" else attention_mma_sync


def _check(spec: AttentionSpec) -> None:
    check_score(spec)
    check_options(spec)


def _cases(spec: AttentionSpec) -> tuple[Case | varlen_cases.VarlenCase | paged_cases.PagedCase, ...]:
    if spec.layout == "paged":
        return paged_cases.prefill_cases(spec)
    return varlen_cases.cases_of(spec) if spec.layout == "varlen" else cases_of(spec)


def _units(spec: AttentionSpec, sizes: Sizes) -> list[Unit]:
    return [("heads", sizes["kv_heads"] * spec.pack_gqa, "the heads of K times the packed heads")]


ATTENTION_OPERATOR = Operator(
    model=AttentionSpec,
    shape=AttentionShape,
    kernel=_kernel,
    rows=ATTENTION,
    features=attention_features,
    variations=attention_variations,
    check=_check,
    stem=lambda spec: [f"d{spec.head_dim}", spec.pattern.stem()],
    title=lambda spec: f"{spec.pattern.stem()}, d {spec.head_dim}",
    units=_units,
    counts=lambda plan, spec: () if spec.pattern.fixed_block is None else ("list_batches", "list_heads"),
    smallest=lambda plan, spec: {
        **{"list_batches": 1, "list_heads": 1, "list_length": 1},
        **dict.fromkeys(spec.pattern.number_params, 0),
    },
    cases=lambda plan, spec: [case.name for case in _cases(spec)],
    random_shapes=True,
)
