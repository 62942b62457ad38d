"""Gradients of varlen_attention without a GPU: both paths, their operators, and the choice of kernels."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

import gradient_oracle  # noqa: E402
import packed_kernel  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from codegen.errors import SpecError  # noqa: E402
from codegen.library import find_spec  # noqa: E402
from codegen.planning import plan_for  # noqa: E402
from codegen.select.backward import HEAD_DIMS, backward_kernels  # noqa: E402
from codegen.spec import AttentionBackwardSpec  # noqa: E402
from runtime import varlen_attention  # noqa: E402
from runtime.errors import ArgumentError  # noqa: E402
from runtime.ops import varlen_gradients  # noqa: E402
from runtime.patterns import Causal, Dense, SinkWindow, SlidingWindow, scored_of  # noqa: E402

Q_BOUNDS = torch.tensor([2, 12, 12, 13, 60], dtype=torch.int32)  # 2 tokens before the first, 6 behind the last
K_BOUNDS = torch.tensor([1, 30, 35, 36, 36], dtype=torch.int32)  # the last sequence has no keys
PATTERNS = {
    "dense": Dense,
    "causal": Causal,
    "top left": lambda: Causal(align="top_left"),
    "window": lambda: SlidingWindow(9, 2),
    "sink window": lambda: SinkWindow(2, 7),
}
OPERATORS = torch.ops.sparse_kernel_codegen


@pytest.fixture(autouse=True, params=[0, 1 << 40], ids=["one kernel", "two kernels"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether one kernel computes all gradients, where there is one."""
    monkeypatch.setattr(varlen_gradients, "LEAST_OF_ONE_KERNEL", request.param)


@pytest.fixture(autouse=True)
def loaded(monkeypatch: pytest.MonkeyPatch) -> Any:
    torch.manual_seed(0)
    torch._dynamo.reset()
    return packed_kernel.install(monkeypatch)


def operands(
    tokens: int = 66, key_tokens: int = 40, heads: int = 4, kv_heads: int = 2, head_dim: int = 64
) -> list[Any]:
    shapes = (tokens, heads), (key_tokens, kv_heads), (key_tokens, kv_heads)
    return [torch.randn(*shape, head_dim).bfloat16().requires_grad_() for shape in shapes]


def call(tensors: list[Any], pattern: Any, **options: Any) -> Any:
    return varlen_attention(*tensors, pattern, cu_seqlens_q=Q_BOUNDS, cu_seqlens_k=K_BOUNDS, **options)


def exact(
    tensors: list[Any], pattern: Any, dout: Any, dlse: Any = None, sink: Any = None, **options: Any
) -> list[torch.Tensor]:
    """Gradients by autograd through the definition in float64, of all tokens at once."""
    leaves = [t.detach().double().requires_grad_() for t in (*tensors, *([] if sink is None else [sink]))]
    q, k, v = (t.transpose(0, 1)[None] for t in leaves[:3])
    seen = packed_kernel.seen_by(pattern.spec_json, q, k, Q_BOUNDS, K_BOUNDS)
    out, lse = gradient_oracle.dense(q, k, v, seen, sink=None if sink is None else leaves[3], **options)
    inside = (torch.arange(q.shape[2]) >= 2) & (torch.arange(q.shape[2]) < 60)
    loss = (out[0].transpose(0, 1) * dout.double())[inside].sum()
    if dlse is not None:
        finite = torch.where(lse > -torch.inf, lse, 0.0)[0]
        loss = loss + (finite * dlse.double())[:, inside].sum()
    return list(torch.autograd.grad(loss, leaves))


def watched(tensors: list[Any], pattern: Any, **options: Any) -> Any:
    """The call as an operator, which a dispatch mode sees."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Sees(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return function(*args, **(kwargs or {}))

    with Sees():
        return call(tensors, pattern, **options)


@pytest.mark.parametrize("way", [call, watched], ids=["direct", "operator"])
@pytest.mark.parametrize("name", PATTERNS)
def test_gradients_are_those_of_each_sequence(name: str, way: Any) -> None:
    tensors, pattern = operands(), PATTERNS[name]()
    dout = torch.randn_like(tensors[0])
    out = way(tensors, pattern)
    found = torch.autograd.grad(out, tensors, dout)
    right = exact(tensors, pattern, dout)
    for gradient, expected, tensor in zip(found, right, tensors, strict=True):
        assert gradient.shape == tensor.shape and gradient.dtype == tensor.dtype and gradient.is_contiguous()
        torch.testing.assert_close(gradient.double(), expected, atol=3e-2, rtol=3e-2)
    for gradient, ends in zip(found, ((2, 60), (1, 36), (1, 36)), strict=True):
        assert not gradient[: ends[0]].any() and not gradient[ends[1] :].any()


@pytest.mark.parametrize("way", [call, watched], ids=["direct", "operator"])
@pytest.mark.parametrize("wanted", ["all", "sink", "without q"])
def test_sinks_and_the_log_sum_exp_have_gradients(wanted: str, way: Any, loaded: Any) -> None:
    tensors, sink = operands(), torch.tensor([0.5, -3.0, 4.0, 8.0], requires_grad=True)
    leaves = {"all": [*tensors, sink], "sink": [sink], "without q": [*tensors[1:], sink]}[wanted]
    given = [t if any(t is leaf for leaf in leaves) else t.detach() for t in tensors]
    out, lse = way(given, Causal(), sink=sink, return_lse=True, softcap=5.0)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    found = torch.autograd.grad([out, lse], leaves, [dout, dlse])
    right = exact(tensors, Causal(), dout, dlse, sink, softcap=5.0)[4 - len(leaves) :]
    for gradient, expected in zip(found, right, strict=True):
        torch.testing.assert_close(gradient.double(), expected, atol=4e-2, rtol=3e-2)


def test_one_kernel_makes_the_statistics_of_both(loaded: Any) -> None:
    tensors = operands()
    call(tensors, Causal()).float().sum().backward()
    by_gradients = {n.spec.gradients: k for n, k in loaded.items() if isinstance(n.spec, AttentionBackwardSpec)}
    if set(by_gradients) == {"dq", "dkdv"}:
        assert by_gradients["dq"].calls[0]["stats"] is None and by_gradients["dkdv"].calls[0]["stats"] is not None
    assert all(each["dlse"] is None for kernel in by_gradients.values() for each in kernel.calls)


def test_views_and_gradients_that_no_kernel_can_read() -> None:
    qkv = torch.randn(40, 3, 4, 72).bfloat16().requires_grad_()
    bounds = torch.tensor([0, 13, 40], dtype=torch.int32)

    def attend(q: Any, k: Any, v: Any) -> Any:
        return varlen_attention(q, k, v, Causal(), cu_seqlens_q=bounds)

    out, lse = varlen_attention(*qkv.unbind(1), Causal(), cu_seqlens_q=bounds, return_lse=True)
    assert out.is_contiguous()
    (found,) = torch.autograd.grad([out, lse], qkv, [torch.ones(()).bfloat16().expand(out.shape), torch.ones(40, 4).T])
    apart = [t.detach().clone().requires_grad_() for t in qkv.unbind(1)]
    out, lse = varlen_attention(*apart, Causal(), cu_seqlens_q=bounds, return_lse=True)
    right = torch.autograd.grad([out, lse], apart, [torch.ones_like(out), torch.ones_like(lse)])
    assert torch.equal(found, torch.stack(right, 1))


def test_without_tokens_gradients_are_zeros() -> None:
    q, k, v = operands(10, 0)
    sink = torch.ones(4, requires_grad=True)
    of_q, of_k = torch.tensor([1, 7, 9], dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
    out, lse = varlen_attention(q, k, v, Dense(), cu_seqlens_q=of_q, cu_seqlens_k=of_k, sink=sink, return_lse=True)
    found = torch.autograd.grad([out, lse], [q, k, v, sink], [torch.ones_like(out), torch.ones_like(lse)])
    assert not found[0].any() and found[1].shape == k.shape
    assert torch.equal(found[3], torch.full_like(sink, 8.0))  # of the tokens of sequences alone


def test_checkpoints_and_compiled_steps() -> None:
    tensors = operands()

    def step(q: Any, k: Any, v: Any) -> Any:
        out = varlen_attention(q * 2, k, v, Causal(), cu_seqlens_q=Q_BOUNDS, cu_seqlens_k=K_BOUNDS)
        return out[2:60].float().pow(2).mean()

    right = torch.autograd.grad(step(*tensors), tensors)
    found = torch.autograd.grad(checkpoint(step, *tensors, use_reentrant=False), tensors)
    assert all(map(torch.equal, found, right))
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    found = torch.autograd.grad(compiled(*tensors), tensors)
    for one, other in zip(found, right, strict=True):
        torch.testing.assert_close(one, other, atol=1e-2, rtol=2e-2)


def test_opcheck() -> None:
    tensors = operands()
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    text, sink, tokens = Causal().spec_json, torch.zeros(4), torch.tensor([0, 40, 66], dtype=torch.int32)
    keys = torch.tensor([0, 30, 40], dtype=torch.int32)
    forward, backward = OPERATORS.varlen_attention.default, OPERATORS.varlen_attention_backward.default
    for options in ({}, {"lse": True}):
        torch.library.opcheck(forward, (*tensors, tokens, keys, sink, [], text), options, test_utils=checks)
    q, k, v = (t.detach() for t in tensors)
    out, lse = forward(q, k, v, tokens, keys, None, [], text, lse=True)
    for dlse in (None, torch.randn_like(lse)):
        given = (torch.randn_like(out), q, k, v, tokens, keys, out, lse, dlse, sink, [], text)
        for options in ({}, {"dsink": True}, {"dq": False}, {"dkdv": False}):
            torch.library.opcheck(backward, given, options, test_utils=checks)


def test_fakes_have_the_shapes_of_gradients() -> None:
    with FakeTensorMode():
        q = torch.empty(100, 8, 72, dtype=torch.float16, requires_grad=True)
        k = torch.empty(50, 2, 72, dtype=torch.float16, requires_grad=True)
        of_q, of_k = (torch.empty(5, dtype=torch.int32) for _ in range(2))
        out = varlen_attention(q, k, k, Causal(), cu_seqlens_q=of_q, cu_seqlens_k=of_k)
        of_out = torch.autograd.grad(out, (q, k), torch.empty_like(out))
        assert [t.shape for t in of_out] == [q.shape, k.shape]


@pytest.mark.parametrize("way", [call, watched], ids=["direct", "operator"])
def test_what_has_no_gradient_is_refused(way: Any) -> None:
    tensors = operands()
    with pytest.raises(
        ArgumentError, match=r"^out: is given, and q requires a gradient, which what is written has not"
    ):
        way(tensors, Causal(), out=torch.empty_like(tensors[0]))
    (first,) = torch.autograd.grad(way(tensors, Causal()).float().sum(), tensors[:1], create_graph=True)
    with pytest.raises(ArgumentError, match=r"^varlen_attention: has no gradient of its gradient"):
        first.float().sum().backward()
    with pytest.raises(ArgumentError, match=r"^deterministic: is 1"):
        way(tensors, Causal(), deterministic=1)
    with torch.inference_mode():
        made = torch.randn(66, 4, 64).bfloat16()
    with pytest.raises(
        ArgumentError, match=r"^q: was made under torch.inference_mode\(\), and autograd cannot keep it"
    ):
        way([made, *tensors[1:]], Causal())


@pytest.mark.parametrize("way", [call, watched], ids=["direct", "operator"])
@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"sink": torch.zeros(3, requires_grad=True)}, r"^sink: has shape \(3,\)"),
        ({"softcap": 0.0}, r"^softcap: is 0.0"),
        ({"scale": -1.0}, r"^scale: is -1"),
    ],
)
def test_bad_arguments_are_named(changes: dict[str, Any], says: str, way: Any) -> None:
    with pytest.raises(ArgumentError, match=says):
        way(operands(), Causal(), **changes)


def test_vmap_and_torch_func_are_refused() -> None:
    q, k, v = operands()
    with pytest.raises(ArgumentError, match=r"mapped by torch\.vmap"):
        torch.vmap(lambda each: call([each, k, v], Causal()))(torch.stack([q, q]))
    with pytest.raises(ArgumentError, match=r"by a transform of torch\.func"):
        torch.func.grad(lambda each: call([each, k, v], Causal()).float().sum())(q.detach())


def test_calls_ask_for_the_order_of_their_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    chosen = varlen_gradients.chosen_for

    def noted(*given: Any, deterministic: bool, **named: Any) -> Any:
        asked.append(deterministic)
        return chosen(*given, deterministic=deterministic, **named)

    monkeypatch.setattr(varlen_gradients, "chosen_for", noted)
    call(operands(), Causal(), deterministic=False).float().sum().backward()
    assert asked and not any(asked)
    asked.clear()
    torch.use_deterministic_algorithms(True)
    try:
        out = call(operands(), Causal(), deterministic=False)
    finally:
        torch.use_deterministic_algorithms(False)
    out.float().sum().backward()
    assert all(asked)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_89"])
def test_every_pattern_and_head_size_has_kernels(arch: str) -> None:
    for pattern in (Dense(), Causal(), Causal(align="top_left"), SlidingWindow(5), SinkWindow(4, 100)):
        for head_dim in HEAD_DIMS["wgmma" if arch == "sm_90a" else "mma"]:
            options: dict[str, Any] = {"arch": arch, "dtype": "bf16", "head_dim": head_dim, "softcap": 20.0}
            found = backward_kernels(scored_of(pattern).pattern, **options, layout="varlen")
            for named in found.of_a_step():
                assert isinstance(named.spec, AttentionBackwardSpec) and named.spec.layout == "varlen"
                plan_for(named)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"pattern": {"kind": "prefix_lm"}}, "pattern.kind: is prefix_lm, which is not written for layout varlen"),
        ({"kv_lengths": True}, "kv_lengths: is not written for layout varlen; leave it out"),
        ({"score": {"value": "score + 1"}}, "score: is not written for layout varlen"),
    ],
)
def test_what_is_not_written_is_refused(changes: dict[str, Any], says: str) -> None:
    fields = {"op": "attention_backward", "arch": "sm_90a", "gradients": "dq", "head_dim": 128, "layout": "varlen"}
    with pytest.raises(SpecError, match=says):
        plan_for(find_spec({**fields, "pattern": {"kind": "causal"}, **changes}))
