"""The kernel of a call over pages: decode, or prefill with so many query heads in a tile."""

from __future__ import annotations

from dataclasses import replace

import pytest

from codegen.library import find_spec
from codegen.planning import plan_for
from codegen.select.paged import (
    PACKS,
    PREFILL_KERNELS,
    PREFILL_TYPES,
    PagedCall,
    packed_kinds,
    prefill_fields,
    queries_of_kernels,
)

CALL = PagedCall("sm_90a", "bf16", 128, 32, 8, 16 * 64, 16, 64, 4096)
"""16 requests with 64 queries each, on average, and 4 query heads for each of 8 KV heads."""


def of(queries: float, requests: int = 16, **changes: object) -> PagedCall:
    return replace(CALL, queries=int(queries * requests), requests=requests, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("call", "pack"),
    [
        (of(64), 4),
        (of(200), 4),
        (of(4096), 1),
        (of(512, 1, same_queries=True), 1),
        (of(512, 1, same_queries=True, window_left=127), 4),
        (of(512, 1, same_queries=True, heads=16), 2),
        (of(512, 1, same_queries=True, heads=16, head_dim=192), 2),
        (of(600, 1, same_queries=True, heads=16), 1),
        (of(1024, 1, same_queries=True, heads=16), 1),
        (of(130, 1, same_queries=True), 4),
        (of(64, heads=64), 8),
        (of(64, heads=128), 8),
        (of(64, heads=48), 2),
        (of(64, heads=40), 1),
        (of(64, heads=8), 1),
        (of(64, head_dim=64, heads=64, verified=frozenset({1, 4})), 4),
        (of(64, head_dim=64, heads=64, sink=True), 8),
        (of(4096, head_dim=64, heads=64, sink=True), 8),
        (of(4096, heads=40, sink=True), 1),
        (of(4096, head_dim=256, heads=16, softcap=50.0), 2),
        (of(4096, softcap=30.0), 4),
        (of(64, heads=16), 2),
        (of(64, heads=16, verified=frozenset({1, 4, 8})), 1),
        (of(0, 0), 1),
    ],
)
def test_heads_share_tiles_that_queries_do_not_fill(call: PagedCall, pack: int) -> None:
    assert call.pack == pack


@pytest.mark.parametrize(
    ("call", "decodes"),
    [
        (of(32), False),
        (of(31, 1), True),
        (of(16), False),
        (of(15), True),
        (of(16, 8), True),
        (of(8, heads=64), False),
        (of(16, heads=40), True),
        (of(64, sink=True, softcap=3.0), False),
        (of(64, softcap=3.0, verified=frozenset()), True),
        (of(64, e4m3=True), False),
        (of(64, e4m3=True, verified=frozenset()), True),
        (of(64, head_dim=256, heads=16, softcap=50.0, verified=frozenset({2})), False),
        (of(0, 0), True),
    ],
)
def test_calls_with_few_queries_decode(call: PagedCall, decodes: bool) -> None:
    assert bool(call.decode_reason()) == decodes


@pytest.mark.parametrize("group", [1, 2, 3, 4, 6, 8, 16, 128])
def test_calls_of_each_kernel(group: int) -> None:
    calls = [
        of(queries, 1, same_queries=True, heads=group, kv_heads=1) for queries in queries_of_kernels("sm_90a", group)
    ]
    assert [bool(call.decode_reason()) for call in calls] == [True, False, False]
    packs = next((pack for pack in PACKS if group % pack == 0), 1)
    assert [call.pack for call in calls[1:]] == [packs, 1]


def test_reasons_name_heads_and_options() -> None:
    assert of(4096).prefill_reason() == "the call has many queries per request, which fill tiles of one head"
    assert "4 query heads of a KV head share a tile: tiles of one head have more steps" in of(64).prefill_reason()
    assert "calls with a sink and a softcap of 3 pack heads" in of(64, sink=True, softcap=3.0).prefill_reason()
    assert "calls with few tiles pack heads" in of(512, 1, same_queries=True, heads=16).prefill_reason()
    reason = of(64, heads=40, sink=True, verified=frozenset(PACKS)).decode_reason()
    assert reason == "no prefill kernel with a sink has a receipt"
    reason = of(64, e4m3=True, sink=True, verified=frozenset()).decode_reason()
    assert reason == "no prefill kernel with an e4m3 cache and a sink has a receipt"


def test_shipped_kernels_have_fields() -> None:
    assert {pack for _, pack, _, _ in PREFILL_KERNELS} <= {1, *PACKS}
    assert prefill_fields("sm_90a", "bf16", 128).keys() == {
        *("op", "layout", "arch", "dtype", "head_dim", "pattern"),
    }
    fields = prefill_fields("sm_90a", "bf16", 64, 8, sink=True, softcap=2.0)
    assert (fields["pack_gqa"], fields["sink"], fields["softcap"], fields["split_kv"]) == (8, True, 2.0, True)
    for head_dim in PREFILL_TYPES:
        for kind in packed_kinds(head_dim):
            for dtype in kind.pop("dtypes"):
                plan_for(find_spec(prefill_fields("sm_90a", dtype, head_dim, **kind)))
