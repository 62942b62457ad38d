"""compat on a GPU, beside torch's own flex_attention and SDPA, and FlashAttention's definition.

pytest tests/gpu/test_compat.py
"""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

import compat_definitions as definitions  # noqa: E402
from torch.nn.attention import flex_attention as flex  # noqa: E402

from runtime import compat  # noqa: E402

BATCH, HEADS, KV_HEADS, LENGTH = 2, 4, 2, 512
ATOL = {torch.float16: 4e-3, torch.bfloat16: 2.5e-2}
flex_attention: Any = compat.flex_attention
flash_attn_func: Any = compat.flash_attn_func
sdpa: Any = compat.scaled_dot_product_attention
DTYPES = (torch.float16, torch.bfloat16)
MASKS = sorted(definitions.mask_mods(1, 1, 1, 1))
SCORES = sorted(definitions.score_mods(1, 1, 1, 1))


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()


def qkv(q_len: int = LENGTH, kv_len: int = LENGTH, kv_heads: int = KV_HEADS, dtype: Any = torch.bfloat16) -> list[Any]:
    of = (HEADS, q_len), (kv_heads, kv_len), (kv_heads, kv_len)
    return [torch.randn(BATCH, h, length, 64, device="cuda").to(dtype) for h, length in of]


def by_torch(tensors: list[Any], **options: Any) -> tuple[Any, Any]:
    """torch's unfused flex_attention in float32."""
    call: Any = flex.flex_attention
    out, aux = call(*(t.float() for t in tensors), enable_gqa=True, return_aux=flex.AuxRequest(lse=True), **options)
    return out, aux.lse


def check_flex(tensors: list[Any], block_masks: Any, score_mod: Any = None) -> None:
    right, right_lse = by_torch(tensors, block_mask=block_masks[0], score_mod=score_mod)
    for mask in block_masks:
        out, aux = flex_attention(*tensors, score_mod, mask, enable_gqa=True, return_aux=flex.AuxRequest(lse=True))
        torch.testing.assert_close(out.float(), right, atol=ATOL[out.dtype], rtol=ATOL[out.dtype])
        torch.testing.assert_close(aux.lse, right_lse, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("lengths", [(LENGTH, LENGTH), (200, 333)])
@pytest.mark.parametrize("name", MASKS)
def test_flex_attention_with_masks(name: str, lengths: tuple[int, int]) -> None:
    mask_mod, sizes = definitions.mask_mods(BATCH, HEADS, *lengths, "cuda")[name], (BATCH, HEADS, *lengths)
    of_torch = flex.create_block_mask(mask_mod, *sizes, device="cuda")
    check_flex(qkv(*lengths), (of_torch, compat.create_block_mask(mask_mod, *sizes)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lengths", [(LENGTH, LENGTH), (200, 333)])
@pytest.mark.parametrize("name", SCORES)
def test_flex_attention_with_scores(name: str, lengths: tuple[int, int], dtype: Any) -> None:
    score_mod = definitions.score_mods(BATCH, HEADS, *lengths, "cuda")[name]
    check_flex(qkv(*lengths, dtype=dtype), (None,), score_mod)


@pytest.mark.parametrize("block", [64, 256, (128, 64), (32, 16)])
def test_flex_attention_with_blocks_of_other_sizes(block: Any) -> None:
    mask_mod = definitions.mask_mods(BATCH, HEADS, LENGTH, LENGTH, "cuda")["causal documents"]
    score_mod = definitions.score_mods(BATCH, HEADS, LENGTH, LENGTH, "cuda")["alibi"]
    mask = flex.create_block_mask(mask_mod, BATCH, HEADS, LENGTH, LENGTH, device="cuda", BLOCK_SIZE=block)
    check_flex(qkv(), (mask,), score_mod)


def test_gradients_of_flex_attention() -> None:
    tensors, bias = qkv(), torch.randn(HEADS, LENGTH, device="cuda", requires_grad=True)

    def score_mod(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return score + bias[h, kv]

    mask = flex.create_block_mask(lambda b, h, q, kv: q >= kv, None, None, LENGTH, LENGTH, device="cuda")
    ours = [t.requires_grad_() for t in tensors]
    out = flex_attention(*ours, score_mod, mask, enable_gqa=True)
    grad = torch.randn_like(out)
    found = torch.autograd.grad(out, (*ours, bias), grad)
    visible = definitions.by_pairs(lambda b, h, q, kv: q >= kv, BATCH, HEADS, LENGTH, LENGTH).cuda()
    doubles = [t.detach().double().requires_grad_() for t in tensors]
    right, _ = definitions.attention(*doubles, visible=visible, score=lambda s: s + bias.double()[:, None])
    expected = torch.autograd.grad(right, (*doubles, bias), grad.double())
    for one, other in zip(found, expected, strict=True):
        size = other.abs().max()
        assert (one.double() - other).abs().max() < 2e-2 * size


@pytest.mark.parametrize("lengths", [(1, 150), (113, 203), (203, 113), (512, 512)])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 1)])
def test_flash_attn_func_on_its_grid(lengths: tuple[int, int], heads: tuple[int, int]) -> None:
    q = torch.randn(BATCH, lengths[0], heads[0], 64, device="cuda").bfloat16()
    k, v = (torch.randn(BATCH, lengths[1], heads[1], 64, device="cuda").bfloat16() for _ in range(2))
    for causal in (False, True):
        for window in definitions.FLASH_WINDOWS:
            visible = definitions.flash_visible(*lengths, causal, window).cuda()
            right, right_lse = definitions.attention(*(t.transpose(1, 2) for t in (q, k, v)), visible=visible)
            out, lse, _ = flash_attn_func(q, k, v, 0.0, None, causal, window, return_attn_probs=True)
            assert out.is_contiguous()
            torch.testing.assert_close(out.transpose(1, 2).double(), right, atol=2.5e-2, rtol=2.5e-2)
            torch.testing.assert_close(lse.double(), right_lse, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("softcap", [0.0, 15.0])
def test_flash_attn_func_with_softcap_and_alibi(causal: bool, softcap: float) -> None:
    tensors = [
        torch.randn(BATCH, length, h, 64, device="cuda").bfloat16() for length, h in ((130, 4), (200, 2), (200, 2))
    ]
    slopes = torch.rand(BATCH, 4, device="cuda")

    def score(logits: Any) -> Any:
        logits = softcap * torch.tanh(logits / softcap) if softcap else logits
        return logits + definitions.flash_bias(slopes.cpu(), 130, 200).cuda()

    visible = definitions.flash_visible(130, 200, causal, (-1, -1)).cuda()
    right, _ = definitions.attention(*(t.transpose(1, 2) for t in tensors), visible=visible, score=score)
    out: Any = flash_attn_func(*tensors, causal=causal, softcap=softcap, alibi_slopes=slopes)
    torch.testing.assert_close(out.transpose(1, 2).double(), right, atol=2.5e-2, rtol=2.5e-2)


def test_flash_attn_func_beside_the_library() -> None:
    library = pytest.importorskip("flash_attn")
    tensors = [torch.randn(BATCH, LENGTH, h, 64, device="cuda").bfloat16() for h in (4, 2, 2)]
    for options in (
        {"causal": True},
        {"window_size": (100, 20)},
        {"softcap": 20.0},
        {"causal": True, "softmax_scale": 0.2},
    ):
        out: Any = flash_attn_func(*tensors, **options)
        right = library.flash_attn_func(*tensors, **options)
        torch.testing.assert_close(out, right, atol=2.5e-2, rtol=2.5e-2)


def test_gradients_of_flash_attn_func() -> None:
    packed = torch.randn(BATCH, 200, 3, 4, 64, device="cuda").bfloat16().requires_grad_()
    out: Any = compat.flash_attn_qkvpacked_func(packed, causal=True)
    grad = torch.randn_like(out)
    (found,) = torch.autograd.grad(out, packed, grad)
    double = packed.detach().double().requires_grad_()
    visible = definitions.flash_visible(200, 200, True, (-1, -1)).cuda()
    right, _ = definitions.attention(*(t.transpose(1, 2) for t in double.unbind(2)), visible=visible)
    (expected,) = torch.autograd.grad(right, double, grad.transpose(1, 2).double())
    assert (found.double() - expected).abs().max() < 2e-2 * expected.abs().max()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lengths", [(LENGTH, LENGTH), (200, 333), (333, 200)])
def test_scaled_dot_product_attention(lengths: tuple[int, int], dtype: Any) -> None:
    tensors = qkv(*lengths, dtype=dtype)
    masks = [torch.rand(shape, device="cuda") > 0.4 for shape in ((*lengths,), (BATCH, 1, 1, lengths[1]))]
    masks.append(torch.rand(BATCH, HEADS, *lengths, device="cuda") > 0.4)
    cases: list[dict[str, Any]] = [{}, {"is_causal": True}, {"scale": 0.3}, *({"attn_mask": mask} for mask in masks)]
    for options in cases:
        right = torch.nn.functional.scaled_dot_product_attention(
            *(t.float() for t in tensors), enable_gqa=True, **options
        )
        out = sdpa(*tensors, enable_gqa=True, **options)
        torch.testing.assert_close(out.float(), right.nan_to_num(), atol=ATOL[dtype], rtol=ATOL[dtype])


def test_compiled_calls() -> None:
    tensors = qkv()
    pattern = compat.create_block_mask(lambda b, h, q, kv: q >= kv, None, None, LENGTH, LENGTH)
    compiled = torch.compile(
        lambda q, k, v, p: (
            flex_attention(q, k, v, None, p, enable_gqa=True),
            compat.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
            flash_attn_func(*(t.transpose(1, 2) for t in (q, k, v)), causal=True),
        ),
        fullgraph=True,
    )
    flexed, dotted, flashed = compiled(*tensors, pattern)
    right: Any = flex_attention(*tensors, None, pattern, enable_gqa=True)
    for other in (flexed, dotted, flashed.transpose(1, 2)):
        torch.testing.assert_close(other, right, atol=2.5e-2, rtol=2.5e-2)
