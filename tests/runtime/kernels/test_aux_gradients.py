"""Gradients of tensors of a score: which there are, how sums become them, and calls beside torch's autograd."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import gradient_oracle  # noqa: E402
import oracle_kernel  # noqa: E402
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from codegen.aux_gradients import reads_of  # noqa: E402
from codegen.errors import SpecError  # noqa: E402
from codegen.expressions.nodes import Variable  # noqa: E402
from codegen.library import find_spec  # noqa: E402
from codegen.planning import plan_for  # noqa: E402
from codegen.plans.backward.daux import BLOCKS, SUM_BYTES  # noqa: E402
from codegen.problem import AttentionShape  # noqa: E402
from codegen.score import Score as ScoreOfSpec  # noqa: E402
from runtime import ArgumentError, block_sparse_attention, explain_attention  # noqa: E402
from runtime.expressions.evaluate import evaluate  # noqa: E402
from runtime.kernels.aux_gradients import of_read  # noqa: E402
from runtime.patterns import Causal, Dense, Score, SlidingWindow  # noqa: E402
from runtime.verify.aux_tensors import scored  # noqa: E402

BATCH, HEADS, Q_LEN, KV_LEN = 2, 4, 37, 53
SIZES = {"batch": BATCH, "heads": HEADS, "q_len": Q_LEN, "kv_len": KV_LEN}
BIAS = "score + bias[head, min(max(q_idx - kv_idx, -4), 4) + 4]"


def spec_score(value: str, **aux: str) -> ScoreOfSpec:
    return ScoreOfSpec(value=value, aux=aux)


# Indices: what they count, then numbers that are added, and that hold them.
COUNTED = (
    *("batch", "head", "q_idx", "kv_idx"),
    *("(q_idx - kv_idx)", "(kv_idx - q_idx + kv_len - q_len)", "(7 - (q_idx - 3 - kv_idx))"),
)
numbers = st.integers(-60, 60)


@st.composite
def indices(draw: Any, counted: tuple[str, ...]) -> str:
    text = draw(st.sampled_from(counted))
    for _ in range(draw(st.integers(0, 3))):
        form = draw(
            st.sampled_from(["({} + {})", "({} - {})", "({1} - {0})", "min({}, {})", "max({1}, {0})", "-({0})"])
        )
        text = form.format(text, draw(numbers))
    return text


@st.composite
def elements(draw: Any) -> tuple[str, tuple[int, ...]]:
    """Draw what a score reads, and the shape of the tensor; of queries, keys and distances it counts one."""
    axes = [*draw(st.sampled_from([("batch",), ("head",), ("batch", "head"), ()]))]
    lines = draw(st.sampled_from([*COUNTED[2:], ""]))
    axes += [lines] if lines else []
    texts = [draw(indices((axis,))) for axis in draw(st.permutations(axes))]
    if draw(st.booleans()):
        texts.insert(draw(st.integers(0, len(texts))), str(draw(st.integers(0, 3))))
    shape = tuple(draw(st.integers(1, 70)) for _ in texts)
    return f"table[{', '.join(texts)}]" if texts else "table", shape


@settings(max_examples=40, deadline=None)
@given(elements(), st.integers(0, 99))
def test_sums_become_the_gradient_of_what_is_read(element: tuple[str, tuple[int, ...]], seed: int) -> None:
    text, shape = element
    (read,) = reads_of(spec_score(f"score + {text}", table=f"fp32[{', '.join(map(str, shape))}]"), ("table",))
    torch.manual_seed(seed)
    ds = torch.randn(BATCH, HEADS, Q_LEN, KV_LEN, dtype=torch.float64)
    table = torch.zeros(shape, dtype=torch.float64, requires_grad=True)
    values: dict[str, Any] = {"q_len": Q_LEN, "kv_len": KV_LEN, "score": torch.zeros((), dtype=torch.float64)}
    for axis, name in enumerate(("batch", "head", "q_idx", "kv_idx")):
        values[name] = torch.arange(ds.shape[axis]).view([-1 if axis == place else 1 for place in range(4)])
    (right,) = torch.autograd.grad((evaluate(read.item, values, {"table": table}) * ds).sum(), table)
    found = of_read(read, summed(ds, read.lines), shape, {"q_len": Q_LEN, "kv_len": KV_LEN})
    torch.testing.assert_close(found, right)


def summed(ds: Any, lines: str) -> Any:
    """Return what a kernel leaves: sums of queries, of keys, or of distances, the least one first."""
    if lines != "diagonals":
        return ds.sum(3 if lines == "rows" else 2)
    return torch.stack([ds.diagonal(-apart, 2, 3).sum(-1) for apart in range(1 - KV_LEN, Q_LEN)], -1)


@pytest.mark.parametrize(
    ("value", "aux", "message"),
    [
        (
            "score + t[kv_idx // 2]",
            "fp32[kv_len]",
            r"score.aux.t: has no gradient: its index is kv_idx // 2, allowed: batch",
        ),
        ("score + t[q_idx + kv_idx]", "fp32[99]", r"its index is q_idx \+ kv_idx, allowed"),
        ("score + t[2 * q_idx]", "fp32[99]", r"its index is 2 \* q_idx, allowed"),
        ("score + t[abs(q_idx - kv_idx)]", "fp32[99]", r"its index is abs\(q_idx - kv_idx\), allowed"),
        ("score + t[q_idx, kv_idx]", "fp32[q_len, kv_len]", r"has no gradient in t\[q_idx, kv_idx\]: only one of its"),
        (
            "score + t[head, head]",
            "fp32[heads, heads]",
            r"only one of its indices may count queries, keys or distances",
        ),
        ("score + t[min(q_idx, 3) - kv_idx]", "fp32[9]", r"its index is min\(q_idx, 3\) - kv_idx, allowed"),
        ("score + t[q_idx]", "int32[q_len]", r"score.aux.t: is int32\[q_len\]; only floating-point tensors"),
        (
            "score + " + " + ".join(f"t[{i}]" for i in range(9)),
            "fp32[9]",
            r"reads 9 elements of tensors with a gradient; at most 8",
        ),
    ],
)
def test_what_has_no_gradient(value: str, aux: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        reads_of(spec_score(value, t=aux), ("t",))


def test_what_is_read_in_conditions_alone_has_no_sums() -> None:
    score = spec_score("where(t[q_idx] > u[kv_idx // 7], score, score * u[head])", t="fp32[q_len]", u="fp32[9]")
    assert reads_of(score, ("t",)) == ()
    assert [read.item.indices for read in reads_of(score, ("t", "u"))] == [(Variable("head"),)]


@pytest.fixture()
def loaded(monkeypatch: pytest.MonkeyPatch) -> Any:
    torch.manual_seed(0)
    torch._dynamo.reset()
    return oracle_kernel.install(monkeypatch)


def qkv(kv_heads: int = 2) -> list[Any]:
    lengths = (HEADS, Q_LEN), (kv_heads, KV_LEN), (kv_heads, KV_LEN)
    return [torch.randn(BATCH, heads, length, 64).bfloat16() for heads, length in lengths]


SCORES: dict[str, tuple[str, dict[str, Any]]] = {
    "slopes": ("score + slope[head] * (kv_idx - q_idx)", {"slope": (HEADS,)}),
    "bias": (BIAS, {"bias": (HEADS, 9)}),
    "keys": ("score + of[batch, kv_idx] * gain[head]", {"of": (BATCH, KV_LEN), "gain": (HEADS,)}),
    "shared": ("score * gain[batch, head] + t[head] * t[batch]", {"gain": (1, HEADS), "t": (1,)}),
    "one": ("30 * tanh(score * gain / 30)", {"gain": ()}),
}


def learned(name: str, dtype: Any = torch.float32) -> tuple[Score, dict[str, Any]]:
    value, shapes = SCORES[name]
    aux = {of: (torch.rand(shape) / 4 + 0.1).to(dtype).requires_grad_() for of, shape in shapes.items()}
    return Score(value, aux=aux), aux


@pytest.mark.parametrize("name", SCORES)
def test_calls_beside_autograd(name: str, loaded: Any) -> None:
    pattern = SlidingWindow(20) if name == "slopes" else Causal()
    tensors, (score, aux) = [t.requires_grad_() for t in qkv()], learned(name)
    dout = torch.randn(tensors[0].shape).bfloat16()
    out = block_sparse_attention(*tensors, pattern, score=score)
    found = torch.autograd.grad(out, [*tensors, *aux.values()], dout)
    leaves = [t.detach().double().requires_grad_() for t in aux.values()]
    assert score.aux is not None  # in which a tensor has a name for each kind of its sizes
    given = {
        of: leaf for of, t in score.aux.items() for leaf, own in zip(leaves, aux.values(), strict=True) if t is own
    }
    node = ScoreOfSpec.model_validate(json.loads(score.spec_json)).expression
    seen = gradient_oracle.seen_by(pattern, *tensors[:2])
    exact, _ = gradient_oracle.dense(*(t.double() for t in tensors), seen, score=partial(scored, node, aux=given))
    right = torch.autograd.grad(exact, leaves, dout.double())
    for one, other, tensor in zip(found[3:], right, aux.values(), strict=True):
        assert one.dtype == tensor.dtype and one.shape == tensor.shape
        torch.testing.assert_close(one.double(), other, atol=0.06 * float(other.abs().max()) + 1e-2, rtol=0)
    kernels = [kernel.spec for kernel in loaded.gradients.values() if kernel.spec.gradients == "daux"]
    assert [spec.aux_gradients for spec in kernels] == [tuple(sorted(score.aux))]


def test_a_tensor_longer_than_both_lengths_has_gradients(loaded: Any) -> None:
    """Of queries and of keys a function reads the beginning; their gradients add up, and are 0 behind."""
    q, k, v = qkv(HEADS)
    t, gain = torch.rand(64, requires_grad=True), torch.rand(BATCH + 1, HEADS, requires_grad=True)

    def score_mod(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return score * gain[b, h] + t[i] * t[j]

    dout = torch.randn(q.shape).bfloat16()
    found = torch.autograd.grad(block_sparse_attention(q, k, v, Dense(), score=score_mod), (t, gain), dout)
    logits = q.double() @ k.double().mT / 8 * gain.double()[:BATCH, :, None, None]
    exact = (logits + t[:Q_LEN, None] * t[:KV_LEN]).softmax(-1) @ v.double()
    for one, other in zip(found, torch.autograd.grad(exact, (t, gain), dout.double()), strict=True):
        torch.testing.assert_close(one, other, atol=0.06 * float(other.abs().max()) + 1e-2, rtol=0)
    assert found[0][:Q_LEN].all() and not found[0][KV_LEN:].any() and not found[1][BATCH:].any()


def test_only_what_is_asked_for_is_computed(loaded: Any) -> None:
    (q, k, v), (score, aux) = qkv(), learned("keys")
    block_sparse_attention(q, k, v, Dense(), score=score).float().sum().backward()
    assert [kernel.spec.gradients for kernel in loaded.gradients.values()] == ["daux"]
    aux["of"].requires_grad_(False)
    block_sparse_attention(q, k, v, Dense(), score=score).float().sum().backward()
    assert [kernel.spec.aux_gradients for kernel in loaded.gradients.values()] == [("gain", "of"), ("gain",)]
    with torch.no_grad():
        assert not block_sparse_attention(q, k, v, Dense(), score=score).requires_grad


def test_conditions_have_zeros_without_a_kernel(loaded: Any) -> None:
    limit = torch.rand(HEADS, requires_grad=True)
    score = Score("where(score > limit[head], score, 0.0)", aux={"limit": limit})
    block_sparse_attention(*qkv(), Dense(), score=score).float().sum().backward()
    assert limit.grad is not None and not limit.grad.any() and not loaded.gradients


def test_what_has_no_gradient_is_refused_before_the_forward(loaded: Any) -> None:
    table = torch.rand(KV_LEN, requires_grad=True)
    score = Score("score + table[kv_idx // 2]", aux={"table": table})
    with pytest.raises(SpecError, match=r"score\.aux\.table: has no gradient: its index is kv_idx // 2"):
        block_sparse_attention(*qkv(), Dense(), score=score)
    assert not loaded
    out = torch.empty(BATCH, HEADS, Q_LEN, 64, dtype=torch.bfloat16)
    with pytest.raises(ArgumentError, match="out: is given, and slope requires a gradient"):
        block_sparse_attention(*qkv(), Dense(), score=learned("slopes")[0], out=out)


def test_explain_names_the_kernel_of_learned_tensors() -> None:
    score, aux = learned("slopes")
    tensors = [t.to("meta") for t in qkv()]
    told = explain_attention(*tensors, Dense(), score=score, arch="sm_90a", gradients=True)
    assert told.gradients is not None and told.gradients.daux is not None
    assert f"\ngradients of {', '.join(aux)}: {told.gradients.daux.stem}" in str(told)
    fixed = Score(score.value, aux={name: tensor.detach() for name, tensor in aux.items()})
    told = explain_attention(*tensors, Dense(), score=fixed, arch="sm_90a", gradients=True)
    assert told.gradients is not None and told.gradients.daux is None and "gradients of" not in str(told)


def test_no_gradient_of_a_gradient(loaded: Any) -> None:
    q, k, v = qkv()
    score, aux = learned("slopes")
    out = block_sparse_attention(q.requires_grad_(), k, v, Dense(), score=score)
    (found,) = torch.autograd.grad(out.float().sum(), aux["slope"], create_graph=True)
    with pytest.raises(ArgumentError, match="has no gradient of its gradient"):
        found.sum().backward()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_by_torch(backend: str, loaded: Any) -> None:
    compiled = torch.compile(
        lambda q, k, v, score: block_sparse_attention(q * 2, k, v, Causal(), score=score).float().sum(),
        fullgraph=True,
        backend=backend,
    )
    (q, k, v), (score, aux) = qkv(), learned("bias", torch.float16)
    compiled(q, k, v, score).backward()
    found, aux["bias"].grad = aux["bias"].grad, None
    block_sparse_attention(q * 2, k, v, Causal(), score=score).float().sum().backward()
    assert found.dtype == torch.float16 and torch.equal(found, aux["bias"].grad)


FIELDS: dict[str, Any] = {
    **{
        "op": "attention_backward",
        "arch": "sm_90a",
        "gradients": "daux",
        "head_dim": 64,
        "pattern": {"kind": "causal"},
    },
    "score": {"value": BIAS, "aux": {"bias": "fp32[heads, 9]"}},
    "aux_gradients": ["bias"],
}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"aux_gradients": []}, "aux_gradients: is empty"),
        ({"aux_gradients": ["slope"]}, "aux_gradients: has 'slope', but the score has bias"),
        ({"score": None}, "score: is missing"),
        ({"gradients": "dq"}, "aux_gradients: names 1 tensors, but gradients dq do not include them"),
        ({"gradients": "dq", "aux_gradients": [], "mma": "mma"}, "mma: is mma; allowed on sm_90a .*: wgmma"),
        ({"mma": "wgmma", "copy": "tma", "schedule": "cooperative"}, "mma: is wgmma; allowed .*: mma"),
        ({"head_dim": 96}, "head_dim: is 96; allowed with gradients daux: 64, 128, 192, 256"),
        ({"tile": {"m": 128, "n": 32}}, "tile.m: is 128; allowed with gradients daux: 64"),
        ({"tile": {"m": 64, "n": 48}}, "tile.n: is 48; allowed with gradients daux: 16, 32, 64"),
        (
            {"score": {"value": "where(t[q_idx] > 0.0, score, 0.0)", "aux": {"t": "fp32[9]"}}, "aux_gradients": ["t"]},
            "aux_gradients: has 't', which the score reads only in conditions",
        ),
    ],
)
def test_specs_without_a_kernel(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        plan_for(find_spec({**FIELDS, **changed}))


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 9), st.integers(1, 64), st.integers(1, 200_000), st.integers(1, 200_000))
def test_sums_stay_small_and_depend_on_the_shape_alone(batch: int, heads: int, q_len: int, kv_len: int) -> None:
    plan = plan_for(find_spec(FIELDS))
    shape = AttentionShape(batch, heads, 1, q_len, kv_len)
    found = plan.problem(shape, 132)
    splits, of_one = found.numbers["splits"], 4 * batch * heads * (q_len + kv_len - 1)
    assert found == plan.problem(shape, 8)
    assert found.sums == {"daux_bias": splits * of_one} and found.tiles == batch * heads * splits
    assert 1 <= splits <= found.numbers["query_tiles"]
    assert splits == 1 or (splits * of_one <= SUM_BYTES and found.tiles <= BLOCKS)
