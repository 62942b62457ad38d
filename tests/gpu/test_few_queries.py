"""block_sparse_attention of few queries on a GPU, by the kernel for decoding: beside the definition in float64."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import attention_oracle  # noqa: E402

from runtime import block_sparse_attention, explain_attention  # noqa: E402
from runtime.ops.attention_choice import DTYPES, arch_of  # noqa: E402
from runtime.ops.paged_calls import has_receipt  # noqa: E402
from runtime.patterns import Causal, Dense, SinkWindow, SlidingWindow  # noqa: E402
from runtime.verify.common import tolerance  # noqa: E402

attention: Any = block_sparse_attention
HALF, BF16 = torch.float16, torch.bfloat16
KEYS = 1037
PATTERNS = {
    "dense": Dense(),
    "causal": Causal(),
    "window": SlidingWindow(700, 3),
    "sink window": SinkWindow(70, 600),
}
GROUPS = ((8, 8), (8, 2), (8, 1))
"""Query heads, and heads of K and V."""


def decodes(dtype: Any = BF16, head_dim: int = 128) -> bool:
    """Whether the GPU has the kernel for decoding."""
    fields = {"op": "paged_attention", "arch": arch_of(torch.device("cuda", 0)), "dtype": DTYPES[dtype]}
    return has_receipt(tuple({**fields, "head_dim": head_dim}.items()))


def needs_kernel(dtype: Any = BF16, head_dim: int = 128) -> None:
    if not decodes(dtype, head_dim):
        pytest.skip(f"no kernel for decoding with heads of {head_dim} in {dtype} has a receipt on this GPU")


def by_heads(*shape: int, dtype: Any = BF16) -> Any:
    """Contiguous (batch, heads, length, head_dim)."""
    return torch.randn(shape, device="cuda").to(dtype)


def by_tokens(batch: int, heads: int, length: int, head_dim: int, dtype: Any = BF16) -> Any:
    """Transposed from (batch, length, heads, head_dim)."""
    return by_heads(batch, length, heads, head_dim, dtype=dtype).transpose(1, 2)


def of_cache(batch: int, heads: int, length: int, head_dim: int, dtype: Any = BF16) -> Any:
    """The first keys of a cache with room, whose other keys are NaN."""
    cache = by_heads(batch, heads, length + 300, head_dim, dtype=dtype)
    cache[:, :, length:] = math.nan
    return cache[:, :, :length]


def expected(
    q: Any,
    k: Any,
    v: Any,
    pattern: Any,
    *,
    kv_lengths: Any = None,
    sink: Any = None,
    scale: Any = None,
    softcap: Any = None,
) -> tuple[Any, Any]:
    """The result and the log-sum-exp in float64."""
    seen = attention_oracle.times_seen(pattern.spec_json, (), (*q.shape[:3], k.shape[2]), kv_lengths).to(q.device)
    group = q.shape[1] // k.shape[1]
    k, v = (t.double().repeat_interleave(group, 1) for t in (k, v))
    logits = q.double() @ k.mT * (1 / math.sqrt(q.shape[3]) if scale is None else scale)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits.masked_fill(seen == 0, -math.inf)
    of_sink = [] if sink is None else [sink.double().reshape(1, -1, 1, 1).expand(*q.shape[:3], 1)]
    lse = torch.cat([logits, *of_sink], 3).logsumexp(3)
    weights = torch.where(logits == -math.inf, 0.0, (logits - lse[..., None]).exp())
    return weights @ v, lse


def check(q: Any, k: Any, v: Any, pattern: Any, **options: Any) -> None:
    """Compare a call with the definition, in an output that was NaN, and without one."""
    told = {name: value for name, value in options.items() if name != "scale"}
    explained = explain_attention(q, k, v, pattern, **told)
    assert explained.is_decoding, str(explained)
    right, right_lse = expected(q, k, v, pattern, **options)
    limit = tolerance(DTYPES[q.dtype], None, float(right.abs().max()))
    out = torch.full_like(q, math.nan)
    given, lse = attention(q, k, v, pattern, out=out, return_lse=True, validate=True, **options)
    assert given is out and lse.is_contiguous() and lse.shape == q.shape[:3]
    assert float((out.double() - right).abs().max()) <= limit
    torch.testing.assert_close(lse.double(), right_lse, atol=2e-3, rtol=1e-3)
    for _ in range(2):  # the second one is a launch that is kept
        alone = attention(q, k, v, pattern, **options)
        assert torch.equal(alone, out) and alone.stride() == torch.empty_like(q).stride()


def layouts(batch: int, queries: int, name: str) -> Iterator[tuple[Any, Any]]:
    """Functions that make q, and K and V, of which views are (tokens, heads, head_dim)."""
    yield by_heads, by_heads
    yield by_heads, of_cache
    yield by_tokens, by_tokens
    if batch == 1 or queries == 1 or name == "dense":
        yield by_heads, by_tokens


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("queries", [1, 2, 5, 8])
@pytest.mark.parametrize("batch", [1, 3])
def test_results_are_those_of_the_definition(name: str, queries: int, batch: int) -> None:
    needs_kernel()
    for heads, kv_heads in GROUPS:
        for of_q, of_k in layouts(batch, queries, name):
            q = of_q(batch, heads, queries, 128)
            k, v = (of_k(batch, kv_heads, KEYS, 128) for _ in "kv")
            try:
                check(q, k, v, PATTERNS[name])
            except Exception as error:
                raise AssertionError((heads, kv_heads, of_q.__name__, of_k.__name__)) from error


@pytest.mark.parametrize("dtype", [HALF, BF16], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
def test_types_head_sizes_and_lengths(dtype: Any, head_dim: int) -> None:
    needs_kernel(dtype, head_dim)
    for keys, queries in product((512, 1000, 4097, 70001), (1, 7)):
        q = by_heads(2, 4, queries, head_dim, dtype=dtype)
        k, v = (by_heads(2, 1, keys, head_dim, dtype=dtype) for _ in "kv")
        for pattern in (Causal(), Dense(), SlidingWindow(511)):
            check(q, k, v, pattern)


def test_options_are_those_of_the_definition() -> None:
    needs_kernel()
    sink = torch.randn(8, device="cuda")
    for queries in (1, 5):
        q, k, v = (by_tokens(3, heads, length, 128) for heads, length in ((8, queries), (2, KEYS), (2, KEYS)))
        check(q, k, v, Causal(), sink=sink, softcap=2.0, scale=0.3)
        check(q, k, v, SinkWindow(4, 700), sink=sink)
        lengths = torch.tensor([0, KEYS, 77], dtype=torch.int32, device="cuda")
        check(q, k, v, Dense(), kv_lengths=lengths, sink=sink)
        check(q, k, v, Dense(), kv_lengths=lengths)
        dense = [by_heads(3, heads, length, 128) for heads, length in ((8, queries), (2, KEYS), (2, KEYS))]
        check(*dense, Dense(), kv_lengths=lengths)
        check(*dense, Dense(), kv_lengths=lengths[1:2], softcap=5.0)
    check(by_heads(3, 8, 1, 128), *dense[1:], Causal(), kv_lengths=lengths)


def test_keys_behind_a_length_may_hold_anything() -> None:
    needs_kernel()
    q, k, v = by_heads(2, 8, 1, 128), by_heads(2, 2, KEYS, 128), by_heads(2, 2, KEYS, 128)
    lengths = torch.tensor([600, 33], dtype=torch.int32, device="cuda")
    right = attention(q, k, v, Causal(), kv_lengths=lengths)
    for tensor in (k, v):
        for batch, length in enumerate(lengths.tolist()):
            tensor[batch, :, length:] = math.nan
    assert torch.equal(attention(q, k, v, Causal(), kv_lengths=lengths), right)


def test_results_agree_with_the_kernel_of_calls_that_need_gradients() -> None:
    needs_kernel()
    q, k, v = by_heads(2, 8, 5, 128).requires_grad_(), by_heads(2, 2, KEYS, 128), by_heads(2, 2, KEYS, 128)
    out, lse = attention(q, k, v, Causal(), return_lse=True)
    assert not explain_attention(q, k, v, Causal()).is_decoding
    with torch.no_grad():
        other, other_lse = attention(q, k, v, Causal(), return_lse=True)
        assert explain_attention(q, k, v, Causal()).is_decoding
    torch.testing.assert_close(out.float(), other.float(), atol=1e-2, rtol=1e-2)
    torch.testing.assert_close(lse, other_lse, atol=1e-3, rtol=1e-3)
    out.float().square().sum().backward()
    assert q.grad is not None and bool(q.grad.isfinite().all())


def test_a_captured_call_serves_other_values_and_lengths() -> None:
    needs_kernel()
    q, k, v = by_heads(4, 8, 1, 128), by_heads(4, 2, 4096, 128), by_heads(4, 2, 4096, 128)
    lengths = torch.full((4,), 4096, dtype=torch.int32, device="cuda")
    out = torch.empty_like(q)
    attention(q, k, v, Causal(), kv_lengths=lengths, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attention(q, k, v, Causal(), kv_lengths=lengths, out=out)
        alone, lse = attention(q, k, v, Dense(), return_lse=True)
    for values in ((4096, 1, 700, 2000), (0, 4096, 4095, 64), (5, 5, 5, 5)):
        for tensor in (q, k, v):
            tensor.normal_()
        lengths.copy_(torch.tensor(values, dtype=torch.int32))
        out.fill_(math.nan)
        graph.replay()
        torch.cuda.synchronize()
        right, _ = expected(q, k, v, Dense(), kv_lengths=lengths)
        assert float((out.double() - right).abs().max()) <= tolerance("bf16", None, float(right.abs().max()))
        right, right_lse = expected(q, k, v, Dense())
        assert float((alone.double() - right).abs().max()) <= tolerance("bf16", None, float(right.abs().max()))
        torch.testing.assert_close(lse.double(), right_lse, atol=2e-3, rtol=1e-3)


def test_a_compiled_region_computes_the_same_bits() -> None:
    needs_kernel()
    for made in (by_heads, by_tokens):
        q, k, v = made(3, 8, 2, 128), made(3, 2, KEYS, 128), made(3, 2, KEYS, 128)

        def call(q: Any, k: Any, v: Any) -> Any:
            out, lse = attention(q, k, v, Causal(), return_lse=True)
            return out + 1, lse * 2

        found = torch.compile(call, fullgraph=True)(q, k, v)
        for one, other in zip(found, call(q, k, v), strict=True):
            assert torch.equal(one, other) and one.stride() == other.stride()


def test_the_same_call_has_the_same_bits() -> None:
    needs_kernel()
    q, k, v = by_heads(3, 8, 4, 128), by_heads(3, 2, 30000, 128), by_heads(3, 2, 30000, 128)
    first, out = attention(q, k, v, Causal()), torch.empty_like(q)
    for _ in range(50):
        attention(q, k, v, Causal(), out=out.fill_(math.nan))
        assert torch.equal(out, first)


def test_calls_on_other_streams_overlap() -> None:
    needs_kernel()
    tensors = [[by_heads(2, 8, 1, 128), by_heads(2, 2, 20000, 128), by_heads(2, 2, 20000, 128)] for _ in range(4)]
    right = [attention(*each, Causal()) for each in tensors]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in tensors]
    for _ in range(20):
        found = []
        for stream, each in zip(streams, tensors, strict=True):
            with torch.cuda.stream(stream):
                found.append(attention(*each, Causal()))
        torch.cuda.synchronize()
        assert all(map(torch.equal, found, right))
