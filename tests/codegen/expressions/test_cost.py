"""What an expression costs: counted where it is computed, and told by explain."""

from __future__ import annotations

import json
from typing import Any

import pytest

from codegen.expressions.cost import Cost, cost_of
from codegen.library import find_spec
from codegen.patterns.block_lists import expression_of
from codegen.planning import plan_for
from codegen.tools.explain import explained

COSTS = {
    "q_idx >= kv_idx": Cost(0, 0, 1),
    "q_idx // 64 == kv_idx // 64": Cost(1, 1, 1),
    "q_idx // 3 > kv_idx": Cost(6, 0, 1),
    "kv_idx % max(q_idx, 1) == 0": Cost(1, 0, 21),
    "doc[batch, q_idx] == doc[batch, kv_idx]": Cost(5, 7, 1),
    "doc[batch, q_idx + 1] == 3": Cost(9, 0, 0),
    "table[q_idx - kv_idx] > 0.0": Cost(0, 0, 7),
    "q_idx * q_idx > kv_idx": Cost(2, 0, 2),  # 64 bits
    "exp(float(kv_idx)) < float(q_idx)": Cost(1, 3, 1),
}
AUX = {"doc": "int32[batch, q_len]", "table": "fp32[8]"}


@pytest.mark.parametrize("text", COSTS)
def test_each_part_is_counted_where_it_is_computed(text: str) -> None:
    assert cost_of(expression_of(text, {name: each for name, each in AUX.items() if name in text})) == COSTS[text]


def test_explain_tells_costs_and_indices() -> None:
    mask = "doc[batch, q_idx] == doc[0, 7] and table[q_idx - kv_idx] > one"
    aux = {**AUX, "one": "fp32[]"}
    pattern: dict[str, Any] = {"kind": "block_lists", "block": {"q": 64, "kv": 64}, "mask": mask, "aux": aux}
    plan = plan_for(find_spec({"op": "attention", "arch": "sm_90a", "head_dim": 64, "pattern": pattern}))
    told = json.dumps(explained(plan)["facts"])
    assert str(cost_of(plan.spec.pattern.expression)) in told
    assert '"aux doc": "int32[batch, q_len]; indices i, j: j clamped to its size"' in told
    assert '"aux table": "fp32[8]; indices i: i clamped to its size"' in told
    assert '"aux one": "fp32[]"' in told
