"""Derivatives of attention where they go wrong without a word: rows without keys, forward mode, modes that change."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import oracle_kernel  # noqa: E402
from torch.autograd import forward_ad  # noqa: E402

from runtime import ArgumentError, block_sparse_attention, merge_attention  # noqa: E402
from runtime.kernels import arguments  # noqa: E402
from runtime.ops import attention_checks, attention_fp8, modes  # noqa: E402
from runtime.ops.quantized_operands import quantized_operands  # noqa: E402
from runtime.patterns import BlockLists, Causal, Dense, PrefixLM, Score  # noqa: E402


@pytest.fixture(autouse=True)
def loaded(monkeypatch: pytest.MonkeyPatch) -> Any:
    return oracle_kernel.install(monkeypatch)


def qkv(length: int = 64) -> list[Any]:
    return [torch.randn(1, 2, length, 64).bfloat16() for _ in range(3)]


def merged(out1: Any, lse1: Any, out2: Any, lse2: Any) -> tuple[Any, Any]:
    """The definition in float64, row by row: what a side without keys holds is never touched."""
    out, lse = torch.zeros_like(out1), torch.full_like(lse1, -math.inf)
    for row in itertools.product(*map(range, lse1.shape)):
        sides = [(o[row], e[row]) for o, e in ((out1, lse1), (out2, lse2)) if e[row] > -math.inf]
        if sides:
            found = torch.logsumexp(torch.stack([e for _, e in sides]), 0)
            out = out.index_put([torch.tensor(i) for i in row], sum((e - found).exp() * o for o, e in sides))
            lse = lse.index_put([torch.tensor(i) for i in row], found)
    return out, lse


def drawn_sides(which: str, dtype: Any, rubbish: float) -> list[Any]:
    """Two sides of (2, 6) rows, some without keys, whose out may hold anything."""
    sides: list[Any] = []
    for side in range(2):
        out, lse = torch.randn(2, 6, 8).to(dtype), 3 * torch.randn(2, 6)
        empty = {
            "neither": torch.zeros(2, 6, dtype=torch.bool),
            "first": torch.full((2, 6), side == 0),
            "both": torch.ones(2, 6, dtype=torch.bool),
            "some": torch.rand(2, 6) < 0.5,
        }[which]
        sides += [out.masked_fill(empty[..., None], rubbish), lse.masked_fill(empty, -math.inf)]
    return sides


CASES = list(itertools.product(("neither", "first", "both", "some"), (torch.float32, torch.bfloat16), (0.0, math.nan)))


@pytest.mark.parametrize("scale", [1.0, 100.0])
def test_gradients_of_a_merge_are_those_of_the_definition(scale: float) -> None:
    torch.manual_seed(0)
    for which, dtype, rubbish in CASES:
        given = drawn_sides(which, dtype, rubbish)
        given = [given[0], scale * given[1], given[2], scale * given[3]]
        mine = [t.detach().clone().requires_grad_() for t in given]
        right = [t.double().requires_grad_() for t in given]
        found, expected = merge_attention(*mine), merged(*right)
        close = {"atol": 2e-2, "rtol": 2e-2} if dtype == torch.bfloat16 else {"atol": 1e-4, "rtol": 1e-4}
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one.double(), other, **close)
        douts = torch.randn(2, 6, 8).to(dtype), torch.randn(2, 6)
        grads = torch.autograd.grad(found, mine, douts, create_graph=True)
        wanted = [torch.zeros_like(t) for t in right]
        if expected[0].requires_grad:
            wanted = torch.autograd.grad(expected, right, [g.double() for g in douts], materialize_grads=True)
        for one, other in zip(grads, wanted, strict=True):
            torch.testing.assert_close(one.double(), other, **close)
        second = torch.autograd.grad([g.float().sum() for g in grads], mine, allow_unused=True)
        assert all(g is None or bool(g.isfinite().all()) for g in second), (which, rubbish)


def test_a_merge_has_tangents_and_no_nan_in_them() -> None:
    for which, _, rubbish in CASES:
        given = drawn_sides(which, torch.float32, rubbish)
        tangents = tuple(map(torch.ones_like, given))
        (out, lse), (of_out, of_lse) = torch.func.jvp(lambda *t: tuple(merge_attention(*t)), tuple(given), tangents)
        seen = lse > -math.inf
        assert bool(of_out.isfinite().all()) and torch.equal(of_lse[seen], torch.ones_like(of_lse[seen]))
        assert not of_out[~seen].any() and not out[~seen].any()


LEARNED = {"q": 0, "k": 1, "v": 2, "sink": 3, "bias": 4}


def attend(*tensors: Any, **options: Any) -> Any:
    q, k, v, sink, bias = tensors
    score = Score("score + bias[kv_idx]", aux={"bias": bias})
    return block_sparse_attention(q, k, v, Causal(), sink=sink, score=score, **options)


@pytest.mark.parametrize("name", LEARNED)
def test_forward_mode_is_refused_by_name(name: str) -> None:
    tensors, place = [*qkv(), torch.randn(2), torch.randn(64)], LEARNED[name]

    def of_one(x: Any, **options: Any) -> Any:
        return attend(*tensors[:place], x, *tensors[place + 1 :], **options)

    x = tensors[place]
    for derivative in (
        lambda: torch.func.jvp(of_one, (x,), (x,)),
        lambda: torch.func.jvp(lambda y: of_one(y.exp()), (x,), (x,)),
        lambda: torch.func.jacfwd(of_one)(x),
    ):
        with pytest.raises(ArgumentError, match=r"tangent of forward-mode|mapped by torch\.vmap"):
            derivative()
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        for call in (
            of_one,
            lambda x: attend(*tensors[:place], x, *tensors[place + 1 :], out=torch.empty_like(tensors[0])),
        ):
            with pytest.raises(ArgumentError, match="tangent of forward-mode"):
                call(dual)
            with torch.no_grad(), pytest.raises(ArgumentError, match="tangent of forward-mode"):
                call(dual)
        with pytest.raises(ArgumentError, match="tangent of forward-mode"):
            of_one(dual.clone().requires_grad_())
        plain = of_one(x)
        assert torch.equal(of_one(dual.detach()), plain)  # a level alone changes nothing
    assert torch.equal(of_one(x), plain)


def test_operators_and_backward_passes_refuse_tangents() -> None:
    q, k, v = qkv()
    operators = torch.ops.sparse_kernel_codegen
    out, _ = operators.block_sparse_attention(q.requires_grad_(), k, v, [], None, None, None, Dense().spec_json)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(k, k)
        with pytest.raises(ArgumentError, match=r"^k: has a tangent"):
            operators.block_sparse_attention(q, dual, v, [], None, None, None, Dense().spec_json)
        dout = forward_ad.make_dual(torch.ones_like(out), torch.ones_like(out))
        with pytest.raises(ArgumentError, match=r"^dout: has a tangent"):
            torch.autograd.grad(out, q, dout)


def test_fp8_refuses_every_derivative(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_fp8, "check_tensor", attention_checks.check_tensor)
    codes = [x.to(torch.float8_e4m3fn) for x in qkv()]
    scale = torch.ones(1, 2, 1)
    given = quantized_operands(*codes, q_scale=scale, k_scale=1.0, v_scale=1.0)
    with forward_ad.dual_level(), pytest.raises(ArgumentError, match="has a tangent"):
        changed = vars(given) | {"q_scale": forward_ad.make_dual(scale, scale)}
        block_sparse_attention(type(given)(**changed), Dense())
    with pytest.raises(ArgumentError, match=r"^q_scale: requires a gradient, and FP8 has no backward"):
        block_sparse_attention(type(given)(**(vars(given) | {"q_scale": scale.requires_grad_()})), Dense())


def test_every_launch_sees_forward_mode() -> None:
    assert not modes.is_watched()
    x = torch.ones(3)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, x)
        assert modes.is_watched()
        assert arguments.has_tangent(dual) and not arguments.has_tangent(x)
        assert arguments.call_key(dual) != arguments.call_key(x)
        assert not any(map(arguments.has_tangent, (None, 1, x.to_sparse(), x.int())))


def test_gradients_are_those_of_the_mode_of_the_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    from runtime.ops import attention_gradients

    asked: list[bool] = []
    choose = attention_gradients.gradient_choice

    def choice(*given: Any, deterministic: bool, **options: Any) -> Any:
        asked.append(deterministic)
        return choose(*given, deterministic=deterministic, **options)

    monkeypatch.setattr(attention_gradients, "gradient_choice", choice)
    for before in (False, True):
        torch.use_deterministic_algorithms(before)
        try:
            out = block_sparse_attention(*(t.requires_grad_() for t in qkv()), Dense(), deterministic=False)
        finally:
            torch.use_deterministic_algorithms(False)
        asked.clear()
        out.sum().backward()
        assert asked == [before]


def test_tensors_of_inference_mode_are_refused_where_autograd_keeps_them() -> None:
    with torch.inference_mode():
        made = qkv()
        prefix = torch.tensor([3], dtype=torch.int32)
        right = block_sparse_attention(*made, PrefixLM(prefix))
    assert torch.equal(block_sparse_attention(*made, PrefixLM(prefix)), right)
    q, k, v = qkv()
    with pytest.raises(ArgumentError, match=r"^k: was made under torch\.inference_mode"):
        block_sparse_attention(q.requires_grad_(), made[1], v, Dense())
    with pytest.raises(ArgumentError, match=r"^pattern: was made under torch\.inference_mode"):
        block_sparse_attention(q, k, v, PrefixLM(prefix))


def test_a_graph_of_gradients_is_refused_where_it_is_reached() -> None:
    q, k, v = (t.float().requires_grad_() for t in qkv())
    out = block_sparse_attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), Dense()).float()
    penalty = q.pow(3).sum()
    (of_q,) = torch.autograd.grad(out.sum() + penalty, q, create_graph=True)
    (other,) = torch.autograd.grad(penalty, q, create_graph=True)
    torch.testing.assert_close(torch.autograd.grad(other.sum(), q, retain_graph=True)[0], 6 * q)
    with pytest.raises(ArgumentError, match="has no gradient of its gradient"):
        of_q.sum().backward()


def test_out_overlaps_nothing_that_a_call_reads() -> None:
    memory = torch.zeros(1, 2, 64, 64).bfloat16()
    words = memory.view(torch.int32).view(-1)
    counts, indices = words[:1].view(1, 1, 1), words[8:9].view(1, 1, 1, 1)
    floats = memory.view(torch.float32).view(-1)
    lists = BlockLists(counts, indices, block=(64, 64))
    apart = BlockLists(counts.clone() + 1, indices.clone(), block=(64, 64))
    q, k, v = qkv()
    score = Score("score + t[kv_idx]", aux={"t": floats[64:128]})
    cases: dict[str, dict[str, Any]] = {
        "the pattern's tensor 0": {"pattern": lists},
        "the pattern's tensor 1": {"pattern": BlockLists(apart.kv_num_blocks, indices, block=(64, 64))},
        "sink": {"pattern": Dense(), "sink": floats[:2]},
        "kv_lengths": {"pattern": Dense(), "kv_lengths": words[:1]},
        r"aux\['t'\]": {"pattern": Dense(), "score": score},
    }
    for name, options in cases.items():
        for _ in range(2):  # a new call, and one that is known
            with pytest.raises(ArgumentError, match=f"^out: overlaps {name} in memory"):
                block_sparse_attention(q, k, v, out=memory, **options)
            block_sparse_attention(q, k, v, out=torch.empty_like(memory), **options)


@pytest.mark.parametrize("odd", [[5.0], torch.tensor([5.0, 6.0]), "5", {}, True])
def test_an_odd_softcap_does_not_get_the_kernel_of_the_last_call(odd: Any) -> None:
    q, k, v = qkv()
    block_sparse_attention(q, k, v, Dense(), softcap=1)
    with pytest.raises(ArgumentError, match=r"^softcap: is "):
        block_sparse_attention(q, k, v, Dense(), softcap=odd)
