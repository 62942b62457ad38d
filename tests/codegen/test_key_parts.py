"""``key_parts``: what is filled in, what the plan of such a kernel has, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from codegen.errors import SpecError
from codegen.library import find_spec
from codegen.plans import plan_for
from codegen.spec import AttentionSpec, parse_spec

FIELDS: dict[str, Any] = {"op": "attention", "arch": "sm_90a", "head_dim": 128, "pattern": {"kind": "dense"}}
PARTS = {**FIELDS, "key_parts": 2}
LISTS = {"kind": "topk", "k": 8, "block": {"q": 128, "kv": 128}}


@pytest.mark.parametrize(
    ("change", "m", "n", "stages"),
    [
        ({}, 64, 64, 2),
        ({"head_dim": 64}, 128, 64, 4),
        ({"head_dim": 64, "tile": {"n": 128}}, 64, 128, 2),
        ({"head_dim": 64, "pattern": {"kind": "causal"}}, 128, 64, 4),
        ({"head_dim": 64, "pattern": {**LISTS, "block": {"q": 64, "kv": 64}}}, 64, 64, 4),
        ({"head_dim": 96}, 64, 64, 2),
        ({"head_dim": 256}, 64, 64, 1),
        ({"pattern": LISTS}, 64, 128, 1),
    ],
)
def test_tile_and_stages_that_are_left_out_fit(change: dict[str, Any], m: int, n: int, stages: int) -> None:
    spec = parse_spec({**PARTS, **change})
    assert isinstance(spec, AttentionSpec)
    assert (spec.tile.m, spec.tile.n, spec.stages) == (m, n, stages)
    assert spec.schedule == "cooperative"
    assert not spec.split_tail
    plan_for(find_spec({**PARTS, **change}))


def test_each_row_has_a_warpgroup_in_both_parts() -> None:
    plan = plan_for(find_spec({**PARTS, "head_dim": 64}))
    values = {constant.name: constant.value for constant in plan.constants}
    assert (values["kStreams"], values["kConsumerWarpgroups"], values["kStreamWarpgroups"]) == (2, 4, 2)
    assert plan.threads == 5 * 128
    (left,) = (region for region in plan.shared if region.name == "Parts")
    assert left.bytes == 2 * 4 * 128 * (64 * 64 // 128 + 4)  # O of 64 x 64, two shifts and two sums of each thread
    assert plan.tile_queries == 128


def test_one_part_is_no_part_of_a_hash() -> None:
    assert parse_spec({**FIELDS, "key_parts": 1}).hash == parse_spec(FIELDS).hash
    assert parse_spec(PARTS).hash != parse_spec(FIELDS).hash


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("key_parts", {"key_parts": 3}),
        ("key_parts", {"arch": "sm_89"}),
        ("key_parts", {"pattern": {"kind": "block_lists", "block": {"q": 64, "kv": 64}}}),
        ("key_parts", {"pattern": {"kind": "strided", "stride": 3, "local": 1, "block": 64}}),
        ("key_parts", {"pattern": {**LISTS, "block": {"q": 64, "kv": 64}}, "share_kv": True}),
        ("split_tail", {"split_tail": True}),
        ("schedule", {"schedule": "ping_pong", "tile": {"m": 128, "n": 64}}),
        ("packed_heads", {"packed_heads": 2}),
        ("tile.m", {"tile": {"m": 192, "n": 64}}),
        ("stages", {"tile": {"m": 128, "n": 64}}),
        ("stages", {"stages": 3}),
        ("pattern.block.q", {"head_dim": 64, "pattern": {**LISTS, "block": {"q": 64, "kv": 64}}, "tile": {"m": 128}}),
        ("tile.n", {"pattern": LISTS, "tile": {"n": 64}}),
    ],
)
def test_what_it_is_not_written_for_is_refused(field: str, change: dict[str, Any]) -> None:
    with pytest.raises(SpecError) as caught:
        plan_for(find_spec({**PARTS, **change}))
    assert caught.value.field == field
