"""Gradients of block_sparse_attention without a GPU: the formulas, and all of torch that is about the kernels."""

from __future__ import annotations

import math
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import attention_oracle  # noqa: E402
import gradient_oracle  # noqa: E402
import oracle_kernel  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from codegen.errors import SpecError  # noqa: E402
from codegen.library import find_spec  # noqa: E402
from codegen.patterns import PATTERNS as PATTERN_MODELS  # noqa: E402
from codegen.scored_pattern import pattern_of  # noqa: E402
from codegen.select.backward import DQ_DKDV_HEAD_DIMS, HEAD_DIMS, backward_kernels  # noqa: E402
from codegen.spec import AttentionBackwardSpec  # noqa: E402
from runtime import ArgumentError, block_sparse_attention, explain_attention, patterns  # noqa: E402
from runtime.kernels import attention_backward  # noqa: E402
from runtime.kernels.arguments import Signatures  # noqa: E402
from runtime.kernels.attention_backward import AttentionBackwardKernel  # noqa: E402
from runtime.kernels.gradient_statistics import fill_statistics, sink_gradient  # noqa: E402
from runtime.ops import attention_gradients  # noqa: E402
from runtime.verify import attention_backward as verified  # noqa: E402
from runtime.verify.attention import Case, make_inputs  # noqa: E402

Dense, Causal, SlidingWindow = patterns.Dense, patterns.Causal, patterns.SlidingWindow
TopK: Any = patterns.TopK
BlockLists: Any = patterns.BlockLists
OPERATORS = torch.ops.sparse_kernel_codegen
FORWARD, BACKWARD = (
    OPERATORS.block_sparse_attention.default,
    OPERATORS.block_sparse_attention_backward.default,
)


@pytest.fixture(autouse=True)
def loaded(monkeypatch: pytest.MonkeyPatch) -> Any:
    torch.manual_seed(0)
    torch._dynamo.reset()
    return oracle_kernel.install(monkeypatch)


def qkv(q_len: int = 300, kv_len: int = 300, heads: int = 4, kv_heads: int = 4, head_dim: int = 64) -> list[Any]:
    shapes = (heads, q_len), (kv_heads, kv_len), (kv_heads, kv_len)
    return [torch.randn(2, h, n, head_dim).bfloat16().requires_grad_() for h, n in shapes]


def ints(*shape: int, most: int = 3) -> Any:
    return torch.randint(0, most, shape, dtype=torch.int32)


def words(*shape: int) -> Any:
    return torch.randint(-(2**31), 2**31, shape).to(torch.int32)


PATTERNS: dict[str, Any] = {
    "dense": Dense,
    "causal": Causal,
    "top left": lambda: Causal(align="top_left"),
    "window": lambda: SlidingWindow(100, 20),
    "sink window": lambda: patterns.SinkWindow(4, 100),
    "strided": lambda: patterns.Strided(3, 1, block=64),
    "strided, both sides": lambda: patterns.Strided(2, 0, block=128, causal=False),
    "prefix": lambda: patterns.PrefixLM(torch.tensor([37, 200], dtype=torch.int32)),
    "topk, repeated": lambda: TopK(ints(2, 4, 3, 3)),
    "topk, shared, out of range": lambda: TopK(ints(1, 1, 3, 4, most=7) - 2),
    "lists": lambda: BlockLists(ints(2, 4, 3), ints(2, 4, 3, 2)),
    "causal lists": lambda: BlockLists(ints(1, 4, 3), ints(1, 4, 3, 2), ints(2, 1, 3), ints(2, 1, 3, 2), mask="causal"),
    "bits": lambda: BlockLists(ints(2, 4, 3), ints(2, 4, 3, 2), mask="bits", mask_bits=words(2, 4, 3, 2, 512)),
    "bits and full blocks": lambda: BlockLists(
        ints(1, 4, 5),
        ints(1, 4, 5, 2),
        ints(2, 1, 5),
        ints(2, 1, 5, 2),
        block=(64, 64),
        mask="bits",
        mask_bits=words(2, 1, 5, 2, 128),
    ),
    "split blocks": lambda: TopK(ints(2, 4, 2, 2, most=5), block=(256, 64)),
    "split lists": lambda: BlockLists(ints(2, 4, 2), ints(2, 4, 2, 2, most=2), block=(192, 192), mask="causal"),
}


LISTS = "topk, repeated", "topk, shared, out of range", "lists", "causal lists", "bits"
"""Patterns whose blocks have 128 keys."""
OPTIONS: dict[str, Any] = {
    "softcap": lambda: {"softcap": 1.5},
    "sink": lambda: {"sink": torch.tensor([0.5, -3.0, 4.0, 8.0], requires_grad=True)},
    "kv_lengths": lambda: {"kv_lengths": torch.tensor([37, 250], dtype=torch.int32)},
    "one length": lambda: {"kv_lengths": torch.tensor([130], dtype=torch.int32)},
    "all": lambda: {
        name: value for kind in ("softcap", "sink", "kv_lengths") for name, value in OPTIONS[kind]().items()
    },
}


def gradients(tensors: list[Any], pattern: Any, dout: Any = None, **options: Any) -> tuple[Any, ...]:
    out = block_sparse_attention(*tensors, pattern, **options)
    return torch.autograd.grad(out, tensors, torch.ones_like(out) if dout is None else dout)


def check(tensors: list[Any], pattern: Any, **options: Any) -> None:
    dout = torch.randn_like(tensors[0])
    found = gradients(tensors, pattern, dout, **options)
    options.pop("deterministic", None)
    gradient_oracle.assert_near(found, gradient_oracle.exact(*tensors, pattern, dout, **options))


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("lengths", [(300, 300), (270, 450)])
def test_the_formulas_are_those_of_autograd(name: str, lengths: tuple[int, int]) -> None:
    """All in float64: the stand-ins of the kernels below compute by these formulas."""
    blocks = {"split blocks", "split lists", "bits and full blocks"}
    if name in blocks and lengths != (300, 300):
        pytest.skip("lists of other lengths")
    q, k, v = (t.detach().double() for t in qkv(*lengths, kv_heads=2))
    pattern = PATTERNS[name]()
    seen = gradient_oracle.seen_by(pattern, q, k)
    out, lse = gradient_oracle.dense(q, k, v, seen)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    for given in (None, dlse):
        found = attention_oracle.gradients(q, k, v, out, lse, dout, seen, dlse=given)
        right = gradient_oracle.exact(q, k, v, pattern, dout, given)
        for each in gradient_oracle.NAMES:
            torch.testing.assert_close(found[each], right[each], atol=1e-12, rtol=1e-10)


@pytest.mark.parametrize("options", OPTIONS)
def test_the_formulas_of_options_are_those_of_autograd(options: str) -> None:
    q, k, v = (t.detach().double() for t in qkv(kv_heads=2))
    given = OPTIONS[options]()
    of_logits = {"softcap": given.get("softcap")}
    sink = given["sink"].detach().double() if "sink" in given else None
    seen = gradient_oracle.seen_by(Causal(), q, k, given.get("kv_lengths"))
    out, lse = gradient_oracle.dense(q, k, v, seen, sink=sink, **of_logits)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    found = attention_oracle.gradients(q, k, v, out, lse, dout, seen, dlse=dlse, **of_logits)
    if sink is not None:
        stats = torch.stack([lse, (out * dout).sum(-1) - dlse], -1)
        found["dsink"] = sink_gradient(sink, lse, torch.nn.functional.pad(stats, (0, 0, 0, 7), value=math.nan))
    for name, right in gradient_oracle.exact(q, k, v, Causal(), dout, dlse, **given).items():
        torch.testing.assert_close(found[name], right, atol=1e-11, rtol=1e-10)


def test_a_definition_that_is_wrong_would_be_seen() -> None:
    q, k, v = (t.detach().double() for t in qkv(64, 64))
    seen = gradient_oracle.seen_by(Dense(), q, k)
    out, lse = gradient_oracle.dense(q, k, v, seen)
    found = attention_oracle.gradients(q, k, v, out, lse, torch.ones_like(out), seen, dlse=torch.ones_like(lse))
    right = gradient_oracle.exact(q, k, v, Dense(), torch.ones_like(out))
    assert float((found["dq"] - right["dq"]).abs().max()) > 1e-3


@pytest.mark.parametrize("kind", ["causal", "lists", "softcap", "kv_lengths"])
def test_receipts_compare_with_the_same_formulas(kind: str) -> None:
    pattern, options = (
        {"kind": "causal"},
        {"softcap": {"softcap": 1.5}, "kv_lengths": {"kv_lengths": True}}.get(kind, {}),
    )
    if kind == "lists":
        pattern = {"kind": "block_lists", "block": {"q": 64, "kv": 64}, "mask": "causal"}  # type: ignore[dict-item]
    fields = {"op": "attention_backward", "arch": "sm_90a", "dtype": "bf16", "head_dim": 64, "gradients": "dq"}
    spec = find_spec({**fields, **options, "pattern": pattern}).spec
    assert isinstance(spec, AttentionBackwardSpec)
    case = Case("gradients", heads=4, kv_heads=2, q_len=200, kv_len=260, lists="repeated", counts="mixed")
    inputs = make_inputs(spec.forward, case, torch.device("cpu"))
    dout = torch.randn_like(inputs.q)
    exact = verified.oracle(spec, case, inputs, dout)
    leaves = [t.double().requires_grad_() for t in (inputs.q, inputs.k, inputs.v)]
    out, _ = gradient_oracle.dense(*leaves, exact.weight, softcap=spec.softcap)
    right = torch.autograd.grad(out, leaves, dout.double())
    for gradient, name in zip(right, gradient_oracle.NAMES, strict=True):
        torch.testing.assert_close(exact.gradients[name], gradient, atol=1e-12, rtol=1e-10)


@pytest.mark.parametrize("name", PATTERNS)
def test_each_pattern_has_gradients(name: str, loaded: Any) -> None:
    check(qkv(), PATTERNS[name]())
    specs = [kernel.spec for kernel in loaded.gradients.values()]
    in_one = name in LISTS or all(spec.pattern.dq_order for spec in specs)
    assert sorted(spec.gradients for spec in specs) == (["dq_dkdv"] if in_one else ["dkdv", "dq"])


@pytest.mark.parametrize("name", PATTERNS)
def test_each_pattern_has_gradients_on_an_ada_gpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = oracle_kernel.install(monkeypatch, arch="sm_89")
    check(qkv(), PATTERNS[name]())
    specs = [kernel.spec for kernel in loaded.gradients.values()]
    assert sorted((s.gradients, s.arch, s.mma) for s in specs) == [("dkdv", "sm_89", "mma"), ("dq", "sm_89", "mma")]


@pytest.mark.parametrize("name", ["dense", "window", "prefix", "topk, repeated", "causal lists", "bits", "split lists"])
@pytest.mark.parametrize("options", OPTIONS)
def test_each_option_has_gradients(name: str, options: str, loaded: Any) -> None:
    tensors, pattern, given = qkv(kv_heads=2), PATTERNS[name](), OPTIONS[options]()
    leaves = [*tensors, *(t for t in given.values() if isinstance(t, torch.Tensor) and t.requires_grad)]
    dout, dlse = torch.randn_like(tensors[0]), torch.randn(2, 4, 300)
    out, lse = block_sparse_attention(*tensors, pattern, return_lse=True, **given)
    some = torch.where(lse > -math.inf, lse, 0.0)
    for weight in (0.0, 1.0):
        loss = (out.float() * dout.float()).sum() + weight * (some * dlse).sum()
        found = torch.autograd.grad(loss, leaves, retain_graph=True)
        right = gradient_oracle.exact(*tensors, pattern, dout, weight * dlse, **given)
        gradient_oracle.assert_near(found[:3], {each: right[each] for each in gradient_oracle.NAMES})
        if "sink" in given:
            gradient_oracle.assert_sink_near(found[3], *tensors, pattern, dout, weight * dlse, **given)
    for kernel in loaded.gradients.values():
        assert kernel.spec.softcap == given.get("softcap") and kernel.spec.kv_lengths == ("kv_lengths" in given)


@pytest.mark.parametrize(
    ("name", "options", "head_dim"),
    [("causal", "softcap", 192), ("bits", "all", 256), ("dense", "kv_lengths", 64), ("split lists", "one length", 136)],
)
def test_options_and_wide_heads_have_gradients_on_an_ada_gpu(
    name: str, options: str, head_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = oracle_kernel.install(monkeypatch, arch="sm_89")
    given = {key: value for key, value in OPTIONS[options]().items() if key != "sink"}
    check(qkv(kv_heads=2, head_dim=head_dim), PATTERNS[name](), **given)
    size = next(size for size in HEAD_DIMS["mma"] if size >= head_dim)
    for kernel in loaded.gradients.values():
        spec = kernel.spec
        assert (spec.arch, spec.head_dim, spec.softcap) == ("sm_89", size, given.get("softcap"))
        assert spec.kv_lengths == ("kv_lengths" in given)
    assert len(loaded.gradients) == 2


IN_ANY_ORDER = {"causal", "top left"}  # with heads of 64


@pytest.mark.parametrize("name", PATTERNS)
def test_sums_have_any_order_where_that_is_wanted_and_faster(name: str, loaded: Any) -> None:
    tensors, pattern = qkv(), PATTERNS[name]()
    check(tensors, pattern, deterministic=False)
    specs = [kernel.spec for kernel in loaded.gradients.values()]
    assert any(not spec.deterministic for spec in specs) == (name in IN_ANY_ORDER)
    loaded.gradients.clear()
    torch.use_deterministic_algorithms(True)
    try:
        gradients(tensors, pattern, deterministic=False)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(kernel.spec.deterministic for kernel in loaded.gradients.values())


def test_compile_takes_steps_in_any_order(loaded: Any) -> None:
    def step(q: Any, k: Any, v: Any, pattern: Any) -> Any:
        return block_sparse_attention(q * 2, k, v, pattern, deterministic=False).float().pow(2).sum()

    tensors, pattern = qkv(), Causal()
    right = torch.autograd.grad(step(*tensors, pattern), tensors)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert all(map(torch.equal, torch.autograd.grad(compiled(*tensors, pattern), tensors), right))
    assert [kernel.spec.deterministic for kernel in loaded.gradients.values()] == [False]


def test_the_sinks_alone_have_a_gradient(loaded: Any) -> None:
    q, k, v = (t.detach() for t in qkv())
    sink, dout = torch.randn(4).requires_grad_(), torch.randn_like(q)
    out = block_sparse_attention(q, k, v, Causal(), sink=sink)
    (found,) = torch.autograd.grad(out, sink, dout)
    gradient_oracle.assert_sink_near(found, q, k, v, Causal(), dout, sink=sink)
    assert not loaded.gradients


def test_a_gradient_of_the_sinks_that_is_wrong_would_be_seen() -> None:
    q, k, v = (t.detach() for t in qkv())
    sink, dout = torch.randn(4), torch.randn_like(q)
    right = gradient_oracle.exact(q, k, v, Causal(), dout, sink=sink)["dsink"].float()
    gradient_oracle.assert_sink_near(right, q, k, v, Causal(), dout, sink=sink)
    for wrong in (-right, 1.1 * right, right.flip(0)):
        with pytest.raises(AssertionError, match="dsink"):
            gradient_oracle.assert_sink_near(wrong, q, k, v, Causal(), dout, sink=sink)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "list_heads", "block"),
    [(8, 2, 2, (64, 64)), (8, 2, 4, (64, 128)), (6, 2, 2, (128, 64)), (8, 1, 1, (64, 64)), (8, 2, 2, (256, 64))],
)
def test_lists_of_kv_heads(heads: int, kv_heads: int, list_heads: int, block: tuple[int, int]) -> None:
    rows, blocks = -(-300 // block[0]), -(-300 // block[1])
    check(qkv(heads=heads, kv_heads=kv_heads), TopK(ints(2, list_heads, rows, 3, most=blocks), block=block))
    counts, lists = ints(2, list_heads, rows, most=4), ints(2, list_heads, rows, 3, most=blocks)
    check(qkv(heads=heads, kv_heads=kv_heads), BlockLists(counts, lists, block=block, mask="causal"))


@pytest.mark.parametrize("head_dim", [8, 64, 72, 96, 104, 128, 136, 192, 200, 256])
def test_head_sizes_and_scale(head_dim: int, loaded: Any) -> None:
    check(qkv(100, 200, kv_heads=2, head_dim=head_dim), Causal(), scale=0.2)
    assert {kernel.spec.head_dim for kernel in loaded.gradients.values()} == {
        min(size for size in (DQ_DKDV_HEAD_DIMS if head_dim <= 128 else HEAD_DIMS["wgmma"]) if size >= head_dim)
    }


def test_only_what_is_wanted_is_computed(loaded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for wanted, kernels in (("q", ["dq"]), ("v", ["dkdv"]), ("k", ["dkdv"]), ("qv", ["dq_dkdv"])):
        loaded.gradients.clear()
        monkeypatch.setattr(attention_gradients, "_routes", Signatures())
        tensors = dict(zip("qkv", qkv(), strict=True))
        for name, tensor in tensors.items():
            tensor.requires_grad_(name in wanted)
        block_sparse_attention(*tensors.values(), Causal()).sum().backward()
        assert [name for name in tensors if tensors[name].grad is not None] == list(wanted)
        assert sorted(kernel.spec.gradients for kernel in loaded.gradients.values()) == kernels


def test_the_second_kernel_takes_the_statistics_of_the_first(loaded: Any) -> None:
    gradients(qkv(), PATTERNS["split blocks"]())
    first, second = loaded.gradients.values()
    assert first.calls[0]["stats"] is None and second.calls[0]["stats"] is not None


def test_a_loss_may_depend_on_the_log_sum_exp() -> None:
    tensors, pattern = qkv(), PATTERNS["causal lists"]()
    dout, dlse = torch.randn_like(tensors[0]), torch.randn(2, 4, 300)
    out, lse = block_sparse_attention(*tensors, pattern, return_lse=True)
    some = lse > -math.inf
    for weight in (1.0, 0.0):
        loss = weight * (out.float() * dout.float()).sum() + (torch.where(some, lse, 0.0) * dlse).sum()
        found = torch.autograd.grad(loss, tensors, retain_graph=True)
        assert float(found[0].abs().max()) > 0
        gradient_oracle.assert_near(found, gradient_oracle.exact(*tensors, pattern, weight * dout, dlse))


def test_statistics_with_a_gradient_of_the_log_sum_exp() -> None:
    out, dout = torch.randn(2, 1, 2, 3, 8)
    lse, dlse = torch.tensor([[[0.5, -math.inf, 2.0]] * 2]), torch.randn(1, 2, 3)
    stats = torch.full((1, 2, 5, 2), torch.nan)
    fill_statistics(stats, out, dout, lse, dlse)
    delta = (out * dout).sum(-1) - dlse
    torch.testing.assert_close(stats[..., 1], torch.nn.functional.pad(torch.where(lse > -math.inf, delta, 0.0), (0, 2)))
    right = torch.where(lse > -math.inf, lse * math.log2(math.e), math.inf)
    torch.testing.assert_close(stats[..., 0], torch.nn.functional.pad(right, (0, 2), value=math.inf))


@pytest.mark.parametrize("made", ["expanded", "transposed", "strided", "misaligned"])
def test_a_gradient_that_no_kernel_can_read_is_copied(made: str, loaded: Any) -> None:
    tensors = qkv()
    shape = tensors[0].shape
    dout = {
        "expanded": lambda: torch.ones((), dtype=torch.bfloat16).expand(shape),
        "transposed": lambda: torch.randn(*shape[:2], 64, 300).bfloat16().mT,
        "strided": lambda: torch.randn(*shape[:3], 67).bfloat16()[..., :64],
        "misaligned": lambda: torch.randn(2 * 4 * 300 * 64 + 1).bfloat16()[1:].view(shape),
    }[made]()
    found = gradients(tensors, Causal(), dout)
    gradient_oracle.assert_near(found, gradient_oracle.exact(*tensors, Causal(), dout))
    for kernel in loaded.gradients.values():
        given = kernel.calls[0]["dout"]
        assert given.is_contiguous() and given.data_ptr() % 16 == 0


def test_what_kernels_can_read_is_not_copied(loaded: Any) -> None:
    dout = torch.randn(2, 300, 4, 64).bfloat16().transpose(1, 2)
    gradients(qkv(), Causal(), dout)
    assert all(kernel.calls[0]["dout"].data_ptr() == dout.data_ptr() for kernel in loaded.gradients.values())


@pytest.mark.parametrize(("name", "lists"), [("causal", 0), ("topk, repeated", 1), ("causal lists", 4)])
@pytest.mark.parametrize("lse", [False, True])
def test_saved_are_the_operands_the_results_and_the_lists(name: str, lists: int, lse: bool) -> None:
    saved: list[Any] = []
    pattern, tensors = PATTERNS[name](), qkv()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        result = block_sparse_attention(*tensors, pattern, return_lse=lse)
    out = result.out if lse else result  # type: ignore[attr-defined]
    assert len(saved) == 5 + lists
    kept = {t.data_ptr() for t in saved}
    assert {t.data_ptr() for t in (*tensors, out, *pattern.index_tensors())} <= kept


def test_saved_are_sinks_and_lengths_too() -> None:
    saved: list[Any] = []
    tensors, given = qkv(), OPTIONS["all"]()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        block_sparse_attention(*tensors, Causal(), **given)
    assert len(saved) == 7
    assert {given["sink"].data_ptr(), given["kv_lengths"].data_ptr()} <= {t.data_ptr() for t in saved}


def test_nothing_is_saved_and_no_lse_computed_without_gradients(loaded: Any) -> None:
    tensors = qkv()
    with torch.no_grad():
        assert not block_sparse_attention(*tensors, Causal()).requires_grad
    assert not block_sparse_attention(*(t.detach() for t in tensors), Causal()).requires_grad
    (kernel,) = loaded.values()
    assert kernel.asked_lse == [False, False]
    block_sparse_attention(*tensors, Causal())
    assert kernel.asked_lse[2:] == [True] and len(loaded) == 1


def test_lists_that_change_between_the_passes_are_noticed() -> None:
    pattern = PATTERNS["topk, repeated"]()
    out = block_sparse_attention(*qkv(), pattern)
    pattern.kv_indices.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def step(q: Any, k: Any, v: Any, pattern: Any) -> Any:
    return block_sparse_attention(q * 2, k, v, pattern).float().pow(2).sum()


@pytest.mark.parametrize("name", ["causal", "causal lists", "split blocks"])
def test_compile_takes_a_training_step_whole(name: str) -> None:
    pattern = PATTERNS[name]()
    tensors = qkv()
    right = torch.autograd.grad(step(*tensors, pattern), tensors)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    found = torch.autograd.grad(compiled(*tensors, pattern), tensors)
    for one, other in zip(found, right, strict=True):
        assert torch.equal(one, other)


def test_compile_takes_options() -> None:
    def step(q: Any, k: Any, v: Any, sink: Any, lengths: Any) -> Any:
        options = {"sink": sink, "kv_lengths": lengths, "softcap": 3.0}
        return block_sparse_attention(q * 2, k, v, Causal(), **options).float().pow(2).sum()

    given = OPTIONS["all"]()
    leaves = [*qkv(), given["sink"]]
    right = torch.autograd.grad(step(*leaves, given["kv_lengths"]), leaves)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert all(map(torch.equal, torch.autograd.grad(compiled(*leaves, given["kv_lengths"]), leaves), right))


def test_compile_with_dynamic_lengths_has_one_graph() -> None:
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend=backend)
    for length in (1152, 640, 384):
        tensors = qkv(length, length, heads=3, kv_heads=3)
        pattern = TopK(ints(2, 3, length // 128, 2))
        found = torch.autograd.grad(compiled(*tensors, pattern), tensors)
        for one, other in zip(found, torch.autograd.grad(step(*tensors, pattern), tensors), strict=True):
            assert torch.equal(one, other)
    assert len(graphs) == 1


def test_a_compiled_step_may_return_the_log_sum_exp_that_no_loss_uses() -> None:
    compiled = torch.compile(
        lambda q, k, v: block_sparse_attention(q, k, v, Causal(), return_lse=True), fullgraph=True, backend="aot_eager"
    )
    tensors = qkv()
    dout = torch.randn_like(tensors[0])
    out, lse = compiled(*tensors)
    assert lse.shape == (2, 4, 300)
    found = torch.autograd.grad(out, tensors, dout)
    gradient_oracle.assert_near(found, gradient_oracle.exact(*tensors, Causal(), dout))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_computes_the_forward_again(reentrant: bool, loaded: Any) -> None:
    tensors = qkv()
    loss = checkpoint(step, *tensors, Causal(), use_reentrant=reentrant)
    found = torch.autograd.grad(loss, tensors) if not reentrant else None
    if found is None:  # autograd.grad is not for reentrant ones
        loss.backward()
        found = tuple(t.grad for t in tensors)
    right = torch.autograd.grad(step(*tensors, Causal()), tensors)
    assert all(map(torch.equal, found, right))


def test_opcheck() -> None:
    q, k, v = qkv(256, 256, heads=2, kv_heads=2)
    lists = ints(1, 2, 2, 2, most=2)
    sink, lengths = torch.randn(2).requires_grad_(), torch.tensor([100, 256], dtype=torch.int32)
    for tensors, pattern, others, options in (
        ([], Causal(), (None, None), {}),
        ([lists], TopK(lists), (None, None), {"lse": True, "scale": 0.3}),
        ([], Causal(), (sink, lengths), {"softcap": 2.0}),
    ):
        torch.library.opcheck(FORWARD, (q, k, v, tensors, *others, None, pattern.spec_json), options)
        out, lse = FORWARD(q, k, v, tensors, *others, None, pattern.spec_json, lse=True)
        given = [t.detach() for t in (torch.randn_like(out), q, k, v, out, lse)]
        detached = tuple(t if t is None else t.detach() for t in others)
        for more in ({}, {"dq": False}, {"dkdv": False, "dsink": others[0] is not None}):
            arguments = (*given, torch.randn_like(lse), tensors, *detached, pattern.spec_json)
            torch.library.opcheck(BACKWARD, arguments, {"scale": 0.3, **more})


def test_the_layout_of_a_gradient_is_that_of_its_operand() -> None:
    tensors = [torch.randn(2, 300, 4, 64).bfloat16().transpose(1, 2).requires_grad_() for _ in range(3)]
    for gradient, tensor in zip(gradients(tensors, Causal()), tensors, strict=True):
        assert gradient.stride() == tensor.stride()


def test_autocast_has_gradients_in_the_type_of_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    from runtime.ops import attention

    def cast(*tensors: Any) -> tuple[Any, ...]:  # as autocast does on a GPU
        return tuple(t.to(torch.bfloat16) for t in tensors)

    monkeypatch.setattr(attention, "any_autocast", lambda: True)
    monkeypatch.setattr(attention, "autocast", cast)
    tensors = [torch.randn(1, 2, 200, 64).requires_grad_() for _ in range(3)]
    assert [g.dtype for g in gradients(tensors, Causal())] == [torch.float32] * 3


def test_second_derivatives_are_refused_by_name() -> None:
    tensors = qkv()
    first = torch.autograd.grad(block_sparse_attention(*tensors, Causal()).sum(), tensors, create_graph=True)
    with pytest.raises(ArgumentError, match="block_sparse_attention: has no gradient of its gradient"):
        first[0].sum().backward()


def test_transforms_of_functions_are_refused_by_name() -> None:
    q, k, v = (t.detach() for t in qkv())
    with pytest.raises(ArgumentError, match=r"q, k and v: one of them is differentiated by a transform of torch\.func"):
        torch.func.grad(lambda q: block_sparse_attention(q, k, v, Dense()).sum())(q)
    out, lse = block_sparse_attention(q, k, v, Dense(), return_lse=True)
    with pytest.raises(ArgumentError, match=r"dout, q, k and v: one of them is mapped by torch\.vmap"):
        torch.vmap(lambda d: BACKWARD(d, q, k, v, out, lse, None, [], None, None, Dense().spec_json))(
            torch.stack([out, out])
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"softcap": 5000.0}, "softcap: is 5000.0, expected a number from 0.001 to 1000"),
        ({"sink": torch.zeros(3)}, r"sink: has shape \(3,\), expected"),
        ({"sink": torch.zeros(4).double()}, r"sink: is torch\.float64"),
        ({"kv_lengths": torch.ones(3, dtype=torch.int32)}, r"kv_lengths: has shape \(3,\)"),
        ({"kv_lengths": torch.ones(2)}, r"kv_lengths: is torch\.float32, expected torch\.int32"),
        ({"out": torch.zeros(2, 4, 300, 64).bfloat16()}, "out: is given, and q requires a gradient"),
        ({"deterministic": None}, "deterministic: is None, expected True or False"),
    ],
)
def test_wrong_options_are_refused_in_the_forward(options: dict[str, Any], message: str, loaded: Any) -> None:
    tensors = qkv()
    with pytest.raises(ArgumentError, match=message):
        block_sparse_attention(*tensors, Causal(), **options)
    assert not loaded


@pytest.mark.parametrize(
    ("pattern", "error", "message"),
    [
        (lambda: TopK(ints(2, 4, 10, 2), block=(32, 64)), ArgumentError, r"block: is \(32, 64\); with a gradient"),
        (lambda: TopK(ints(2, 4, 5, 2), block=(64, 32)), ArgumentError, r"block: is \(64, 32\); with a gradient"),
        (lambda: TopK(ints(2, 4, 4, 2), block=(96, 64)), ArgumentError, r"block: is \(96, 64\); with a gradient"),
    ],
)
def test_patterns_without_a_gradient_are_refused_in_the_forward(
    pattern: Any, error: Any, message: str, loaded: Any
) -> None:
    tensors, made = qkv(), pattern()
    with pytest.raises(error, match=message):
        block_sparse_attention(*tensors, made)
    with pytest.raises(error, match=message):
        explain_attention(*(t.detach().to("meta") for t in tensors), _on_meta(made), arch="sm_90a", gradients=True)
    assert not loaded
    with torch.no_grad():
        block_sparse_attention(*tensors, made)


def _on_meta(pattern: Any) -> Any:
    leaves, tree = torch.utils._pytree.tree_flatten(pattern)
    return torch.utils._pytree.tree_unflatten([None if t is None else t.to("meta") for t in leaves], tree)


def test_heads_and_devices_without_a_gradient_are_refused_in_the_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = oracle_kernel.install(monkeypatch, arch="sm_75")
    with pytest.raises(SpecError, match="arch: is sm_75; gradients of attention support sm_80, sm_86"):
        block_sparse_attention(*qkv(), Causal())
    oracle_kernel.install(monkeypatch)
    with pytest.raises(SpecError, match="head_dim: is 264; gradients support heads of up to 256"):
        backward_kernels(pattern_of({"kind": "causal"}), arch="sm_90a", dtype="bf16", head_dim=264)
    with pytest.raises(ArgumentError, match="q: has head size 264, expected a multiple of 8 up to 256"):
        block_sparse_attention(*qkv(head_dim=264), Causal())
    assert not loaded


def test_operands_are_checked_as_without_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = qkv()
    with pytest.raises(ArgumentError, match=r"k: is torch\.float16, q is torch\.bfloat16"):
        block_sparse_attention(q, k.half(), v, Causal())
    monkeypatch.undo()
    with pytest.raises(ArgumentError, match="q: is on cpu, expected a CUDA device"):
        block_sparse_attention(q, k, v, Causal())


def test_the_choice_says_what_it_refuses() -> None:
    dense = pattern_of({"kind": "dense"})
    found = backward_kernels(dense, arch="sm_90a", dtype="fp16", head_dim=112)
    specs = (found.dq.spec, found.dkdv.spec)
    assert [(s.gradients, s.head_dim, s.dtype) for s in specs] == [("dq", 128, "fp16"), ("dkdv", 128, "fp16")]  # type: ignore[union-attr]
    ada = backward_kernels(dense, arch="sm_89", dtype="bf16", head_dim=80)
    assert (ada.dq.stem, ada.dkdv.stem) == ("l4_dense_dq_bf16", "l4_dense_dkdv_bf16")
    lists = pattern_of({"kind": "topk", "block": {"q": 64, "kv": 32}})
    with pytest.raises(SpecError, match=r"pattern\.block\.kv: is 32; allowed in a gradient: 64, 128"):
        backward_kernels(lists, arch="sm_90a", dtype="fp16", head_dim=64)


def test_a_pattern_without_a_walk_over_queries_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PATTERN_MODELS["strided"], "queries", None)
    pattern = pattern_of({"kind": "strided", "stride": 3, "local": 1, "block": 64})
    with pytest.raises(
        SpecError, match="pattern: is strided, which has no gradient; patterns with a gradient: block_lists"
    ):
        backward_kernels(pattern, arch="sm_90a", dtype="fp16", head_dim=64)


def test_explain_names_the_kernels_of_the_gradients() -> None:
    tensors = [t.detach().to("meta") for t in qkv()]
    told = explain_attention(*tensors, Causal(), arch="sm_90a", gradients=True)
    assert told.gradients is not None and told.choice.spec.lse  # type: ignore[union-attr]
    of_all = told.gradients.dq_dkdv
    assert of_all is not None and f"\ndQ, dK and dV: {of_all.stem}\n  receipt: " in str(told)
    assert f"\ndQ alone: {told.gradients.dq.stem}\n  receipt: " in str(told)
    assert f"\ndK and dV alone: {told.gradients.dkdv.stem}" in str(told)
    assert "dQ" not in str(explain_attention(*tensors, Causal(), arch="sm_90a"))
    in_any_order = explain_attention(*tensors, Causal(), arch="sm_90a", gradients=True, deterministic=False)
    assert "\ndQ, dK and dV: h100_causal_d64_dq_dkdv_any_order_bf16\n" in str(in_any_order)


def test_rows_of_another_call_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_backward, "check_tensor", oracle_kernel._check_tensor)
    kernel = AttentionBackwardKernel.__new__(AttentionBackwardKernel)
    spec = backward_kernels(pattern_of({"kind": "causal"}), arch="sm_90a", dtype="bf16", head_dim=64).dq.spec
    assert isinstance(spec, AttentionBackwardSpec)
    kernel.spec, kernel._dtype, kernel._has_dlse = spec, torch.bfloat16, False
    q, k, v = (t.detach() for t in qkv())
    lse = torch.zeros(2, 4, 300)
    operands = {"q": q, "k": k, "v": v, "out": q.clone(), "dout": q.clone(), "lse": lse, "dlse": None}
    kernel._check_operands(operands)
    kernel._check_operands({**operands, "dlse": lse.mT.contiguous().mT})
    for change, message in (
        ({"out": q[:, :, :200]}, r"out: has shape \(2, 4, 200, 64\), expected"),
        ({"out": q.half()}, r"out: is torch\.float16, this kernel takes torch\.bfloat16"),
        ({"dout": q.mT.contiguous().mT}, "dout: has stride 300 in its last dimension, which must be contiguous"),
        ({"v": v[:, :2]}, r"v: has shape \(2, 2, 300, 64\)"),
        ({"k": k[:, :3], "v": v[:, :3]}, "k: has 3 heads, q has 4: not a multiple"),
        ({"lse": lse[:, :, 1:]}, r"lse: has shape \(2, 4, 299\)"),
        ({"lse": lse.half()}, r"lse: is torch\.float16"),
        ({"lse": lse.mT.contiguous().mT}, "lse: has strides"),
        ({"dlse": lse[:1]}, r"dlse: has shape \(1, 4, 300\)"),
    ):
        with pytest.raises(ArgumentError, match=message):
            kernel._check_operands({**operands, **change})


def test_operands_that_want_gradients_are_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels refuse them where gradients are on; what is explained is not called."""
    on: list[bool] = []
    monkeypatch.setattr("runtime.ops.explain.check_operands", lambda *_, **__: on.append(torch.is_grad_enabled()))
    q, k, v = (torch.randn(1, 2, 256, 64).half().requires_grad_() for _ in range(3))
    told = str(explain_attention(q, k, v, Causal(), arch="sm_90a", gradients=True))
    assert on == [False] and "dQ alone: " in told


@pytest.mark.parametrize("make", [lambda: SlidingWindow(90, 20), lambda: patterns.SinkWindow(7, 60, 3)])
def test_windows_are_passed_to_kernels_that_leave_them_to_the_call(
    make: Any, loaded: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_window = attention_gradients.backward_kernels
    monkeypatch.setattr(attention_gradients, "backward_kernels", lambda of, **how: of_window(of.general(), **how))
    attention_gradients.gradient_choice.cache_clear()
    loaded.general = True
    try:
        check(qkv(), make())
    finally:
        attention_gradients.gradient_choice.cache_clear()
    (kernel,), backward = loaded.values(), loaded.gradients.values()
    assert kernel.spec.pattern.is_general and backward
    assert all(each.spec.pattern.is_general and each.calls for each in backward)


def test_a_pattern_without_its_numbers_is_no_call() -> None:
    q, k, v = (t.detach() for t in qkv())
    for kind, name in (("sliding_window", "left"), ("sink_window", "sink")):
        with pytest.raises(SpecError, match=rf"^pattern\.{name}: is missing; the pattern of a call must have it"):
            FORWARD(q, k, v, [], None, None, None, f'{{"kind": "{kind}"}}')
