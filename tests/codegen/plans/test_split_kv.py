"""Parts of the keys of tiles: how many, and memory that suffices for any lengths."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from codegen.errors import SpecError
from codegen.library import find_spec
from codegen.plan import Plan
from codegen.planning import plan_for
from codegen.problem import AttentionShape

FIELDS = {"op": "attention", "arch": "sm_90a", "layout": "paged", "pattern": {"kind": "sink_window"}, "head_dim": 128}
WINDOW = {"window_left": 1 << 24, "window_right": 0, "sink_keys": 0}
SLOTS = 132


def plan_of(pack: int) -> Plan:
    return plan_for(find_spec({**FIELDS, "pack_gqa": pack, "split_kv": True}))


def shape(heads: int, kv_heads: int, queries: int, keys: int, requests: int) -> AttentionShape:
    return AttentionShape(1, heads, kv_heads, queries, keys, **WINDOW, sequences=requests)


@pytest.mark.parametrize(
    ("call", "splits"),
    [
        (shape(32, 8, 32, 32768, 1), 16),
        (shape(32, 8, 128, 32768, 1), 4),
        (shape(32, 8, 512, 32768, 1), 1),
        (shape(32, 8, 16 * 64, 4096, 16), 1),
        (shape(32, 8, 128, 1000, 1), 1),
        (shape(32, 8, 128, 1100, 1), 2),
        (shape(4, 1, 4 * 32, 32768, 4), 16),
    ],
)
def test_parts_fill_the_gpu(call: AttentionShape, splits: int) -> None:
    found = plan_of(4).problem(call, SLOTS)
    assert found.numbers["splits"] == splits
    whole = call.heads // 4 * (call.q_len // 32 + call.sequences)
    assert found.numbers["tiles"] == whole * splits
    assert bool(found.scratch["partials"]) == bool(found.counters["parts_done"]) == (splits > 1)


@given(st.sampled_from((1, 2, 8)), st.integers(1, 20), st.integers(1, 5000), st.integers(1, 300), st.integers(1, 300))
def test_memory_suffices(pack: int, packs: int, queries: int, requests: int, slots: int) -> None:
    plan = PLANS[pack]
    found = plan.problem(shape(packs * pack, packs, queries, 1 << 20, requests), slots)
    splits = found.numbers["splits"]
    if splits == 1:
        return
    parts, part_bytes = found.numbers["tiles"], 4 * 2 * 128 * (128 // 2 + 4)
    assert parts * part_bytes <= found.scratch["partials"] == 2 * slots * part_bytes
    assert 2 * parts // splits <= found.counters["parts_done"]


PLANS = {pack: plan_of(pack) for pack in (1, 2, 8)}


@pytest.mark.parametrize("layout", ["padded", "varlen"])
def test_other_layouts_are_refused(layout: str) -> None:
    fields: dict[str, Any] = {**FIELDS, "layout": layout, "pattern": {"kind": "causal"}, "split_kv": True}
    with pytest.raises(SpecError, match=rf"^split_kv: is true; layout {layout} does not support it"):
        plan_for(find_spec(fields))
