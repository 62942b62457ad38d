"""compat.scaled_dot_product_attention beside torch's own, in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import oracle_kernel  # noqa: E402
from each import looped  # noqa: E402

from runtime import ArgumentError, compat  # noqa: E402
from runtime.ops import attention  # noqa: E402
from runtime.patterns import Dense, Score  # noqa: E402

block_sparse_attention: Any = attention.block_sparse_attention
sdpa: Any = compat.scaled_dot_product_attention


@pytest.fixture(autouse=True)
def loaded(monkeypatch: pytest.MonkeyPatch) -> Any:
    torch.manual_seed(0)
    torch._dynamo.reset()
    return oracle_kernel.install(monkeypatch)


def qkv(
    lead: tuple[int, ...] = (2, 4), kv_lead: Any = None, q_len: int = 150, kv_len: int = 200, d: int = 64
) -> list[Any]:
    kv_lead = lead if kv_lead is None else kv_lead
    shapes = (*lead, q_len, d), (*kv_lead, kv_len, d), (*kv_lead, kv_len, d)
    return [torch.randn(shape).bfloat16() for shape in shapes]


def check(tensors: list[Any], **options: Any) -> None:
    right = torch.nn.functional.scaled_dot_product_attention(*(t.double() for t in tensors), **options)
    out = sdpa(*tensors, **options)
    assert out.shape == right.shape and out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), right.nan_to_num(), atol=1e-2, rtol=1e-2)


@looped
@pytest.mark.parametrize("lead", [(), (3,), (2, 4), (2, 3, 2), (1, 2, 3, 1)])
@pytest.mark.parametrize("causal", [False, True])
def test_shapes_and_the_causal_mask(lead: tuple[int, ...], causal: bool) -> None:
    check(qkv(lead), is_causal=causal, scale=0.2)
    check(qkv(lead, q_len=200, kv_len=150), is_causal=causal)
    check(qkv(lead, q_len=130, kv_len=130), is_causal=causal)


@looped
@pytest.mark.parametrize("kv_lead", [(2, 2), (2, 1)])
def test_grouped_heads(kv_lead: tuple[int, ...]) -> None:
    check(qkv((2, 4), kv_lead), enable_gqa=True, is_causal=True)
    check(qkv((4,), kv_lead[1:]), enable_gqa=True)


MASKS = [
    ((2, 4), (150, 200)),
    ((2, 4), (1, 200)),
    ((2, 4), (150, 1)),
    ((2, 4), (2, 1, 1, 200)),
    ((2, 4), (2, 1, 150, 200)),
    ((2, 4), (1, 4, 150, 200)),
    ((2, 4), (4, 1, 200)),
    ((), (150, 200)),
    ((3,), (3, 150, 200)),
    ((3,), (1, 150, 200)),
    ((2, 3, 2), (2, 3, 2, 150, 200)),
    ((2, 3, 2), (2, 1, 1, 1, 200)),
    ((2, 3, 2), (1, 1, 2, 150, 200)),
    ((2, 3, 2), (150, 200)),
]


@looped
@pytest.mark.parametrize(("lead", "shape"), MASKS)
def test_masks(lead: tuple[int, ...], shape: tuple[int, ...]) -> None:
    mask = torch.rand(shape) > 0.4
    mask[..., :40] = False  # a block that is hidden in part
    check(qkv(lead), attn_mask=mask)


def test_masks_of_grouped_heads_and_queries_without_keys() -> None:
    mask = torch.rand(2, 4, 150, 200) > 0.5
    mask[:, :, 3] = False
    check(qkv((2, 4), (2, 2)), attn_mask=mask, enable_gqa=True)


def test_gradients_are_those_of_torch() -> None:
    tensors = [t.requires_grad_() for t in qkv()]
    mask = torch.rand(2, 1, 150, 200) > 0.5
    out = sdpa(*tensors, attn_mask=mask)
    right = torch.nn.functional.scaled_dot_product_attention(*(t.double() for t in tensors), attn_mask=mask)
    grad = torch.randn_like(out)
    found = torch.autograd.grad(out, tensors, grad)
    for one, other in zip(found, torch.autograd.grad(right, tensors, grad.double()), strict=True):
        torch.testing.assert_close(one, other, atol=3e-2, rtol=3e-2)


def test_compiled_calls_are_the_same() -> None:
    tensors, mask = qkv(), torch.rand(150, 200) > 0.5
    for options in ({"is_causal": True}, {"attn_mask": mask}, {"attn_mask": mask[:1]}):
        compiled = torch.compile(lambda *t, options=options: sdpa(*t, **options), fullgraph=True, backend="eager")
        assert torch.equal(compiled(*tensors), sdpa(*tensors, **options))


def test_a_bias_is_refused_with_the_score_that_it_is() -> None:
    bias, tensors = torch.randn(2, 1, 150, 200), qkv()
    with pytest.raises(ArgumentError) as refused:
        sdpa(*tensors, attn_mask=bias)
    text = "score=Score('score + bias[batch, head, q_idx, kv_idx]', aux={'bias': bias})"
    assert f"block_sparse_attention(q, k, v, Dense(), {text})" in str(refused.value)
    score = Score("score + bias[batch, head, q_idx, kv_idx]", aux={"bias": bias})
    right = torch.nn.functional.scaled_dot_product_attention(*(t.double() for t in tensors), attn_mask=bias.double())
    out = block_sparse_attention(*tensors, Dense(), score=score)
    torch.testing.assert_close(out.double(), right, atol=1e-2, rtol=1e-2)


def given(**changes: Any) -> dict[str, Any]:
    return {**dict(zip(("query", "key", "value"), qkv(), strict=True)), **changes}


@looped
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dropout_p": 0.5}, r"dropout_p: is 0\.5: kernels have no dropout"),
        ({"is_causal": 1}, "is_causal: is 1"),
        ({"is_causal": True, "attn_mask": torch.ones(150, 200) > 0}, "attn_mask: is given, and is_causal is True"),
        ({"attn_mask": torch.zeros(150, 200)}, r"attn_mask: is torch\.float32, expected torch\.bool: a bias of"),
        ({"attn_mask": torch.ones(150, 200).int()}, r"attn_mask: is torch\.int32, expected torch\.bool: masks"),
        ({"attn_mask": torch.ones(150, 100) > 0}, r"attn_mask: has shape \(150, 100\), expected .* \(2, 4, 150, 200\)"),
        ({"attn_mask": torch.ones(1, 1, 1, 150, 200) > 0}, r"attn_mask: has shape \(1, 1, 1, 150, 200\)"),
        ({"attn_mask": [True]}, "attn_mask: is list"),
        ({"key": qkv((2, 2))[1], "value": qkv((2, 2))[2]}, "enable_gqa: is False"),
        ({"key": qkv((3, 4))[1]}, "key: has dimensions"),
        ({"query": torch.zeros(3).bfloat16()}, "query: has dimensions"),
        ({"query": None}, "query: is NoneType"),
        ({"scale": math.nan}, "scale: is nan"),
        ({"query": torch.zeros(2, 4, 150, 64)}, r"query: is torch\.float32"),
    ],
)
def test_what_is_refused_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=f"^{message}"):
        sdpa(**given(**changes))
