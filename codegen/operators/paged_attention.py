"""The record of attention over pages."""

from __future__ import annotations

from codegen.operators.record import Operator
from codegen.paged_cases import cases_of
from codegen.plans import paged_attention
from codegen.problem import PagedShape
from codegen.select.default_tables import PAGED_ATTENTION
from codegen.spec import PagedAttentionSpec

PAGED_ATTENTION_OPERATOR = Operator(
    model=PagedAttentionSpec,
    shape=PagedShape,
    kernel=lambda spec: paged_attention,
    rows=PAGED_ATTENTION,
    stem=lambda spec: [
        f"d{spec.head_dim}",
        *(["e4m3"] if spec.cache == "e4m3" else []),
        f"{spec.tile.m}x{spec.tile.n}",
    ],
    title=lambda spec: spec.op,
    computes=lambda spec: ("dtype", "head_dim"),
    cases=lambda plan, spec: [case.name for case in cases_of(spec)],
)
