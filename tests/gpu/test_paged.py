"""paged_attention on a GPU: every case through the public function, CUDA graphs, streams, workspaces, equal bits."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import pytest
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

import paged_garbage  # noqa: E402

from codegen.library import find_spec  # noqa: E402
from codegen.paged_cases import PagedCase, cases_of, prefill_cases  # noqa: E402
from runtime import (  # noqa: E402
    ArgumentError,
    KeyLists,
    explain_paged_attention,
    paged_attention,
    paged_workspace,
)
from runtime.kernels.attention import AttentionResult  # noqa: E402
from runtime.ops.attention_choice import arch_of  # noqa: E402
from runtime.patterns import Causal, Dense, SinkWindow, SlidingWindow  # noqa: E402
from runtime.verify import paged_attention as verified  # noqa: E402
from runtime.verify.common import max_error, tolerance  # noqa: E402

HALF, BF16, E4M3 = torch.float16, torch.bfloat16, torch.float8_e4m3fn
KINDS: tuple[tuple[str, str, int], ...] = (("bf16", "same", 128), ("fp16", "same", 64), ("bf16", "e4m3", 128))
RUNS = 50
EXPLAINED = ("q", "k_cache", "v_cache", "pattern", "block_table", "cu_seqlens_q")
DRAWN_KINDS = (*KINDS, ("fp16", "e4m3", 64))
REPLAYS = (  # keys of each request, and where its queries begin and end
    ((900, 60, 3000, 77), (0, 1, 2, 3, 4)),
    ((900, 60, 0, 0), (0, 1, 2, 3, 4)),
    ((900, 60, 3000, 77), (0, 1, 2, 2, 2)),
    ((900, 60, 0, 0), (0, 1, 2, 2, 2)),
    ((0, 60, 0, 77), (0, 0, 1, 1, 2)),
    ((0, 0, 0, 0), (0, 0, 0, 0, 0)),
    ((900, 60, 3000, 77), (0, 1, 2, 3, 4)),
)
"""Batches that one graph of four requests serves: the empty ones are its padding."""


def spec_of(dtype: str, cache: str, d: int) -> Any:
    fields = {"op": "paged_attention", "arch": arch_of(torch.device("cuda", 0)), "dtype": dtype, "head_dim": d}
    return find_spec(fields if cache == "same" else {**fields, "cache": cache}).spec


CASES = [
    (kind, case)
    for kind in KINDS
    for case in cases_of(find_spec({"op": "paged_attention", "arch": "sm_89", "cache": kind[1], "head_dim": 64}).spec)  # type: ignore[arg-type]
    if not (case.entries and (case.window != (None, 0) or case.sink_keys))  # lists beside windows: kernel objects
]


def prefill_spec(pack: int) -> Any:
    fields = {"op": "attention", "layout": "paged", "arch": "sm_90a", "head_dim": 64, "pack_gqa": pack}
    return find_spec({**fields, "pattern": {"kind": "sink_window"}}).spec


PREFILL = {case.name: case for pack in (4, 1) for case in prefill_cases(prefill_spec(pack))}.values()
SINKS_AND_CAPS = (
    PagedCase("sinks", (400, 90, 0), (130, 90, 40), heads=16, kv_heads=2, sinks=True, window=(127, 0)),
    PagedCase("softcap", (400, 90), (130, 60), heads=8, kv_heads=2, softcap=3.0, page_size=16),
    PagedCase("both_of_one_head", (400, 90), (130, 60), heads=3, kv_heads=1, softcap=3.0, sinks=True),
)


def pattern_of(case: PagedCase, options: dict[str, Any]) -> Any:
    if case.entries:
        return KeyLists(options["lists"], options.get("counts"), case.entry_keys)
    left, right = case.window
    if left is None:
        return Dense() if right is None else Causal()
    assert right is not None
    return SinkWindow(case.sink_keys, left, right) if case.sink_keys else SlidingWindow(left, right)


def call_of(case: PagedCase, inputs: Any) -> dict[str, Any]:
    """The call of a case by the public function, with heads first where the case has that."""
    q, k, v, options, _ = inputs
    scales = {name: options.get(name) for name in ("k_scale", "v_scale")}
    if case.layout == "HND":
        k, v = k.transpose(1, 2), v.transpose(1, 2)
        scales = {name: s.transpose(1, 2) if s is not None and s.dim() > 1 else s for name, s in scales.items()}
    names = ("block_table", "seq_lens", "cu_seqlens_q", "softcap", "sink", "batch_invariant")
    given = {name: options[name] for name in names if options.get(name) is not None}
    given |= {"q": q, "k_cache": k, "v_cache": v, "pattern": pattern_of(case, options), **scales}
    return given | {"layout": "HND" if case.layout == "HND" else "NHD"}


@pytest.mark.parametrize(
    ("kind", "case"), CASES, ids=lambda each: each.name if isinstance(each, PagedCase) else str(each)
)
def test_each_case_is_right(kind: tuple[str, str, int], case: PagedCase) -> None:
    spec = spec_of(*kind)
    inputs = verified.inputs_of(case, spec, torch.device("cuda"))
    right, right_lse = verified.oracle(case, spec, inputs)
    given = call_of(case, inputs)
    out = torch.full_like(inputs.q, float("nan"))
    if case.spoiled:
        with pytest.raises(ArgumentError, match="block_table: has page"):
            paged_attention(**given, validate=True)
    result = paged_attention(**given, out=out, return_lse=True, validate=not case.spoiled)
    assert isinstance(result, AttentionResult) and result.out is out and result.lse is not None
    inside = slice(inputs.bounds[0], inputs.bounds[-1])
    limit = tolerance(spec.dtype, None, float(right[inside].abs().max()))
    assert max_error(out[inside], right[inside]) <= limit, case.describe()
    torch.testing.assert_close(result.lse[:, inside].double(), right_lse[:, inside], atol=2e-3, rtol=1e-3)
    assert out[: inside.start].isnan().all() and out[inside.stop :].isnan().all()
    again = paged_attention(**given)
    assert isinstance(again, torch.Tensor) and torch.equal(again[inside], out[inside])


@pytest.mark.parametrize("kind", KINDS[:2], ids=str)
@pytest.mark.parametrize("case", PREFILL, ids=lambda case: case.name)
def test_each_case_of_prefill_is_right(kind: tuple[str, str, int], case: PagedCase) -> None:
    test_each_case_is_right(kind, case)


@pytest.mark.parametrize("case", SINKS_AND_CAPS, ids=lambda case: case.name)
def test_sinks_and_caps_take_tiles_of_queries(case: PagedCase) -> None:
    """Of 64 and 128 elements, so that a shipped kernel and one without a file are both tried."""
    for kind in KINDS[:2]:
        test_each_case_is_right(kind, case)


@st.composite
def small_cases(draw: st.DrawFn) -> PagedCase:
    """A case of short requests, of any layout and pattern."""
    requests = draw(st.integers(1, 5))
    keys = st.one_of(st.integers(0, 40), st.integers(1, 600))
    kv_lens = tuple(draw(st.lists(keys, min_size=requests, max_size=requests).filter(any)))
    packed = draw(st.booleans())
    if packed:
        queries = st.one_of(st.integers(0, 8), st.integers(0, 150))
        q_lens = tuple(draw(st.lists(queries, min_size=requests, max_size=requests).filter(any)))
    else:
        q_lens = (draw(st.one_of(st.integers(1, 8), st.integers(1, 70))),) * requests
    kv_heads = draw(st.integers(1, 3))
    pattern = draw(st.sampled_from(("dense", "causal", "window", "sink window", "lists")))
    options: dict[str, Any] = {"window": (None, None)} if pattern == "dense" else {}
    if "window" in pattern:
        options["window"] = draw(st.tuples(st.integers(0, 300), st.sampled_from((0, 9))))
    if pattern == "sink window":
        options["sink_keys"] = draw(st.integers(1, 70))
    if pattern == "lists":
        options |= {"entries": draw(st.integers(1, 40)), "entry_keys": draw(st.sampled_from((1, 4, 16, 64)))}
        options |= {"head_lists": draw(st.booleans()), "counted": draw(st.booleans())}
    return PagedCase(
        f"drawn_{draw(st.integers(0, 9999)):04}",
        kv_lens,
        q_lens,
        heads=kv_heads * draw(st.integers(1, 8)),
        kv_heads=kv_heads,
        page_size=draw(st.sampled_from((1, 16, 32, 64))),
        layout=draw(st.sampled_from(("NHD", "HND", "rows"))),
        shared=draw(st.booleans()),
        packed=packed,
        before=draw(st.sampled_from((0, 0, 7))) if packed else 0,
        softcap=draw(st.sampled_from((None, None, 3.0))),
        sinks=draw(st.booleans()),
        batch_invariant=draw(st.booleans()),
        **options,
    )


@settings(max_examples=30, deadline=None)
@drawn(st.sampled_from(DRAWN_KINDS), small_cases(), st.booleans())
def test_small_cases_are_right(kind: tuple[str, str, int], case: PagedCase, token_scales: bool) -> None:
    test_each_case_is_right(kind, replace(case, token_scales=token_scales and kind[1] == "e4m3"))


@pytest.mark.parametrize("d", [64, 128, 192, 256])
def test_parts_of_keys_have_the_same_sum_each_time(d: int) -> None:
    """Few tiles, whose keys are divided between thread blocks; short requests have one part."""
    given = decode((20000, 700, 1300, 5), d=d)
    given["q"] = torch.randn(150, 16, d, device="cuda").to(BF16)
    given["cu_seqlens_q"] = torch.tensor([0, 40, 100, 147, 150], dtype=torch.int32, device="cuda")
    assert "prefill" in str(explain_paged_attention(**{name: given[name] for name in EXPLAINED}))
    exact = paged_attention(**given, batch_invariant=True)
    out = torch.empty_like(given["q"])
    given |= {"out": out, "workspace": workspace(given)}
    first = paged_attention(**given).clone()
    torch.testing.assert_close(first.float(), exact.float(), atol=2e-2, rtol=2e-2)
    for _ in range(RUNS):
        out.fill_(float("nan"))
        paged_attention(**given)
        assert torch.equal(out, first)


def test_prompts_take_tiles_of_queries_and_graphs_serve_other_lengths() -> None:
    """The result of a chunk is that of the same queries one by one; a captured call serves other tables and bounds."""
    given = decode((900, 300))
    given |= {
        "q": torch.randn(200, 16, 128, device="cuda").to(BF16),
        "out": torch.empty(200, 16, 128, device="cuda").to(BF16),
    }
    given["cu_seqlens_q"] = torch.tensor([0, 150, 200], dtype=torch.int32, device="cuda")
    given["workspace"] = workspace(given)
    few = {**given, "batch_invariant": True, "workspace": None, "out": None}

    def check() -> None:
        torch.testing.assert_close(given["out"].float(), paged_attention(**few).float(), atol=2e-2, rtol=2e-2)

    paged_attention(**given)
    check()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        paged_attention(**given)
    given["cu_seqlens_q"].copy_(torch.tensor([0, 30, 200]))
    given["seq_lens"].copy_(torch.tensor([800, 250]))
    given["block_table"].copy_(given["block_table"].flip(1))
    given["out"].fill_(float("nan"))
    graph.replay()
    check()


def decode(
    lengths: tuple[int, ...], dtype: Any = BF16, cache: Any = None, d: int = 128, seed: int = 0, spare: int = 0
) -> dict[str, Any]:
    """A call of one query for each request, over pages of 16 in any order."""
    draw = torch.Generator("cuda").manual_seed(seed)
    counts = [-(-length // 16) for length in lengths]
    pages = sum(counts) + 5 + spare

    def normal(*shape: int) -> Any:
        return torch.randn(shape, generator=draw, device="cuda")

    order = torch.randperm(pages, generator=draw, device="cuda").int()
    table = torch.zeros(len(lengths), max(counts) + 1, dtype=torch.int32, device="cuda")
    first = 0
    for row, count in zip(table, counts, strict=True):
        row[:count] = order[first : first + count]
        first += count
    given = {"q": normal(len(lengths), 16, d).to(dtype), "pattern": Causal(), "block_table": table}
    given |= {name: normal(pages, 16, 4, d).to(cache or dtype) for name in ("k_cache", "v_cache")}
    return given | {"seq_lens": torch.tensor(lengths, dtype=torch.int32, device="cuda")}


def int32(values: Any) -> Any:
    return torch.tensor(list(values), dtype=torch.int32, device="cuda")


def chosen(given: dict[str, Any], order: list[int]) -> dict[str, Any]:
    """The call of some requests of another call, in any order; ``cu_seqlens_q`` has the queries of each."""
    bounds = given["cu_seqlens_q"].tolist()
    tokens = torch.tensor([token for i in order for token in range(bounds[i], bounds[i + 1])], device="cuda")
    ends = accumulate((bounds[i + 1] - bounds[i] for i in order), initial=0)
    found = {**given, "q": given["q"][tokens], "cu_seqlens_q": int32(ends)}
    found |= {name: given[name][order] for name in ("block_table", "seq_lens")}
    if isinstance(given["pattern"], KeyLists):
        lists = given["pattern"]
        counts = None if lists.counts is None else lists.counts[:, tokens]
        found["pattern"] = KeyLists(lists.indices[:, tokens], counts, lists.keys)
    return found


def drawn_lists(tokens: int, entries: int, most: int, keys: int) -> KeyLists:
    """Lists of entries below ``most`` for each query and K/V head, some absent, and how many count."""
    indices = torch.randint(-1, most, (4, tokens, entries), dtype=torch.int32, device="cuda")
    counts = torch.randint(entries // 2, entries + 1, (4, tokens), dtype=torch.int32, device="cuda")
    return KeyLists(indices, counts, keys)


def workspace(given: dict[str, Any], *, batch_invariant: bool = False) -> Any:
    tokens, heads, d = given["q"].shape
    sizes = {"batch": given["block_table"].shape[0], "tokens": tokens, "heads": heads, "kv_heads": 4, "head_dim": d}
    return paged_workspace(**sizes, batch_invariant=batch_invariant)


@pytest.mark.parametrize("own", [False, True], ids=["its own memory", "a workspace"])
@pytest.mark.parametrize("with_lists", [False, True], ids=["causal", "lists"])
def test_a_graph_serves_other_tables_lengths_lists_and_queries(own: bool, with_lists: bool) -> None:
    """Replayed after everything has changed in place; and with requests that have become empty."""
    given, other = decode((900, 40, 3000, 77)), decode((300, 3100, 5, 640), seed=1)
    table = torch.zeros(4, 300, dtype=torch.int32, device="cuda")
    given["block_table"] = torch.cat([given["block_table"], table], 1)[:, :200].contiguous()
    wide = torch.cat([other["block_table"], table], 1)[:, :200].contiguous()
    entries = torch.randint(-1, 60, (4, 4, 30), device="cuda", dtype=torch.int32)
    counts = torch.tensor([[30, 3, 0, 9]] * 4, device="cuda", dtype=torch.int32)
    if with_lists:
        given["pattern"] = KeyLists(entries, counts, 16)
    more = {"workspace": workspace(given)} if own else {}
    paged_attention(**given, **more)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        paged_attention(**given, **more)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = paged_attention(**given, **more, return_lse=True)
    assert isinstance(found, AttentionResult) and found.lse is not None
    pages = min(given["k_cache"].shape[0], other["k_cache"].shape[0])
    given["q"].copy_(other["q"])
    given["block_table"].copy_(wide % pages)
    given["seq_lens"].copy_(other["seq_lens"])
    entries.copy_(entries.flip(-1) + 1)
    counts.copy_(counts.flip(-1))
    for empty in (False, True):
        if empty:
            given["seq_lens"][2:] = 0
        for _ in range(3):
            found.out.fill_(float("nan"))
            graph.replay()
        eager = paged_attention(**given, return_lse=True)
        assert isinstance(eager, AttentionResult)
        assert torch.equal(found.out, eager.out) and torch.equal(found.lse, eager.lse)
    assert not found.out[2:].any() and bool(found.lse[:, 2:].isneginf().all())


@pytest.mark.parametrize("invariant", [False, True], ids=["", "batch_invariant"])
@pytest.mark.parametrize("queries", [1, 50], ids=["decode", "prefill"])
@pytest.mark.parametrize("with_lists", [False, True], ids=["causal", "lists"])
@pytest.mark.parametrize("kind", [(BF16, None, 128), (HALF, E4M3, 64)], ids=["bf16", "e4m3"])
def test_a_graph_serves_batches_padded_with_empty_requests(
    kind: tuple[Any, Any, int], with_lists: bool, queries: int, invariant: bool
) -> None:
    """Replays with requests without keys, without queries and without both; other tokens are not written."""
    given = decode(REPLAYS[0][0], *kind)
    q = torch.randn(4 * queries, 16, kind[2], device="cuda").to(kind[0])
    given |= {"q": q, "cu_seqlens_q": int32(queries * i for i in REPLAYS[0][1]), "batch_invariant": invariant}
    if with_lists:
        given["pattern"] = drawn_lists(4 * queries, 30, 60, 16)
    sizes = {"batch": 4 * queries, "tokens": 4 * queries, "heads": 16, "kv_heads": 4, "head_dim": kind[2]}
    memory = paged_workspace(**sizes, batch_invariant=invariant)
    into = {"out": torch.empty_like(q), "workspace": memory, "return_lse": True}
    paged_attention(**given, **into)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = paged_attention(**given, **into)
    assert isinstance(captured, AttentionResult) and captured.lse is not None
    for lengths, places in REPLAYS:
        bounds = [queries * place for place in places]
        given["seq_lens"].copy_(int32(lengths))
        given["cu_seqlens_q"].copy_(int32(bounds))
        captured.out.fill_(float("nan"))
        captured.lse.fill_(float("nan"))
        graph.replay()
        assert captured.out[bounds[-1] :].isnan().all() and captured.lse[:, bounds[-1] :].isnan().all()
        for i, (first, end) in enumerate(pairwise(bounds)):
            if first == end:
                continue
            out, lse = captured.out[first:end], captured.lse[:, first:end]
            alone = paged_attention(**chosen(given, [i]), return_lse=True)
            assert isinstance(alone, AttentionResult) and alone.lse is not None
            if lengths[i] == 0:
                assert not out.any() and bool(lse.isneginf().all())
            elif invariant:
                assert torch.equal(out, alone.out) and torch.equal(lse, alone.lse)
            else:
                torch.testing.assert_close(out, alone.out, atol=2e-2, rtol=2e-2)
                torch.testing.assert_close(lse, alone.lse, atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize("kind", [(BF16, None, 128), (HALF, E4M3, 64)], ids=["bf16", "e4m3"])
def test_calls_have_the_same_bits_beside_other_work(kind: tuple[Any, Any, int]) -> None:
    """Parts are added in the order of the keys, whichever thread block ends last."""
    given = decode((5000, 40, 9000, 77, 640), *kind)
    first = paged_attention(**given)
    assert isinstance(first, torch.Tensor)
    busy, x = torch.cuda.Stream(), torch.randn(2048, 2048, device="cuda")
    different = torch.zeros((), dtype=torch.int64, device="cuda")
    for i in range(RUNS):
        with torch.cuda.stream(busy):
            for _ in range(i % 5):
                x = (x @ x).clamp(-1, 1)
        different += (paged_attention(**given) != first).sum()
    assert int(different) == 0


@pytest.mark.parametrize("kind", [(BF16, None, 128), (HALF, E4M3, 64)], ids=["bf16", "e4m3"])
@pytest.mark.parametrize("what", ["causal", "lists", "window", "sink window", "drafts", "lists of drafts"])
def test_batch_invariant_results_do_not_depend_on_the_batch(kind: tuple[Any, Any, int], what: str) -> None:
    """The same bits alone, in a batch, at another place in one, with its pages elsewhere and with a shorter table."""
    lengths = (5000, 40, 9000, 77)
    given = decode(lengths, *kind, spare=700)
    options: dict[str, Any] = {"batch_invariant": True}
    counts = (1, 3, 8, 5) if "drafts" in what else (1, 1, 1, 1)
    bounds = list(accumulate(counts, initial=0))
    given["q"] = torch.randn(bounds[-1], 16, kind[2], device="cuda").to(kind[0])
    given["cu_seqlens_q"] = int32(bounds)
    if "lists" in what:
        given["pattern"] = drawn_lists(bounds[-1], 200, 560, 16)
    elif "window" in what:
        given["pattern"] = SlidingWindow(3000) if what == "window" else SinkWindow(300, 3000)
    batch = paged_attention(**given, **options)
    assert isinstance(batch, torch.Tensor)
    if "drafts" not in what:
        assert torch.equal(paged_attention(**{**given, "cu_seqlens_q": None}, **options), batch)
    backwards = paged_attention(**chosen(given, [3, 2, 1, 0]), **options)
    assert isinstance(backwards, torch.Tensor)
    for i, part in enumerate(reversed(backwards.split(counts[::-1]))):
        mine = batch[bounds[i] : bounds[i + 1]]
        assert torch.equal(part, mine)
        alone = chosen(given, [i])
        assert torch.equal(paged_attention(**alone, **options), mine)
        alone["block_table"] = alone["block_table"][:, : -(-lengths[i] // 16)].contiguous()
        assert torch.equal(paged_attention(**alone, **options), mine)
    pages = given["k_cache"].shape[0]
    moved = torch.randperm(pages, device="cuda")
    caches = {}
    for name in ("k_cache", "v_cache"):
        caches[name] = torch.empty_like(given[name])
        caches[name].view(torch.uint8)[moved] = given[name].view(torch.uint8)
    table = {"block_table": moved[given["block_table"].long()].int()}
    assert torch.equal(paged_attention(**{**given, **caches, **table}, **options), batch)


def several_queries(given: dict[str, Any], queries: int, *, entries: int = 0, keys: int = 64) -> dict[str, Any]:
    """A call of many queries for each request, with lists if they have entries."""
    batch, _, d = given["q"].shape
    tokens = batch * queries
    given |= {"q": torch.randn(tokens, 16, d, device="cuda").to(given["q"].dtype)}
    given |= {"cu_seqlens_q": int32(range(0, tokens + 1, queries))}
    return given | ({"pattern": drawn_lists(tokens, entries, 2048 // keys, keys)} if entries else {})


@pytest.mark.parametrize("own", [False, True], ids=["its own memory", "a workspace"])
def test_calls_do_not_synchronize(own: bool) -> None:
    """Neither the same call again nor one with other tensors, nor the first one of another batch size."""

    def calls(requests: int) -> dict[str, dict[str, Any]]:
        lengths, other = (900, 40, 3000, 77)[:requests], (700, 2000, 90, 300)[:requests]
        scales = {"k_scale": torch.ones(1, device="cuda"), "v_scale": torch.ones(4, device="cuda")}
        found = {
            "decode": decode(lengths),
            "e4m3": decode(lengths, HALF, E4M3, 64) | scales,
            "window": decode(lengths) | {"pattern": SlidingWindow(100), "sink": torch.zeros(16, device="cuda")},
            "lists": several_queries(decode(lengths), 2, entries=20, keys=16),
            "invariant": decode(lengths) | {"batch_invariant": True},
            "prefill": several_queries(decode(other), 100),
            "prefill, e4m3": several_queries(decode(other, BF16, E4M3), 100) | scales,
            "key blocks": several_queries(decode(other), 600, entries=16),
        }
        if own:
            for given in found.values():
                tokens, heads, d = given["q"].shape
                sizes = {"batch": tokens, "tokens": tokens, "heads": heads, "kv_heads": 4, "head_dim": d}
                given["workspace"] = paged_workspace(**sizes, batch_invariant="batch_invariant" in given)
                given["out"] = torch.empty_like(given["q"])
        return found

    warm, again, fewer = calls(4), calls(4), calls(3)
    for given in warm.values():
        paged_attention(**given)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for each in (warm, again, fewer):
            for given in each.values():
                paged_attention(**given)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()


@pytest.mark.parametrize("queries", [1, 100], ids=["decode", "prefill"])
@pytest.mark.parametrize("warm", [False, True], ids=["first", "later"])
def test_tensors_on_another_device_are_named(queries: int, warm: bool) -> None:
    plain = several_queries(decode((900, 140)), queries) | {"sink": torch.zeros(16, device="cuda")}
    codes = several_queries(decode((900, 140), HALF, E4M3, 64), queries)
    codes |= {name: torch.ones(1, device="cuda") for name in ("k_scale", "v_scale")}
    listed = several_queries(decode((900, 140)), queries, entries=4)
    lists = listed["pattern"]
    names = ("k_cache", "v_cache", "block_table", "seq_lens", "cu_seqlens_q", "sink", "k_scale", "v_scale")
    wrong = [(given, name, {name: given[name].cpu()}) for given in (plain, codes) for name in names if name in given]
    wrong.append((listed, "pattern.indices", {"pattern": KeyLists(lists.indices.cpu(), lists.counts, 64)}))
    wrong.append((listed, "pattern.counts", {"pattern": KeyLists(lists.indices, lists.counts.cpu(), 64)}))
    if warm:
        for given in (plain, codes, listed):
            paged_attention(**given)
    for given, name, changes in wrong:
        with pytest.raises(ArgumentError, match=rf"^{name}: is .*on cpu"):
            paged_attention(**{**given, **changes})
    torch.cuda.synchronize()


def test_a_workspace_serves_one_call_after_another() -> None:
    """Of other sizes, patterns and types; its counters are 0 between them, and nothing behind it is written."""
    calls = [decode((5000, 40)), decode((9000, 300, 20, 1)), decode((700,) * 30), decode((4000,), HALF, E4M3)]
    largest = max((workspace(each, batch_invariant=True) for each in calls), key=lambda memory: memory.numel())
    guarded = torch.full((largest.numel() + 4096,), 0x5A, dtype=torch.uint8, device="cuda")
    memory = guarded[: largest.numel()].zero_()
    for _ in range(2):
        for given in calls:
            for invariant in (False, True):
                plain = paged_attention(**given, batch_invariant=invariant)
                assert torch.equal(paged_attention(**given, batch_invariant=invariant, workspace=memory), plain)
    assert bool((guarded[largest.numel() :] == 0x5A).all())
    with pytest.raises(ArgumentError, match=r"^workspace: has 256 bytes, expected at least \d+"):
        paged_attention(**calls[0], workspace=memory[:256])


def test_streams_without_a_workspace_do_not_share_memory() -> None:
    one, other = decode((9000, 300, 20)), decode((100, 8000, 7000), seed=1)
    expected = [paged_attention(**each) for each in (one, other)]
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    found: list[list[Any]] = [[], []]
    for _ in range(20):
        for place, (stream, given) in enumerate(zip(streams, (one, other), strict=True)):
            with torch.cuda.stream(stream):
                found[place].append(paged_attention(**given))
    torch.cuda.synchronize()
    for right, results in zip(expected, found, strict=True):
        assert all(torch.equal(right, each) for each in results)


def test_a_compiled_call_is_one_graph() -> None:
    given = decode((900, 40, 3000, 77))
    entries = torch.randint(0, 60, (1, 4, 30), device="cuda", dtype=torch.int32)

    def step(q: Any, k: Any, v: Any, table: Any, lengths: Any, entries: Any) -> Any:
        options = {"block_table": table, "seq_lens": lengths}
        window = paged_attention(2 * q, k, v, SlidingWindow(100), **options)
        return window + paged_attention(q, k, v, KeyLists(entries, keys=16), **options)

    tensors = [given[name] for name in ("q", "k_cache", "v_cache", "block_table", "seq_lens")]
    right = step(*tensors, entries)
    found = torch.compile(step, fullgraph=True)(*tensors, entries)
    torch.testing.assert_close(found, right, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("kind", [(BF16, BF16), (HALF, E4M3)], ids=["bf16", "e4m3"])
@pytest.mark.parametrize("lists", [False, True], ids=["causal", "lists"])
def test_tables_lengths_and_lists_may_hold_anything(kind: tuple[Any, Any], lists: bool) -> None:
    for seed in range(12):
        bounds = seed % 4 == 3
        drawn = paged_garbage.drawn_call(seed, *kind, 64, lists=lists, bounds=bounds)
        given = {name: each.cuda() if isinstance(each, torch.Tensor) else each for name, each in drawn.items()}
        keys, counts, indices = (given.pop(name, None) for name in ("entry_keys", "counts", "lists"))
        pattern = Causal() if indices is None else KeyLists(indices, counts, keys)
        out = torch.full_like(given["q"], float("nan"))
        invariant = seed % 3 == 2
        result = paged_attention(**given, pattern=pattern, out=out, return_lse=True, batch_invariant=invariant)
        assert isinstance(result, AttentionResult) and result.lse is not None
        torch.cuda.synchronize()
        if bounds:  # several requests may write a token
            continue
        right, right_lse = paged_garbage.expected(drawn)
        torch.testing.assert_close(out.double().cpu(), right, atol=1e-2, rtol=1e-2, equal_nan=True, msg=str(seed))
        inside = ~right_lse.isnan()
        torch.testing.assert_close(result.lse.double().cpu()[inside], right_lse[inside], atol=2e-3, rtol=1e-3)


def test_autocast_casts_queries() -> None:
    given = decode((900, 40))
    queries = given["q"].float()
    with torch.autocast("cuda", dtype=HALF):
        found = paged_attention(**{**given, "q": queries})
    assert isinstance(found, torch.Tensor) and found.dtype == BF16
    assert torch.equal(found, paged_attention(**given))
