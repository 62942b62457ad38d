"""``query_grouping: search``: what its plan has, and what a call launches."""

from __future__ import annotations

from typing import Any

import pytest

from codegen.errors import SpecError
from codegen.library import find_spec
from codegen.parse import parse_spec
from codegen.planning import plan_for
from codegen.plans.attention.query_order import BLOCK_WINDOWS, WINDOW_TILES, order_search
from codegen.render import render

NAME, PLAIN = "h100_topk32_b64_self_ordered", "h100_topk32_d64_b64"


def fields(name: str = NAME, **more: Any) -> dict[str, Any]:
    return {**find_spec(name).spec.model_dump(mode="json", by_alias=True), **more}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (fields(PLAIN, query_grouping="search"), "query_grouping: is search; grouping requires share_kv_loads"),
        (fields(PLAIN, query_grouping="given"), "query_grouping: is given; grouping requires share_kv_loads"),
        (
            fields(l2_lockstep=True),
            "l2_lockstep: is true; not supported with the dynamic tile scheduler",
        ),
    ],
)
def test_what_an_order_cannot_be_found_for(data: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_spec(data)
    assert str(caught.value).startswith(message) and caught.value.field == message.split(":", maxsplit=1)[0]


@pytest.mark.parametrize(
    ("old", "says"),
    [
        ({"order_queries": True}, "order_queries: is true, which is now query_grouping: search"),
        ({"query_order": True}, "query_order: is true, which is now query_grouping: given"),
        ({"order_queries": False}, "order_queries: is now query_grouping; leave it out for false"),
    ],
)
def test_the_former_options_are_told_the_field_of_today(old: dict[str, Any], says: str) -> None:
    plain = {name: value for name, value in fields().items() if name != "query_grouping"}
    with pytest.raises(SpecError) as caught:
        parse_spec(plain | old)
    assert str(caught.value) == says


@pytest.mark.parametrize(("sub_tiles", "tile"), [(2, 128), (3, 192)])
def test_the_search_has_room_for_its_windows(sub_tiles: int, tile: int) -> None:
    plan = plan_for(find_spec(fields(tile={"m": tile, "n": 64})))
    assert plan.prologue is not None and plan.prologue.overlaps
    tiles, others = WINDOW_TILES[sub_tiles], sub_tiles - 1
    # struct Window of the source: lists, weights, left, asked, taken, lacking, loads
    words = 1024 // 32 + 4
    window = 4 * tiles * sub_tiles * words + 2 * tiles * (tiles * others + 8)
    window += 4 * (tiles * others // 32 + tiles * others + tiles * others + others + 2)
    assert plan.prologue.shared_bytes == 2 * -(-window // 16) * 16 <= plan.arch.shared_memory_per_block
    assert tiles * others <= 32 * 8 and tiles % 16 == 0  # the source asks for both
    assert plan.launch()["prologue"] == [plan.prologue.threads, plan.prologue.shared_bytes, True]
    assert plan_for(find_spec("h100_topk32_b64_shared")).launch()["prologue"] is None


@pytest.mark.parametrize(("k", "rounds"), [(1, 32), (8, 4), (16, 2), (17, 2), (32, 1), (64, 1)])
def test_a_launch_begins_with_query_blocks_as_they_come(k: int, rounds: int) -> None:
    pattern = {"kind": "topk", "k": k, "block": {"q": 64, "kv": 64}}
    constants = {c.name: c.value for c in plan_for(find_spec(fields(pattern=pattern, stages=3))).constants}
    assert constants["kEarlyRounds"] == rounds


def test_tiles_are_handed_out_to_as_many_thread_blocks_as_there_are_places() -> None:
    plan, plain = (plan_for(find_spec(name)) for name in (NAME, "h100_topk32_b64_shared"))
    assert (plan.thread_blocks(2736, 132), plain.thread_blocks(2736, 132)) == (132, 131)
    source = render(find_spec(NAME))
    assert "atomicAdd(p.scheduler, 1)" in source and source.count("release_scheduler(p)") == 1


@pytest.mark.parametrize(
    ("batches", "heads", "query_blocks", "query_tiles", "blocks"),
    [(1, 16, 512, 171, 16), (2, 16, 2048, 683, 64), (1, 1, 3, 1, 1), (3, 1, 1152, 384, 3), (3, 1, 1153, 385, 6)],
)
def test_a_search_has_a_thread_block_for_some_windows(
    batches: int, heads: int, query_blocks: int, query_tiles: int, blocks: int
) -> None:
    search = order_search(batches, heads, query_blocks, query_tiles=query_tiles, sub_tiles=3)
    assert search.thread_blocks == blocks and search.bytes == 4 * batches * heads * query_blocks
    assert blocks * BLOCK_WINDOWS * WINDOW_TILES[3] >= batches * heads * query_tiles
    assert search.values == {
        "order_heads": heads,
        "query_order_head_stride": query_blocks if heads > 1 else 0,
        "query_order_batch_stride": heads * query_blocks if batches > 1 else 0,
    }


def test_other_kernels_do_not_search() -> None:
    for name in ("h100_topk32_b64_shared", "h100_topk32_b64_ordered"):
        plan = plan_for(find_spec(name))
        assert plan.prologue is None and not {p.name for p in plan.params} & {"order_heads", "scheduler"}
        assert "search" not in find_spec(name).spec.canonical_json()
