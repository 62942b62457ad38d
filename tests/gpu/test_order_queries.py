"""``query_grouping: search``: the order that a call finds is the one its source describes, and changes no result."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from codegen.library import find_spec  # noqa: E402
from codegen.plans.attention.query_order import LIST_BITS, WINDOW_TILES  # noqa: E402
from runtime import load_kernel  # noqa: E402
from runtime.driver import workspace  # noqa: E402

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs sm_90"
)
PATTERN = {"kind": "topk", "k": 16, "block": {"q": 64, "kv": 64}}


def fields(**more: Any) -> dict[str, Any]:
    shipped = find_spec("h100_topk32_b64_self_ordered").spec.model_dump(mode="json", by_alias=True)
    return {**shipped, "pattern": PATTERN, **more}


def loads_of(rows: list[set[int]], order: list[int], tile_blocks: int) -> int:
    """Count the key blocks that tiles load for these lists."""
    tiles = [order[i : i + tile_blocks] for i in range(0, len(order), tile_blocks)]
    return sum(len(set().union(*(rows[block] for block in tile))) for tile in tiles)


def described_order(lists: list[list[int]], key_blocks: int, tile_blocks: int) -> list[int]:
    """Return the order of one head's lists, step by step as the generated source describes it."""
    rows = [{entry % LIST_BITS for entry in entries if 0 <= entry < key_blocks} for entries in lists]
    others, window = tile_blocks - 1, WINDOW_TILES[tile_blocks] * tile_blocks
    order: list[int] = []
    for first in range(0, len(rows), window):
        end = min(first + window, len(rows))
        tiles = (end - first) // tile_blocks
        tile_lists = [set(rows[first + tile * tile_blocks]) for tile in range(tiles)]
        members = [[first + tile * tile_blocks] for tile in range(tiles)]
        left = set(range(tiles * others))  # places of what is offered
        block_of = [first + i // others * tile_blocks + 1 + i % others for i in range(tiles * others)]
        for _ in range(others):
            asking = set(range(tiles))
            while asking:
                best: dict[int, tuple[int, int]] = {}  # place: weight and minus the tile
                for tile in asking:
                    # Most in common; then the place that comes first, by eights from the tile's own on.
                    weights = [
                        (len(tile_lists[tile] & rows[block_of[i]]), -((i // 8 - tile * others // 8) % 32), -(i % 8), i)
                        for i in left
                    ]
                    common, *_, place = max(weights)
                    best[place] = max(best.get(place, (-1, 0)), (common, -tile))
                for place, (_, tile) in best.items():
                    members[-tile].append(block_of[place])
                    tile_lists[-tile] |= rows[block_of[place]]
                    left.remove(place)
                    asking.remove(-tile)
        found = [block for blocks in members for block in blocks]
        as_they_come = list(range(first, first + len(found)))
        order += (
            found if loads_of(rows, found, tile_blocks) < loads_of(rows, as_they_come, tile_blocks) else as_they_come
        )
        order += range(first + tiles * tile_blocks, end)
    return order


@pytest.fixture(autouse=True)
def taken(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Holds the scratch memory of each launch."""
    scratch = workspace.scratch
    monkeypatch.setattr(workspace, "scratch", lambda *given: (SCRATCH.append(scratch(*given)), SCRATCH[-1])[1])
    yield
    SCRATCH.clear()


SCRATCH: list[Any] = []


def found_order(shape: tuple[int, ...]) -> Any:
    """The order that the last call found."""
    torch.cuda.synchronize()
    return SCRATCH[-1].view(torch.int32)[: shape[0] * shape[1] * shape[2]].view(shape).clone()


def problem(heads: int, query_blocks: int, keys: int, lists: Any) -> tuple[Any, ...]:
    q = torch.randn(1, heads, query_blocks * 64 - 5, 128, device="cuda", dtype=torch.float16)
    k, v = (torch.randn(1, heads, keys, 128, device="cuda", dtype=torch.float16) for _ in range(2))
    return q, k, v, lists.to(device="cuda", dtype=torch.int32)


@pytest.mark.parametrize(
    ("tile_blocks", "heads", "query_blocks", "keys"),
    [(3, 2, 512, 32768), (3, 1, 11, 3000), (3, 3, 290, 5000), (3, 1, 2, 900), (3, 1, 40, 131072), (2, 2, 300, 9000)],
)
def test_an_order_is_what_the_source_describes(tile_blocks: int, heads: int, query_blocks: int, keys: int) -> None:
    kernel = load_kernel(fields(tile={"m": 64 * tile_blocks, "n": 64}))
    key_blocks = -(-keys // 64)
    lists = torch.randint(-3, key_blocks + 3, (1, heads, query_blocks, 16))  # repeated entries, some out of range
    kernel(*problem(heads, query_blocks, keys, lists))
    order = found_order((1, heads, query_blocks))
    for head in range(heads):
        assert order[0, head].tolist() == described_order(lists[0, head].tolist(), key_blocks, tile_blocks)


@pytest.mark.parametrize("kind", ["equal", "sliding", "groups"])
def test_lists_that_share_much_are_found(kind: str) -> None:
    rows = torch.arange(96)
    starts = {"equal": rows * 0, "sliding": rows, "groups": rows % 32 * 16}[kind]  # groups: three far from one another
    lists = (starts[:, None] + torch.arange(16))[None, None]
    load_kernel(fields())(*problem(1, 96, 64 * 512, lists))
    in_order = lists[0, 0][found_order((1, 1, 96))[0, 0].cpu().long()]
    assert (
        loads_of([set(entries) for entries in in_order.tolist()], list(range(96)), 3)
        <= {"equal": 32 * 16, "sliding": 32 * 18, "groups": 32 * 16}[kind]
    )


def test_an_order_changes_no_result_and_each_call_is_the_same() -> None:
    lists = torch.rand(1, 16, 100, 200).argsort(-1)[..., :16]
    inputs = problem(16, 100, 64 * 200, lists)
    plain, plain_lse = load_kernel(fields(query_grouping="none"))(*inputs)
    kernel = load_kernel(fields())
    outs = [torch.full_like(plain, float("nan")) for _ in range(20)]
    found = [kernel(*inputs, out=out)[1] for out in outs]
    assert (outs[0] - plain).abs().max() < 2e-3 and (found[0] - plain_lse).abs().max() < 1e-4
    assert not torch.equal(outs[0], plain)  # other blocks were loaded together
    assert all(torch.equal(out, outs[0]) and torch.equal(lse, found[0]) for out, lse in zip(outs, found, strict=True))


def test_lists_of_all_heads_are_put_in_order_once() -> None:
    kernel = load_kernel(fields())
    lists = torch.rand(1, 1, 100, 200).argsort(-1)[..., :16]
    q, k, v, shared = problem(16, 100, 64 * 200, lists)
    out, _ = kernel(q, k, v, shared)
    order = found_order((1, 1, 100))
    assert order[0, 0].tolist() == described_order(lists[0, 0].tolist(), 200, 3)
    assert torch.equal(kernel(q, k, v, shared.expand(1, 16, 100, 16))[0], out)


def test_a_graph_finds_the_order_anew() -> None:
    kernel = load_kernel(fields())
    q, k, v, lists = problem(16, 100, 64 * 200, torch.rand(1, 16, 100, 200).argsort(-1)[..., :16])
    kernel(q, k, v, lists)
    out, graph = torch.empty_like(q), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernel(q, k, v, lists, out=out)
    for _ in range(3):
        lists.copy_(torch.rand(1, 16, 100, 200, device="cuda").argsort(-1)[..., :16])
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, kernel(q, k, v, lists)[0])


def test_streams_have_orders_of_their_own() -> None:
    kernel = load_kernel(fields())
    problems = [problem(16, 100, 64 * 200, torch.rand(1, 16, 100, 200).argsort(-1)[..., :16]) for _ in range(3)]
    alone = [kernel(*inputs)[0] for inputs in problems]
    streams = [torch.cuda.Stream() for _ in problems]
    torch.cuda.synchronize()
    for _ in range(5):
        outs = []
        for stream, inputs in zip(streams, problems, strict=True):
            with torch.cuda.stream(stream):
                outs.append(kernel(*inputs)[0])
        torch.cuda.synchronize()
        assert all(torch.equal(out, wanted) for out, wanted in zip(outs, alone, strict=True))
