"""Calls with a score, of a text or a function: beside the definition, through gradients, under torch's machinery."""

from __future__ import annotations

import io
from functools import partial
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import attention_oracle  # noqa: E402
import gradient_oracle  # noqa: E402
import known_functions  # noqa: E402
import oracle_kernel  # noqa: E402

from codegen.errors import SpecError  # noqa: E402
from codegen.library import find_spec  # noqa: E402
from codegen.planning import plan_for  # noqa: E402
from runtime import ArgumentError, block_sparse_attention, explain_attention  # noqa: E402
from runtime.kernels.aux_tensors import AuxArguments  # noqa: E402
from runtime.patterns import BlockLists, Causal, Dense, Score, SlidingWindow  # noqa: E402

BATCH, HEADS, LENGTH = known_functions.BATCH, known_functions.HEADS, known_functions.LENGTH
ALIBI = "score + slope[head] * (kv_idx - q_idx)"
SCORES = {name: each for name, each in known_functions.SCORES.items() if name != "many_functions"}
# which rounds the score, so that bits of a product decide


@pytest.fixture(autouse=True)
def loaded(monkeypatch: pytest.MonkeyPatch) -> Any:
    torch.manual_seed(0)
    torch._dynamo.reset()
    return oracle_kernel.install(monkeypatch)


def qkv(kv_heads: int = HEADS) -> list[Any]:
    return [torch.randn(BATCH, heads, LENGTH, 64).bfloat16() for heads in (HEADS, kv_heads, kv_heads)]


def slopes() -> Any:
    return torch.tensor([2.0 ** -(2 * h + 1) for h in range(HEADS)])


def alibi() -> Any:
    return Score(ALIBI, aux={"slope": slopes()})


def by_function(function: Any, logits: Any) -> Any:
    """Return what a user's own function makes of logits, as FlexAttention calls it."""
    for axis in range(3, -1, -1):
        function = torch.vmap(function, (0, *(0 if i == axis else None for i in range(4))))
    return function(logits, *map(torch.arange, logits.shape)).to(logits.dtype)


def causal_pairs() -> Any:
    return torch.ones(LENGTH, LENGTH).tril().expand(BATCH, HEADS, -1, -1).to(torch.int32)


@pytest.mark.parametrize("name", SCORES)
def test_functions_as_users_write_them(name: str) -> None:
    q, k, v = qkv()
    score = partial(by_function, SCORES[name])
    right, lse = attention_oracle.attention(q, k, v, causal_pairs(), score=score)
    for given in (SCORES[name], Score(SCORES[name])):
        out, found = block_sparse_attention(q, k, v, Causal(), score=given, return_lse=True)
        torch.testing.assert_close(out.float(), right, atol=2e-2, rtol=0)
        torch.testing.assert_close(found, lse)


def test_a_text_is_what_a_function_is() -> None:
    (q, k, v), slope = qkv(), slopes()
    out = block_sparse_attention(q, k, v, Causal(), score=alibi())
    assert torch.equal(
        out, block_sparse_attention(q, k, v, Causal(), score=lambda s, b, h, q, k: s + slope[h] * (k - q))
    )
    capped = block_sparse_attention(q, k, v, Causal(), score="30 * tanh(score / 30)")
    torch.testing.assert_close(capped, block_sparse_attention(q, k, v, Causal(), softcap=30.0))


def test_each_score_has_its_kernel_and_tensors_change_freely(loaded: Any) -> None:
    q, k, v = qkv()
    before = block_sparse_attention(q, k, v, Causal(), score=alibi())
    steeper = Score(ALIBI, aux={"slope": 4 * slopes()})
    assert not torch.equal(before, block_sparse_attention(q, k, v, Causal(), score=steeper))
    block_sparse_attention(q, k, v, Causal(), score="score * 2")
    block_sparse_attention(q, k, v, Causal())
    specs = [kernel.spec for kernel in loaded.values()]
    assert [None if spec.score is None else spec.score.value for spec in specs] == [ALIBI, "score * 2", None]


def test_a_mask_and_a_score_share_tensors() -> None:
    q, k, v = qkv()
    doc, every = torch.randint(0, 3, (BATCH, LENGTH)), torch.zeros(1, 1, 1, 1, dtype=torch.int32)

    def same(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return doc[b, q_idx] == doc[b, kv_idx]

    def score(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + doc[b, q_idx] * doc[b, kv_idx] / 4

    lists: Any = BlockLists
    pattern = lists(torch.ones(1, 1, 1, dtype=torch.int32), every, mask=same)
    right, _ = attention_oracle.attention(
        q, k, v, (doc[:, None, :, None] == doc[:, None, None]).int(), score=partial(by_function, score)
    )
    out = block_sparse_attention(q, k, v, pattern, score=score)
    torch.testing.assert_close(out.float(), right, atol=2e-2, rtol=0)
    with pytest.raises(ArgumentError, match="score: has a tensor doc_kv, and so has the mask of the pattern"):
        block_sparse_attention(q, k, v, pattern, score=Score("score + doc_kv[batch, kv_idx]", aux={"doc_kv": doc + 1}))


@pytest.mark.parametrize("name", ["soft_cap", "relative_bias", "causal_in_a_score", "squared"])
def test_gradients(name: str, loaded: Any) -> None:
    function = SCORES.get(name, lambda score, b, h, q, k: score * score / 4 + score * (1 + h))
    tensors, score = [t.requires_grad_() for t in qkv(kv_heads=2)], Score(function)
    dout = torch.randn_like(tensors[0])
    found = torch.autograd.grad(block_sparse_attention(*tensors, SlidingWindow(20), score=score), tensors, dout)
    given: dict[str, Any] = {"score": partial(by_function, function)}
    right = gradient_oracle.exact(*tensors, SlidingWindow(20), dout, **given)
    gradient_oracle.assert_near(found, right, gradient_oracle.rounded(*tensors, SlidingWindow(20), dout, **given))
    assert all(kernel.spec.score.value == score.value for kernel in loaded.gradients.values())


def test_compiled_by_torch() -> None:
    compiled = torch.compile(
        lambda q, k, v, score: block_sparse_attention(q * 2, k, v, Causal(), score=score),
        fullgraph=True,
        backend="eager",
    )
    for factor in (1, 3):
        (q, k, v), score = qkv(), Score(ALIBI, aux={"slope": factor * slopes()})
        assert torch.equal(compiled(q, k, v, score), block_sparse_attention(q * 2, k, v, Causal(), score=score))
    tensors = [t.requires_grad_() for t in qkv()]
    compiled(*tensors, alibi()).sum().backward()
    assert all(t.grad is not None for t in tensors)


def test_exported_by_torch() -> None:
    class Attend(torch.nn.Module):  # type: ignore[misc]
        def forward(self, q: Any, k: Any, v: Any, score: Any) -> Any:
            return block_sparse_attention(q, k, v, Causal(), score=score)

    tensors, saved = qkv(), io.BytesIO()
    torch.export.save(torch.export.export(Attend(), (*tensors, alibi())), saved)
    saved.seek(0)
    again = torch.export.load(saved).module()
    steeper = Score(ALIBI, aux={"slope": 4 * slopes()})
    assert torch.equal(again(*tensors, steeper), block_sparse_attention(*tensors, Causal(), score=steeper))


def test_explained() -> None:
    told = explain_attention(*qkv(), Causal(), score=alibi(), arch="sm_90a", gradients=True)
    assert told.choice.spec.score.value == ALIBI and told.gradients.dq.spec.score.value == ALIBI


@pytest.mark.parametrize(
    ("score", "message"),
    [
        (3, "score: is int, expected an expression or a function"),
        ("score +", r"score: is 'score \+': column 8"),
        ("score > 1", "score: .*its value is a Boolean"),
        ("score + q_idx % kv_idx", "score: .*may divide by zero"),
        (lambda score, b, h, q, k: score > 1, "score_mod: .*returns a bool"),
        (lambda score, b, h, q, k: score if h > 1 else -score, "score_mod: .*tests a value|score_mod: .*__bool__"),
    ],
)
def test_what_is_refused(score: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        block_sparse_attention(*qkv(), Dense(), score=score)


def test_what_does_not_go_with_a_score() -> None:
    with pytest.raises(
        SpecError, match=r"softcap: is 30; .*write the tanh in score.value, as in 30 \* tanh\(score / 30\)"
    ):
        block_sparse_attention(*qkv(), Dense(), score="score", softcap=30.0)


def test_more_positions_than_expressions_count_to_are_refused() -> None:
    fields = {"op": "attention", "arch": "sm_90a", "head_dim": 64, "pattern": {"kind": "dense"}}
    for score, refuses in (({"score": {"value": "score + q_idx"}}, True), ({}, False)):
        named: Any = find_spec({**fields, **score})
        arguments = AuxArguments(named.spec, plan_for(named))
        assert arguments.check(torch.empty(1, 1, 2**30, 64, device="meta"), 2**30, ()) == {}
        for q_len, kv_len, name in ((2**30 + 1, 1, "q"), (1, 2**30 + 1, "k")):
            q = torch.empty(1, 1, q_len, 64, device="meta")
            if refuses:
                with pytest.raises(ArgumentError, match=rf"{name}: has a length of 1073741825; .* at most 1073741824"):
                    arguments.check(q, kv_len, ())
            else:
                assert arguments.check(q, kv_len, ()) == {}
