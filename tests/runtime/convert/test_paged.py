"""Converters of serving engines' formats: as plain Python reads them, whatever the tensors hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from runtime import ArgumentError, KeyLists, convert  # noqa: E402

few = settings(max_examples=40)
dtypes = st.sampled_from([torch.int32, torch.int64])


@st.composite
def page_lists(draw: st.DrawFn) -> tuple[list[list[int]], int, list[int]]:
    """Pages of each request, tokens of a page, and keys in the last page of each."""
    requests = draw(st.lists(st.lists(st.integers(0, 99), max_size=5), min_size=1, max_size=5))
    page_size = draw(st.sampled_from([1, 16, 64]))
    return requests, page_size, [draw(st.integers(1, page_size)) for _ in requests]


def csr_of(requests: list[list[int]], last: list[int], dtype: Any) -> tuple[Any, Any, Any]:
    """FlashInfer's table."""
    ends = [0]
    for pages in requests:
        ends.append(ends[-1] + len(pages))
    return tuple(torch.tensor(t, dtype=dtype) for t in (ends, [page for pages in requests for page in pages], last))


@few
@given(page_lists(), dtypes, st.sampled_from([None, 1, 3, 7]))
def test_page_tables(drawn: Any, dtype: Any, max_pages: int | None) -> None:
    requests, page_size, last = drawn
    csr = csr_of(requests, last, dtype)
    found = convert.from_page_csr(*csr, page_size=page_size, max_pages=max_pages)
    width = max_pages or max(1, sum(map(len, requests)))
    assert found.block_table.tolist() == [(pages + [-1] * width)[:width] for pages in requests]
    assert found.seq_lens.tolist() == [
        (len(pages) - 1) * page_size + keys if pages else 0 for pages, keys in zip(requests, last, strict=True)
    ]
    assert found.block_table.dtype == found.seq_lens.dtype == torch.int32 and found.seq_lens.is_contiguous()


def test_pointers_that_make_no_sense_list_no_page() -> None:
    indptr = torch.tensor([-1, 2, 1, 9], dtype=torch.int32)
    found = convert.from_page_csr(indptr, torch.tensor([5, 6, 7]), torch.tensor([3, 4, 5]), page_size=16, max_pages=4)
    assert found.block_table.tolist() == [[-1, 5, 6, -1], [-1] * 4, [6, 7, -1, -1]]
    assert found.seq_lens.tolist() == [35, 0, 117]


@pytest.mark.parametrize("shape", [(3, 2, 16, 4, 64), (3, 2, 4, 16, 64)], ids=["NHD", "HND"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_stacked_caches(shape: tuple[int, ...], dtype: Any) -> None:
    cache = torch.randn(shape).to(dtype)
    found = convert.from_stacked_cache(cache)
    assert found.k_cache.data_ptr() == cache.data_ptr() and found.v_cache.stride() == found.k_cache.stride()
    assert torch.equal(found.k_cache.float(), cache[:, 0].float())
    assert torch.equal(found.v_cache.float(), cache[:, 1].float())
    of_vllm = cache.transpose(0, 1).contiguous()
    assert torch.equal(convert.from_stacked_cache(of_vllm.transpose(0, 1)).v_cache.float(), cache[:, 1].float())


def test_joined_caches() -> None:
    cache = torch.randn(3, 4, 128, 256, dtype=torch.bfloat16)
    found = convert.from_joined_cache(cache)
    assert found.k_cache.data_ptr() == cache.data_ptr() and found.v_cache.stride() == found.k_cache.stride()
    for page, head, token in ((0, 0, 0), (2, 3, 127), (1, 2, 5)):
        row = cache[page, head, token]
        assert torch.equal(found.k_cache[page, head, token], row[:128])
        assert torch.equal(found.v_cache[page, head, token], row[128:])


def keys_of(lists: KeyLists, head: int, token: int) -> list[int]:
    """Positions that a list has, one by one."""
    entries = lists.indices[head if lists.indices.shape[0] > 1 else 0, token].tolist()
    if lists.counts is not None:
        entries = entries[: max(0, int(lists.counts[0, token]))]
    return [entry * lists.keys + i for entry in entries if entry >= 0 for i in range(lists.keys)]


def test_lists_of_msa_are_not_copied() -> None:
    topk_idx = torch.tensor([[[0, 3, 7, -1], [2, -1, -1, -1]], [[1, 2, 3, 4], [-1, -1, -1, -1]]], dtype=torch.int32)
    lists = convert.from_msa_lists(topk_idx)
    assert lists.keys == 128 and lists.counts is None and lists.indices.data_ptr() == topk_idx.data_ptr()
    assert keys_of(lists, 0, 1) == list(range(256, 384)) and keys_of(lists, 1, 1) == []
    wide = convert.from_msa_lists(topk_idx.long().transpose(1, 2).contiguous().transpose(1, 2), block=64)
    assert wide.keys == 64 and torch.equal(wide.indices, topk_idx) and wide.indices.stride(-1) == 1


@few
@given(
    st.sampled_from([1, 2, 4]), st.lists(st.tuples(st.integers(0, 8), st.integers(0, 9)), min_size=1), dtypes, st.data()
)
def test_lists_of_qsa(group: int, drawn: list[tuple[int, int]], dtype: Any, data: st.DataObject) -> None:
    """Groups of consecutive tokens, of which the last may be cut off by the query's own position."""
    room = 8
    rows, expected, ends = [], [], []
    for count, cut in drawn:
        groups = data.draw(st.lists(st.integers(0, 50), min_size=count, max_size=count, unique=True).map(sorted))
        tokens = [each * group + i for each in groups for i in range(group)]
        tokens = tokens[: len(tokens) - cut % group] if tokens else tokens
        ends.append(tokens[-1] if tokens else -1)
        expected.append(tokens)
        rows.append(tokens + [-1] * (room * group - len(tokens)) + [len(tokens)])
    lists = convert.from_qsa_lists(torch.tensor(rows, dtype=dtype), group=group)
    assert lists.keys == group and lists.indices.shape == (1, len(drawn), room) and lists.counts is not None
    assert lists.indices.dtype == lists.counts.dtype == torch.int32 and lists.counts.is_contiguous()
    for token, tokens in enumerate(expected):
        assert [key for key in keys_of(lists, 0, token) if key <= ends[token]] == tokens


def test_positions_of_single_tokens_are_not_copied() -> None:
    logical_indices = torch.tensor([[5, 1, 2], [3, 0, 1]], dtype=torch.int32)
    lists = convert.from_qsa_lists(logical_indices)
    assert lists.indices.data_ptr() == logical_indices.data_ptr() and lists.indices.stride(-1) == 1
    assert [keys_of(lists, 0, token) for token in range(2)] == [[5, 1], [3]]


@few
@given(st.lists(st.integers(-2, 6)).map(sorted), st.integers(1, 5), dtypes)
def test_requests_of_tokens(requests: list[int], batch: int, dtype: Any) -> None:
    bounds = convert.from_token_requests(torch.tensor(requests, dtype=dtype), batch=batch)
    assert bounds.dtype == torch.int32 and bounds.shape == (batch + 1,)
    for request in range(batch):
        assert requests[bounds[request] : bounds[request + 1]] == [request] * requests.count(request)


@few
@given(st.lists(st.lists(st.integers(-2, 90), min_size=4, max_size=4), min_size=1, max_size=6), dtypes, st.booleans())
def test_slots(rows: list[list[int]], dtype: Any, counted: bool) -> None:
    counts = [row[0] % 6 - 1 for row in rows]
    length = torch.tensor(counts, dtype=dtype) if counted else None
    found = convert.from_slots(torch.tensor(rows, dtype=dtype), length)
    for row, count, pages, seq_len in zip(
        rows, counts, found.block_table.tolist(), found.seq_lens.tolist(), strict=True
    ):
        listed = row[: max(0, count)] if counted else row
        assert [page for page in pages[:seq_len] if page >= 0] == [slot for slot in listed if slot >= 0]
        assert seq_len <= len(listed)
    assert found.block_table.dtype == found.seq_lens.dtype == torch.int32


def test_slots_of_several_queries_have_counts_of_requests_or_queries() -> None:
    indices = torch.arange(12).reshape(2, 3, 2)
    assert convert.from_slots(indices).seq_lens.tolist() == [2] * 6
    assert convert.from_slots(indices, torch.tensor([1, 2])).seq_lens.tolist() == [1, 1, 1, 2, 2, 2]
    assert convert.from_slots(indices, torch.tensor([[0, 1, 2], [2, 1, 0]])).seq_lens.tolist() == [0, 1, 2, 2, 1, 0]
    turned = convert.from_slots(indices.transpose(1, 2).contiguous().transpose(1, 2)).block_table
    assert torch.equal(turned, indices.flatten(0, 1).int()) and turned.stride(-1) == 1


def test_tokens_as_pages() -> None:
    cache = torch.randn(5, 64, 2, 128, dtype=torch.float16)
    pages = convert.to_token_pages(cache)
    assert pages.shape == (320, 1, 2, 128) and pages.data_ptr() == cache.data_ptr()
    assert torch.equal(pages[2 * 64 + 7, 0], cache[2, 7])
    stacked = convert.from_stacked_cache(torch.randn(5, 2, 64, 2, 128, dtype=torch.float16))
    with pytest.raises(ArgumentError, match=r"cache: has steps of 32768 elements .* expected 64 times as many"):
        convert.to_token_pages(stacked.k_cache)
    assert convert.to_token_pages(stacked.k_cache[:1]).shape == (64, 1, 2, 128)
    joined = convert.from_joined_cache(torch.randn(5, 64, 2, 256, dtype=torch.float16))
    assert torch.equal(convert.to_token_pages(joined.v_cache)[70, 0], joined.v_cache[1, 6])


CALLS: dict[str, Callable[..., Any]] = {
    "page_csr": lambda indptr, indices, last: convert.from_page_csr(indptr, indices, last, page_size=16, max_pages=3),
    "msa_lists": lambda topk_idx: convert.from_msa_lists(topk_idx).indices,
    "qsa_lists": lambda logical: [(lists := convert.from_qsa_lists(logical, group=4)).indices, lists.counts],
    "token_requests": lambda requests: convert.from_token_requests(requests, batch=3),
    "slots": convert.from_slots,
}
INPUTS = {
    "page_csr": ([0, 2, 3], [4, 5, 6], [9, 16]),
    "msa_lists": ([[[3, 1, -1]]],),
    "qsa_lists": ([[8, 9, 10, 11, 4, 5, -1, -1, 6]],),
    "token_requests": ([0, 0, 2, 2],),
    "slots": ([[5, -1, 7], [1, 2, 3]], [3, 2]),
}


@pytest.mark.parametrize("name", CALLS)
def test_nothing_depends_on_what_tensors_hold(name: str) -> None:
    """Tensors on ``meta`` have shapes and no values; a compiled function would break at what reads them."""
    tensors = [torch.tensor(values, dtype=torch.int32) for values in INPUTS[name]]
    real, there = CALLS[name](*tensors), CALLS[name](*(tensor.to("meta") for tensor in tensors))
    compiled = torch.compile(CALLS[name], fullgraph=True, backend="eager")(*tensors)
    parts = [[each] if isinstance(each, torch.Tensor) else list(each) for each in (real, there, compiled)]
    for expected, on_meta, found in zip(*parts, strict=True):
        assert on_meta.is_meta and on_meta.shape == expected.shape and on_meta.dtype == expected.dtype
        assert torch.equal(found, expected)


INTS = torch.zeros(4, dtype=torch.int32)
CACHE = torch.zeros(3, 16, 4, 64, dtype=torch.float16)
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "one pointer": (
        lambda: convert.from_page_csr(INTS[:1], INTS, INTS, page_size=16),
        "indptr: its length: is 1, expected a whole number, 2 or more",
    ),
    "pages in floats": (
        lambda: convert.from_page_csr(INTS, INTS.float(), INTS[:3], page_size=16),
        "indices: is torch.float32, expected torch.int32, torch.int64",
    ),
    "no tensor": (lambda: convert.from_page_csr(INTS, [1], INTS[:3], page_size=16), "indices: is list, expected a"),
    "last pages": (
        lambda: convert.from_page_csr(INTS, INTS, INTS, page_size=16),
        "last_page_len: has shape (4,): batch is 4, expected 3",
    ),
    "size of a page": (lambda: convert.from_page_csr(INTS, INTS, INTS[:3], page_size=0), "page_size: is 0, expected"),
    "no columns": (
        lambda: convert.from_page_csr(INTS, INTS, INTS[:3], page_size=16, max_pages=0),
        "max_pages: is 0, expected a whole number, 1 or more",
    ),
    "a single cache": (lambda: convert.from_stacked_cache(CACHE), "kv_cache: has 4 dimensions (3, 16, 4, 64)"),
    "stacked outside": (
        lambda: convert.from_stacked_cache(CACHE.expand(2, 3, 16, 4, 64)),
        "kv_cache: has shape (2, 3, 16, 4, 64), expected (pages, 2, page_size, kv_heads, head_dim) or (pages, 2, "
        "kv_heads, page_size, head_dim); pass kv_cache.transpose(0, 1)",
    ),
    "bytes": (
        lambda: convert.from_joined_cache(CACHE.to(torch.uint8)),
        "kv_cache: is torch.uint8, expected torch.float16, torch.bfloat16, torch.float8_e4m3fn",
    ),
    "half a row": (
        lambda: convert.from_joined_cache(CACHE[..., :63]),
        "kv_cache: has rows of 63 elements, expected 2 * head_dim",
    ),
    "columns first": (
        lambda: convert.from_joined_cache(CACHE.transpose(2, 3)),
        "kv_cache: has stride 64 in its last dimension, which must be contiguous",
    ),
    "lists of all heads": (lambda: convert.from_msa_lists(INTS[None]), "topk_idx: has 2 dimensions (1, 4), expected 3"),
    "empty lists": (lambda: convert.from_msa_lists(INTS[None, None, :0]), "topk_idx: its entries: is 0, expected"),
    "keys of a block": (
        lambda: convert.from_msa_lists(INTS[None, None], block=96),
        "block: is 96, expected one of 1, 2, 4, 8, 16, 32, 64, 128, 256",
    ),
    "count alone": (lambda: convert.from_qsa_lists(INTS[:, None]), "logical_indices: its columns: is 1, expected"),
    "groups that do not fit": (
        lambda: convert.from_qsa_lists(INTS[None], group=4),
        "group: is 4, expected a divisor of the 3 entries",
    ),
    "groups of three": (lambda: convert.from_qsa_lists(INTS[None], group=3), "group: is 3, expected one of 1, 2, 4"),
    "no requests": (lambda: convert.from_token_requests(INTS, batch=0), "batch: is 0, expected a whole number, 1 or"),
    "no places": (lambda: convert.from_slots(INTS[None, :0]), "indices: its entries: is 0, expected"),
    "counts of other tokens": (
        lambda: convert.from_slots(INTS[None], INTS),
        "topk_length: has shape (4,): tokens is 4, expected 1",
    ),
    "counts of other queries": (
        lambda: convert.from_slots(INTS[None, None], INTS[None]),
        "topk_length: has shape (1, 4): queries is 4, expected 1",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    call, message = REFUSED[name]
    with pytest.raises(ArgumentError) as caught:
        call()
    assert str(caught.value).startswith(message)
