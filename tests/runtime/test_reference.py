"""reference_attention beside the definition that the tests of kernels have, which is written apart from it."""

from __future__ import annotations

import math
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import attention_oracle  # noqa: E402
import gradient_oracle  # noqa: E402
from each import looped  # noqa: E402
from torch.nn.attention import flex_attention as flex  # noqa: E402

from runtime import ArgumentError, convert, create_block_mask, reference_attention  # noqa: E402
from runtime.patterns import BlockLists, Causal, Dense, PrefixLM, Score, SlidingWindow, Strided, TopK  # noqa: E402
from runtime.reference import reference_attention as typed  # noqa: E402

call: Any = typed


def qkv(q_len: int = 40, kv_len: int = 60, dtype: Any = torch.float64, heads: int = 4, kv_heads: int = 2) -> list[Any]:
    torch.manual_seed(0)
    of = (heads, q_len), (kv_heads, kv_len), (kv_heads, kv_len)
    return [torch.randn(2, h, length, 16, dtype=torch.float64).to(dtype) for h, length in of]


def top() -> Any:
    return TopK(torch.tensor([[[[0, 2], [1, -1], [3, 0]]]], dtype=torch.int32), block=(16, 16))


def lists() -> Any:
    counts, indices = torch.tensor([[[1, 2, 0]]]).int(), torch.tensor([[[[1, 0], [0, 2], [0, 0]]]]).int()
    full = torch.tensor([[[1, 1, 2]]]).int(), torch.tensor([[[[0, 0], [1, 0], [3, 1]]]]).int()
    return BlockLists(counts, indices, *full, block=(16, 16), mask="causal")


PATTERNS = {
    "dense": Dense,
    "causal": Causal,
    "window": lambda: SlidingWindow(7, 2),
    "strided": lambda: Strided(2, 0, 64),
    "prefix": lambda: PrefixLM(torch.tensor([3, 40], dtype=torch.int32)),
    "topk": top,
    "lists": lists,
    "expression": lambda: create_block_mask("(q_idx + head) % 3 == 0", 2, 4, 40, 60, device="cpu", BLOCK_SIZE=16),
}
OPTIONS: list[dict[str, Any]] = [
    {},
    {"scale": 0.4, "softcap": 2.0},
    {"sink": torch.tensor([0.5, -1.0, 0.0, 2.0])},
    {"kv_lengths": torch.tensor([0, 33], dtype=torch.int32)},
]


@looped
@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("options", OPTIONS)
def test_it_is_the_definition(name: str, options: dict[str, Any]) -> None:
    pattern, tensors = PATTERNS[name](), qkv()
    given = {key: value for key, value in options.items() if key != "kv_lengths"}
    seen = gradient_oracle.seen_by(pattern, *tensors[:2], options.get("kv_lengths"))
    right, lse = attention_oracle.attention(*tensors, seen, **given)
    found = call(*tensors, pattern, return_lse=True, **options)
    assert found.out.dtype == found.lse.dtype == torch.float64
    torch.testing.assert_close(found.out.float(), right, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found.lse.float(), lse, atol=1e-5, rtol=1e-5)
    rounded = call(*(t.bfloat16() for t in tensors), pattern, **options)
    assert rounded.dtype == torch.bfloat16
    torch.testing.assert_close(rounded.float(), right, atol=3e-2, rtol=3e-2)


def test_scores_as_texts_functions_and_objects() -> None:
    tensors, slope = qkv(), torch.tensor([0.5, 0.25, 0.1, 0.0], dtype=torch.float32)
    function = lambda score, b, h, q, kv: score + slope[h] * (kv - q)  # noqa: E731
    made = Score("score + slope[head] * (kv_idx - q_idx)", aux={"slope": slope})
    seen = gradient_oracle.seen_by(Causal(), *tensors[:2])
    distance = torch.arange(60) - torch.arange(40)[:, None]
    right, _ = attention_oracle.attention(*tensors, seen, score=lambda s: s + slope[:, None, None] * distance)
    for score in (function, made):
        torch.testing.assert_close(call(*tensors, Causal(), score=score).float(), right, atol=1e-5, rtol=1e-5)
    text = call(*tensors, Causal(), score="3.0 * tanh(score / 3.0)")
    assert torch.allclose(text, call(*tensors, Causal(), softcap=3.0))


def test_block_masks_and_float32() -> None:
    tensors = qkv(64, 64, torch.float32, 2, 2)
    mask = flex.create_block_mask(lambda b, h, q, kv: q >= kv, None, None, 64, 64, device="cpu", BLOCK_SIZE=32)
    right = torch.nn.functional.scaled_dot_product_attention(*tensors, is_causal=True)
    torch.testing.assert_close(call(*tensors, mask), right)


def test_gradients_are_finite_where_a_query_sees_nothing() -> None:
    tensors = [t.requires_grad_() for t in qkv(60, 40)]
    out, lse = call(*tensors, Causal(), return_lse=True)
    assert not out[:, :, :20].any() and bool((lse[:, :, :20] == -math.inf).all())
    seen = convert.to_token_mask(Causal(), q_len=60, kv_len=40)
    right, _ = gradient_oracle.dense(*tensors, seen.expand(2, 4, 60, 40).int())
    grad = torch.randn_like(out)
    for one, other in zip(
        torch.autograd.grad(out, tensors, grad), torch.autograd.grad(right, tensors, grad), strict=True
    ):
        assert one.isfinite().all()
        torch.testing.assert_close(one, other)


@looped
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": torch.zeros(3, 4)}, r"q: is torch\.float32 \(3, 4\), expected floating-point"),
        ({"k": torch.zeros(2, 3, 60, 16, dtype=torch.float64)}, r"k: has shape \(2, 3, 60, 16\)"),
        ({"v": torch.zeros(2, 2, 60, 16)}, r"v: is torch\.float32 on cpu, q is torch\.float64"),
        ({"v": torch.zeros(2, 2, 50, 16, dtype=torch.float64)}, r"v: has shape \(2, 2, 50, 16\)"),
        ({"pattern": "causal"}, r"pattern: is 'causal', .*write Causal\(\)"),
        ({"softcap": 2.0, "score": "score"}, "softcap: is given beside a score"),
        ({"sink": torch.zeros(3)}, r"sink: is torch\.float32 \(3,\), expected floating-point \(4,\)"),
        ({"sink": torch.zeros(4, dtype=torch.int32)}, r"sink: is torch\.int32 \(4,\), expected floating-point"),
        (
            {"kv_lengths": torch.zeros(3, dtype=torch.int32)},
            r"kv_lengths: is torch\.int32 \(3,\), expected int32 \(1,\) or",
        ),
        ({"scale": 0.0}, r"scale: is 0\.0"),
        ({"return_lse": 1}, "return_lse: is 1"),
        (
            {"pattern": TopK(torch.zeros(1, 3, 3, 1, dtype=torch.int32), block=(16, 16))},
            "heads: is 4, but the pattern has",
        ),
    ],
)
def test_what_is_refused_is_named(changes: dict[str, Any], message: str) -> None:
    given = {**dict(zip("qkv", qkv(), strict=True)), "pattern": Causal(), **changes}
    with pytest.raises(ArgumentError, match=f"^{message}"):
        call(**given)
    assert reference_attention is typed
