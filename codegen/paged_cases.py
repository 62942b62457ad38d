"""Cases of attention over pages: lengths, layouts and lists, without a tensor."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace

from codegen.spec import AttentionSpec, PagedAttentionSpec

UNSEEN_PAGE = -7
"""Filler of a page table behind a request's pages."""


@dataclass(frozen=True)
class PagedCase:
    """One batch of requests.

    Attributes:
        name: unique; also the seed.
        kv_lens: keys of each request.
        q_lens: queries of each request.
        heads: a multiple of kv_heads.
        kv_heads: heads of K and V.
        page_size: tokens of a page; 0 for K and V without pages.
        layout: ``NHD`` or ``HND``, or ``rows``: heads first, with K and V of a token in one row.
        shared: whether all requests begin with the same pages.
        packed: whether ``cu_seqlens_q`` gives the queries; otherwise all requests have as many.
        before: tokens before the first request, and as many behind the last one; nothing is written there.
        window: keys before and after a query's own; None for no bound.
        sink_keys: keys at the beginning that later queries see too.
        entries: entries of a list; 0 without lists.
        entry_keys: keys of an entry.
        head_lists: whether each KV head has its own lists.
        counted: whether a tensor gives the entries that count.
        repeated: whether the second half of a list repeats the first.
        softcap: cap of the logits, or None.
        sinks: whether each head has a sink.
        batch_invariant: whether keys are divided by the length of their request alone.
        spread: factor on q; large values make one key win.
        token_scales: whether each token of an e4m3 cache has its own factors.
        spoiled: whether rows that no query sees, and their factors, hold NaN; the table then has anything for pages
            that no query sees, and for one page of each request that queries see it has none of the cache.
    """

    name: str
    kv_lens: tuple[int, ...]
    q_lens: tuple[int, ...]
    heads: int = 8
    kv_heads: int = 2
    page_size: int = 64
    layout: str = "NHD"
    shared: bool = False
    packed: bool = True
    before: int = 0
    window: tuple[int | None, int | None] = (None, 0)
    sink_keys: int = 0
    entries: int = 0
    entry_keys: int = 1
    head_lists: bool = True
    counted: bool = False
    repeated: bool = False
    softcap: float | None = None
    sinks: bool = False
    batch_invariant: bool = False
    spread: float = 1.0
    token_scales: bool = False
    spoiled: bool = False

    def describe(self) -> str:
        """The parameters that differ from a plain case."""
        count = len(self.kv_lens)
        text = f"{count} requests H{self.heads}:{self.kv_heads} of at most {max(self.q_lens)} x {max(self.kv_lens)}"
        pages = f"pages of {self.page_size}, {self.layout}" if self.page_size else f"no pages, {self.layout}"
        extras = {
            "shared pages": self.shared,
            f"{self.before} tokens around": self.before > 0,
            f"window {self.window}": self.window != (None, 0),
            f"{self.sink_keys} sink keys": self.sink_keys > 0,
            f"lists of {self.entries} x {self.entry_keys} keys": self.entries > 0,
            "lists for all heads": self.entries > 0 and not self.head_lists,
            "counts": self.counted,
            "repeated entries": self.repeated,
            f"softcap {self.softcap}": self.softcap is not None,
            "sinks": self.sinks,
            "batch invariant": self.batch_invariant,
            f"q x {self.spread:g}": self.spread != 1.0,
            "factors of tokens": self.token_scales,
            "NaN in unseen rows and a page outside of the cache": self.spoiled,
        }
        return ", ".join([text, pages, *(word for word, said in extras.items() if said)])


def _decode(name: str, *kv_lens: int, **fields: object) -> PagedCase:
    """A case of one query for each request."""
    return replace(PagedCase(name, kv_lens, (1,) * len(kv_lens), packed=False), **fields)  # type: ignore[arg-type]


CASES = (
    _decode("decode", 1000, 77, 1, 4096, 515, heads=32, kv_heads=8),
    _decode("pages_of_1", 333, 40, page_size=1),
    _decode("pages_of_16", 3333, 40, 1777, page_size=16, heads=4, kv_heads=4),
    _decode("pages_of_256", 3333, 400, page_size=256, layout="HND", heads=16, kv_heads=2),
    _decode("shared_pages", 2000, 2100, 1500, shared=True, page_size=16),
    _decode("rows", 3333, 400, 5000, page_size=128, layout="rows", heads=64, kv_heads=4),
    _decode("contiguous", 3000, 400, 5000, page_size=0, layout="HND", heads=8, kv_heads=8),
    _decode("one_head", 900, 3, heads=64, kv_heads=1),
    PagedCase("two_queries", (1000, 77, 2, 4096), (2, 2, 2, 2), page_size=16, packed=False),
    PagedCase("several_queries", (3333, 400, 5000), (1, 3, 8), heads=64, kv_heads=4, page_size=128, layout="rows"),
    PagedCase("chunks", (700, 65, 1000), (300, 65, 17), heads=4, kv_heads=2, page_size=32),
    PagedCase("empty_requests", (300, 0, 5000, 7, 64), (1, 0, 37, 7, 0), heads=16, kv_heads=4, page_size=32),
    PagedCase("without_keys", (0, 3), (2, 5), heads=16, kv_heads=4),
    PagedCase("tokens_around", (300, 90), (3, 2), before=5),
    _decode("long_and_short", 65536, *(100 + i for i in range(31))),
    _decode("many_requests", *(1 + 37 * i % 300 for i in range(200)), page_size=16),
    _decode("one_long", 40000, heads=4, kv_heads=1),
    PagedCase("window", (9000, 300, 20), (1, 4, 2), window=(511, 0)),
    PagedCase("two_sided_window", (9000, 300, 20), (1, 40, 2), window=(100, 30)),
    PagedCase("sink_window", (9000, 300, 20), (1, 4, 2), window=(100, 0), sink_keys=40),
    PagedCase("full", (900, 300, 20), (1, 40, 25), window=(None, None)),
    PagedCase("options", (900, 300, 20, 0), (1, 4, 2, 1), softcap=3.0, sinks=True),
    _decode("one_key_wins", 900, 300, spread=40.0),
    _decode(
        "lists", 9000, 300, 20, 100, heads=64, kv_heads=4, page_size=128, layout="rows", entries=16, entry_keys=128
    ),
    PagedCase(
        "shared_lists", (9000, 300), (4, 4), entries=7, entry_keys=64, head_lists=False, counted=True, page_size=16
    ),
    PagedCase("lists_of_fours", (9000, 300), (1, 3), heads=24, entries=500, entry_keys=4, counted=True),
    PagedCase(
        "lists_of_eights", (9000, 300), (1, 3), kv_heads=4, entries=100, entry_keys=8, counted=True, page_size=16
    ),
    PagedCase("repeated_entries", (900, 300), (1, 3), heads=16, entries=40, entry_keys=4, repeated=True),
    PagedCase("lists_of_tokens", (9000, 300), (1, 3), heads=24, entries=300, window=(4000, 0), sink_keys=3),
    _decode("lists_without_pages", 3000, 400, page_size=0, layout="HND", entries=9, entry_keys=16, counted=True),
    PagedCase("batch_invariant", (9000, 300, 20, 40000), (1, 3, 1, 1), batch_invariant=True, sinks=True),
    _decode("invariant_lists", 9000, 5000, entries=200, entry_keys=16, batch_invariant=True),
)


SPOILED_CASES = (
    _decode("spoiled_decode", 1000, 77, 20, page_size=16, spoiled=True),
    _decode("spoiled_window_of_one", 3333, 77, 20, page_size=16, heads=16, window=(300, 0), spoiled=True),
    _decode("spoiled_sink_window_of_one", 3333, 77, 20, page_size=32, window=(30, 0), sink_keys=5, spoiled=True),
    PagedCase("spoiled_window_of_drafts", (3333, 300, 20), (5, 1, 3), heads=16, window=(77, 0), spoiled=True),
    PagedCase("spoiled_tiles", (900, 300), (40, 17), heads=16, page_size=8, layout="HND", window=(20, 3), spoiled=True),
    PagedCase(
        "spoiled_sink_window_of_drafts",
        (9000, 300, 77),
        (4, 1, 3),
        page_size=16,
        layout="rows",
        window=(1000, 0),
        sink_keys=70,
        spoiled=True,
    ),
    PagedCase("spoiled_lists", (900, 300), (1, 4), entries=30, entry_keys=8, page_size=16, spoiled=True),
    PagedCase(
        "spoiled_lists_of_tokens",
        (900, 300),
        (1, 4),
        entries=200,
        window=(77, 0),
        sink_keys=20,
        page_size=4,
        spoiled=True,
    ),
)


E4M3_CASES = (
    _decode("token_scales", 1000, 77, 3333, token_scales=True, heads=16),
    PagedCase(
        "spoiled_token_scales",
        (900, 300),
        (1, 4),
        page_size=16,
        window=(77, 0),
        sink_keys=5,
        token_scales=True,
        spoiled=True,
    ),
    PagedCase("token_scales_of_lists", (900, 300), (1, 4), layout="HND", entries=60, entry_keys=4, token_scales=True),
)


def cases_of(spec: PagedAttentionSpec) -> tuple[PagedCase, ...]:
    """The cases of a kernel."""
    return (*CASES, *SPOILED_CASES, *(E4M3_CASES if spec.cache == "e4m3" else ()))


PREFILL_PAGE_SIZES = (0, 16, 32, 64, 128, 256)
PREFILL_CASES = (
    PagedCase("prefill", (1024,), (1024,), heads=4, kv_heads=2),
    PagedCase("chunk", (4000,), (300,), heads=4, kv_heads=1, page_size=16),
    PagedCase("tile_edges", (127, 128, 129, 1, 64), (127, 128, 129, 1, 64), page_size=32),
    PagedCase("sliding_chunk", (2000, 700), (500, 700), window=(200, 0), page_size=16),
    PagedCase("sinks_of_a_chunk", (2000, 700), (500, 700), window=(200, 0), sink_keys=20, page_size=16),
    PagedCase("no_pages", (400, 400, 7), (400, 100, 7), page_size=0, layout="HND"),
    PagedCase("same_queries", (300, 200, 900), (130, 130, 130), packed=False, heads=4, kv_heads=4),
    PagedCase("spoiled", (1000, 333, 65), (200, 333, 65), page_size=16, spoiled=True),
    PagedCase("spoiled_window", (1000, 333), (200, 150), page_size=64, window=(77, 3), sink_keys=5, spoiled=True),
    PagedCase("spoiled_rows", (700, 300), (250, 300), page_size=32, layout="rows", window=(100, 0), spoiled=True),
)


PACKED_CASES = (
    PagedCase("few_queries", (777, 300, 64, 1000), (64, 63, 1, 17), page_size=16),
    PagedCase("pack_edges", (700, 16, 17, 31, 32, 33, 63, 64, 65), (15, 16, 17, 31, 32, 33, 63, 64, 65)),
    PagedCase("several_packs", (500, 90), (100, 9), heads=32, kv_heads=2, page_size=32, layout="rows"),
    PagedCase("shared_pages_of_packs", (500, 333, 90), (60, 33, 9), shared=True, before=5),
    PagedCase("window_of_packs", (2000, 150), (300, 150), window=(127, 0), page_size=16),
    PagedCase("sink_window_of_packs", (2000, 150), (100, 40), window=(127, 0), sink_keys=4),
    PagedCase("full_packs", (900, 20), (50, 5), window=(None, None), layout="HND"),
    PagedCase("spoiled_packs", (900, 320), (50, 320), page_size=16, window=(100, 0), spoiled=True),
    PagedCase("many_parts", (20000,), (40,), page_size=16),
    PagedCase("parts_of_some", (9000, 100, 600, 1500, 0), (20, 20, 3, 1, 2), heads=16, kv_heads=1),
    PagedCase("packs_without_keys", (0, 3, 0, 130), (40, 9, 0, 130), page_size=16),
)


PREFILL_E4M3_CASES = (
    PagedCase("token_scales", (1000, 333), (1000, 200), page_size=16, token_scales=True),
    PagedCase("token_scales_of_heads_first", (900, 129), (300, 129), layout="HND", window=(200, 0), token_scales=True),
    PagedCase("token_scales_of_rows", (700,), (250,), heads=4, kv_heads=1, layout="rows", token_scales=True),
)


def prefill_cases(spec: AttentionSpec) -> tuple[PagedCase, ...]:
    """The cases of a kernel for many queries of each request."""
    of_packs = (*(PACKED_CASES if spec.pack_gqa > 1 else ()), *(PREFILL_E4M3_CASES if spec.has_codes else ()))
    return tuple(
        _served(case, spec) for case in (*(case for case in CASES if _is_prefill(case)), *PREFILL_CASES, *of_packs)
    )


def _served(case: PagedCase, spec: AttentionSpec) -> PagedCase:
    """A case with the packs, sinks and softcap of a kernel."""
    heads = case.kv_heads * math.lcm(case.heads // case.kv_heads, spec.pack_gqa)
    return replace(case, heads=heads, sinks=spec.sink, softcap=spec.softcap)


def _is_prefill(case: PagedCase) -> bool:
    other = case.entries or case.softcap is not None or case.sinks or case.batch_invariant
    return not other and case.page_size in PREFILL_PAGE_SIZES


def random_prefill_cases(spec: AttentionSpec, count: int = 40) -> tuple[PagedCase, ...]:
    """Small cases of random lengths, pages and windows: the same ones every time."""
    draw = random.Random(0)

    def case(number: int) -> PagedCase:
        requests, kv_heads, group = draw.randint(1, 6), draw.randint(1, 3), draw.randint(1, 4)
        kv_lens = tuple(draw.choice((draw.randint(0, 40), draw.randint(1, 700))) for _ in range(requests))
        q_lens = tuple(draw.choice((keys, draw.randint(0, keys), draw.randint(0, 20))) for keys in kv_lens)
        window = draw.choice(((None, 0), (None, None), (draw.randint(0, 300), draw.choice((0, 0, 9)))))
        return PagedCase(
            f"random_{number:03}",
            kv_lens,
            q_lens if any(q_lens) else (1, *q_lens[1:]),
            kv_heads * group,
            kv_heads,
            draw.choice(PREFILL_PAGE_SIZES[1:]),
            draw.choice(("NHD", "HND", "rows")),
            before=draw.choice((0, 0, 77)),
            window=window,
            sink_keys=0 if window[0] is None else draw.choice((0, 1, 33)),
            spoiled=draw.random() < 0.3,
        )

    return tuple(_served(case(number), spec) for number in range(count))
