"""Launches of attention that are kept: the same as those of checked calls, and only for calls like the first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
from scripts import imported

torch = pytest.importorskip("torch")

from recorded_launches import record  # noqa: E402

from runtime import block_sparse_attention, verified_only  # noqa: E402
from runtime.kernels import attention as objects  # noqa: E402
from runtime.kernels import attention_launch  # noqa: E402
from runtime.kernels.attention import AttentionResult  # noqa: E402
from runtime.ops.attention_launches import launches  # noqa: E402
from runtime.ops.quantized_operands import quantized_operands  # noqa: E402
from runtime.patterns import BlockLists, Causal, Dense, Score, SlidingWindow, TopK  # noqa: E402

attention: Any = block_sparse_attention
LENGTH, HEADS = 512, 4


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    with imported("pretended") as module:
        yield module


@pytest.fixture
def enqueued(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """What each launch is given, and whether it was kept."""
    torch.manual_seed(0)
    with script.pretended():
        yield record(monkeypatch, (objects,), attention_launch)


def qkv(head_dim: int = 128) -> list[Any]:
    return [torch.randn(1, HEADS, LENGTH, head_dim).half() for _ in range(3)]


def whole_numbers(*shape: int) -> Any:
    return torch.ones(shape, dtype=torch.int32)


def in_fp8(**options: Any) -> Any:
    codes = [torch.randn(1, HEADS, LENGTH, 128).to(torch.float8_e4m3fn) for _ in range(3)]
    return replace(quantized_operands(*codes, q_scale=0.5, k_scale=0.25, v_scale=2.0), **options)


def calls() -> dict[str, Callable[[], Any]]:
    """Calls of each kind whose launches are kept."""
    q, k, v = qkv()
    small = qkv(72)
    out, sink, lengths = torch.empty_like(q), torch.zeros(HEADS), whole_numbers(1)
    topk = TopK(whole_numbers(1, HEADS, LENGTH // 128, 2))
    lists = BlockLists(whole_numbers(1, 1, LENGTH // 128), whole_numbers(1, 1, LENGTH // 128, 2))
    slope, mean = torch.zeros(HEADS), torch.zeros(1, HEADS, 128)
    score = Score("score + slope[head]", aux={"slope": slope})
    fp8, smoothed = in_fp8(), in_fp8(k_mean=mean, mean_logits=torch.randn(1, HEADS, LENGTH))
    return {
        "dense": lambda: attention(q, k, v, Dense()),
        "causal, scaled": lambda: attention(q, k, v, Causal(), scale=0.25),
        "softcap": lambda: attention(q, k, v, Causal(), softcap=30.0),
        "window": lambda: attention(q, k, v, SlidingWindow(100)),
        "a head that is filled up": lambda: attention(*small, Causal()),
        "lse and sink": lambda: attention(q, k, v, Causal(), sink=sink, return_lse=True),
        "lengths": lambda: attention(q, k, v, Dense(), kv_lengths=lengths),
        "topk": lambda: attention(q, k, v, topk),
        "lists": lambda: attention(q, k, v, lists),
        "lists and lengths": lambda: attention(q, k, v, lists, kv_lengths=lengths),
        "score": lambda: attention(q, k, v, Causal(), score=score),
        "out": lambda: attention(q, k, v, topk, out=out),
        "FP8": lambda: attention(fp8, Causal()),
        "FP8, out and lse": lambda: attention(fp8, Causal(), out=out.bfloat16(), return_lse=True),
        "FP8, smoothed": lambda: attention(smoothed, Causal(), return_lse=True),
    }


def described(result: Any) -> Any:
    """Sizes, strides and types of a result."""
    tensors = tuple(result) if isinstance(result, AttentionResult) else (result,)
    return type(result), [None if t is None else (tuple(t.shape), t.stride(), t.dtype) for t in tensors]


def check_launches(call: Callable[[], Any], enqueued: list[dict[str, Any]]) -> None:
    """Assert that the second of two calls launches at once, what the first one launched."""
    enqueued.clear()
    first, again = call(), call()
    checked, kept = enqueued
    assert not checked["kept"] and kept["kept"] and described(again) == described(first)
    assert kept["signature"] is checked["signature"] and kept["memory"] == checked["memory"]
    assert checked["read"].keys() == kept["read"].keys()
    made = {"o", "lse"}
    assert {**kept["read"], **dict.fromkeys(made)} == {**checked["read"], **dict.fromkeys(made)}
    for read, result in ((checked["read"], first), (kept["read"], again)):
        out, lse = result if isinstance(result, AttentionResult) else (result, None)
        assert (read["o"], read["lse"]) == (out.data_ptr(), 0 if lse is None else lse.data_ptr())


def test_a_kept_launch_is_that_of_the_checked_call(enqueued: list[Any]) -> None:
    for name, call in calls().items():
        try:
            check_launches(call, enqueued)
        except Exception as error:
            raise AssertionError(name) from error


def test_other_arguments_are_checked_as_in_a_first_call(enqueued: list[Any]) -> None:
    q, k, v = qkv()
    out, sink = torch.empty_like(q), torch.zeros(HEADS)
    plain: dict[str, Any] = {"q": q, "k": k, "v": v, "pattern": Causal(), "sink": sink, "out": out}
    wide = torch.zeros(1, HEADS, LENGTH, 129).half()[..., :128]
    wrong: dict[str, dict[str, Any]] = {
        "keys": {"k": k[:, :, :-1]},
        "type": {"v": v.bfloat16()},
        "types of all": {name: torch.zeros_like(q).float() for name in "qkv"},
        "no tensor": {"k": 3},
        "none": {"v": None},
        "nested": {"k": torch.nested.nested_tensor([k[0]])},
        "sparse": {"v": v.to_sparse()},
        "strides": {"v": wide},
        "misaligned": {"q": torch.zeros(q.numel() + 1).half()[1:].view(q.shape)},
        "out is q": {"out": q},
        "out overlaps k": {"out": k[:, :, :].view(k.shape)},
        "out of another size": {"out": out[..., :64]},
        "out expanded": {"out": torch.zeros(1, 1, 1, 128).half().expand(q.shape)},
        "a gradient beside out": {"q": q.clone().requires_grad_()},
        "sink": {"sink": torch.zeros(HEADS + 1)},
        "scale": {"scale": True},
        "scale of another size": {"scale": 0.0},
        "softcap": {"softcap": "1"},
        "validate": {"validate": 1},
        "return_lse": {"return_lse": 0},
    }
    for name, changed in wrong.items():
        outcomes = []
        for warm in (False, True):
            launches.clear()
            if warm:
                attention(**plain)
                attention(**plain)
                assert enqueued[-1]["kept"]
            try:
                outcomes.append((None, described(attention(**{**plain, **changed}))))
            except Exception as error:
                outcomes.append((type(error), str(error).partition(":")[0]))
        assert outcomes[0] == outcomes[1], f"{name}: {outcomes}"
        assert outcomes[0][0] is not None or "type" in name, name  # types are of the checks that are left out here


def test_an_output_that_overlaps_is_named_after_calls_with_one_that_does_not(enqueued: list[Any]) -> None:
    q, k, v = qkv()
    fp8 = in_fp8()
    memory = torch.zeros(2, 1, HEADS, LENGTH, 128).half()
    for _ in range(2):
        attention(memory[0], k, v, Causal(), out=memory[1])
        attention(fp8, Causal(), out=torch.empty_like(q).bfloat16())
    assert enqueued[-1]["kept"] and enqueued[-2]["kept"]
    shifted = memory.flatten()[8 : 8 + q.numel()].view(q.shape)
    for tensors in ((memory[0], k, v), (k, memory[0], v), (q, k, memory[0])):
        with pytest.raises(objects.ArgumentError, match="out: overlaps"):
            attention(*tensors, Causal(), out=shifted)
    memory = torch.zeros(q.shape).bfloat16()
    codes = memory.view(torch.float8_e4m3fn).flatten()[: q.numel()].view(q.shape)
    for name in ("q", "k"):
        with pytest.raises(objects.ArgumentError, match=f"out: overlaps {name}"):
            attention(replace(fp8, **{name: codes}), Causal(), out=memory)


def test_autograd_sees_that_a_kept_launch_writes(enqueued: list[Any]) -> None:
    q, k, v = qkv()
    out = torch.empty_like(q)
    versions = []
    for _ in range(3):
        attention(q, k, v, Causal(), out=out)
        versions.append(out._version)
    assert enqueued[-1]["kept"] and versions[0] < versions[1] < versions[2]


def test_the_mode_of_receipts_is_part_of_what_is_kept(enqueued: list[Any]) -> None:
    q, k, v = qkv()
    for _ in range(2):
        attention(q, k, v, Causal())
    with verified_only(False):
        attention(q, k, v, Causal())
    assert [launch["kept"] for launch in enqueued] == [False, True, False]


def test_lists_that_are_split_in_each_call_are(enqueued: list[Any]) -> None:
    q, k, v = qkv()
    pattern = TopK(whole_numbers(1, HEADS, LENGTH // 256, 1), block=(256, 256))
    for _ in range(3):
        attention(q, k, v, pattern)
    assert not any(launch["kept"] for launch in enqueued)


def test_a_window_of_another_size_is_another_launch(enqueued: list[Any]) -> None:
    q, k, v = qkv()
    for left in (100, 50, 100, 50):
        attention(q, k, v, SlidingWindow(left))
    assert [launch["kept"] for launch in enqueued] == [False, False, True, True]
    assert enqueued[2]["signature"] is enqueued[0]["signature"] is not enqueued[1]["signature"]
