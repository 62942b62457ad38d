"""``query_order``: which query blocks form a tile, how an order is found, and what a call wants of one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from codegen.errors import SpecError  # noqa: E402
from codegen.library import find_spec  # noqa: E402
from codegen.parse import parse_spec  # noqa: E402
from codegen.planning import plan_for  # noqa: E402
from runtime.errors import ArgumentError  # noqa: E402
from runtime.kernels.attention import AttentionKernel  # noqa: E402
from runtime.prepare.prepared import PreparedLists  # noqa: E402
from runtime.prepare.query_grouping import find_query_order  # noqa: E402

NAME = "h100_topk32_b64_ordered"


def kernel_of(name: str) -> AttentionKernel:
    named = find_spec(name)
    return AttentionKernel(SimpleNamespace(named=named, plan=plan_for(named)), None)  # type: ignore[arg-type]


def loads(lists: Any, order: Any, tile_blocks: int) -> int:
    """Count the loads of all tiles: different key blocks of each."""
    in_order = lists.gather(2, order.long()[..., None].expand_as(lists))
    return sum(len(set(tile.flatten().tolist())) for head in in_order.flatten(0, 1) for tile in head.split(tile_blocks))


@given(
    sizes=st.tuples(st.integers(1, 2), st.integers(1, 3), st.integers(1, 20), st.integers(1, 6)),
    key_blocks=st.integers(1, 9),
    tile_blocks=st.sampled_from((2, 3)),
    seed=st.integers(0, 1 << 30),
)
def test_an_order_has_each_query_block_once(
    sizes: tuple[int, ...], key_blocks: int, tile_blocks: int, seed: int
) -> None:
    source = torch.Generator().manual_seed(seed)
    lists = torch.randint(-2, key_blocks + 3, sizes, generator=source, dtype=torch.int32)
    order = find_query_order(lists, key_blocks, tile_blocks)
    assert order.dtype == torch.int32
    assert torch.equal(order.sort(-1).values, torch.arange(sizes[2], dtype=torch.int32).expand(sizes[:3]))
    assert torch.equal(order, find_query_order(lists, key_blocks, tile_blocks))


@pytest.mark.parametrize("tile_blocks", [2, 3])
def test_equal_lists_come_together(tile_blocks: int) -> None:
    kinds = torch.arange(12).reshape(4, 3).repeat(tile_blocks, 1)  # four lists of three blocks, one after the other
    lists = kinds[torch.randperm(len(kinds), generator=torch.Generator().manual_seed(1))][None, None]
    assert loads(lists, find_query_order(lists, 12, tile_blocks), tile_blocks) == 12


@pytest.mark.parametrize(("tile_blocks", "most"), [(2, 0.91), (3, 0.86)])
def test_random_lists_need_fewer_loads(tile_blocks: int, most: float) -> None:
    lists = torch.rand((1, 2, 512, 512), generator=torch.Generator().manual_seed(2)).argsort(-1)[..., :32]
    order = find_query_order(lists, 512, tile_blocks)
    assert loads(lists, order, tile_blocks) < most * lists.numel()
    neighbors = torch.arange(512).expand(order.shape)
    assert loads(lists, neighbors, tile_blocks) > 0.93 * lists.numel()


def test_heads_are_done_in_groups_with_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    lists = torch.randint(0, 40, (2, 3, 40, 8), generator=torch.Generator().manual_seed(3))
    together = find_query_order(lists, 40, 3)
    monkeypatch.setattr("runtime.prepare.query_grouping._WEIGHT_BYTES", 1)
    assert torch.equal(find_query_order(lists, 40, 3), together)


def test_a_kernel_finds_the_order_of_its_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.kernels.attention.check_tensor", lambda *arguments: None)  # lists are on a GPU
    kernel = kernel_of(NAME)
    lists = torch.randint(0, 11, (1, 2, 14, 32), dtype=torch.int32)
    prepared = kernel.prepare(lists, 700)
    assert prepared.kv_indices is lists and torch.equal(prepared.query_order, find_query_order(lists, 11, 3))
    with pytest.raises(ArgumentError, match=r"kv_len: is 0, expected the number of keys"):
        kernel.prepare(lists, 0)
    with pytest.raises(ArgumentError, match=r"kv_indices: has shape .* k 32"):
        kernel.prepare(lists[..., :31], 700)
    plain = kernel_of("h100_topk32_b64_shared").prepare(lists, 700)
    assert plain.kv_indices is lists and plain.query_order is None
    for name, kind in (("h100_dense", "dense"), ("h100_block_lists", "block_lists")):
        with pytest.raises(ArgumentError, match=f"kv_indices: is not prepared for {name}: its pattern is {kind}"):
            kernel_of(name).prepare(lists, 700)


def test_prepared_lists_stand_for_lists_and_their_order() -> None:
    kernel, plain = kernel_of(NAME), kernel_of("h100_topk32_b64_shared")
    lists, order = torch.zeros((1, 2, 11, 32), dtype=torch.int32), torch.arange(11, dtype=torch.int32)
    prepared, unordered = PreparedLists(lists, order), PreparedLists(lists)
    assert kernel._unprepared((prepared,)) == kernel._unprepared((prepared, None)) == (lists, order)
    assert kernel._arguments.gather((), {"kv_indices": prepared}) == (prepared, None)
    assert plain._unprepared((unordered,)) == (lists,)
    with pytest.raises(ArgumentError, match=r"query_order: is given twice: kv_indices has one"):
        kernel._unprepared((prepared, order))
    for one, wrong, what in ((kernel, unordered, "no order.* takes one"), (plain, prepared, "an order.* takes none")):
        with pytest.raises(ArgumentError, match=f"kv_indices: is prepared for another kernel: it has {what}"):
            one._unprepared((wrong,))


def test_a_call_wants_an_order_that_fits() -> None:
    kernel = kernel_of(NAME)
    q = torch.zeros((1, 2, 700, 128), dtype=torch.float16)
    lists = torch.zeros((1, 2, 11, 32), dtype=torch.int32)
    order = torch.arange(11, dtype=torch.int32).expand(1, 1, 11)
    assert kernel._arguments.check(q, (lists, order))["query_order_head_stride"] == 0
    for wrong, message in (
        (None, r"query_order: is missing: .* prepare\(kv_indices, kv_len\) finds it"),
        (order.long(), r"query_order: is torch.int64, expected torch.int32"),
        (order[..., :10], r"query_order: has shape .* query_blocks 11"),
        (order[0], r"query_order: has shape"),
    ):
        with pytest.raises(ArgumentError, match=message):
            kernel._arguments.check(q, (lists, *(() if wrong is None else (wrong,))))
    kernel._arguments.check_values(q, q, (lists, order))
    twice = order.contiguous()
    twice[0, 0, 3] = 4
    with pytest.raises(ArgumentError, match=r"query_order: must contain each of the 11 query blocks once"):
        kernel._arguments.check_values(q, q, (lists, twice))
    twice[0, 0, 3] = 11
    with pytest.raises(ArgumentError, match=r"query_order: is 11 at batch 0, head 0, row 3; allowed: 0 to 10"):
        kernel._arguments.check_values(q, q, (lists, twice))


def test_it_needs_tiles_that_share() -> None:
    fields = find_spec("h100_topk32_d64_b64").spec.model_dump(mode="json", by_alias=True)
    with pytest.raises(SpecError) as caught:
        parse_spec({**fields, "query_grouping": "given"})
    assert caught.value.field == "query_grouping"
    plain = find_spec("h100_topk32_b64_shared").spec
    assert "query_grouping" not in plain.canonical_json() and plain.hash != find_spec(NAME).spec.hash


def test_the_length_of_keys_is_a_whole_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.kernels.attention.check_tensor", lambda *arguments: None)
    kernel, lists = kernel_of(NAME), torch.zeros((1, 2, 14, 32), dtype=torch.int32)
    assert kernel.prepare(lists, 1).query_order.shape == (1, 2, 14)
    for wrong in (2.5, "1", None):
        with pytest.raises(ArgumentError, match=rf"kv_len: is {wrong}, expected the number of keys of a head"):
            kernel.prepare(lists, wrong)  # type: ignore[arg-type]


def test_a_query_block_that_comes_twice_is_found_anywhere() -> None:
    kernel = kernel_of(NAME)
    q = torch.zeros((1, 2, 700, 128), dtype=torch.float16)
    lists = torch.zeros((1, 2, 11, 32), dtype=torch.int32)
    order = torch.arange(11, dtype=torch.int32).repeat(1, 2, 1)
    order[0, 1, 3] = 9  # not beside the other one
    with pytest.raises(ArgumentError, match=r"query_order: must contain each of the 11 query blocks once"):
        kernel._arguments.check_values(q, q, (lists, order))


def test_as_many_heads_are_done_at_once_as_there_is_memory_for(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def order(lists: Any, key_blocks: int, tile_blocks: int) -> Any:
        sizes.append(len(lists))
        return torch.zeros(lists.shape[:2], dtype=torch.int64)

    monkeypatch.setattr("runtime.prepare.query_grouping._order", order)
    weight_bytes = 2 * 4 * 41 * 40  # of 40 lists of 40 blocks, and one more
    monkeypatch.setattr("runtime.prepare.query_grouping._WEIGHT_BYTES", weight_bytes)
    find_query_order(torch.zeros(1, 5, 40, 8, dtype=torch.int32), 40, 2)
    assert sizes == [2, 2, 1]


def test_lists_are_where_the_kernel_is() -> None:
    with pytest.raises(ArgumentError, match="kv_indices: is on cpu, expected a CUDA device"):
        kernel_of(NAME).prepare(torch.zeros((1, 2, 14, 32), dtype=torch.int32), 700)
