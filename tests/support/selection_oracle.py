"""Selection of key blocks by its definition, on any device, in place of ``runtime.select_topk_blocks``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from runtime.verify.select_topk import Case, ranks, selected


def select(q: Any, k: Any, block: tuple[int, int], topk: int, *, causal: bool, always: Sequence[int]) -> Any:
    """Return the lists that ``select_topk_blocks`` returns."""
    sizes = {"heads": q.shape[1], "kv_heads": k.shape[1], "batch": q.shape[0]}
    case = Case("", q.shape[2], k.shape[2], block, topk, causal=causal, always=tuple(always), **sizes)
    return selected(ranks(q, k, case), topk)
