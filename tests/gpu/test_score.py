"""Scores that users write, on a GPU: beside the definition, over every pattern, through gradients.

pytest -n 4 tests/gpu/test_score.py
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import attention_oracle  # noqa: E402
import gradient_oracle  # noqa: E402
import known_functions  # noqa: E402
from torch.utils import _pytree as pytree  # noqa: E402

from codegen.arch import ARCHS  # noqa: E402
from codegen.library import find_spec  # noqa: E402
from codegen.score import Score as ScoreModel  # noqa: E402
from runtime import block_sparse_attention, load_kernel  # noqa: E402
from runtime.patterns import (  # noqa: E402  # noqa: E402
    BlockLists,
    Causal,
    Dense,
    PrefixLM,
    Score,
    SinkWindow,
    SlidingWindow,
    Strided,
    TopK,
    scored_of,
    split_tensors,
    with_score,
)
from runtime.verify.aux_tensors import scored  # noqa: E402

HERE = torch.cuda.get_device_capability() if torch.cuda.is_available() else (9, 0)
HOPPER = pytest.mark.skipif(ARCHS["sm_90a"].compute_capability != HERE, reason="kernels of sm_90a")
DTYPES = (torch.float16, torch.bfloat16)
ATOL = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
FUNCTIONS = [name for name in known_functions.SCORES if name != "many_functions"]  # which rounds the score itself
ALIBI = "score + slope[head] * (kv_idx - q_idx)"
MIXED = (
    "max(0.7 * score, bias[kv_idx]) + tanh(shift[q_idx] - score) + table[head, q_idx - kv_idx + 7] "
    "- abs(q_idx - kv_idx) / 64"
)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()


def qkv(batch: int, heads: int, q_len: int, kv_len: int, d: int, dtype: Any, kv_heads: int = 0) -> list[Any]:
    of = (heads, q_len), (kv_heads or heads, kv_len), (kv_heads or heads, kv_len)
    return [torch.randn(batch, h, n, d, device="cuda").to(dtype) for h, n in of]


def on_gpu(tree: Any) -> Any:
    return pytree.tree_map(lambda t: t if t is None else t.cuda(), tree)


def alibi(heads: int) -> Any:
    return Score(ALIBI, aux={"slope": torch.tensor([2.0 ** -(8 * (h + 1) / heads) for h in range(heads)]).cuda()})


def mixed(heads: int, q_len: int, kv_len: int) -> Any:
    aux = {"bias": torch.randn(kv_len), "shift": torch.randn(q_len), "table": torch.randn(heads, 15).half()}
    return on_gpu(Score(MIXED, aux=aux))


def model_of(score: Any) -> Any:
    return ScoreModel.model_validate_json(score.spec_json)


def by_definition(score: Any) -> Any:
    return partial(scored, model_of(score).expression, aux=score.aux)


def seen_by(pattern: Any, q: Any, k: Any, kv_lengths: Any = None) -> Any:
    own, aux = split_tensors(scored_of(pattern), pattern.index_tensors())
    return attention_oracle.times_seen(pattern.spec_json, own, (*q.shape[:3], k.shape[2]), kv_lengths, aux).cuda()


def check(tensors: list[Any], pattern: Any, score: Any, **options: Any) -> None:
    q, k, v = tensors
    given = {name: value for name, value in options.items() if name != "kv_lengths"}
    seen = seen_by(pattern, q, k, options.get("kv_lengths"))
    right, right_lse = attention_oracle.attention(q, k, v, seen, score=by_definition(score), **given)
    out, lse = block_sparse_attention(q, k, v, pattern, score=score, return_lse=True, **options)
    torch.testing.assert_close(out.float(), right, atol=ATOL[q.dtype], rtol=0)
    torch.testing.assert_close(lse, right_lse, atol=2e-4, rtol=1e-4)


def lists(q_len: int, kv_len: int, block: tuple[int, int], heads: int = 1, **mask: Any) -> Any:
    """Every other block of random ones is full, the others are partial."""
    rows, columns = -(-q_len // block[0]), -(-kv_len // block[1])
    order = torch.rand(1, heads, rows, columns, device="cuda").argsort(-1).int()
    half = columns // 2
    counts = torch.full((1, heads, rows), columns - half, dtype=torch.int32, device="cuda")
    full = (torch.full_like(counts, half), order[..., columns - half :].contiguous()) if half else ()
    return BlockLists(counts, order[..., : columns - half].contiguous(), *full, block=block, **mask)


def patterns(q_len: int, kv_len: int) -> dict[str, Any]:
    block = (128, 128)
    q_doc, kv_doc = (torch.randint(0, 3, (2, n), dtype=torch.int32, device="cuda") for n in (q_len, kv_len))
    columns = -(-kv_len // block[1])
    listed = torch.rand(1, 1, -(-q_len // block[0]), columns, device="cuda").argsort(-1).int()[..., : columns // 2 + 1]
    bits = lists(q_len, kv_len, block)
    words = torch.randint(-(2**31), 2**31, (*bits.kv_indices.shape, 128 * 128 // 32), device="cuda").int()
    of_bits = BlockLists(bits.kv_num_blocks, bits.kv_indices, block=block, mask="bits", mask_bits=words)
    text = "q_doc[batch, q_idx] == kv_doc[batch, kv_idx] or (q_idx + kv_idx) % 5 == 0"
    return {
        "dense": Dense(),
        "causal": Causal(),
        "top_left": Causal(align="top_left"),
        "window": SlidingWindow(200),
        "two_sided": SlidingWindow(100, 60),
        "sink_window": SinkWindow(4, 150),
        "prefix_lm": PrefixLM(torch.tensor([100, 0], dtype=torch.int32, device="cuda")),
        "strided": Strided(4, 1),
        "topk": TopK(listed.contiguous()),
        "lists": lists(q_len, kv_len, block),
        "lists_causal": lists(q_len, kv_len, block, mask="causal"),
        "lists_bits": of_bits,
        "lists_expression": lists(q_len, kv_len, block, mask=text, aux={"q_doc": q_doc, "kv_doc": kv_doc}),
    }


PATTERNS = (
    *("dense", "causal", "top_left", "window", "two_sided", "sink_window", "prefix_lm", "strided", "topk", "lists"),
    *("lists_causal", "lists_bits", "lists_expression"),
)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_as_users_write_them(name: str, head_dim: int, dtype: Any) -> None:
    n = known_functions.LENGTH
    tensors = qkv(known_functions.BATCH, known_functions.HEADS, n, n, head_dim, dtype)
    for pattern in (Dense(), Causal()):
        check(tensors, pattern, on_gpu(Score(known_functions.SCORES[name])))


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(("q_len", "kv_len"), [(1000, 1000), (333, 900), (900, 500)])
@pytest.mark.parametrize("name", PATTERNS)
def test_every_pattern(name: str, q_len: int, kv_len: int, head_dim: int) -> None:
    tensors, pattern = qkv(2, 4, q_len, kv_len, head_dim, torch.bfloat16), patterns(q_len, kv_len)[name]
    for score in (alibi(4), mixed(4, q_len, kv_len)):
        check(tensors, pattern, score)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [8, 64, 96, 128, 192, 256])
@pytest.mark.parametrize("name", ["causal", "topk", "lists_expression"])
def test_head_sizes(name: str, head_dim: int, dtype: Any) -> None:
    tensors, pattern = qkv(2, 4, 700, 700, head_dim, dtype), patterns(700, 700)[name]
    for score in (alibi(4), mixed(4, 700, 700), Score("20 * tanh(score / 20)")):
        check(tensors, pattern, score)


@pytest.mark.parametrize("block", [(1, 64), (16, 64), (64, 64), (128, 64), (64, 128)])
@pytest.mark.parametrize("list_heads", [1, 2])
def test_query_heads_that_share_keys(list_heads: int, block: tuple[int, int]) -> None:
    """Blocks of few queries are filled up with heads: each row has its own head's part of the score."""
    tensors = qkv(2, 16, 300, 700, 128, torch.bfloat16, kv_heads=2)
    pattern = lists(300, 700, block, list_heads)
    check(tensors, pattern, alibi(16))
    check(tensors, TopK(pattern.kv_indices, block=block), mixed(16, 300, 700))


@pytest.mark.parametrize("name", ["dense", "causal", "window", "lists_causal", "topk"])
def test_lengths_of_batches_and_sinks(name: str) -> None:
    tensors, pattern = qkv(3, 4, 500, 800, 128, torch.float16), patterns(500, 800)[name]
    lengths = torch.tensor([800, 1, 333], dtype=torch.int32, device="cuda")
    check(tensors, pattern, mixed(4, 500, 800), kv_lengths=lengths)
    check(tensors, pattern, alibi(4), sink=torch.randn(4, device="cuda"))


@pytest.mark.parametrize("scale", [0.01, 0.3])
def test_scales(scale: float) -> None:
    check(qkv(1, 4, 300, 300, 64, torch.float16), Causal(), mixed(4, 300, 300), scale=scale)


def test_long_sequences_keep_near_keys_apart() -> None:
    """Distances are exact: a bias near the diagonal is small, however large the positions are."""
    q, k, v = qkv(1, 1, 300, 40000, 64, torch.float16)
    check([q, k, v], SlidingWindow(100), Score("score - 0.5 * (q_idx + kv_len - q_len - kv_idx)"))
    check([q, k, v], Causal(), Score("score - 0.25 * abs(q_idx + kv_len - q_len - kv_idx)"))


def test_hidden_pairs_stay_hidden_whatever_their_score_is() -> None:
    tensors = qkv(1, 2, 500, 500, 128, torch.bfloat16)
    check(tensors, Causal(), Score("score + log2(q_idx - kv_idx + 1)"))  # NaN behind the diagonal
    check(tensors, Causal(), Score("where(kv_idx > q_idx, inf, score)"))


def test_scores_of_no_key_and_of_nan() -> None:
    q, k, v = qkv(1, 2, 300, 300, 128, torch.float16)
    out, lse = block_sparse_attention(q, k, v, Dense(), score="where(q_idx % 3 == 0, -inf, score)", return_lse=True)
    assert bool((out[:, :, ::3] == 0).all()) and bool((lse[:, :, ::3] == -math.inf).all())
    assert not bool(out.isnan().any() | lse.isnan().any())
    out, lse = block_sparse_attention(q, k, v, Dense(), score="score + sqrt(q_idx - 5)", return_lse=True)
    assert bool(out[:, :, :5].isnan().all()) and not bool(out[:, :, 5:].isnan().any())


def test_a_mask_and_a_score_share_a_tensor() -> None:
    doc = torch.randint(0, 3, (2, 500), dtype=torch.int32, device="cuda").sort(-1).values
    gain = torch.randn(3, device="cuda")
    pattern = lists(500, 500, (128, 128), mask=lambda b, h, q, k: (doc[b, q] == doc[b, k]) | (k < 40))
    score = Score(lambda score, b, h, q, k: score * gain[doc[b, q]] + torch.where(doc[b, q] == doc[b, k], 0.5, 0.0))
    check(qkv(2, 4, 500, 500, 128, torch.float16), pattern, score)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("name", ["causal", "topk", "lists_expression"])
def test_kernels_by_mma_sync(name: str, head_dim: int, dtype: str) -> None:
    of = {"fp16": torch.float16, "bf16": torch.bfloat16}[dtype]
    (q, k, v), pattern = qkv(2, 4, 300, 300, head_dim, of), patterns(300, 300)[name]
    for score in (alibi(4), mixed(4, 300, 300), Score("20 * tanh(score / 20)")):
        spec = model_of(score).model_dump()
        fields = {"op": "attention", "arch": "sm_89", "dtype": dtype, "head_dim": head_dim, "score": spec}
        kernel = load_kernel(find_spec({**fields, "pattern": pattern.spec_pattern()}), forward_compatible=True)
        _, tensors = with_score(pattern, pattern.index_tensors(), score, q, k)
        own, aux = split_tensors(scored_of(pattern, score), tensors)
        out, lse = kernel(q, k, v, *own, aux=aux)
        right, right_lse = attention_oracle.attention(q, k, v, seen_by(pattern, q, k), score=by_definition(score))
        torch.testing.assert_close(out.float(), right, atol=ATOL[q.dtype], rtol=0)
        torch.testing.assert_close(lse, right_lse, atol=2e-4, rtol=1e-4)


def test_compiled_by_torch() -> None:
    def attend(q: Any, k: Any, v: Any, score: Any) -> Any:
        return block_sparse_attention(q * 2, k, v, Causal(), score=score) * 3

    compiled = torch.compile(attend, fullgraph=True)
    q, k, v = qkv(2, 4, 300, 300, 64, torch.bfloat16)
    for _ in range(2):
        score = mixed(4, 300, 300)
        torch.testing.assert_close(compiled(q, k, v, score), attend(q, k, v, score), atol=2e-2, rtol=0)


def test_in_a_graph() -> None:
    (q, k, v), score = qkv(1, 4, 500, 500, 128, torch.float16), alibi(4)
    block_sparse_attention(q, k, v, Causal(), score=score)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = block_sparse_attention(q, k, v, Causal(), score=score)
    score.aux["slope"].mul_(3)
    graph.replay()
    assert torch.equal(out, block_sparse_attention(q, k, v, Causal(), score=score))


def check_gradients(tensors: list[Any], pattern: Any, score: Any, *, clean: Any = None, **options: Any) -> None:
    """``clean`` is the score without NaN where pairs are hidden, which autograd would not keep apart."""
    leaves = [t.requires_grad_() for t in tensors]
    dout = torch.randn_like(leaves[0])
    out = block_sparse_attention(*leaves, pattern, score=score, **options)
    found = torch.autograd.grad(out, leaves, dout)
    given = {name: options[name] for name in ("kv_lengths",) if name in options}
    given["score"] = by_definition(score if clean is None else clean)
    right, rounded = (of(*leaves, pattern, dout, **given) for of in (gradient_oracle.exact, gradient_oracle.rounded))
    assert all(bool(t.isfinite().all()) for t in found)
    gradient_oracle.assert_near(found, right, rounded, noise=gradient_oracle.noise(*(t.detach() for t in leaves), dout))


@HOPPER
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_of_functions_as_users_write_them(name: str, dtype: Any) -> None:
    n = known_functions.LENGTH
    tensors = qkv(known_functions.BATCH, known_functions.HEADS, n, n, 64, dtype, kv_heads=2)
    check_gradients(tensors, Causal(), on_gpu(Score(known_functions.SCORES[name])))


@HOPPER
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("name", ["dense", "causal", "two_sided", "lists_bits", "lists_expression"])
def test_gradients(name: str, head_dim: int, dtype: Any) -> None:
    pattern = patterns(500, 500)[name]
    squared = Score("score * score / 8 + gain[head] * score", aux={"gain": torch.randn(4, device="cuda")})
    for score in (alibi(4), mixed(4, 500, 500), squared):
        check_gradients(qkv(2, 4, 500, 500, head_dim, dtype, kv_heads=2), pattern, score)


@HOPPER
@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("name", ["causal", "lists", "lists_causal"])
def test_gradients_in_any_order_and_of_lengths(name: str, deterministic: bool) -> None:
    lengths = torch.tensor([700, 3], dtype=torch.int32, device="cuda")
    tensors, pattern = qkv(2, 4, 333, 700, 64, torch.bfloat16), patterns(333, 700)[name]
    check_gradients(tensors, pattern, mixed(4, 333, 700), kv_lengths=lengths, deterministic=deterministic)


@HOPPER
def test_gradients_where_hidden_pairs_have_no_score() -> None:
    """NaN and infinity behind the diagonal, and beyond the last query, reach no gradient."""
    tensors = qkv(1, 2, 300, 300, 128, torch.bfloat16)
    text = "score * (1 + sqrt({0}) / 20) + log2({0} + 1)"
    clean = Score(text.format("max(q_idx - kv_idx, 0)"))
    check_gradients(tensors, Causal(), Score(text.format("(q_idx - kv_idx)")), clean=clean)


@HOPPER
def test_gradients_of_the_log_sum_exp() -> None:
    leaves, score = [t.requires_grad_() for t in qkv(2, 4, 300, 300, 64, torch.float16)], mixed(4, 300, 300)
    dout, dlse = torch.randn_like(leaves[0]), torch.randn(leaves[0].shape[:3], device="cuda")
    results = block_sparse_attention(*leaves, Causal(), score=score, return_lse=True)
    found = torch.autograd.grad(results, leaves, [dout, dlse])
    right = gradient_oracle.exact(*leaves, Causal(), dout, dlse, score=by_definition(score))
    gradient_oracle.assert_near(found, right, noise=gradient_oracle.noise(*(t.detach() for t in leaves), dout))


@HOPPER
def test_gradients_repeat() -> None:
    leaves = [t.requires_grad_() for t in qkv(2, 4, 700, 700, 128, torch.float16)]
    score, dout = mixed(4, 700, 700), torch.randn_like(leaves[0])
    runs = [torch.autograd.grad(block_sparse_attention(*leaves, Causal(), score=score), leaves, dout) for _ in range(2)]
    assert all(torch.equal(*pair) for pair in zip(*runs, strict=True))
