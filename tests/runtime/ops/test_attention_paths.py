"""Calls that need gradients take one of two paths, past torch's dispatcher or through it: both accept and refuse the
same calls, in the same words, and compute the same gradients."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import oracle_kernel  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from runtime import block_sparse_attention, explain_attention, patterns  # noqa: E402
from runtime.errors import CodegenError  # noqa: E402
from runtime.kernels.arguments import Signatures  # noqa: E402
from runtime.ops import attention_calls, attention_differentiated, attention_gradients, attention_launches  # noqa: E402
from runtime.patterns import Causal, Dense, Score  # noqa: E402

HEADS, LENGTH = 4, 256


class Watched(TorchDispatchMode):
    """A mode that changes nothing; calls below it take the dispatcher's path."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


PATHS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "past the dispatcher": (contextlib.nullcontext, contextlib.nullcontext),
    "a watched backward pass": (contextlib.nullcontext, Watched),
    "a watched forward pass": (Watched, contextlib.nullcontext),
    "the dispatcher": (Watched, Watched),
}
"""Modes of the forward and of the backward pass."""


@pytest.fixture(autouse=True)
def loaded(monkeypatch: pytest.MonkeyPatch) -> Any:
    return oracle_kernel.install(monkeypatch)


def ints(*shape: int, most: int = 2) -> Any:
    return torch.randint(0, most, shape, dtype=torch.int32)


def sink(*, learned: bool) -> Any:
    return torch.tensor([0.5, -3.0, 4.0, 8.0], requires_grad=learned)


def masked(near: Any) -> Any:
    """Lists of every block, whose pairs a tensor of a mask decides."""
    lists = torch.tensor([0, 1], dtype=torch.int32).expand(1, 1, 2, 2).contiguous()
    counts = torch.full((1, 1, 2), 2, dtype=torch.int32)
    return patterns.BlockLists(counts, lists, mask="q_idx - kv_idx < near[head]", aux={"near": near})


PATTERNS: dict[str, Callable[[], Any]] = {
    "dense": Dense,
    "causal": Causal,
    "window": lambda: patterns.SlidingWindow(100, 20),
    "prefix": lambda: patterns.PrefixLM(torch.tensor([37, 200], dtype=torch.int32)),
    "topk": lambda: patterns.TopK(ints(2, HEADS, 2, 2)),
    "lists": lambda: patterns.BlockLists(ints(2, HEADS, 2), ints(2, HEADS, 2, 2)),
    "split lists": lambda: patterns.BlockLists(ints(2, HEADS, 1), ints(2, HEADS, 1, 1, most=1), block=(256, 256)),
    "mask": lambda: masked(ints(HEADS, most=90)),
}
OPTIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": dict,
    "a sink with a gradient": lambda: {"sink": sink(learned=True)},
    "a sink without one": lambda: {"sink": sink(learned=False)},
    "kv_lengths": lambda: {"kv_lengths": torch.tensor([37, 250], dtype=torch.int32)},
    "softcap": lambda: {"softcap": 1.5},
    "scale": lambda: {"scale": 0.3},
    "score": lambda: {"score": Score("score + slope[head] * (kv_idx - q_idx)", aux={"slope": torch.rand(HEADS)})},
    "return_lse": lambda: {"return_lse": True},
    "any order": lambda: {"deterministic": False},
    "all": lambda: {
        **{"sink": sink(learned=True), "kv_lengths": torch.tensor([130], dtype=torch.int32)},
        **{"softcap": 2.0, "scale": 0.2, "return_lse": True},
    },
}
LEARNED = ("q", "k", "v", "qk", "qv", "kv", "qkv", "")


def qkv(learned: str = "qkv") -> list[Any]:
    tensors = {name: torch.randn(2, HEADS, LENGTH, 64).bfloat16() for name in "qkv"}
    return [tensor.requires_grad_(name in learned) for name, tensor in tensors.items()]


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the next call the first one of its kind."""
    for module in (attention_calls, attention_gradients):
        monkeypatch.setattr(module, "_routes", Signatures())
    monkeypatch.setattr(attention_differentiated, "_permitted", Signatures())
    for launches in (attention_launches.launches, attention_gradients._launches):
        monkeypatch.setattr(launches, "_kept", {})


def gradients(path: str, tensors: list[Any], pattern: Any, **options: Any) -> list[Any]:
    """Result, log-sum-exp and gradients of a call by one of the paths."""
    forward, backward = (make() for make in PATHS[path])
    leaves = [t for t in (*tensors, options.get("sink")) if t is not None and t.requires_grad]
    with forward:
        result = block_sparse_attention(*tensors, pattern, **options)
    out, lse = result if options.get("return_lse") else (result, None)
    torch.manual_seed(1)
    loss = (out.float() * torch.randn(out.shape)).sum()
    if lse is not None:
        loss = loss + torch.where(lse > -math.inf, lse, 0.0).sum()
    with backward:
        found = torch.autograd.grad(loss, leaves)
    return [out, *([] if lse is None else [lse]), *found]


def compare(tensors: list[Any], pattern: Any, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare the paths: the first call of a kind, and a later one."""
    right: list[Any] = []
    for path in PATHS:
        forget(monkeypatch)
        for call in ("first", "later"):
            found = gradients(path, tensors, pattern, **options)
            right = right or found
            assert len(found) == len(right) and all(map(torch.equal, found, right)), (path, call)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_both_paths_compute_the_same_gradients(pattern: str, options: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    compare(qkv(), PATTERNS[pattern](), OPTIONS[options](), monkeypatch)


@pytest.mark.parametrize("options", ["plain", "a sink with a gradient", "a sink without one", "all"])
@pytest.mark.parametrize("learned", LEARNED)
def test_each_operand_may_be_the_one_with_a_gradient(
    learned: str, options: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = OPTIONS[options]()
    if learned or getattr(given.get("sink"), "requires_grad", False):
        compare(qkv(learned), Causal(), given, monkeypatch)


WRONG: dict[str, Callable[[], tuple[list[Any], Any, dict[str, Any]]]] = {
    "sink of other heads": lambda: (qkv(), Causal(), {"sink": torch.zeros(3, requires_grad=True)}),
    "sink of another type": lambda: (qkv(), Causal(), {"sink": torch.zeros(4).double().requires_grad_()}),
    "sink with steps": lambda: (qkv(), Causal(), {"sink": torch.zeros(8, requires_grad=True)[::2]}),
    "sink that is a list": lambda: (qkv(), Causal(), {"sink": [0.0] * HEADS}),
    "sparse sink": lambda: (qkv(), Causal(), {"sink": torch.zeros(HEADS).to_sparse()}),
    "lengths of another type": lambda: (qkv(), Causal(), {"kv_lengths": torch.ones(2)}),
    "lengths of other batches": lambda: (qkv(), Causal(), {"kv_lengths": torch.ones(3, dtype=torch.int32)}),
    "softcap": lambda: (qkv(), Causal(), {"softcap": 5000.0}),
    "softcap that is a text": lambda: (qkv(), Causal(), {"softcap": "1"}),
    "scale": lambda: (qkv(), Causal(), {"scale": math.inf}),
    "k of another type": lambda: ([t.half() if i == 1 else t for i, t in enumerate(qkv())], Causal(), {}),
    "v of other keys": lambda: ([t[:, :, :99] if i == 2 else t for i, t in enumerate(qkv())], Causal(), {}),
    "k of other heads": lambda: ([t[:, :3] if i else t for i, t in enumerate(qkv())], Causal(), {}),
    "q in three dimensions": lambda: ([t[0] if i == 0 else t for i, t in enumerate(qkv())], Causal(), {}),
    "k that is None": lambda: ([t if i != 1 else None for i, t in enumerate(qkv())], Causal(), {}),
    "lists of other blocks": lambda: (qkv(), patterns.TopK(ints(2, HEADS, 5, 2)), {}),
    "lists of another type": lambda: (qkv(), patterns.TopK(ints(2, HEADS, 2, 2).long()), {}),
    "blocks without a gradient": lambda: (qkv(), patterns.TopK(ints(2, HEADS, 8, 2), block=(32, 64)), {}),
    "a mask's tensor with a gradient": lambda: (qkv(), masked(torch.ones(HEADS, requires_grad=True)), {}),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_both_paths_refuse_the_same_calls_in_the_same_words(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    said = []
    tensors, pattern, options = WRONG[wrong]()
    for path in ("past the dispatcher", "the dispatcher"):
        for earlier in (False, True):  # a first call, and one after a right call
            forget(monkeypatch)
            if earlier:
                gradients(path, qkv(), Causal())
            with pytest.raises(CodegenError) as caught, PATHS[path][0]():
                block_sparse_attention(*tensors, pattern, **options)
            said.append(str(caught.value))
    assert len({*said}) == 1, said


@pytest.mark.parametrize("path", PATHS)
def test_a_second_derivative_is_refused_in_the_same_words(path: str) -> None:
    forward, backward = (make() for make in PATHS[path])
    tensors = qkv()
    with forward:
        out = block_sparse_attention(*tensors, Causal())
    with backward:
        (of_q, *_) = torch.autograd.grad(out.float().pow(2).sum(), tensors, create_graph=True)
    with pytest.raises(CodegenError) as caught:
        of_q.float().sum().backward()
    reason = "has no gradient of its gradient (double backward): detach its gradient before differentiating further"
    assert str(caught.value) == f"block_sparse_attention: {reason}"


def test_all_operators_refuse_second_derivatives_in_these_words() -> None:
    runtime = Path(__file__).resolve().parents[3] / "runtime"
    texts = {path.relative_to(runtime).as_posix(): path.read_text(encoding="utf-8") for path in runtime.rglob("*.py")}
    assert [name for name, text in texts.items() if "gradient of its gradient" in text] == ["ops/operators.py"]


def test_a_call_that_needs_gradients_is_explained() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "is_cuda", True)
        told = explain_attention(*qkv(), Causal(), sink=sink(learned=True), arch="sm_90a", gradients=True)
    assert told.gradients is not None
