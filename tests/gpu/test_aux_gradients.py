"""Gradients of tensors of a score on a GPU: beside the formulas and autograd in float64, the same bits in every run.

pytest -n 4 tests/gpu/test_aux_gradients.py
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import attention_oracle  # noqa: E402
import gradient_oracle  # noqa: E402
from gpu.test_score import PATTERNS, model_of, patterns, qkv, seen_by  # noqa: E402

from runtime import block_sparse_attention  # noqa: E402
from runtime.patterns import Causal, Dense, Score, SlidingWindow  # noqa: E402
from runtime.verify.aux_tensors import scored  # noqa: E402

DTYPES = (torch.float16, torch.bfloat16)
BATCH, HEADS, Q_LEN, KV_LEN = 2, 4, 333, 517
N = 40  # of a table by distance, on either side
FLOAT_ERROR = 2.0**-16  # of the sum of what pairs add, without their signs: logits of 20 have errors of 2^-19
ROUNDOFF = {torch.float32: 0.0, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
AUTOGRAD = 0.05  # of the largest element: delta is of the result in 16 bits
RUNS = 20
SCORES: dict[str, tuple[str, dict[str, tuple[int, ...]]]] = {
    "slopes": ("score + slope[head] * (kv_idx - q_idx)", {"slope": (HEADS,)}),
    "bias": (f"score + bias[head, min(max(q_idx - kv_idx, {-N}), {N}) + {N}]", {"bias": (HEADS, 2 * N + 1)}),
    "bias_beyond": ("score + bias[kv_idx - q_idx + kv_len - q_len]", {"bias": (50,)}),
    "queries": ("score * of[head, q_idx]", {"of": (HEADS, Q_LEN)}),
    "keys": ("score + of[batch, kv_idx]", {"of": (BATCH, KV_LEN)}),
    "keys_of_all": ("score + of[batch, kv_idx]", {"of": (1, KV_LEN)}),
    "gain": ("score * gain[head]", {"gain": (HEADS,)}),
    "soft_cap": ("cap * tanh(score / cap)", {"cap": ()}),
    "two_tables": (
        "score * gain[head] + row[q_idx] * key[batch, kv_idx] + bias[head, q_idx - kv_idx + 60]",
        {"gain": (HEADS,), "row": (Q_LEN,), "key": (BATCH, KV_LEN), "bias": (HEADS, 121)},
    ),
}


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()


def drawn(name: str, dtype: Any = torch.float32) -> Any:
    value, shapes = SCORES[name]
    steps = {"slope": 1 / 64, "cap": 2.0}
    aux = {of: (torch.rand(shape, device="cuda") + 0.2) * steps.get(of, 0.5) for of, shape in shapes.items()}
    return Score(value, aux={of: tensor.to(dtype).requires_grad_() for of, tensor in aux.items()})


def check(tensors: list[Any], pattern: Any, score: Any, **options: Any) -> None:
    """Compare the gradients of a score's tensors with the formulas, of the result and LSE as they are, and autograd."""
    q, k, v = tensors
    dout = torch.randn(q.shape, device="cuda").to(q.dtype)
    out, lse = block_sparse_attention(q, k, v, pattern, score=score, return_lse=True, **options)
    names = sorted(score.aux)
    leaves = [score.aux[name] for name in names]
    found = torch.autograd.grad(out, leaves, dout)
    seen, plain = seen_by(pattern, q, k, options.get("kv_lengths")), {n: t.detach() for n, t in score.aux.items()}
    formulas = partial(attention_oracle.aux_gradients, q, k, v, out.detach(), lse.detach(), dout, seen, model_of(score))
    right, sizes = (formulas(plain, names=names, sizes=each) for each in (False, True))
    doubles = {name: tensor.double().requires_grad_() for name, tensor in plain.items()}
    by_score = partial(scored, model_of(score).expression, aux=doubles)
    sink = None if options.get("sink") is None else options["sink"].double()
    exact, _ = gradient_oracle.dense(*(t.double() for t in tensors), seen, score=by_score, sink=sink)
    by_autograd = torch.autograd.grad(exact, [doubles[name] for name in names], dout.double())
    for name, gradient, other in zip(names, found, by_autograd, strict=True):
        tensor = score.aux[name]
        assert (gradient.shape, gradient.dtype, gradient.device) == (tensor.shape, tensor.dtype, tensor.device)
        rounding = ROUNDOFF[tensor.dtype] * float(right[name].abs().max())
        atol = FLOAT_ERROR * float(sizes[name].max()) + rounding
        torch.testing.assert_close(gradient.double(), right[name], atol=atol, rtol=0, msg=lambda m, n=name: f"{n}: {m}")
        loose = AUTOGRAD * max(float(other.abs().max()), 0.01 * float(sizes[name].max())) + rounding
        torch.testing.assert_close(gradient.double(), other, atol=loose, rtol=0, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SCORES)
def test_scores(name: str, dtype: Any) -> None:
    tensors = qkv(BATCH, HEADS, Q_LEN, KV_LEN, 64, dtype, 2)
    for pattern in (Causal(), SlidingWindow(100, 30)):
        check(tensors, pattern, drawn(name))


@pytest.mark.parametrize("aux_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["slopes", "bias", "keys", "queries"])
def test_tensors_of_16_bits(name: str, aux_dtype: Any) -> None:
    check(qkv(BATCH, HEADS, Q_LEN, KV_LEN, 128, torch.bfloat16, 1), Causal(), drawn(name, aux_dtype))


@pytest.mark.parametrize("head_dim", [64, 96, 128, 136, 192, 256])
@pytest.mark.parametrize("name", ["bias", "gain"])
def test_head_sizes(name: str, head_dim: int) -> None:
    check(qkv(BATCH, HEADS, Q_LEN, KV_LEN, head_dim, torch.bfloat16, 2), Causal(), drawn(name))


@pytest.mark.parametrize("pattern", PATTERNS)
def test_patterns(pattern: str) -> None:
    tensors = qkv(BATCH, HEADS, Q_LEN, KV_LEN, 64, torch.float16, 2)
    check(tensors, patterns(Q_LEN, KV_LEN)[pattern], drawn("two_tables"))


def test_lengths_of_batches_and_sinks() -> None:
    tensors = qkv(BATCH, HEADS, Q_LEN, KV_LEN, 64, torch.bfloat16)
    lengths = torch.tensor([KV_LEN, 70], dtype=torch.int32, device="cuda")
    check(tensors, Dense(), drawn("two_tables"), kv_lengths=lengths)
    check(tensors, Causal(), drawn("two_tables"), sink=torch.randn(HEADS, device="cuda"))


def test_many_tiles_for_each_thread_block() -> None:
    tensors = qkv(1, 2, 4100, 4100, 128, torch.bfloat16, 1)
    table = (torch.rand(2, 2 * N + 1, device="cuda") / 2).requires_grad_()
    check(tensors, Causal(), Score(SCORES["bias"][0], aux={"bias": table}))


def test_beside_the_other_gradients() -> None:
    tensors = [t.requires_grad_() for t in qkv(BATCH, HEADS, Q_LEN, KV_LEN, 64, torch.bfloat16, 2)]
    score, dout = drawn("bias"), torch.randn(BATCH, HEADS, Q_LEN, 64, device="cuda").bfloat16()
    together = torch.autograd.grad(
        block_sparse_attention(*tensors, Causal(), score=score), [*tensors, score.aux["bias"]], dout
    )
    apart = torch.autograd.grad(block_sparse_attention(*tensors, Causal(), score=score), [score.aux["bias"]], dout)
    frozen = Score(score.value, aux={"bias": score.aux["bias"].detach()})
    without = torch.autograd.grad(block_sparse_attention(*tensors, Causal(), score=frozen), tensors, dout)
    for one, other in zip(together, (*without, *apart), strict=True):
        assert torch.equal(one, other)


def test_a_loss_of_the_lse() -> None:
    q, k, v = qkv(BATCH, HEADS, Q_LEN, KV_LEN, 64, torch.bfloat16)
    score = drawn("gain")
    lse = block_sparse_attention(q, k, v, Dense(), score=score, return_lse=True).lse
    dlse = torch.randn(lse.shape, device="cuda")
    (found,) = torch.autograd.grad((lse * dlse).sum(), [score.aux["gain"]])
    gain = score.aux["gain"].detach().double().requires_grad_()
    by_score = partial(scored, model_of(score).expression, aux={"gain": gain})
    _, exact = gradient_oracle.dense(q.double(), k.double(), v.double(), seen_by(Dense(), q, k), score=by_score)
    (right,) = torch.autograd.grad((exact * dlse.double()).sum(), gain)
    torch.testing.assert_close(found.double(), right, atol=1e-3 * float(right.abs().max()), rtol=1e-3)


@pytest.mark.parametrize("name", ["two_tables", "slopes"])
def test_every_run_gives_the_same_bits(name: str) -> None:
    q, k, v = qkv(BATCH, HEADS, 1500, 1500, 128, torch.bfloat16, 2)
    value, shapes = SCORES[name]
    sizes = {Q_LEN: 1500, KV_LEN: 1500}
    aux = {of: torch.rand([sizes.get(n, n) for n in shape], device="cuda") / 64 for of, shape in shapes.items()}
    score = Score(value, aux={of: tensor.requires_grad_() for of, tensor in aux.items()})
    leaves = list(score.aux.values())
    out = block_sparse_attention(q, k, v, Causal(), score=score)
    dout = torch.randn_like(out)
    first = torch.autograd.grad(out, leaves, dout, retain_graph=True)
    for _ in range(RUNS - 1):
        again = torch.autograd.grad(out, leaves, dout, retain_graph=True)
        assert all(map(torch.equal, first, again))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_by_torch(backend: str) -> None:
    compiled = torch.compile(
        lambda q, k, v, score: block_sparse_attention(q * 2, k, v, Causal(), score=score),
        fullgraph=True,
        backend=backend,
    )
    (q, k, v), score = qkv(BATCH, HEADS, Q_LEN, KV_LEN, 64, torch.bfloat16), drawn("bias")
    dout = torch.randn_like(q)
    found = torch.autograd.grad(compiled(q, k, v, score), [score.aux["bias"]], dout)
    right = torch.autograd.grad(block_sparse_attention(q * 2, k, v, Causal(), score=score), [score.aux["bias"]], dout)
    assert torch.equal(found[0], right[0])


def test_a_step_in_a_graph() -> None:
    (q, k, v), score = qkv(BATCH, HEADS, Q_LEN, KV_LEN, 64, torch.bfloat16), drawn("two_tables")
    leaves, dout = list(score.aux.values()), torch.randn_like(q)

    def step() -> Any:
        return torch.autograd.grad(block_sparse_attention(q, k, v, Causal(), score=score), leaves, dout)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        right = step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    for _ in range(2):
        graph.replay()
        assert all(map(torch.equal, found, right))
