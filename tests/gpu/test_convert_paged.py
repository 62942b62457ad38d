"""Converters of serving formats on a GPU: without a synchronization, and what attention makes of the result."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from runtime import convert, paged_attention  # noqa: E402
from runtime.patterns import BlockLists, Causal, Dense  # noqa: E402

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


def drawn_blocks(
    lengths: list[int], queries: list[int], block: tuple[int, int], draw: Any
) -> tuple[BlockLists, list[Any]]:
    """Lists of the query blocks of each request, and bool (kv_heads, queries, keys): what the queries of each see.

    A block of keys before all queries of a query block is full or partial at random.
    """
    bounds = int32([0, *accumulate(queries)])
    sequence, number = (t.tolist() for t in convert.packed_list_rows(bounds, sum(queries), block[0]))
    most = -(-max(lengths) // block[1])
    counts, full_counts = torch.zeros(2, 1, KV_HEADS, len(sequence), dtype=torch.int32)
    indices, full = torch.full((2, 1, KV_HEADS, len(sequence), most), -1, dtype=torch.int32)
    seen = [torch.zeros(KV_HEADS, each, keys, dtype=torch.bool) for each, keys in zip(queries, lengths, strict=True)]
    for row, (request, at) in enumerate(zip(sequence, number, strict=True)):
        if request < 0:
            continue
        first, end = at * block[0], min((at + 1) * block[0], queries[request])
        position = torch.arange(first, end) + lengths[request] - queries[request]
        blocks = -(-lengths[request] // block[1])
        for head in range(KV_HEADS):
            for entry in torch.randperm(blocks, generator=draw)[: int(torch.randint(blocks + 1, (), generator=draw))]:
                keys = torch.arange(int(entry) * block[1], min(int(entry + 1) * block[1], lengths[request]))
                seen[request][head, first:end, keys] = keys <= position[:, None]
                is_full = int(entry + 1) * block[1] <= int(position[0]) and bool(torch.rand((), generator=draw) < 0.5)
                to, count = (full, full_counts) if is_full else (indices, counts)
                to[0, head, row, count[0, head, row]] = entry
                count[0, head, row] += 1
    tensors = (t.cuda() for t in (counts, indices, full_counts, full))
    return BlockLists(*tensors, block=block, mask="causal"), seen


@pytest.mark.parametrize("block", [(64, 64), (128, 64), (64, 128), (128, 128)], ids=str)
@pytest.mark.parametrize(
    ("lengths", "queries", "head_dim"),
    [([75, 16, 300, 40], [70, 16, 130, 0], 64), ([2500, 700, 130], [1400, 300, 1], 128)],
    ids=["few queries", "many queries"],
)
def test_lists_of_query_blocks_are_those_of_dense_attention(
    lengths: list[int], queries: list[int], head_dim: int, block: tuple[int, int]
) -> None:
    """Over pages; many queries take the kernel by key blocks on Hopper."""
    draw = torch.Generator().manual_seed(2)
    counts = [-(-length // PAGE) for length in lengths]
    order = torch.randperm(sum(counts) + 3, generator=draw)
    table = torch.full((len(lengths), max(counts)), -1, dtype=torch.int32)
    for row, pages in zip(table, order[: sum(counts)].split(counts), strict=True):
        row[: len(pages)] = pages
    k, v = torch.randn(2, len(order), PAGE, KV_HEADS, head_dim, generator=draw).half().cuda()
    q = torch.randn(sum(queries), HEADS, head_dim, generator=draw).half().cuda()
    pattern, seen = drawn_blocks(lengths, queries, block, draw)
    bounds = int32([0, *accumulate(queries)])
    lists = convert.to_key_lists(pattern, cu_seqlens_q=bounds, tokens=sum(queries))
    out = paged_attention(
        q, k, v, lists, block_table=table.cuda(), seq_lens=int32(lengths), cu_seqlens_q=bounds, validate=True
    )
    assert isinstance(out, torch.Tensor)
    for i, (first, end) in enumerate(pairwise(bounds.tolist())):
        pages, mask = table[i, : counts[i]].long().cuda(), seen[i].cuda()[:, None]
        keys, values = (t[pages].flatten(0, 1)[: lengths[i]].double().transpose(0, 1)[:, None] for t in (k, v))
        mine = q[first:end].double().unflatten(1, (KV_HEADS, HEADS // KV_HEADS)).permute(1, 2, 0, 3)
        logits = (mine @ keys.mT * head_dim**-0.5).masked_fill(~mask, -torch.inf)
        expected = (logits.softmax(-1).nan_to_num(0.0) @ values).permute(2, 0, 1, 3).flatten(1, 2)
        torch.testing.assert_close(out[first:end].double(), expected, atol=TOLERANCE, rtol=2e-3)


def test_no_synchronization(cache: Cache) -> None:
    topk_idx, rows, requests = int32([[[0, 1]] * 3] * 2), int32([[0, 1, 2, 3, 4]] * 3), int32([0, 1, 2])
    ends, listed, last = int32([0, 2, 3, 5]), int32([4, 3, 2, 1, 0]), int32([1, 2, 3])
    blocks = BlockLists(int32([[[1, 1, 1]]]), int32([[[[0], [0], [0]]]]), block=(64, 64), mask="causal")
    torch.cuda.set_sync_debug_mode("error")
    try:
        convert.from_page_csr(ends, listed, last, page_size=PAGE)
        convert.from_msa_lists(topk_idx.long())
        convert.from_qsa_lists(rows, group=4)
        convert.from_token_requests(requests, batch=3)
        convert.from_slots(rows, last)
        convert.to_key_lists(blocks, cu_seqlens_q=ends, tokens=5)
        convert.to_token_pages(cache.k)
    finally:
        torch.cuda.set_sync_debug_mode("default")
