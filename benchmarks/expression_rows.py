"""The masks and scores of benchmarks/expressions.py for FlexAttention, and their built-in counterparts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from runtime.patterns import Causal, Pattern, PrefixLM, SlidingWindow

LENGTH, HEADS, HEAD_DIM, BLOCK = 32768, 16, 128, 128
SHORTEST = 256  # keys of a document
WINDOW = 2048
FARTHEST = 128  # beyond it all distances have one bias
CAP = 30.0
SIDE, NEIGHBORS = 64, 13  # of an image, and of the part of it that a query sees
Sees = Callable[[Any, Any, Any, Any], Any]  # mask_mod: batch, head, query, key
Scores = Callable[[Any, Any, Any, Any, Any], Any]  # score_mod: score, batch, head, query, key


@dataclass(frozen=True)
class Row:
    """One workload.

    Attributes:
        name: its name.
        sees: its mask; None: every key is seen.
        score: its score; None: as it is.
        tensors: those that the functions read, by the names that FlashAttention 4's functions have them by.
        batch, length: of q, k and v; they have HEADS heads of HEAD_DIM elements.
        built_in: a pattern of the same mask, and options of the same score, if they exist.
    """

    name: str
    sees: Sees | None = None
    score: Scores | None = None
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    batch: int = 1
    length: int = LENGTH
    built_in: tuple[Pattern, dict[str, Any]] | None = None


def documents(count: int, device: str) -> torch.Tensor:
    """The number of the document of each position, int32: uneven ones, the same in every run."""
    source = torch.Generator().manual_seed(LENGTH + count)
    free = LENGTH - SHORTEST * count
    inner = (torch.rand(count - 1, generator=source) * free).sort().values.long()
    ends = inner + SHORTEST * torch.arange(1, count)
    return torch.bucketize(torch.arange(LENGTH), ends, right=True).int().to(device)


def causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """The mask of a decoder."""
    return q_idx >= kv_idx


def rows(device: str) -> tuple[Row, ...]:
    """All of them."""
    doc = documents(8, device)
    prefix = torch.tensor([LENGTH // 4], dtype=torch.int32, device=device)
    slopes = torch.exp2(-8.0 / HEADS * torch.arange(1, HEADS + 1, device=device))
    table = torch.randn(HEADS, 2 * FARTHEST + 1, device=device, generator=torch.Generator(device).manual_seed(0))

    def of_document(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (doc[q_idx] == doc[kv_idx]) & (q_idx >= kv_idx)

    def window(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (q_idx >= kv_idx) & (q_idx - kv_idx <= WINDOW)

    def of_window_and_document(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return window(b, h, q_idx, kv_idx) & (doc[q_idx] == doc[kv_idx])

    def of_prefix(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (kv_idx < prefix[b]) | (q_idx >= kv_idx)

    def natten(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        half = NEIGHBORS // 2
        rows = torch.clamp(q_idx // SIDE, half, SIDE - 1 - half) - kv_idx // SIDE
        columns = torch.clamp(q_idx % SIDE, half, SIDE - 1 - half) - kv_idx % SIDE
        return (rows.abs() <= half) & (columns.abs() <= half)

    def alibi(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + slopes[h] * (kv_idx - q_idx)

    def relative(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + table[h, torch.clamp(q_idx - kv_idx, -FARTHEST, FARTHEST) + FARTHEST]

    def capped(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return CAP * torch.tanh(score / CAP)

    return (
        Row("causal", causal, built_in=(Causal(), {})),
        Row("window 2048", window, built_in=(SlidingWindow(WINDOW, 0), {})),
        Row("documents, causal", of_document, tensors={"doc": doc}),
        Row("window 2048 and documents", of_window_and_document, tensors={"doc": doc}),
        Row("prefix LM", of_prefix, tensors={"prefix": prefix}, built_in=(PrefixLM(prefix), {})),
        Row("natten 64 x 64, 13 x 13", natten, batch=4, length=SIDE * SIDE),
        Row("ALiBi, causal", causal, alibi, {"slopes": slopes}),
        Row("relative bias", None, relative, {"table": table}, length=LENGTH // 4),
        Row("softcap 30, causal", causal, capped, built_in=(Causal(), {"softcap": CAP})),
    )
