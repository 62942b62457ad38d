"""compat.flash_attn_func: the pattern and the arguments of every call of FlashAttention's grid, and what it refuses."""

from __future__ import annotations

import math
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import compat_definitions as definitions  # noqa: E402
import oracle_kernel  # noqa: E402
from each import looped  # noqa: E402

from runtime import ArgumentError, compat, convert  # noqa: E402
from runtime.compat import flash  # noqa: E402
from runtime.kernels.attention import AttentionResult  # noqa: E402
from runtime.patterns import Causal, Dense, SlidingWindow  # noqa: E402

flash_attn_func: Any = compat.flash_attn_func


@pytest.fixture(autouse=True)
def loaded(monkeypatch: pytest.MonkeyPatch) -> Any:
    torch.manual_seed(0)
    torch._dynamo.reset()
    return oracle_kernel.install(monkeypatch)


def qkv(q_len: int = 40, kv_len: int = 70, heads: int = 4, kv_heads: int = 2, batch: int = 2, d: int = 64) -> list[Any]:
    of = (q_len, heads), (kv_len, kv_heads), (kv_len, kv_heads)
    return [torch.randn(batch, length, h, d).bfloat16() for length, h in of]


def check(tensors: list[Any], visible: Any, score: Any = None, scale: Any = None, **options: Any) -> None:
    q, k, v = (t.transpose(1, 2) for t in tensors)
    right, right_lse = definitions.attention(q, k, v, visible=visible, score=score, scale=scale)
    out = flash_attn_func(*tensors, **options)
    assert out.shape == tensors[0].shape and out.dtype == tensors[0].dtype
    torch.testing.assert_close(out.transpose(1, 2).double(), right, atol=1e-2, rtol=1e-2)
    if options.get("alibi_slopes") is None:
        again, lse, attention = flash_attn_func(*tensors, **options, return_attn_probs=True)
        assert torch.equal(again, out) and attention is None and lse.dtype == torch.float32
        torch.testing.assert_close(lse.double(), right_lse, atol=1e-5, rtol=1e-5)


def test_windows_of_the_grid_show_the_same_pairs() -> None:
    cases = 0
    for (q_len, kv_len), causal, window, heads in definitions.flash_grid():
        if heads == (4, 4):
            pattern = flash._window(causal, window, kv_len)
            right = definitions.flash_visible(q_len, kv_len, causal, window)
            found = convert.to_token_mask(pattern, q_len=q_len, kv_len=kv_len)[0, 0]
            assert torch.equal(found, right), (q_len, kv_len, causal, window, pattern)
            cases += 1
    assert cases == 144


def test_calls_of_the_grid_are_right() -> None:
    grid = [case for case in definitions.flash_grid() if case[0] in ((1, 150), (113, 203), (203, 113))]
    for (q_len, kv_len), causal, window, (heads, kv_heads) in grid[::7]:
        visible = definitions.flash_visible(q_len, kv_len, causal, window)
        check(qkv(q_len, kv_len, heads, kv_heads), visible, causal=causal, window_size=window)


@looped
@pytest.mark.parametrize(
    ("causal", "window", "pattern"),
    [
        (False, (-1, -1), Dense()),
        (False, (None, None), Dense()),
        (True, (-1, -1), Causal()),
        (False, (-1, 0), Causal()),
        (True, (-1, 7), Causal()),
        (True, (4, 7), SlidingWindow(4, 0)),
        (False, [4, 7], SlidingWindow(4, 7)),
    ],
)
def test_patterns_are_the_simplest(causal: bool, window: Any, pattern: Any) -> None:
    assert flash._window(causal, window, 100).spec_json == pattern.spec_json


@looped
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("softcap", [0.0, 15.0])
@pytest.mark.parametrize("slopes", [None, (4,), (2, 4)])
def test_softcap_and_alibi(causal: bool, softcap: float, slopes: Any) -> None:
    slopes = None if slopes is None else torch.rand(slopes)

    def score(logits: Any) -> Any:
        logits = softcap * torch.tanh(logits / softcap) if softcap else logits
        return logits if slopes is None else logits + definitions.flash_bias(slopes, 40, 70)

    options = {"softcap": softcap, "alibi_slopes": slopes, "causal": causal}
    tensors = qkv()
    tensors[0] *= 8  # so that the softcap changes something
    check(tensors, definitions.flash_visible(40, 70, causal, (-1, -1)), score, scale=0.3, softmax_scale=0.3, **options)


def test_queries_without_keys() -> None:
    out, lse, _ = flash_attn_func(*qkv(70, 40), causal=True, return_attn_probs=True)
    assert not out[:, :30].any() and bool((lse[:, :, :30] == -math.inf).all())


def test_packed_tensors_are_views() -> None:
    q, k, v = qkv(40, 40, 4, 4)
    right = flash_attn_func(q, k, v, causal=True, window_size=(5, 0))
    assert torch.equal(compat.flash_attn_qkvpacked_func(torch.stack([q, k, v], 2), 0.0, None, True, (5, 0)), right)
    assert torch.equal(compat.flash_attn_kvpacked_func(q, torch.stack([k, v], 2), 0.0, None, True, (5, 0)), right)


def test_gradients_are_those_of_the_definition() -> None:
    tensors = [t.requires_grad_() for t in qkv()]
    out = flash_attn_func(*tensors, causal=True, deterministic=True)
    right, _ = definitions.attention(
        *(t.transpose(1, 2) for t in tensors), visible=definitions.flash_visible(40, 70, True, (-1, -1))
    )
    grad = torch.randn_like(out)
    found = torch.autograd.grad(out, tensors, grad)
    for one, other in zip(found, torch.autograd.grad(right, tensors, grad.transpose(1, 2).double()), strict=True):
        torch.testing.assert_close(one.float(), other.float(), atol=3e-2, rtol=3e-2)


def test_deterministic_reaches_the_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []

    def attend(*operands: Any, deterministic: bool, **_: Any) -> Any:
        given.append(deterministic)
        return operands[0], None

    monkeypatch.setattr(flash, "attend", attend)
    flash_attn_func(*qkv())
    flash_attn_func(*qkv(), deterministic=True)
    assert given == [False, True]


@looped
@pytest.mark.parametrize(
    "options", [{"causal": True}, {"window_size": (5, 3)}, {"softcap": 3.0}, {"alibi_slopes": torch.ones(4)}]
)
def test_compiled_calls_are_the_same(options: Any) -> None:
    compiled = torch.compile(lambda *t: flash_attn_func(*t, **options), fullgraph=True, backend="eager")
    tensors = qkv()
    assert torch.equal(compiled(*tensors), flash_attn_func(*tensors, **options))


def given(**changes: Any) -> dict[str, Any]:
    return {**dict(zip("qkv", qkv(), strict=True)), **changes}


@looped
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dropout_p": 0.1}, r"dropout_p: is 0\.1: kernels have no dropout"),
        ({"softcap": -1.0}, r"softcap: is -1\.0: expected 0\.0 for none"),
        ({"softcap": 1e9}, "softcap: is 1000000000.0, expected a number from"),
        ({"softcap": "x"}, "softcap: is str, expected a number"),
        ({"causal": 1}, "causal: is 1, expected True or False"),
        ({"deterministic": None}, "deterministic: is None"),
        ({"window_size": 5}, r"window_size: is 5, expected \(left, right\)"),
        ({"window_size": (-2, 0)}, r"window_size: is \(-2, 0\), expected"),
        ({"window_size": (3.0, 0)}, r"window_size: is \(3\.0, 0\), expected"),
        ({"softmax_scale": math.inf}, "softmax_scale: is inf"),
        ({"alibi_slopes": torch.ones(4).half()}, r"alibi_slopes: is torch\.float16, expected torch\.float32"),
        ({"alibi_slopes": torch.ones(3)}, r"alibi_slopes: has shape \(3,\), expected \(4,\) or \(2, 4\)"),
        (
            {"alibi_slopes": torch.ones(4), "return_attn_probs": True},
            "return_attn_probs: is True: not with alibi_slopes",
        ),
        ({"q": torch.zeros(80, 4, 64)}, r"q: has 3 dimensions \(80, 4, 64\), expected \(batch, length, heads"),
        ({"q": torch.zeros(2, 40, 4, 64)}, r"q: is torch\.float32"),
        ({"k": None}, "k: is NoneType"),
    ],
)
def test_what_is_refused_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=f"^{message}"):
        flash_attn_func(**given(**changes))


def test_windows_of_very_many_keys_are_refused() -> None:
    with pytest.raises(ArgumentError, match=r"window_size: is \(5, -1\): windows are for 16777216 keys at most"):
        flash._window(False, (5, -1), 2**24 + 1)


def test_packed_shapes_are_checked() -> None:
    with pytest.raises(ArgumentError, match=r"^qkv: has shape \(2, 40, 4, 64\), expected \(batch, length, 3, heads"):
        compat.flash_attn_qkvpacked_func(qkv()[0])


def test_packed_sequences_are_those_of_varlen_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, dict[str, Any]]] = []

    def called(q: Any, k: Any, v: Any, pattern: Any, **options: Any) -> Any:
        calls.append((pattern, options))
        lse = torch.zeros(q.shape[1], q.shape[0])
        return AttentionResult(q, lse) if options["return_lse"] else q

    monkeypatch.setattr(flash, "varlen_attention", called)
    q, k, v = (t[0] for t in qkv())
    bounds = torch.tensor([0, 10, 40], dtype=torch.int32)
    given = (q, k, v, bounds, bounds, 30, 30)
    assert compat.flash_attn_varlen_func(*given, causal=True) is q
    out, lse, third = compat.flash_attn_varlen_func(
        *given, softmax_scale=0.5, window_size=(5, 0), softcap=20.0, return_attn_probs=True
    )
    assert out is q and lse.shape == (q.shape[1], q.shape[0]) and third is None
    assert [(type(pattern), options["scale"], options.get("softcap")) for pattern, options in calls] == [
        (Causal, None, None),
        (SlidingWindow, 0.5, 20.0),
    ]
    assert all(options["cu_seqlens_q"] is options["cu_seqlens_k"] is bounds for _, options in calls)
    compat.flash_attn_varlen_func(*given, deterministic=True)
    assert [options["deterministic"] for _, options in calls] == [False, False, True]
    for name, value in (
        ("dropout_p", 0.1),
        ("alibi_slopes", torch.zeros(4)),
        ("block_table", bounds),
        ("deterministic", 1),
    ):
        with pytest.raises(ArgumentError, match=f"^{name}: "):
            compat.flash_attn_varlen_func(*given, **{name: value})
