"""What the backend of vLLM computes on a GPU, beside the definition."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import paged_oracle  # noqa: E402

from runtime.integrations.vllm.layers import Layer, Most, Requests  # noqa: E402
from runtime.integrations.vllm.selections import (  # noqa: E402
    minimax_m3_sparse_attn,
    minimax_m3_sparse_attn_decode,
    qsa_sparse_paged_attention,
)
from runtime.key_lists import KeyLists  # noqa: E402
from runtime.patterns import Causal, Dense, SinkWindow, SlidingWindow  # noqa: E402

BF16, HALF, E4M3 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
HEADS, KV_HEADS = 8, 2
LENGTHS, QUERIES = (900, 300, 70, 5), (1, 4, 70, 5)
ORDERS = {"LBNHC": (0, 1, 3, 2, 4), "LBHNC": (0, 1, 2, 3, 4), "LHBNC": (0, 2, 1, 3, 4), "BLNHC": (1, 0, 3, 2, 4)}
"""Orders in memory of layers, pages, heads, tokens and elements in vLLM's layouts."""


def int32(values: Any) -> Any:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def batch_of(lengths: Any = LENGTHS, queries: Any = QUERIES, page: int = 16, width: int = 64, seed: int = 0) -> Any:
    """Requests with pages in any order, padded by empty ones to as many as a CUDA graph has."""
    draw = torch.Generator().manual_seed(seed)
    pages = [-(-length // page) for length in lengths]
    table = torch.zeros(len(lengths), width, dtype=torch.int32)
    for row, numbers in zip(table, torch.randperm(sum(pages), generator=draw).int().split(pages), strict=True):
        row[: len(numbers)] = numbers
    bounds, tokens = int32([0, *accumulate(queries)]), slice(0, max(sum(queries), 16))
    return Requests(table.cuda(), int32(lengths), bounds, max(queries), True, tokens)


def cache_of(pages: int, page: int, d: int, dtype: Any, layout: str = "LBNHC") -> Any:
    """The cache of the second of three layers: (pages, kv_heads, page, 2 * head size)."""
    order, shape = ORDERS[layout], (3, pages, KV_HEADS, page, 2 * d)
    stored = torch.randn([shape[axis] for axis in order], device="cuda").to(dtype)
    return stored.permute([order.index(axis) for axis in range(5)])[1]


def right(layer: Layer, q: Any, cache: Any, batch: Requests, pattern: Any = None, **scales: Any) -> Any:
    left = None if layer.window is None else layer.window - 1
    if pattern is None and batch.causal:
        pattern = Causal() if left is None else SlidingWindow(left)
    elif pattern is None:
        pattern = Dense() if left is None else SlidingWindow(left, left)
    k_cache, v_cache = cache.split(layer.head_size, -1)
    table = {"block_table": batch.block_table, "seq_lens": batch.seq_lens, "cu_seqlens_q": batch.cu_seqlens_q}
    options = {"scale": layer.scale, "softcap": layer.softcap, "sink": layer.sink, "layout": "HND", **scales}
    return paged_oracle.attend(q, k_cache, v_cache, pattern, **table, **options)


def computed(layer: Layer, q: Any, cache: Any, batch: Requests, k: float = 1.0, v: float = 1.0) -> Any:
    out = torch.full_like(q, float("nan"))
    k_scale, v_scale = (torch.tensor(scale, device="cuda") for scale in (k, v))
    layer.attend("layer", q, cache, batch, out, k_scale=k_scale, v_scale=v_scale)
    return out


def queries_of(d: int, dtype: Any, tokens: int = sum(QUERIES)) -> Any:
    """Queries as vLLM passes them: views of a tensor with K and V."""
    return torch.randn(tokens, HEADS + 2 * KV_HEADS, d, device="cuda").to(dtype)[:, :HEADS]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("layout", ORDERS)
@pytest.mark.parametrize(("dtype", "d", "page"), [(BF16, 128, 16), (HALF, 64, 64), (BF16, 256, 32), (HALF, 192, 128)])
def test_a_batch_of_prompts_and_steps_is_right_in_each_layout(dtype: Any, d: int, page: int, layout: str) -> None:
    batch = batch_of(page=page)
    layer, q, cache = Layer(HEADS, KV_HEADS, d, d**-0.5), queries_of(d, dtype), cache_of(90, page, d, dtype, layout)
    layer.prepare(dtype, None)
    out = computed(layer, q, cache, batch)
    torch.testing.assert_close(out, right(layer, q, cache, batch), atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("layout", ORDERS)
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize(("dtype", "d", "page"), [(BF16, 128, 16), (HALF, 64, 64), (BF16, 256, 32)])
def test_prompts_behind_steps_are_right(dtype: Any, d: int, page: int, window: int | None, layout: str) -> None:
    """The second part of a batch, which takes another kernel on Hopper. Tokens of steps are not written."""
    batch = batch_of((900, 300), (300, 200), page)._replace(tokens=slice(7, 507))
    layer = Layer(HEADS, KV_HEADS, d, d**-0.5, window)
    layer.prepare(dtype, None)
    q, cache = queries_of(d, dtype, 507), cache_of(90, page, d, dtype, layout)
    out = computed(layer, q, cache, batch)
    torch.testing.assert_close(out[7:], right(layer, q[7:], cache, batch), atol=1e-2, rtol=1e-2)
    assert out[:7].isnan().all()


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize(("dtype", "d"), [(BF16, 128), (HALF, 64)])
def test_new_prompts_with_sinks_are_packed(dtype: Any, d: int, window: int | None) -> None:
    """No prefill kernel over pages has sinks. K and V of the tokens are read, and pages are not."""
    batch = batch_of((300, 200), (300, 200))._replace(tokens=slice(7, 507), are_new=True)
    layer, sink = Layer(HEADS, KV_HEADS, d, d**-0.5, window), torch.randn(HEADS, device="cuda")
    layer.prepare(dtype, sink)
    q, (k, v) = queries_of(d, dtype, 507), torch.randn(2, 507, KV_HEADS, d, device="cuda").to(dtype)
    cache, out, one = cache_of(90, 16, d, dtype), torch.full_like(q, float("nan")), torch.tensor(1.0, device="cuda")
    layer.attend("layer", q, cache.fill_(float("nan")), batch, out, k_scale=one, v_scale=one, new=(k, v))
    for first, length in ((7, 300), (307, 200)):
        rows = slice(first, first + length)
        keys, values = (t[rows].float().repeat_interleave(HEADS // KV_HEADS, 1) for t in (k, v))
        logits = torch.einsum("qhd,khd->hqk", q[rows].float(), keys) * layer.scale
        away = torch.arange(length, device="cuda")[:, None] - torch.arange(length, device="cuda")
        logits.masked_fill_((away < 0) | (away >= (window or length)), float("-inf"))
        weights = torch.cat([logits, sink[:, None, None].expand(-1, length, 1)], -1).softmax(-1)[..., :-1]
        expected = torch.einsum("hqk,khd->qhd", weights, values)
        torch.testing.assert_close(out[rows].float(), expected, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 100])
def test_windows_sinks_and_softcaps_are_right(window: int | None, causal: bool) -> None:
    batch = batch_of()._replace(causal=causal)
    layer = Layer(HEADS, KV_HEADS, 64, 0.2, window, 20.0)
    layer.prepare(BF16, torch.randn(HEADS, device="cuda").bfloat16())
    q, cache = queries_of(64, BF16), cache_of(90, 16, 64, BF16)
    torch.testing.assert_close(computed(layer, q, cache, batch), right(layer, q, cache, batch), atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize(("dtype", "d"), [(BF16, 128), (HALF, 64), (BF16, 256)])
def test_an_e4m3_cache_is_right(dtype: Any, d: int) -> None:
    batch, layer = batch_of(page=64), Layer(HEADS, KV_HEADS, d, d**-0.5, is_e4m3=True)
    layer.prepare(dtype, None)
    q, cache = queries_of(d, dtype), cache_of(40, 64, d, E4M3)
    out = computed(layer, q, cache.view(torch.uint8), batch, 0.5, 0.75)
    scales = {"k_scale": torch.tensor([0.5], device="cuda"), "v_scale": torch.tensor([0.75], device="cuda")}
    torch.testing.assert_close(out, right(layer, q, cache, batch, **scales), atol=1e-2, rtol=1e-2)


def last_pages(call: Any) -> KeyLists:
    """The first and the last two pages of 16 keys of each request, without a synchronization."""
    tokens = torch.arange(call.query.shape[0], device="cuda", dtype=torch.int32)
    request = torch.searchsorted(call.cu_seqlens_q[1:], tokens, right=True).clamp(max=call.seq_lens.shape[0] - 1)
    last = (call.seq_lens[request] - 1) // 16
    entries = torch.stack([torch.zeros_like(last), last - 1, last], -1)
    entries = torch.where((entries > 0) | (torch.arange(3, device="cuda") == 0), entries, -1)
    return KeyLists(entries[None].int().contiguous(), keys=16)


@pytest.mark.parametrize("policy", [lambda call: SinkWindow(4, 50), last_pages], ids=["window", "pages"])
def test_one_graph_serves_steps_prompts_and_padding(policy: Any) -> None:
    """Captured once with 16 tokens of 6 requests; replayed with any division of them."""
    for layer in (Layer(HEADS, KV_HEADS, 128, 0.1), Layer(HEADS, KV_HEADS, 128, 0.1, policy=policy)):
        layer.prepare(BF16, None)
        q, cache = queries_of(128, BF16, 16), cache_of(300, 16, 128, BF16)
        batch, out = batch_of([1] * 6, [16, 0, 0, 0, 0, 0]), torch.empty(16, HEADS, 128, device="cuda").bfloat16()
        one = torch.tensor(1.0, device="cuda")
        call = {"k_scale": one, "v_scale": one}
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            layer.attend("layer", q, cache, batch, out, **call)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            layer.attend("layer", q, cache, batch, out, **call)
        for seed, (lengths, queries) in enumerate(
            [
                ([900, 40, 5, 300, 77, 1], [1, 1, 1, 1, 1, 1]),
                ([900, 40, 14, 0, 0, 0], [1, 1, 14, 0, 0, 0]),
                ([16, 0, 0, 0, 0, 0], [16, 0, 0, 0, 0, 0]),
                ([700, 800, 0, 0, 0, 0], [8, 8, 0, 0, 0, 0]),
            ]
        ):
            other = batch_of(lengths, queries, seed=seed)
            for name in ("block_table", "seq_lens", "cu_seqlens_q"):
                getattr(batch, name).copy_(getattr(other, name))
            out.fill_(float("nan"))
            graph.replay()
            tokens = sum(queries)
            pattern = None
            if layer.policy is not None:
                pattern = policy(
                    type("Call", (), {"query": q, "seq_lens": other.seq_lens, "cu_seqlens_q": other.cu_seqlens_q})
                )
            expected = right(layer, q, cache, other, pattern)
            torch.testing.assert_close(out[:tokens], expected[:tokens], atol=1e-2, rtol=1e-2)


def test_invariant_results_do_not_depend_on_the_batch() -> None:
    layer = Layer(HEADS, KV_HEADS, 128, 0.1, batch_invariant=True, most=Most(8, 100))
    layer.prepare(BF16, None)
    batch, q, cache = batch_of(), queries_of(128, BF16), cache_of(90, 16, 128, BF16)
    whole = computed(layer, q, cache, batch)
    for i, (first, end) in enumerate(zip([0, *accumulate(QUERIES)], accumulate(QUERIES), strict=False)):
        one = Requests(
            batch.block_table[i : i + 1].contiguous(),
            batch.seq_lens[i : i + 1].contiguous(),
            int32([0, end - first]),
            end - first,
            True,
            slice(0, end - first),
        )
        assert torch.equal(computed(layer, q[first:end], cache, one), whole[first:end])
    larger = Layer(HEADS, KV_HEADS, 128, 0.1, batch_invariant=True, most=Most(1, 1))  # a call allocates its own memory
    larger.prepare(BF16, None)
    assert torch.equal(computed(larger, q, cache, batch), whole)


@pytest.mark.parametrize("is_e4m3", [False, True])
def test_msa_is_right(is_e4m3: bool) -> None:
    """Also beside padded requests, which have no keys and lists of -1."""
    lengths, tokens = [3000, 900, 0, 140], 8
    batch = batch_of(lengths, [2] * 4, page=128, width=24)
    cache = torch.randn(40, KV_HEADS, 128, 256, device="cuda").to(E4M3 if is_e4m3 else BF16)
    last = torch.tensor([(length - 2 + j) // 128 for length in lengths for j in range(2)], device="cuda")
    ranks = torch.rand(KV_HEADS, tokens, 24, device="cuda") - (torch.arange(24, device="cuda") > last[:, None]).float()
    topk = ranks.topk(16).indices
    topk = torch.where(topk <= last[:, None], topk, -1).int().transpose(0, 1).contiguous().transpose(0, 1)
    q, out = (
        torch.randn(tokens, 16, 128, device="cuda").bfloat16(),
        torch.empty(tokens, 16, 128, device="cuda").bfloat16(),
    )
    scale = (
        {"k_scale": torch.tensor(0.5, device="cuda"), "v_scale": torch.tensor(2.0, device="cuda")} if is_e4m3 else {}
    )
    minimax_m3_sparse_attn_decode(q, cache, topk, batch.block_table, batch.seq_lens, KV_HEADS, 0.1, out, 2, **scale)
    layer = Layer(16, KV_HEADS, 128, 0.1)
    pattern = KeyLists(topk, keys=128)
    expected = right(layer, q, cache, batch, pattern, **{name: factor.view(1) for name, factor in scale.items()})
    torch.testing.assert_close(out, expected, atol=2e-2, rtol=1e-2)
    again = torch.empty_like(out)
    prefix = batch.seq_lens - 2
    minimax_m3_sparse_attn(
        q, cache, topk, batch.block_table, batch.cu_seqlens_q, batch.seq_lens, prefix, 2, KV_HEADS, 0.1, again, **scale
    )
    torch.testing.assert_close(again, expected, atol=2e-2, rtol=1e-2)


@pytest.mark.parametrize("prefill", [False, True])
@pytest.mark.parametrize("is_e4m3", [False, True])
def test_qsa_is_right(prefill: bool, is_e4m3: bool) -> None:
    lengths, queries = (400, 90, 33), (60, 33, 9) if prefill else (1, 1, 1)
    batch, tokens = batch_of(lengths, queries, page=64, width=8), sum(queries)
    k_cache, v_cache = torch.randn(2, 20, 64, KV_HEADS, 256, device="cuda").to(E4M3 if is_e4m3 else BF16)
    position = torch.cat([torch.arange(n - count, n) for n, count in zip(lengths, queries, strict=True)]).cuda()
    ranks = torch.rand(tokens, 512, device="cuda") - (torch.arange(512, device="cuda") > position[:, None]).float()
    chosen, counts = ranks.topk(32).indices.int(), (position + 1).clamp(max=32).int()
    listed = torch.cat([chosen, counts[:, None]], 1).contiguous()
    to_req = torch.repeat_interleave(torch.arange(3), torch.tensor(queries)).int().cuda()
    q, gate = (
        torch.randn(tokens, 8, 256, device="cuda").bfloat16(),
        torch.randn(tokens, 8 * 256, device="cuda").bfloat16(),
    )
    factors = {"k_scale": 0.5, "v_scale": 2.0} if is_e4m3 else {}
    out = qsa_sparse_paged_attention(
        q, k_cache, v_cache, listed, batch.block_table, to_req, prefill, output_gate=gate, **factors
    )
    pattern = KeyLists(chosen[None].contiguous(), counts[None].contiguous())
    table = {"block_table": batch.block_table, "seq_lens": batch.seq_lens, "cu_seqlens_q": batch.cu_seqlens_q}
    scales = {name: torch.tensor([factor], device="cuda") for name, factor in factors.items()}
    expected = paged_oracle.attend(q, k_cache, v_cache, pattern, **table, **scales)
    expected = expected.float() * torch.sigmoid(gate.view(q.shape).float())
    torch.testing.assert_close(out.float(), expected, atol=2e-2, rtol=1e-2)
