"""Choice between the decode kernel and the prefill kernel of attention over pages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from codegen.arch import ARCHS
from codegen.patterns.base import MOST_KEYS
from codegen.problem import PAGE_ROWS

PREFILL_QUERIES = 32
"""Queries per request, on average, from which calls take the prefill kernel."""
PREFILL_TYPES = {64: ("fp16", "bf16"), 128: ("fp16", "bf16"), 192: ("fp16", "bf16"), 256: ("bf16",)}
"""Types of q of prefill kernels, by head size. In fp16, the one of 256 exceeded twice torch's error in a case."""


@dataclass(frozen=True)
class PagedCall:
    """What the choice depends on.

    Attributes:
        arch: architecture of the GPU.
        dtype: type of q.
        head_dim: elements per head.
        queries: queries of all requests.
        requests: requests.
        page_size: tokens of a page; None if K and V of a request are contiguous.
        max_keys: keys that a request has room for.
        empty: whether the cache has no elements.
        e4m3: whether the cache is e4m3, or has scales.
        lists: whether each query has a list of keys.
        sink: whether there are sinks.
        softcap: whether logits are capped.
        batch_invariant: whether results may not depend on the other requests.
    """

    arch: str
    dtype: str
    head_dim: int
    queries: int
    requests: int
    page_size: int | None
    max_keys: int
    empty: bool = False
    e4m3: bool = False
    lists: bool = False
    sink: bool = False
    softcap: bool = False
    batch_invariant: bool = False

    def decode_reason(self) -> str:
        """Reason for the decode kernel; "" if the call takes the prefill kernel."""
        few = self.queries < PREFILL_QUERIES * self.requests or not self.requests
        odd_page = self.page_size is not None and self.page_size % PAGE_ROWS > 0
        count = f"it has {self.queries} queries for {self.requests} requests, fewer than {PREFILL_QUERIES} for each"
        reasons = {
            count: few,
            "its cache is empty": self.empty,
            "it has lists": self.lists,
            "it has a sink": self.sink,
            "it has a softcap": self.softcap,
            "it is batch-invariant": self.batch_invariant,
            "its cache is e4m3": self.e4m3,
            f"its heads have {self.head_dim} elements in {self.dtype}": self.dtype not in PREFILL_TYPES[self.head_dim],
            f"its pages have {self.page_size} tokens, no multiple of {PAGE_ROWS}": odd_page,
            f"a request has room for more than {MOST_KEYS} keys": self.max_keys > MOST_KEYS,
            "the GPU has no WGMMA": not ARCHS[self.arch].has_wgmma,
        }
        return next((reason for reason, holds in reasons.items() if holds), "")


def decode_fields(arch: str, dtype: str, cache: str, head_dim: int) -> dict[str, Any]:
    """Fields of the spec of the decode kernel."""
    fields = {"op": "paged_attention", "arch": arch, "dtype": dtype, "head_dim": head_dim}
    return fields if cache == "same" else {**fields, "cache": cache}


def prefill_fields(arch: str, dtype: str, head_dim: int) -> dict[str, Any]:
    """Fields of the spec of the prefill kernel."""
    fields = {"op": "attention", "layout": "paged", "arch": arch, "dtype": dtype, "head_dim": head_dim}
    return {**fields, "pattern": {"kind": "sink_window"}}
