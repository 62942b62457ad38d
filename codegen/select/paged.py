"""Choice between the decode kernel and the prefill kernels of attention over pages."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

from codegen.arch import ARCHS
from codegen.patterns.base import MOST_KEYS
from codegen.problem import PAGE_ROWS

TILE_ROWS = 128
"""Rows of a tile of the prefill kernels."""
STEP_KEYS = 128
"""Keys of a step, in the estimate of a tile's steps."""
PREFILL_QUERIES = 32
"""Queries per request, on average, from which calls take a prefill kernel."""
PACKED_ROWS = 64
"""Rows per request and pack, on average, from which shorter calls take one too, if their tiles fill the GPU."""
PACKS = 8, 4, 2
"""Query heads of a tile, best first: more heads have fewer queries in a tile, and the windows of those fewer keys."""
PREFILL_TYPES = {64: ("fp16", "bf16"), 128: ("fp16", "bf16"), 192: ("fp16", "bf16"), 256: ("bf16",)}
"""Types of q of prefill kernels, by head size. In fp16, the one of 256 exceeded twice torch's error in a case."""
PREFILL_KERNELS: dict[tuple[int, int, bool, float | None], tuple[str, ...]] = {
    **{(head_dim, 1, False, None): dtypes for head_dim, dtypes in PREFILL_TYPES.items()},
    (64, 4, False, None): PREFILL_TYPES[64],
    (64, 8, True, None): PREFILL_TYPES[64],
    (128, 4, False, None): PREFILL_TYPES[128],
    (128, 8, False, None): PREFILL_TYPES[128],
    (192, 2, False, None): PREFILL_TYPES[192],
    (256, 2, False, None): PREFILL_TYPES[256],
    (256, 2, False, 50.0): PREFILL_TYPES[256],
}
"""Types of q of the prefill kernels, by head size, packed query heads, sink and softcap. Calls take those that have a
receipt."""
E4M3_PREFILL_KERNELS: dict[tuple[int, int, bool, float | None], tuple[str, ...]] = {
    (64, 1, False, None): PREFILL_TYPES[64],
    (128, 1, False, None): PREFILL_TYPES[128],
    (128, 4, False, None): PREFILL_TYPES[128],
}
"""The same for e4m3 caches."""
PREFILL_KERNELS_OF = {"same": PREFILL_KERNELS, "e4m3": E4M3_PREFILL_KERNELS}
"""Those tables, by the type of the cache in specs."""
PACKED_GAIN = 0.95
"""Most steps with packed heads, in those of tiles of one head, from which calls take them."""


@dataclass(frozen=True)
class PagedCall:
    """What the choice depends on.

    Attributes:
        arch: architecture of the GPU.
        dtype: type of q.
        head_dim: elements per head.
        heads: query heads.
        kv_heads: heads of K and V.
        queries: queries of all requests.
        requests: requests.
        same_queries: whether all requests have the same number of queries.
        window_left: keys that a query sees before its own.
        page_size: tokens of a page; None if K and V of a request are contiguous.
        max_keys: keys that a request has room for.
        empty: whether the cache has no elements.
        e4m3: whether the cache is e4m3.
        lists: whether each query has a list of keys.
        sink: whether there are sinks.
        softcap: cap of the logits, or None.
        batch_invariant: whether results may not depend on the other requests.
        verified: packed query heads of the kernels for such calls that have a receipt; 1: of those of one head.
    """

    arch: str
    dtype: str
    head_dim: int
    heads: int
    kv_heads: int
    queries: int
    requests: int
    page_size: int | None
    max_keys: int
    same_queries: bool = False
    window_left: int = MOST_KEYS
    empty: bool = False
    e4m3: bool = False
    lists: bool = False
    sink: bool = False
    softcap: float | None = None
    batch_invariant: bool = False
    verified: frozenset[int] = frozenset({1, *PACKS})

    @functools.cached_property
    def pack(self) -> int:
        """Query heads of a KV head that share a tile of the prefill kernel.

        Calls with a sink or a softcap have packed heads wherever they can, as their shipped kernels do.
        """
        if not self.requests or not self.kv_heads:
            return 1
        packs = [pack for pack in PACKS if self.heads // self.kv_heads % pack == 0 and pack in self.verified]
        if not packs or self.sink or self.softcap is not None or self._has_few_tiles():
            return packs[0] if packs else 1
        return packs[0] if self._steps(packs[0]) < PACKED_GAIN * self._steps(1) else 1

    def decode_reason(self) -> str:
        """Reason for the decode kernel; "" if the call takes a prefill kernel."""
        few = not self.requests or (self.queries < PREFILL_QUERIES * self.requests and not self._has_full_packs())
        kind = self._words("an e4m3 cache" if self.e4m3 else "", *self._option_words())
        unverified = bool(kind) and self.pack not in self.verified
        odd_page = self.page_size is not None and self.page_size % PAGE_ROWS > 0
        count = f"it has {self.queries} queries for {self.requests} requests, fewer than {PREFILL_QUERIES} for each"
        reasons = {
            count: few,
            "its cache is empty": self.empty,
            "it has lists": self.lists,
            "it is batch-invariant": self.batch_invariant,
            f"its heads have {self.head_dim} elements in {self.dtype}": self.dtype not in PREFILL_TYPES[self.head_dim],
            f"its pages have {self.page_size} tokens, no multiple of {PAGE_ROWS}": odd_page,
            f"a request has room for more than {MOST_KEYS} keys": self.max_keys > MOST_KEYS,
            "the GPU has no WGMMA": not ARCHS[self.arch].has_wgmma,
            f"no prefill kernel {kind} has a receipt": unverified,
        }
        return next((reason for reason, holds in reasons.items() if holds), "")

    def prefill_reason(self) -> str:
        """Reason for the prefill kernel."""
        if self.pack == 1:
            return "the call has many queries per request, which fill tiles of one head"
        options = self._words(*self._option_words())
        if not options and self._has_few_tiles():
            options = "with few tiles"
        why = f"calls {options} pack heads" if options else "tiles of one head have more steps"
        return f"the call has many queries per request; {self.pack} query heads of a KV head share a tile: {why}"

    def _option_words(self) -> tuple[str, str]:
        """The options of the kernel, in words."""
        return "a sink" if self.sink else "", "" if self.softcap is None else f"a softcap of {self.softcap:g}"

    @staticmethod
    def _words(*words: str) -> str:
        """What a kernel has, as part of a sentence."""
        return "with " + " and ".join(filter(None, words)) if any(words) else ""

    def _tiles(self, pack: int) -> float:
        """Tiles of the average request and a KV head; one of several lengths fills half of its last tile on average."""
        rows = self.queries / self.requests * pack / TILE_ROWS
        return self.heads / self.kv_heads / pack * (math.ceil(rows) if self.same_queries else max(1, rows + 0.5))

    def _steps(self, pack: int) -> float:
        """Steps of those tiles."""
        keys = min(self.max_keys, self.window_left + TILE_ROWS // pack)
        return self._tiles(pack) * (keys / STEP_KEYS + 1)

    def _has_few_tiles(self) -> bool:
        """Whether tiles of one head leave half of the GPU idle: kernels of packed heads divide their keys."""
        return self._tiles(1) * self.kv_heads * self.requests <= ARCHS[self.arch].machine.sms / 2

    def _has_full_packs(self) -> bool:
        """Whether packed tiles fill half of their rows, and half of the GPU's multiprocessors."""
        rows = self.queries / self.requests * self.pack
        tiles = self._tiles(self.pack) * self.kv_heads * self.requests
        return self.pack > 1 and rows >= PACKED_ROWS and tiles >= ARCHS[self.arch].machine.sms / 2


def queries_of_kernels(arch: str, group: int) -> tuple[int, ...]:
    """Queries of one request whose calls, with one KV head, take each of the kernels of a layer without a window.

    Args:
        arch: architecture of the GPU.
        group: query heads.
    """
    tiles = ARCHS[arch].machine.sms // 2 + 1  # too many for ``_has_few_tiles``
    return 1, PREFILL_QUERIES, TILE_ROWS * -(-tiles // group)


def decode_fields(arch: str, dtype: str, cache: str, head_dim: int) -> dict[str, Any]:
    """Fields of the spec of the decode kernel."""
    fields = {"op": "paged_attention", "arch": arch, "dtype": dtype, "head_dim": head_dim}
    return fields if cache == "same" else {**fields, "cache": cache}


def packed_kinds(head_dim: int) -> list[dict[str, Any]]:
    """Options of the kernels of a head size that pack heads and divide the keys of tiles, and their types of q."""
    return [
        {"dtypes": dtypes, "pack": pack, "sink": sink, "softcap": softcap, "cache": cache}
        for cache, kernels in PREFILL_KERNELS_OF.items()
        for (size, pack, sink, softcap), dtypes in kernels.items()
        if size == head_dim and pack > 1
    ]


def prefill_fields(
    arch: str,
    dtype: str,
    head_dim: int,
    pack: int = 1,
    *,
    cache: str = "same",
    sink: bool = False,
    softcap: float | None = None,
) -> dict[str, Any]:
    """Fields of the spec of a prefill kernel.

    Args:
        arch: architecture of the GPU.
        dtype: type of q.
        head_dim: elements per head.
        pack: query heads of a tile.
        cache: type of K and V: ``same`` as q, or ``e4m3``.
        sink: whether there are sinks.
        softcap: cap of the logits, or None.
    """
    fields = {"op": "attention", "layout": "paged", "arch": arch, "dtype": dtype, "head_dim": head_dim}
    options: dict[str, Any] = {} if cache == "same" else {"cache": cache}
    options |= {"pack_gqa": pack} if pack > 1 else {}
    options |= {"split_kv": True} if pack > 1 or sink or softcap is not None else {}
    options |= {"sink": True} if sink else {}
    options |= {} if softcap is None else {"softcap": softcap}
    return {**fields, "pattern": {"kind": "sink_window"}, **options}
