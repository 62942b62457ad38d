"""The record of the selection of key blocks."""

from __future__ import annotations

from codegen.operators.record import Operator, Sizes, Unit
from codegen.plans import select_topk
from codegen.problem import SelectShape
from codegen.select.default_tables import SELECT_TOPK
from codegen.spec import SelectTopkSpec

CLOSE_PRODUCTS = 1e-3
"""Products that differ by at least this much are never reordered."""
_CASES = (
    "plain causal causal_short_queries causal_more_queries ties ties_causal one_block more_than_there_are odd_lengths "
    "narrow_head odd_head wide_head many_key_blocks many_query_blocks always_beyond always_near"
)


def _units(spec: SelectTopkSpec, sizes: Sizes) -> list[Unit]:
    del spec
    return [("heads", sizes["kv_heads"], "the heads of K"), ("head_dim", 8, "the elements of a load")]


SELECT_TOPK_OPERATOR = Operator(
    model=SelectTopkSpec,
    shape=SelectShape,
    kernel=lambda spec: select_topk,
    rows=SELECT_TOPK,
    stem=lambda spec: [f"{spec.tile.m}x{spec.tile.n}"],
    title=lambda spec: spec.op,
    computes=lambda spec: ("dtype",),  # the call decides the number of blocks
    units=_units,
    cases=lambda plan, spec: _CASES.split(),
    tolerance=CLOSE_PRODUCTS,
)
