"""Launches of backward passes that are kept: the same as those of checked calls, and only for calls like the first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
from scripts import imported

torch = pytest.importorskip("torch")

from recorded_launches import record  # noqa: E402

from runtime import block_sparse_attention, verified_only  # noqa: E402
from runtime.kernels import attention_backward, gradient_launch  # noqa: E402
from runtime.ops import attention_gradients  # noqa: E402
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
    attention_gradients._launches.clear()
    with script.pretended():
        yield record(monkeypatch, (attention_backward,), gradient_launch)


def qkv(head_dim: int = 128, kv_heads: int = HEADS, learned: str = "qkv") -> list[Any]:
    heads = {"q": HEADS, "k": kv_heads, "v": kv_heads}
    return [torch.randn(1, n, LENGTH, head_dim).half().requires_grad_(name in learned) for name, n in heads.items()]


def ones(*shape: int) -> Any:
    return torch.ones(shape, dtype=torch.int32)


Backward = Callable[..., Any]


def backward(tensors: list[Any], pattern: Any, **options: Any) -> Backward:
    """A backward pass of a call that was made before, for any gradients of its results."""
    result = attention(*tensors, pattern, **options)
    results = tuple(result) if options.get("return_lse") else (result,)
    leaves = [tensor for tensor in tensors if tensor.requires_grad]
    given = [torch.ones_like(each) for each in results]
    return lambda *dout: torch.autograd.grad(results, leaves, dout or given, retain_graph=True)


def calls() -> dict[str, Backward]:
    """Backward passes of each kind whose launches are kept."""
    topk = TopK(ones(1, HEADS, LENGTH // 128, 2))
    lists = BlockLists(ones(1, 1, LENGTH // 128), ones(1, 1, LENGTH // 128, 2))
    narrow = TopK(ones(1, HEADS, LENGTH // 64, 2), block=(64, 64))
    return {
        "dense": backward(qkv(), Dense()),
        "causal, scaled": backward(qkv(), Causal(), scale=0.25),
        "grouped heads": backward(qkv(kv_heads=1), Causal()),
        "a head that is filled up": backward(qkv(72), Causal()),
        "softcap": backward(qkv(), Causal(), softcap=30.0),
        "window": backward(qkv(), SlidingWindow(100)),
        "two kernels": backward(qkv(256), Causal()),
        "lengths": backward(qkv(), Dense(), kv_lengths=ones(1)),
        "sink without a gradient": backward(qkv(), Causal(), sink=torch.zeros(HEADS)),
        "topk": backward(qkv(), topk),
        "narrow topk, two kernels": backward(qkv(), narrow),
        "lists": backward(qkv(), lists),
        "any order": backward(qkv(), Causal(), deterministic=False),
        "of q alone": backward(qkv(learned="q"), Causal()),
        "of k and v": backward(qkv(learned="kv"), Causal()),
    }


def described(gradients: Any) -> Any:
    return [(tuple(t.shape), t.stride(), t.dtype) for t in gradients]


def test_a_kept_launch_is_that_of_the_checked_call(enqueued: list[Any]) -> None:
    made = {"dq", "dk", "dv", "stats", "dq_accum"}
    for name, call in calls().items():
        enqueued.clear()
        first = call()
        kernels = len(enqueued)
        again = call()
        assert kernels in (1, 2) and len(enqueued) == 2 * kernels, name
        assert described(again) == described(first), name
        for checked, kept in zip(enqueued[:kernels], enqueued[kernels:], strict=True):
            assert not checked["kept"] and kept["kept"], name
            same = ("signature", "memory", "prologue")
            assert {key: checked[key] for key in same} == {key: kept[key] for key in same}, name
            assert checked["read"].keys() == kept["read"].keys(), name
            fresh = dict.fromkeys(made & checked["read"].keys())
            assert {**checked["read"], **fresh} == {**kept["read"], **fresh}, name
        for launches, found in ((enqueued[:kernels], first), (enqueued[kernels:], again)):
            places = {place for launch in launches for place in launch["read"].values()}
            assert all(gradient.data_ptr() in places for gradient in found), name
            statistics = {launch["read"]["stats"] for launch in launches}
            shared = [launch["prologue"] for launch in launches].count(False)
            assert len(statistics) == kernels - shared or kernels > 1, name


def test_calls_that_do_more_than_launch_are_checked_each_time(enqueued: list[Any]) -> None:
    expanded = torch.ones(()).half().expand(1, HEADS, LENGTH, 128)
    slope = torch.zeros(HEADS, requires_grad=True)
    score = Score("score + slope[head]", aux={"slope": slope})
    wide = TopK(ones(1, HEADS, LENGTH // 256, 1), block=(256, 256))
    sink = torch.zeros(HEADS, requires_grad=True)
    plain = backward(qkv(), Causal())
    of_sink = attention(*qkv(), Causal(), sink=sink)
    of_slope = attention(*qkv(), Causal(), score=score)
    cases = {
        "an expanded gradient": lambda: plain(expanded),
        "lists that are split": backward(qkv(), wide),
        "a sink": lambda: torch.autograd.grad(of_sink, sink, torch.ones_like(of_sink), retain_graph=True),
        "a score's": lambda: torch.autograd.grad(of_slope, slope, torch.ones_like(of_slope), retain_graph=True),
    }
    for name, call in cases.items():
        enqueued.clear()
        for _ in range(3):
            call()
        assert not any(launch["kept"] for launch in enqueued), name


def test_a_gradient_that_lies_elsewhere_or_is_of_another_kind_is_checked(enqueued: list[Any]) -> None:
    q, k, v = qkv()
    call = backward([q, k, v], Causal())
    shape = (1, HEADS, LENGTH, 128)
    memory = torch.ones(q.numel() + 1).half()
    by_token = torch.ones(1, LENGTH, HEADS, 128).half().transpose(1, 2)
    for other, is_kept in ((memory[1:].view(shape), False), (by_token, False), (torch.ones(shape).half(), True)):
        attention_gradients._launches.clear()
        call()
        call()
        assert enqueued[-1]["kept"]
        call(other)
        assert enqueued[-1]["kept"] is is_kept, other.stride()


def test_another_mode_scale_or_order_has_a_launch_of_its_own(enqueued: list[Any]) -> None:
    q, k, v = qkv(64)
    seen = []
    for options in ({}, {"scale": 0.5}, {"deterministic": False}, {"softcap": 2.0}):
        call = backward([q, k, v], Causal(), **options)
        call()
        call()
        assert [launch["kept"] for launch in enqueued[-2:]] == [False, True], options
        seen.append(enqueued[-1]["signature"])
    assert len(set(map(id, seen))) == len(seen)
    with verified_only(False):
        call = backward([q, k, v], Causal())
        call()
    assert not enqueued[-1]["kept"]


def test_a_pass_whose_launch_does_nothing_is_not_kept_again(
    enqueued: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    call, kept = backward(qkv(), Causal()), []
    keep = attention_gradients._launches.keep
    monkeypatch.setattr(attention_gradients._launches, "keep", lambda *given: (kept.append(given), keep(*given)))
    expanded = torch.ones(()).half().expand(1, HEADS, LENGTH, 128)
    for _ in range(6):
        call(expanded)
    assert len(kept) == 1
    call()
    call()
    assert enqueued[-1]["kept"] and len(kept) == 2
