"""Masks and scores as users of FlexAttention write them, with what they capture. Needs torch alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention.flex_attention import and_masks, noop_mask, or_masks

BATCH, HEADS, LENGTH = 2, 4, 60
MASKS: dict[str, Callable[..., Any]] = {}
SCORES: dict[str, Callable[..., Any]] = {}
GLOBAL_DOCUMENTS = torch.arange(LENGTH) // 13


def draw(*shape: int, below: int = 0) -> Any:
    generator = torch.Generator().manual_seed(math.prod(shape) + below)
    return torch.randint(below, shape, generator=generator) if below else torch.randn(shape, generator=generator)


def known(table: dict[str, Callable[..., Any]]) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    def add(maker: Callable[[], Any]) -> Callable[[], Any]:
        table[maker.__name__] = maker()
        return maker

    return add


def causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx >= kv_idx


MASKS |= {"causal": causal, "noop": noop_mask}


def window(width: Any) -> Callable[..., Any]:
    def sliding_window(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return torch.abs(q_idx - kv_idx) <= width

    return sliding_window


def prefix(lengths: Any) -> Callable[..., Any]:
    return lambda b, h, q_idx, kv_idx: kv_idx < lengths[b]


MASKS |= {
    "window": window(7),
    "window_captured": window(torch.tensor(9)),
    "causal_window": and_masks(causal, window(5)),
}
MASKS |= {"prefix_lm": or_masks(prefix(torch.tensor([11, 0], dtype=torch.int32)), causal)}


@known(MASKS)
def documents() -> Any:
    ids = draw(BATCH, LENGTH, below=5).sort(-1).values.to(torch.int32)
    return lambda b, h, q_idx, kv_idx: (ids[b, q_idx] == ids[b, kv_idx]) & (q_idx >= kv_idx)


@known(MASKS)
def nested_lookup() -> Any:
    ids = draw(BATCH, LENGTH, below=5)
    return lambda b, h, q_idx, kv_idx: ids[b][q_idx] == ids[b][kv_idx]


def of_a_global(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return GLOBAL_DOCUMENTS[q_idx] == GLOBAL_DOCUMENTS[kv_idx]


MASKS["of_a_global"] = of_a_global


@known(MASKS)
def dilated() -> Any:
    return lambda b, h, q_idx, kv_idx: ((q_idx - kv_idx) % 3 == 0) & (q_idx - kv_idx <= 12) & (kv_idx <= q_idx)


@known(MASKS)
def natten() -> Any:
    width, kernel = 10, 3

    def neighbors(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        def clamped(x: Any, most: int) -> Any:
            return x.clamp(kernel // 2, most - 1 - kernel // 2)

        across = (clamped(q_idx % width, width) - kv_idx % width).abs() <= kernel // 2
        down = (clamped(q_idx // width, LENGTH // width) - kv_idx // width).abs() <= kernel // 2
        return across & down

    return neighbors


@known(MASKS)
def of_the_head() -> Any:
    widths, full = torch.tensor([3, 5, 9, 60]), torch.tensor([True, False, False, True])
    return lambda b, h, q_idx, kv_idx: (
        full[h] | (torch.abs(q_idx - kv_idx) < widths[h]) & ((h % 2 == 0) | causal(0, 0, q_idx, kv_idx))
    )


@known(MASKS)
def jagged() -> Any:
    offsets, lengths = torch.tensor([0, 20, LENGTH]), torch.tensor([[15], [31]])

    def inside(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        start, end = offsets[b], offsets[b + 1]
        return torch.logical_and(kv_idx >= start, kv_idx < end) & (q_idx - start < lengths[b, 0])

    return inside


@known(MASKS)
def block_diffusion() -> Any:
    half, block = LENGTH // 2, 6

    def seen(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        q_clean, kv_clean = q_idx >= half, kv_idx >= half
        of_q = torch.where(q_clean, q_idx - half, q_idx) // block
        of_kv = torch.where(kv_clean, kv_idx - half, kv_idx) // block
        own = (of_q == of_kv) & (q_clean == kv_clean)
        return own | ((of_q > of_kv) & kv_clean & ~q_clean) | ((of_q >= of_kv) & kv_clean & q_clean)

    return seen


@known(MASKS)
def truths_as_numbers() -> Any:
    def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        count = (q_idx > kv_idx) * 2 + (h == b).long() + sum([kv_idx < 30, q_idx < 20])
        both = ((q_idx > 8) + (kv_idx > 8)) * (q_idx / 2 > kv_idx)  # of truth values + is or, * is and
        return (count - 1 >= 1) ^ both ^ torch.maximum(h > 1, b > 0) & ((kv_idx << 1 | 1) & 4 != 0)

    return mask


@known(MASKS)
def negative_index() -> Any:
    bits = draw(LENGTH, below=2).bool()
    return lambda b, h, q_idx, kv_idx: bits[q_idx - kv_idx] & bits[-1 - kv_idx] ^ bits[-3]


@known(MASKS)
def of_an_object() -> Any:
    class Window:
        def __init__(self) -> None:
            self.widths = torch.tensor([[4], [9]])

        def __call__(self, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            return (q_idx - kv_idx <= self.widths[b, 0]) & (kv_idx <= q_idx)

    return Window()


@known(SCORES)
def soft_cap() -> Any:
    cap = 20.0
    return lambda score, b, h, q_idx, kv_idx: cap * torch.tanh(score / cap)


@known(SCORES)
def alibi() -> Any:
    slopes = torch.tensor([2.0 ** -(each + 1) for each in range(HEADS)])
    return lambda score, b, h, q_idx, kv_idx: score + slopes[h] * (kv_idx - q_idx)


@known(SCORES)
def alibi_computed() -> Any:
    return lambda score, b, h, q_idx, kv_idx: score + torch.exp2(-((h + 1) * 8.0 / HEADS)) * (kv_idx - q_idx)


@known(SCORES)
def alibi_by_a_power() -> Any:
    return lambda score, b, h, q_idx, kv_idx: score - 2.0 ** (-8 * (h + 1) / HEADS) * (q_idx - kv_idx).abs().float()


@known(SCORES)
def relative_bias() -> Any:
    table = draw(HEADS, 2 * LENGTH - 1)
    return lambda score, b, h, q_idx, kv_idx: score + table[h, q_idx - kv_idx + LENGTH - 1]


@known(SCORES)
def relative_bias_clipped() -> Any:
    bias = draw(17, HEADS).to(torch.bfloat16)
    return lambda score, b, h, q_idx, kv_idx: score + bias[torch.clamp(kv_idx - q_idx, -8, 8) + 8][h].to(score.dtype)


@known(SCORES)
def transformer_xl() -> Any:
    content, position = draw(BATCH, HEADS, LENGTH), draw(BATCH, HEADS, LENGTH, 2 * LENGTH)
    scale = 1 / math.sqrt(64)

    def shifted(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + (content[b, h, kv_idx] + position[b, h, q_idx, kv_idx - q_idx + LENGTH]) * scale

    return shifted


@known(SCORES)
def causal_in_a_score() -> Any:
    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        hidden = score.masked_fill(q_idx < kv_idx, -math.inf)
        return torch.where(torch.logical_not(h == 1), hidden, torch.full_like(score, float("-inf")))

    return score_mod


@known(SCORES)
def many_functions() -> Any:
    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        far = (q_idx - kv_idx).abs().to(torch.float32) + torch.tensor(1.0)
        decay = torch.exp(-far / 16) + torch.rsqrt(far) + torch.log(far) + torch.log2(far) + far.sqrt() + far**0.5
        small = (
            torch.sigmoid(score)
            + score.square()
            + score**3
            + far**-2
            + torch.nn.functional.relu(score)
            + far.reciprocal()
        )
        return decay - small + 1 / (1 + kv_idx) + torch.minimum(score, far) + (score * 4).to(torch.int64) + q_idx**2

    return score_mod
