"""What FlexAttention, FlashAttention and SDPA compute, by their documentation, in float64. Needs torch alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import torch

Mod = Callable[..., Any]


def places(batch: int, heads: int, q_len: int, kv_len: int) -> tuple[torch.Tensor, ...]:
    """Batch, head, query and key of each pair, as tensors that broadcast to (batch, heads, q_len, kv_len)."""
    sizes = batch, heads, q_len, kv_len
    return tuple(torch.arange(n).view([-1 if i == axis else 1 for i in range(4)]) for axis, n in enumerate(sizes))


def by_pairs(mod: Mod, *sizes: int, score: Any = None) -> torch.Tensor:
    """A mask_mod or score_mod of every pair: vmap over (batch, heads, q_len, kv_len), as in torch."""
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    first = () if score is None else (0,)
    axes = ((None, None, None, 0), (None, None, 0, None), (None, 0, None, None), (0, None, None, None))
    for dims in axes:
        mod = torch.vmap(mod, in_dims=(*first, *dims))
    numbers = [torch.arange(n) for n in sizes]
    with TransformGetItemToIndex():
        found: torch.Tensor = mod(*(() if score is None else (score,)), *numbers)
    return found


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    visible: torch.Tensor | None = None,
    scale: float | None = None,
    score: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The result and the log-sum-exp of (batch, heads, length, head_dim) in float64; 0 and -inf without keys."""
    group = q.shape[1] // k.shape[1]
    q, k, v = q.double(), k.double().repeat_interleave(group, 1), v.double().repeat_interleave(group, 1)
    logits = q @ k.mT * (1 / math.sqrt(q.shape[3]) if scale is None else scale)
    if score is not None:
        logits = score(logits)
    if visible is not None:
        logits = logits.masked_fill(~visible, -math.inf)
    lse = logits.logsumexp(-1)
    weights = (logits - lse.clamp(min=-1e300)[..., None]).exp()
    return weights @ v, lse


def flash_visible(q_len: int, kv_len: int, causal: bool, window: tuple[int, int]) -> torch.Tensor:
    """FlashAttention's visible pairs, bool (q_len, kv_len), pair by pair."""
    left, right = window[0], 0 if causal else window[1]

    def sees(i: int, j: int) -> bool:
        at = i + kv_len - q_len
        return (left < 0 or j >= at - left) and (right < 0 or j <= at + right)

    return torch.tensor([[sees(i, j) for j in range(kv_len)] for i in range(q_len)])


def flash_bias(slopes: torch.Tensor, q_len: int, kv_len: int) -> torch.Tensor:
    """ALiBi's bias, (batch or 1, heads, q_len, kv_len): -slope * |i + kv_len - q_len - j|."""
    i, j = torch.arange(q_len)[:, None], torch.arange(kv_len)
    slopes = slopes.double().reshape(-1, slopes.shape[-1], 1, 1)
    return -slopes * (i + kv_len - q_len - j).abs()


FLASH_LENGTHS = ((1, 1), (1, 150), (64, 64), (113, 203), (203, 113), (130, 130), (150, 1), (128, 257))
FLASH_WINDOWS = ((-1, -1), (0, 0), (3, 0), (0, 5), (40, 17), (-1, 9), (-1, 0), (33, -1), (500, 500))


def flash_grid() -> Iterator[tuple[tuple[int, int], bool, tuple[int, int], tuple[int, int]]]:
    """Lengths, causal, window and numbers of heads."""
    yield from product(FLASH_LENGTHS, (False, True), FLASH_WINDOWS, ((4, 4), (4, 2), (6, 1)))


def mask_mods(batch: int, heads: int, q_len: int, kv_len: int, device: Any = "cpu") -> dict[str, Mod]:
    """Masks that users of FlexAttention write, of attention-gym's kinds, for any lengths."""
    offset = kv_len - q_len
    documents = (torch.arange(max(q_len, kv_len), device=device) // 37).expand(batch, -1).contiguous()
    documents[-1] //= 2
    prefix = torch.arange(batch, dtype=torch.int32, device=device) * 29 + 11
    widths = torch.arange(heads, device=device) * 13 + 5

    def causal(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return q >= kv

    def sliding(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (q >= kv) & (q - kv <= 40)

    def same_document(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return documents[b, q] == documents[b, kv]

    def natten(b: Any, h: Any, q: Any, kv: Any, wide: int = 16, kernel: int = 5) -> Any:
        half = kernel // 2
        x, y = (q % wide).clamp(half, wide - 1 - half), (q // wide).clamp(half, max(q_len // wide - 1 - half, half))
        return ((x - kv % wide).abs() <= half) & ((y - kv // wide).abs() <= half)

    def dilated(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return ((q - kv).abs() % 4 == 0) & ((q - kv).abs() <= 64)

    def global_tokens(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (kv < 7) | (q < 7) | ((q - kv).abs() < 20)

    return {
        "none": lambda b, h, q, kv: q >= 0,
        "causal": causal,
        "causal at the end": lambda b, h, q, kv: q + offset >= kv,
        "sliding window": sliding,
        "window of a head": lambda b, h, q, kv: (q - kv).abs() <= widths[h],
        "prefix LM": lambda b, h, q, kv: (kv < prefix[b]) | (q >= kv),
        "documents": same_document,
        "causal documents": lambda b, h, q, kv: same_document(b, h, q, kv) & causal(b, h, q, kv),
        "natten": natten,
        "dilated": dilated,
        "global tokens": global_tokens,
        "every other head": lambda b, h, q, kv: (h % 2 == 0) | (q >= kv),
    }


def score_mods(batch: int, heads: int, q_len: int, kv_len: int, device: Any = "cpu") -> dict[str, Mod]:
    """Scores that users of FlexAttention write, of attention-gym's kinds, for any lengths."""
    generator = torch.Generator().manual_seed(0)
    slopes = (2.0 ** -(8 * (torch.arange(heads) + 1) / heads)).to(device)
    table = torch.randn(heads, q_len + kv_len, generator=generator).to(device)
    keys = torch.randn(batch, kv_len, generator=generator).to(device)
    documents = (torch.arange(max(q_len, kv_len), device=device) // 21).float()
    return {
        "none": lambda score, b, h, q, kv: score,
        "alibi": lambda score, b, h, q, kv: score + slopes[h] * (kv - q),
        "softcap": lambda score, b, h, q, kv: 20.0 * torch.tanh(score / 20.0),
        "relative": lambda score, b, h, q, kv: score + (q - kv),
        "relative bias": lambda score, b, h, q, kv: score + table[h, q - kv + kv_len - 1],
        "bias of a key": lambda score, b, h, q, kv: score + keys[b, kv],
        "causal": lambda score, b, h, q, kv: torch.where(q >= kv, score, -float("inf")),
        "times of documents": lambda score, b, h, q, kv: score - 0.1 * (documents[q] - documents[kv]).abs(),
    }
