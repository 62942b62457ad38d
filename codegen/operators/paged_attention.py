"""The record of attention over pages."""

from __future__ import annotations

from codegen.operators.record import Operator
from codegen.plans import paged_attention
from codegen.problem import PagedShape
from codegen.select.default_tables import PAGED_ATTENTION
from codegen.spec import PagedAttentionSpec

_CASES = (
    "decode pages_of_1 pages_of_256 shared_pages heads_first interleaved contiguous several_queries packed_queries "
    "empty_requests long_and_short window sink_window full options lists list_of_tokens listed_repeats counted_lists "
    "many_requests invariant one_key"
)

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
    cases=lambda plan, spec: _CASES.split(),
)
