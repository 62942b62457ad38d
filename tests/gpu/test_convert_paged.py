"""Converters of serving formats on a GPU: without a synchronization, and what attention makes of the result."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from runtime import convert, paged_attention  # noqa: E402
from runtime.patterns import Causal, Dense  # noqa: E402

HEADS, KV_HEADS, HEAD_DIM, PAGE, PAGES = 8, 2, 64, 16, 20
LENGTHS = [75, 16, 160]
TOLERANCE = 3e-3
"""Of fp16, for results of about 1."""


def int32(values: Any) -> Any:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def attention(q: Any, k: Any, v: Any, keys: list[list[list[int]]]) -> Any:
    """float32 (tokens, heads, head_dim), one query after the other.

    Args:
        q: (tokens, heads, head_dim).
        k: (tokens of the cache, kv_heads, head_dim).
        v: as k.
        keys: rows of k that each query sees, by KV head.
    """
    out = torch.zeros(q.shape, device="cuda")
    group = HEADS // KV_HEADS
    for token, of_heads in enumerate(keys):
        for head in range(HEADS):
            seen = of_heads[head // group]
            weights = (k[seen, head // group].float() @ q[token, head].float() * HEAD_DIM**-0.5).softmax(0)
            out[token, head] = weights @ v[seen, head // group].float()
    return out


class Cache:
    """A cache in pages, and its pages of each request in random order."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        order = torch.randperm(PAGES, generator=generator).tolist()
        counts = [-(-length // PAGE) for length in LENGTHS]
        self.pages = [[order.pop() for _ in range(count)] for count in counts]
        self.k, self.v = torch.randn(2, PAGES, PAGE, KV_HEADS, HEAD_DIM, generator=generator).half().cuda()
        self.q = torch.randn(len(LENGTHS), HEADS, HEAD_DIM, generator=generator).half().cuda()

    def slot(self, request: int, position: int) -> int:
        return self.pages[request][position // PAGE] * PAGE + position % PAGE

    def expected(self, positions: list[list[list[int]]]) -> Any:
        """The result, from the positions that each query sees, by KV head."""
        keys = [[[self.slot(i, at) for at in seen] for seen in heads] for i, heads in enumerate(positions)]
        return attention(self.q, self.k.flatten(0, 1), self.v.flatten(0, 1), keys)

    def table(self) -> Any:
        ends = [0]
        for pages in self.pages:
            ends.append(ends[-1] + len(pages))
        listed = [page for pages in self.pages for page in pages]
        last = [(length - 1) % PAGE + 1 for length in LENGTHS]
        return convert.from_page_csr(int32(ends), int32(listed), int32(last), page_size=PAGE, max_pages=10)


@pytest.fixture(scope="module")
def cache() -> Cache:
    return Cache()


def assert_close(found: Any, expected: Any) -> None:
    assert (found.float() - expected).abs().max() <= TOLERANCE


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_a_table_and_a_cache_of_flashinfer(cache: Cache, layout: Any) -> None:
    stacked = torch.stack([cache.k, cache.v], 1)
    stacked = stacked.transpose(2, 3).contiguous() if layout == "HND" else stacked
    table = cache.table()
    out = paged_attention(
        cache.q, *convert.from_stacked_cache(stacked), Causal(), **table._asdict(), layout=layout, validate=True
    )
    assert_close(out, cache.expected([[list(range(length))] * KV_HEADS for length in LENGTHS]))


def test_lists_and_a_cache_of_msa(cache: Cache) -> None:
    joined = torch.cat([cache.k, cache.v], -1).transpose(1, 2).contiguous()
    lists = [[[0, 3, 4], [0, -1, -1], [1, 8, 9]], [[4, -1, -1], [0, -1, -1], [0, 5, -1]]]
    positions = [
        [
            [at for block in lists[head][i] if block >= 0 for at in range(block * 16, block * 16 + 16) if at < length]
            for head in range(KV_HEADS)
        ]
        for i, length in enumerate(LENGTHS)
    ]
    out = paged_attention(
        cache.q,
        *convert.from_joined_cache(joined),
        convert.from_msa_lists(int32(lists), block=16),
        **cache.table()._asdict(),
        layout="HND",
    )
    assert_close(out, cache.expected(positions))


def test_lists_of_qsa(cache: Cache) -> None:
    groups = [[0, 5, 18], [3], [2, 39]]
    tokens = [[at for group in each for at in range(group * 4, group * 4 + 4)] for each in groups]
    tokens = [[at for at in each if at < length] for each, length in zip(tokens, LENGTHS, strict=True)]
    rows = [each + [-1] * (12 - len(each)) + [len(each)] for each in tokens]
    expected = cache.expected([[each] * KV_HEADS for each in tokens])
    for group in (1, 4):
        lists = convert.from_qsa_lists(int32(rows), group=group)
        bounds = convert.from_token_requests(int32([0, 1, 2]), batch=3)
        out = paged_attention(
            cache.q, cache.k, cache.v, lists, **cache.table()._asdict(), cu_seqlens_q=bounds, validate=True
        )
        assert_close(out, expected)


@pytest.mark.parametrize("counted", [False, True])
def test_slots_become_pages_of_one_token(cache: Cache, counted: bool) -> None:
    positions = [[70, 3, 12, 74], [5], [0, 159, 31]]
    slots = [[cache.slot(i, at) for at in each] for i, each in enumerate(positions)]
    filler = 7 if counted else -1
    rows = int32([each + [filler] * (5 - len(each)) for each in slots])
    lengths = int32([len(each) for each in slots]) if counted else None
    k, v = map(convert.to_token_pages, (cache.k, cache.v))
    out = paged_attention(cache.q, k, v, Dense(), **convert.from_slots(rows, lengths)._asdict())
    assert_close(out, cache.expected([[each] * KV_HEADS for each in positions]))


def test_no_synchronization(cache: Cache) -> None:
    topk_idx, rows, requests = int32([[[0, 1]] * 3] * 2), int32([[0, 1, 2, 3, 4]] * 3), int32([0, 1, 2])
    ends, listed, last = int32([0, 2, 3, 5]), int32([4, 3, 2, 1, 0]), int32([1, 2, 3])
    torch.cuda.set_sync_debug_mode("error")
    try:
        convert.from_page_csr(ends, listed, last, page_size=PAGE)
        convert.from_msa_lists(topk_idx.long())
        convert.from_qsa_lists(rows, group=4)
        convert.from_token_requests(requests, batch=3)
        convert.from_slots(rows, last)
        convert.to_token_pages(cache.k)
    finally:
        torch.cuda.set_sync_debug_mode("default")
