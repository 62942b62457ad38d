"""compat.flex_attention: masks and scores of attention-gym's kinds, the converted lists, and what it refuses."""

from __future__ import annotations

import math
from functools import cache, partial
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import compat_definitions as definitions  # noqa: E402
import oracle_kernel  # noqa: E402
from each import looped  # noqa: E402
from torch.nn.attention import flex_attention as flex  # noqa: E402

from runtime import (  # noqa: E402
    ArgumentError,
    block_sparse_attention,
    compat,
    convert,
    explain_attention,
    reference_attention,
)
from runtime.compat import flex as translation  # noqa: E402
from runtime.patterns import BlockLists, Causal, Score  # noqa: E402

BATCH, HEADS, KV_HEADS, Q_LEN, KV_LEN = 2, 4, 2, 200, 300
SIZES = BATCH, HEADS, Q_LEN, KV_LEN
flex_attention: Any = compat.flex_attention


@pytest.fixture(autouse=True)
def loaded(monkeypatch: pytest.MonkeyPatch) -> Any:
    torch.manual_seed(0)
    torch._dynamo.reset()
    return oracle_kernel.install(monkeypatch)


def qkv(q_len: int = Q_LEN, kv_len: int = KV_LEN, kv_heads: int = KV_HEADS, d: int = 64) -> list[Any]:
    of = (HEADS, q_len), (kv_heads, kv_len), (kv_heads, kv_len)
    return [torch.randn(BATCH, h, length, d).bfloat16() for h, length in of]


def pairs_of(pattern: Any) -> Any:
    return convert.to_token_mask(pattern, q_len=Q_LEN, kv_len=KV_LEN, batch=BATCH, heads=HEADS)


def score_by_pairs(score_mod: Any) -> Any:
    return lambda logits: definitions.by_pairs(score_mod, *logits.shape, score=logits)


def check(tensors: list[Any], visible: Any = None, score: Any = None, scale: Any = None, **options: Any) -> None:
    right, right_lse = definitions.attention(*tensors, visible=visible, score=score, scale=scale)
    out, lse = flex_attention(*tensors, scale=scale, enable_gqa=True, return_lse=True, **options)
    torch.testing.assert_close(out.double(), right, atol=1e-2, rtol=1e-2)
    torch.testing.assert_close(lse.double(), right_lse, atol=1e-4, rtol=1e-5)


MASKS = definitions.mask_mods(*SIZES)
SCORES = definitions.score_mods(*SIZES)


@looped
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("block", [128, (64, 192), (32, 16), (48, 80)])
def test_masks_of_torch_keep_their_pairs(name: str, block: Any) -> None:
    """Blocks of kernels keep the lists of torch; others are split, or merged with bits."""
    mask = flex.create_block_mask(MASKS[name], *SIZES, device="cpu", BLOCK_SIZE=block)
    pattern: Any = translation._pattern_of(mask, *qkv()[:2])
    assert torch.equal(pairs_of(pattern), definitions.by_pairs(MASKS[name], *SIZES).expand(SIZES))
    assert (pattern.mask == "bits") == (block in ((32, 16), (48, 80)))


@looped
@pytest.mark.parametrize("name", MASKS)
def test_masks_of_ours_keep_their_pairs(name: str) -> None:
    pattern = compat.create_block_mask(MASKS[name], *SIZES, device="cpu")
    assert torch.equal(pairs_of(pattern), definitions.by_pairs(MASKS[name], *SIZES).expand(SIZES))


@looped
@pytest.mark.parametrize("name", ["causal", "prefix LM", "natten", "window of a head"])
def test_calls_with_masks(name: str) -> None:
    visible = definitions.by_pairs(MASKS[name], *SIZES).expand(SIZES)
    of_torch = flex.create_block_mask(MASKS[name], *SIZES, device="cpu")
    for mask in (of_torch, compat.create_block_mask(MASKS[name], *SIZES, device="cpu")):
        check(qkv(), visible, block_mask=mask)


@looped
@pytest.mark.parametrize("name", SCORES)
def test_calls_with_scores(name: str) -> None:
    check(qkv(), score=score_by_pairs(SCORES[name]), score_mod=SCORES[name], scale=0.2)


def test_a_mask_and_a_score_with_different_tensors_of_one_name() -> None:
    def mask_of(table: Any) -> Any:
        return lambda b, h, q, kv: (table[q] >= 0.3) & (kv <= q + 100)

    def score_of(table: Any) -> Any:
        return lambda score, b, h, q, kv: score + table[kv]

    mask_mod, score_mod = mask_of(torch.rand(Q_LEN)), score_of(torch.randn(KV_LEN))
    mask = flex.create_block_mask(mask_mod, None, None, Q_LEN, KV_LEN, device="cpu")
    visible = definitions.by_pairs(mask_mod, *SIZES)
    check(qkv(), visible, score_by_pairs(score_mod), block_mask=mask, score_mod=score_mod)


def test_tensors_of_a_mask_are_read_in_each_call() -> None:
    reach = torch.full((Q_LEN,), 400)
    every = torch.arange(3, dtype=torch.int32).expand(1, 1, 2, 3).contiguous()
    mask = flex.BlockMask.from_kv_blocks(
        torch.full((1, 1, 2), 3, dtype=torch.int32),
        every,
        BLOCK_SIZE=128,
        mask_mod=lambda b, h, q, kv: kv <= reach[q],
        seq_lengths=(Q_LEN, KV_LEN),
    )
    tensors = qkv()
    for each in (400, 7):
        reach.fill_(each)
        visible = torch.arange(KV_LEN) <= reach[:, None]
        check(tensors, visible.expand(SIZES), block_mask=mask)


def test_a_score_that_is_the_logit_needs_no_kernel_of_its_own(loaded: Any) -> None:
    flex_attention(*qkv(), score_mod=SCORES["none"], enable_gqa=True)
    (kernel,) = loaded.values()
    assert kernel.spec.score is None


def test_a_mask_without_lists_of_full_blocks_and_without_a_function() -> None:
    counts, indices = torch.tensor([[[2, 1]]]).int(), torch.tensor([[[[2, 0, 1], [1, 0, 2]]]]).int()
    mask = flex.BlockMask.from_kv_blocks(counts, indices, BLOCK_SIZE=128, seq_lengths=(Q_LEN, KV_LEN))
    blocks = torch.tensor([[1, 0, 1], [0, 1, 0]], dtype=torch.bool)
    visible = blocks.repeat_interleave(128, 0)[:Q_LEN].repeat_interleave(128, 1)[:, :KV_LEN]
    check(qkv(), visible.expand(SIZES), block_mask=mask)


def test_return_aux() -> None:
    tensors = qkv()
    out, lse = flex_attention(*tensors, enable_gqa=True, return_lse=True)
    again, aux = flex_attention(*tensors, enable_gqa=True, return_aux=flex.AuxRequest(lse=True))
    assert torch.equal(again, out) and torch.equal(aux.lse, lse) and aux.max_scores is None
    _, without = flex_attention(*tensors, enable_gqa=True, return_aux=flex.AuxRequest())
    assert without.lse is None


def test_torch_returns_the_same() -> None:
    """On the CPU in float32, mask and score together, with the log-sum-exp in the same base."""
    tensors = [t.float() for t in qkv(kv_heads=HEADS)]
    mask = flex.create_block_mask(MASKS["sliding window"], *SIZES, device="cpu")
    options = {"block_mask": mask, "score_mod": SCORES["alibi"], "return_aux": flex.AuxRequest(lse=True)}
    call: Any = flex.flex_attention
    right, right_aux = call(*tensors, **options)
    out, aux = flex_attention(*(t.bfloat16() for t in tensors), **options)
    torch.testing.assert_close(out.float(), right, atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(aux.lse, right_aux.lse, atol=1e-3, rtol=1e-3)


def test_gradients_are_those_of_torch() -> None:
    tensors = [t.requires_grad_() for t in qkv(128, 128, HEADS)]
    bias = torch.randn(HEADS, 256, requires_grad=True)

    def score_mod(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return score + bias[h, (q - kv + 128).clamp(0, 255)]

    mask = flex.create_block_mask(MASKS["causal"], None, None, 128, 128, device="cpu")
    out = flex_attention(*tensors, score_mod=score_mod, block_mask=mask)
    grad = torch.randn_like(out)
    found = torch.autograd.grad(out, (*tensors, bias), grad)
    doubles = [t.detach().double().requires_grad_() for t in tensors]
    score = lambda logits: logits + bias.double()[:, torch.arange(128)[:, None] - torch.arange(128) + 128]  # noqa: E731
    visible = definitions.by_pairs(MASKS["causal"], BATCH, HEADS, 128, 128)
    right, _ = definitions.attention(*doubles, visible=visible, score=score)
    expected = torch.autograd.grad(right, (*doubles, bias), grad.double())
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.float(), other.float(), atol=3e-2, rtol=3e-2)


def test_compiled_calls_are_the_same() -> None:
    pattern = compat.create_block_mask(MASKS["causal documents"], *SIZES, device="cpu")
    score, tensors = Score(SCORES["alibi"]), qkv()
    call = partial(flex_attention, score_mod=score, block_mask=pattern, enable_gqa=True)
    compiled = torch.compile(
        lambda q, k, v, p, s: flex_attention(q, k, v, s, p, enable_gqa=True), fullgraph=True, backend="eager"
    )
    assert torch.equal(compiled(*tensors, pattern, score), call(*tensors))


@cache
def causal_mask() -> Any:
    """A mask of torch, which imports torch's compiler: 1 s that the collection of tests does without."""
    return flex.create_block_mask(MASKS["causal"], None, None, Q_LEN, KV_LEN, device="cpu")


@looped
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"enable_gqa": False}, "enable_gqa: is False, and query has 4 heads and key has 2: pass enable_gqa=True"),
        ({"enable_gqa": 1}, "enable_gqa: is 1"),
        ({"kernel_options": {"BLOCK_M": 64}}, "kernel_options: is {'BLOCK_M': 64}: they are options of Triton"),
        (
            {"return_aux": flex.AuxRequest(max_scores=True)},
            "return_aux: is AuxRequest.*kernels do not return the largest",
        ),
        ({"return_aux": flex.AuxRequest(lse=True), "return_lse": True}, "return_lse: is True, and return_aux is given"),
        ({"return_lse": 1}, "return_lse: is 1"),
        ({"block_mask": torch.ones(3)}, "block_mask: is Tensor, expected a torch BlockMask or an object of"),
        (
            lambda: {"block_mask": causal_mask()[0]._adjust(128, 128)},
            "block_mask: is for 128 queries and 128 keys, query has 200",
        ),
        (lambda: {"block_mask": causal_mask()[:, :, :1]}, "block_mask: is"),
        ({"score_mod": 3}, "score_mod: is 3, expected a function or a patterns.Score"),
        ({"score_mod": lambda s, b, h, q, k: s.cumsum(0)}, "score_mod: .*cumsum"),
        ({"query": torch.zeros(BATCH, HEADS, Q_LEN, 64)}, r"query: is torch\.float32"),
        ({"key": torch.zeros(2, 3)}, "key: "),
        ({"value": qkv(d=32)[2]}, "value: "),
        ({"query": None}, "query: is NoneType"),
        ({"scale": math.nan}, "scale: is nan"),
    ],
)
def test_what_is_refused_is_named(changes: Any, message: str) -> None:
    changes = changes() if callable(changes) else changes
    named = dict(zip(("query", "key", "value"), qkv(), strict=True))
    with pytest.raises(ArgumentError, match=f"^{message}"):
        flex_attention(**{**named, "enable_gqa": True, **changes})


def test_a_mask_that_no_kernel_can_have_is_refused_with_a_way_out() -> None:
    def of_a_sum(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return torch.stack([q, kv]).sum() % 3 == 0

    mask = flex.create_block_mask(of_a_sum, None, None, Q_LEN, KV_LEN, device="cpu")
    with pytest.raises(
        ArgumentError, match=r"^block_mask: its mask_mod .*calls stack, .*from_block_mask\(block_mask\)"
    ):
        flex_attention(*qkv(), block_mask=mask, enable_gqa=True)
    visible = definitions.by_pairs(lambda b, h, q, kv: (q + kv) % 3 == 0, *SIZES)
    check(qkv(), visible, block_mask=convert.from_block_mask(mask))


def test_patterns_of_this_package_are_taken_as_they_are() -> None:
    for pattern in (
        Causal(align="top_left"),
        compat.create_block_mask("q_idx >= kv_idx", None, None, Q_LEN, KV_LEN, "cpu"),
    ):
        check(qkv(), definitions.by_pairs(MASKS["causal"], *SIZES), block_mask=pattern)
    assert isinstance(pattern, BlockLists)


LONGER = Q_LEN, 333, 600
"""Sizes of tensors that functions capture, for Q_LEN queries and KV_LEN keys: at least those."""


def longer_mask(size: int, batch: int = BATCH, heads: int = HEADS) -> Any:
    """A mask whose tensors are longer than the lengths, and of more batches and heads."""
    documents = (torch.arange(size).expand(batch, -1) // torch.arange(37, 37 + batch)[:, None]).contiguous()
    reach, keys = torch.arange(heads) * 50 + 20, torch.arange(max(size, KV_LEN)) // 45
    documents = documents.clamp(max=int(documents[:BATCH, :Q_LEN].max()))
    return lambda b, h, q, kv: (documents[b, q] == keys[kv]) | (q - kv <= reach[h])


def longer_score(size: int, batch: int = BATCH, heads: int = HEADS) -> Any:
    """A score likewise, with a tensor that queries and keys index."""
    size = max(size, KV_LEN)
    documents, bias = torch.arange(size) // 21, torch.randn(batch, heads, size)
    return lambda score, b, h, q, kv: score - 0.1 * (documents[q] - documents[kv]).abs() + bias[b, h, kv]


ENTRIES: dict[str, Any] = {
    "compat.flex_attention, torch's mask": lambda tensors, mask, score, of_torch: compat.flex_attention(
        *tensors, score, of_torch, enable_gqa=True
    ),
    "compat.flex_attention, our mask": lambda tensors, mask, score, of_torch: compat.flex_attention(
        *tensors, score, compat.create_block_mask(mask, *SIZES, device="cpu"), enable_gqa=True
    ),
    "block_sparse_attention, torch's mask": lambda tensors, mask, score, of_torch: block_sparse_attention(
        *tensors, of_torch, score=score
    ),
    "block_sparse_attention, our mask": lambda tensors, mask, score, of_torch: block_sparse_attention(
        *tensors, compat.create_block_mask(mask, *SIZES, device="cpu"), score=score
    ),
    "block_sparse_attention, bits": lambda tensors, mask, score, of_torch: block_sparse_attention(
        *tensors, convert.from_block_mask(of_torch, batch=BATCH, heads=HEADS), score=score
    ),
    "reference": lambda tensors, mask, score, of_torch: reference_attention(*tensors, of_torch, score=score),
    "reference, our mask": lambda tensors, mask, score, of_torch: reference_attention(
        *tensors, compat.create_block_mask(mask, *SIZES, device="cpu"), score=score
    ),
}
"""Calls that know the lengths, each given the operands, a mask_mod, a score_mod and torch's mask."""


@looped
@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("block", [128, 32])
def test_tensors_of_functions_may_be_longer_than_the_lengths(entry: str, block: int) -> None:
    for size in LONGER:
        for batch, heads in ((BATCH, HEADS), (BATCH + 1, HEADS + 3)):
            mask, score = longer_mask(size, batch, heads), longer_score(size, batch, heads)
            of_torch = flex.create_block_mask(mask, *SIZES, device="cpu", BLOCK_SIZE=block)
            tensors = qkv()
            visible = definitions.by_pairs(mask, *SIZES)
            right, _ = definitions.attention(*tensors, visible=visible, score=score_by_pairs(score))
            out = ENTRIES[entry](tensors, mask, score, of_torch)
            torch.testing.assert_close(out.double(), right, atol=1e-2, rtol=1e-2)


def test_a_longer_tensor_of_both_a_mask_and_a_score_is_one() -> None:
    """Views of it are equal, though not one object; a kernel serves all sizes of it."""
    texts = set()
    for size in (KV_LEN, 333, 600):
        table = torch.arange(size) // 37
        mask = compat.create_block_mask(
            lambda b, h, q, kv, table=table: table[q] == table[kv], *SIZES, device="cpu", BLOCK_SIZE=64
        )
        score: Any = lambda score, b, h, q, kv, table=table: score + table[q]  # noqa: E731
        out = block_sparse_attention(*qkv(), mask, score=score)
        assert out.shape == (BATCH, HEADS, Q_LEN, 64)
        texts.add(mask.spec_json)
        found = convert.to_token_mask(mask, q_len=Q_LEN, kv_len=KV_LEN)
        assert torch.equal(found[0, 0], table[:Q_LEN, None] == table[:KV_LEN])
        assert (mask & mask).spec_json == mask.spec_json
    assert len(texts) == 1


def test_a_call_with_longer_tensors_is_explained() -> None:
    told = explain_attention(*(t.to("meta") for t in qkv()), Causal(), score=longer_score(600), arch="sm_90a")
    assert "fp32[batch, heads, kv_len]" in told.choice.spec.model_dump_json()
