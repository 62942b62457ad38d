"""block_sparse_attention of a few queries without a GPU: the kernel for decoding runs on the host (host_paged.py)."""

from __future__ import annotations

import platform
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from scripts import imported

torch = pytest.importorskip("torch")

import attention_oracle  # noqa: E402
import host_paged  # noqa: E402
from host_streams import pretend_stream  # noqa: E402

from codegen.library import find_spec  # noqa: E402
from codegen.render import generate  # noqa: E402
from runtime import block_sparse_attention  # noqa: E402
from runtime.ops import attention_calls, paged_calls  # noqa: E402
from runtime.patterns import Causal, Dense, SinkWindow, SlidingWindow  # noqa: E402

RUNS = platform.machine() == "x86_64" and shutil.which("g++") is not None
pytestmark = pytest.mark.skipif(not RUNS, reason="needs g++, and the registers of an x86-64")
KEYS, D = 515, 64
KERNEL = {"op": "paged_attention", "arch": "sm_90a", "dtype": "fp16", "head_dim": D}
PATTERNS = {
    "dense": Dense(),
    "causal": Causal(),
    "window": SlidingWindow(510, 2),
    "sink window": SinkWindow(7, 505),
}


@pytest.fixture
def kernel(tmp_path: Path) -> Iterator[Any]:
    """The kernel of heads of 64, which all calls with few queries take."""
    named = find_spec(KERNEL)
    with imported("pretended") as script, script.pretended(), pytest.MonkeyPatch.context() as inner:
        pretend_stream(inner)
        found = host_paged.HostKernel(named, tmp_path)
        inner.setattr(paged_calls, "_kernel", lambda *_: found)  # undone before the stand-in driver's own
        inner.setattr(attention_calls, "remember", None)  # no other kernel is chosen
        torch.manual_seed(0)
        yield found


def by_heads(batch: int, heads: int, length: int) -> Any:
    """Contiguous."""
    return torch.randn(batch, heads, length, D).half()


def by_tokens(batch: int, heads: int, length: int) -> Any:
    """Transposed from (batch, length, heads, head_dim)."""
    return torch.randn(batch, length, heads, D).half().transpose(1, 2)


def of_longer(batch: int, heads: int, length: int) -> Any:
    """The first keys of a longer tensor, as of a cache with room."""
    return torch.randn(batch, heads, length + 9, D).half()[:, :, :length]


def check(kernel: Any, q: Any, k: Any, v: Any, pattern: Any, **options: Any) -> None:
    """Compare a call with the definition: without and with an output, and its log-sum-exp."""
    kv_lengths = options.get("kv_lengths")
    seen = attention_oracle.times_seen(pattern.spec_json, (), (*q.shape[:3], k.shape[2]), kv_lengths)
    others = {name: value for name, value in options.items() if name != "kv_lengths"}
    right, right_lse = attention_oracle.attention(q, k, v, seen, **others)
    kernel.host.tensors = [q, k, v, *(t for t in (options.get("sink"), kv_lengths) if t is not None)]
    out = torch.full_like(q, float("nan"))
    given, lse = block_sparse_attention(q, k, v, pattern, out=out, return_lse=True, **options)
    assert given is out and lse.shape == q.shape[:3] and lse.is_contiguous()
    torch.testing.assert_close(out.float(), right, atol=2e-3, rtol=2e-3)
    torch.testing.assert_close(lse, right_lse, atol=2e-3, rtol=1e-3)
    for _ in range(2):  # the second one is a launch that is kept
        alone = block_sparse_attention(q, k, v, pattern, **options)
        assert torch.equal(alone, out) and alone.stride() == torch.empty_like(q).stride()


LAYOUTS: tuple[tuple[Any, Any], ...] = (
    (by_heads, by_heads),
    (by_heads, of_longer),
    (by_tokens, by_tokens),
    (by_heads, by_tokens),
)


def sizes() -> Iterator[tuple[int, int, int, int]]:
    """Batch, query heads, heads of K and V, queries: groups of 1, 4 and 8, and a prime number of heads."""
    yield from ((1, 8, 2, 1), (3, 4, 4, 1), (3, 8, 1, 1), (1, 8, 1, 5), (2, 8, 2, 2), (2, 3, 3, 8))


def test_results_are_those_of_the_definition(recorded: Callable[..., None], kernel: Any) -> None:
    recorded(generate(find_spec(KERNEL)).source)
    for order, (batch, heads, kv_heads, q_len) in enumerate(sizes()):
        kernel.host.order = order
        for of_q, of_k in LAYOUTS:
            for name, pattern in PATTERNS.items():
                q, k, v = of_q(batch, heads, q_len), of_k(batch, kv_heads, KEYS), of_k(batch, kv_heads, KEYS)
                if batch > 1 and q_len > 1 and name != "dense" and of_q is by_heads and of_k is by_tokens:
                    continue  # which no view is
                try:
                    check(kernel, q, k, v, pattern)
                except Exception as error:
                    raise AssertionError((batch, heads, q_len, of_q.__name__, of_k.__name__, name)) from error


def test_options_are_those_of_the_definition(recorded: Callable[..., None], kernel: Any) -> None:
    recorded(generate(find_spec(KERNEL)).source)
    """Sinks, a cap and a scale; lengths of batches, also one that is 0 and one of more keys than there are."""
    sink = torch.randn(8)
    for q_len in (1, 3):
        q, k, v = by_tokens(2, 8, q_len), by_tokens(2, 2, KEYS), by_tokens(2, 2, KEYS)
        check(kernel, q, k, v, Causal(), sink=sink, softcap=2.0, scale=0.3)
        check(kernel, q, k, v, Dense(), sink=sink, kv_lengths=torch.tensor([0, 77], dtype=torch.int32))
        check(kernel, q, k, v, Dense(), kv_lengths=torch.tensor([KEYS, 0], dtype=torch.int32))
        dense = by_heads(2, 8, q_len), by_heads(2, 2, KEYS), by_heads(2, 2, KEYS)
        check(kernel, *dense, Dense(), kv_lengths=torch.tensor([200], dtype=torch.int32))
        check(kernel, *dense, Dense(), kv_lengths=torch.tensor([200, 1], dtype=torch.int32))
    check(kernel, by_heads(2, 8, 1), k, v, Causal(), kv_lengths=torch.tensor([300, 20], dtype=torch.int32))
