"""Arguments of other libraries in a call of block_sparse_attention: errors name them and the way to write them."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import oracle_kernel  # noqa: E402
from each import looped  # noqa: E402

from runtime import ArgumentError, compat, patterns  # noqa: E402
from runtime.ops import attention_hints as hints  # noqa: E402
from runtime.ops.attention import block_sparse_attention  # noqa: E402

call: Any = block_sparse_attention


@pytest.fixture(autouse=True)
def _kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    oracle_kernel.install(monkeypatch)


def qkv() -> list[Any]:
    return [torch.zeros(1, 2, 64, 64).bfloat16() for _ in range(3)]


@looped
@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        (
            {"causal": True},
            r"causal: is True, and block_sparse_attention has no such argument: the pattern is Causal\(\)",
        ),
        ({"is_causal": True}, r"is_causal: is True, .*Causal\(align='top_left'\)"),
        ({"softmax_scale": 0.5}, r"softmax_scale: is 0\.5, .*: write scale="),
        ({"window_size": (5, 0)}, r"window_size: is \(5, 0\), .*: the pattern is SlidingWindow\(left, right\)"),
        ({"block_mask": 3}, r"block_mask: is 3, .*compat\.flex_attention takes it"),
        ({"score_mod": lambda s, *_: s}, "score_mod: is a function, .*: write score="),
        ({"attn_mask": torch.ones(64, 64)}, r"attn_mask: is a Tensor, .*from_token_mask\(attn_mask\)"),
        ({"dropout_p": 0.0}, r"dropout_p: is 0\.0, .*: leave it out"),
        ({"validte": True}, "validte: is True, .*: did you mean validate"),
    ],
)
@pytest.mark.parametrize("pattern", [(), (patterns.Dense(),)])
def test_keywords_of_others_are_refused(keywords: dict[str, Any], message: str, pattern: Any) -> None:
    with pytest.raises(ArgumentError, match=f"^{message}"):
        call(*qkv(), *pattern, **keywords)


def test_hints_are_of_arguments_that_are_there() -> None:
    own = inspect.signature(block_sparse_attention).parameters
    for name, hint in hints._OTHERS.items():
        assert name not in own
        if "write " in hint:
            assert hint.split("write ")[1].split("=")[0] in own
        for function in compat.__all__:
            if f"compat.{function} takes it" in hint:
                assert name in inspect.signature(getattr(compat, function)).parameters, (name, function)


@looped
@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("causal", r"is 'causal', expected an object of .*: write Causal\(\)$"),
        ("Sliding-Window", r"is 'Sliding-Window', .*: write SlidingWindow\(left, right\)$"),
        ("full", r".*: write Dense\(\)$"),
        ("top_k", "is 'top_k', expected an object of .*patterns or a FlexAttention BlockMask$"),
        (patterns.Causal, r"is the class Causal: write Causal\(\)$"),
        (None, r"is missing, expected an object of .*, such as Causal\(\)$"),
        (torch.ones(64, 64, dtype=torch.bool), r"is Tensor, .*from_token_mask\(mask\)"),
        (lambda b, h, q, k: q >= k, r"is function, .*create_block_mask\(mask_mod, B, H, Q_LEN, KV_LEN\)"),
        (3, "is int, expected an object of"),
    ],
)
def test_patterns_that_are_none(pattern: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=f"^pattern: {message}"):
        call(*qkv(), pattern)
