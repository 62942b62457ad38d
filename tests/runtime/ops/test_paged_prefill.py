"""Calls over pages with many queries per request: which kernel they take, what a launch has, and what is refused."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import nullcontext
from types import ModuleType
from typing import Any
from unittest.mock import patch

import pytest
from scripts import imported

torch = pytest.importorskip("torch")

from codegen.errors import SpecError  # noqa: E402
from codegen.library import as_shipped, find_spec, shipped_specs  # noqa: E402
from codegen.planning import plan_for  # noqa: E402
from codegen.select.paged import PACKS, PREFILL_KERNELS_OF, prefill_fields  # noqa: E402
from runtime import KeyLists, paged_attention  # noqa: E402
from runtime.driver import launch  # noqa: E402
from runtime.errors import ArgumentError  # noqa: E402
from runtime.kernels.paged_attention import Window, WorkspaceBytes  # noqa: E402
from runtime.ops import paged_calls  # noqa: E402
from runtime.patterns import Causal, Dense, SinkWindow, SlidingWindow  # noqa: E402

HALF, BF16, E4M3 = torch.float16, torch.bfloat16, torch.float8_e4m3fn
PAGES, SIZE, HEADS, KV_HEADS, D = 12, 16, 8, 2, 64
TOKENS = 100
MOST = 1 << 24


@pytest.fixture
def driver() -> Iterator[ModuleType]:
    """A stand-in driver: calls with tensors of the CPU reach it."""
    with imported("pretended") as module, module.pretended():
        yield module


@pytest.fixture
def launches(driver: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Parameters of the launches so far, by name, with the name of the kernel."""
    found: list[dict[str, Any]] = []

    def launched(self: Any, signature: Any, addresses: Any, stream: int, *, prologue: bool = True) -> None:
        del stream, prologue
        layout = self.layout
        values: dict[str, Any] = {**addresses, "kernel": self.plan.stem, "maps": signature.maps}
        for name, kind in layout.types.items():
            if kind in ("i32", "i64", "f32"):
                (values[name],) = struct.unpack_from(launch._FORMATS[kind], signature.block, layout.offsets[name])
        found.append(values)

    monkeypatch.setattr(launch.LoadedKernel, "launch", launched)
    monkeypatch.setattr(paged_calls, "verified_packs", lambda *kind, **options: frozenset({1, *PACKS}))
    return found


def int32(*values: int) -> Any:
    return torch.tensor(values, dtype=torch.int32)


def call(dtype: Any = HALF, cache: Any = None, d: int = D, size: int = SIZE, **changes: Any) -> dict[str, Any]:
    """Arguments of a call: three requests with 100 queries together."""
    shape = (PAGES, size, KV_HEADS, d)
    given: dict[str, Any] = {"q": torch.randn(TOKENS, HEADS, d).to(dtype), "pattern": Causal()}
    given |= {name: torch.randn(shape).to(cache or dtype) for name in ("k_cache", "v_cache")}
    given |= {"block_table": torch.arange(PAGES, dtype=torch.int32).view(3, 4), "seq_lens": int32(40, 3, 64)}
    return given | {"cu_seqlens_q": int32(0, 40, 43, 100)} | changes


def is_prefill(found: dict[str, Any]) -> bool:
    """Whether a launch is of the prefill kernel."""
    assert ("paged_attention" not in found["kernel"]) or "query_tiles" not in found
    return "query_tiles" in found


@pytest.mark.parametrize("pattern", [Causal(), Dense(), SlidingWindow(5), SinkWindow(3, 5)], ids=lambda p: p.kind)
@pytest.mark.parametrize("d", [64, 128, 192, 256])
@pytest.mark.parametrize("dtype", [HALF, BF16], ids=str)
def test_many_queries_take_tiles_of_them(launches: list[dict[str, Any]], pattern: Any, d: int, dtype: Any) -> None:
    paged_attention(**call(dtype, d=d, pattern=pattern))
    assert is_prefill(launches[0]) == ((d, dtype) != (256, HALF))


@pytest.mark.parametrize(
    "changes",
    [
        {"q": torch.zeros(95, HEADS, D).half()},
        {"batch_invariant": True},
        {"pattern": KeyLists(torch.zeros(1, TOKENS, 3, dtype=torch.int32))},
    ],
    ids=["fewer queries", "batch_invariant", "lists"],
)
def test_what_takes_the_kernel_for_few_queries(launches: list[dict[str, Any]], changes: dict[str, Any]) -> None:
    paged_attention(**call(**changes))
    assert not is_prefill(launches[0])


def test_so_do_small_pages_and_other_gpus(launches: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    paged_attention(**call(size=8))
    paged_attention(**call(k_cache=torch.zeros(0, 16, 2, D).half(), v_cache=torch.zeros(0, 16, 2, D).half()))
    monkeypatch.setattr(paged_calls, "arch_of", lambda device: "sm_89")
    with (
        patch.object(paged_calls, "_kernel", side_effect=RuntimeError("few")),
        pytest.raises(RuntimeError, match="few"),
    ):
        paged_attention(**call(), scale=0.5)
    assert not any(map(is_prefill, launches))


@pytest.mark.parametrize("dtype", [HALF, BF16], ids=str)
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_an_e4m3_cache_has_kernels_of_its_own(launches: list[dict[str, Any]], dtype: Any, layout: str) -> None:
    """Their factors are of the tensor, of heads, or of tokens, as those of the kernel for few queries."""
    given = call(dtype, cache=E4M3, layout=layout)
    if layout == "HND":
        given |= {name: given[name].transpose(1, 2).contiguous() for name in ("k_cache", "v_cache")}
    tokens = torch.ones(given["k_cache"].shape[:3])
    paged_attention(**given)
    paged_attention(**given, k_scale=torch.ones(1), v_scale=torch.ones(KV_HEADS))
    paged_attention(**given, k_scale=tokens, v_scale=tokens.clone())
    assert all(map(is_prefill, launches))
    plain, of_heads, of_tokens = launches
    assert (plain["k_scale"], plain["v_scale"], plain["scale_by_token"]) == (0, 0, 0)
    assert (of_heads["k_scale_stride"], of_heads["v_scale_stride"], of_heads["scale_by_token"]) == (0, 1, 0)
    strides = [of_tokens[f"scale_{axis}_stride"] for axis in ("page", "token", "head")]
    by_heads = [SIZE * KV_HEADS, KV_HEADS, 1] if layout == "NHD" else [SIZE * KV_HEADS, 1, SIZE]
    assert (of_tokens["scale_by_token"], strides) == (1, by_heads)
    row = D // 16  # chunks
    chunks = [plain[f"{name}_chunks"] for name in ("page", "token", "kv_head")]
    assert chunks == [stride * row for stride in by_heads]


def test_without_a_receipt_an_e4m3_cache_takes_the_kernel_for_few_queries(
    launches: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paged_calls, "verified_packs", lambda *kind, cache, **options: frozenset())
    paged_attention(**call(cache=E4M3))
    assert not is_prefill(launches[0])


def test_factors_are_of_an_e4m3_cache(launches: list[dict[str, Any]]) -> None:
    with pytest.raises(ArgumentError, match=r"^k_scale: is given, but the cache is fp16, which has no scale"):
        paged_attention(**call(), k_scale=torch.ones(1))
    with pytest.raises(ArgumentError, match=r"^v_scale: has shape and strides None"):
        paged_attention(**call(cache=E4M3), k_scale=torch.ones(PAGES, SIZE, KV_HEADS))
    assert not launches


@pytest.mark.parametrize("sink", [None, torch.zeros(HEADS)], ids=["", "sink"])
@pytest.mark.parametrize("softcap", [None, 5], ids=["", "softcap"])
def test_sinks_and_caps_are_of_the_kernel(launches: list[dict[str, Any]], sink: Any, softcap: Any) -> None:
    paged_attention(**call(sink=sink, softcap=softcap))
    (found,) = launches
    assert "query_tiles" in found and (sink is None or found["sink"] == sink.data_ptr())
    fields = prefill_fields("sm_90a", "fp16", D, 4, sink=sink is not None, softcap=softcap)
    assert found["kernel"] == as_shipped(find_spec(fields)).stem


@pytest.mark.parametrize(
    ("tokens", "heads", "pack"),
    [(300, 8, 4), (300, 16, 8), (300, 12, 2), (300, 6, 1), (3 * 128, 8, 4), (3 * 1024, 8, 1)],
    ids=str,
)
def test_few_queries_fill_tiles_with_heads(launches: list[dict[str, Any]], tokens: int, heads: int, pack: int) -> None:
    given = call(q=torch.randn(tokens, heads, 128).half(), d=128, out=torch.empty(tokens, heads, 130).half()[..., :128])
    with pytest.raises(ArgumentError, match=r"^out: "):  # rows of 260 bytes
        paged_attention(**given)
    paged_attention(**given | {"out": torch.empty(tokens, heads, 136).half()[..., :128]})
    (found,) = launches
    assert (found["heads"], found["heads_per_kv_head"]) == (heads // pack, heads // pack // KV_HEADS)
    assert found["query_tiles"] == tokens // (128 // pack) + 3
    maps = {each.name: each.encoder for each in found["maps"]}
    of_heads = (128, pack, tokens, heads // pack, 1) if pack > 1 else (128, tokens, heads, 1)
    assert maps["q"].dims == maps["o"].dims == of_heads
    strides = (128, heads * 128, pack * 128) if pack > 1 else (heads * 128, 128)
    assert tuple(maps["q"].strides)[: len(strides)] == strides
    assert tuple(maps["o"].strides)[: len(strides)] == tuple(stride // 128 * 136 for stride in strides)
    assert (found["o_row_stride"], found["o_head_stride"]) == (heads * 136, 136)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_a_launch_has_the_sizes_and_addresses_of_a_call(launches: list[dict[str, Any]], layout: str) -> None:
    given = call(pattern=SinkWindow(3, 5))
    k, v = given["k_cache"], given["v_cache"]
    if layout == "HND":
        given |= {"k_cache": k.transpose(1, 2).contiguous(), "v_cache": v.transpose(1, 2).contiguous()}
    result = paged_attention(**given, layout=layout, return_lse=True)
    (found,) = launches
    assert result.out.shape == given["q"].shape and result.lse.shape == (HEADS, TOKENS)
    assert (found["o"], found["lse"]) == (result.out.data_ptr(), result.lse.data_ptr())
    assert found["k"] == given["k_cache"].data_ptr() and found["v"] == found["v_row"] == given["v_cache"].data_ptr()
    for name in ("q", "cu_seqlens_q", "seq_lens", "block_table"):
        assert found[name] == given[name].data_ptr()
    assert (found["q_len"], found["sequences"], found["max_keys"], found["pages"]) == (TOKENS, 3, 64, PAGES)
    assert (found["page_shift"], found["page_mask"], found["table_stride"]) == (4, 15, 4)
    assert (found["has_bounds"], found["has_lengths"], found["request_queries"], found["request_keys"]) == (1, 1, 0, 0)
    assert (found["window_left"], found["window_right"], found["sink_keys"]) == (5, 0, 3)
    assert (found["heads"], found["heads_per_kv_head"]) == (HEADS // 4, HEADS // KV_HEADS // 4)
    assert (found["o_row_stride"], found["o_head_stride"], found["head_chunks"]) == (HEADS * D, D, D // 8)
    places = {each.name: each.encoder for each in found["maps"]}
    assert places["k"].dims == places["v"].dims == places["v_row"].dims == (D, SIZE, KV_HEADS, PAGES)
    assert places["q"].dims == places["o"].dims == (D, 4, TOKENS, HEADS // 4, 1)


def test_missing_bounds_lengths_and_tables_have_numbers(launches: list[dict[str, Any]]) -> None:
    q = torch.randn(TOKENS - 1, HEADS, D).half()
    paged_attention(**call(q=q, cu_seqlens_q=None, seq_lens=None))
    found = launches[-1]
    assert found["cu_seqlens_q"] == found["seq_lens"] == q.data_ptr()
    assert (found["has_bounds"], found["has_lengths"], found["request_queries"], found["request_keys"]) == (
        0,
        0,
        33,
        64,
    )
    whole = torch.randn(2 * 40, HEADS, D).half()
    caches = {name: torch.randn(2, 77, KV_HEADS, D).half() for name in ("k_cache", "v_cache")}
    paged_attention(**call(q=whole, block_table=None, seq_lens=None, cu_seqlens_q=None, **caches))
    found = launches[-1]
    assert is_prefill(found) and found["block_table"] == 0
    assert (found["page_shift"], found["page_mask"], found["pages"]) == (31, 2**31 - 1, 2)
    assert (found["max_keys"], found["request_keys"], found["request_queries"]) == (77, 77, 40)


def test_windows_end_at_the_most_keys(launches: list[dict[str, Any]]) -> None:
    paged_attention(**call(pattern=Dense()))
    assert (launches[0]["window_left"], launches[0]["window_right"]) == (MOST, MOST)


def test_a_workspace_has_the_scheduler_at_its_beginning(launches: list[dict[str, Any]]) -> None:
    memory = torch.zeros(1 << 23, dtype=torch.uint8)
    out = torch.empty(TOKENS, HEADS, D).half()
    for _ in range(2):
        found = paged_attention(**call(out=out), workspace=memory)
        assert found is out
    assert [each["scheduler"] for each in launches] == [memory.data_ptr()] * 2
    with pytest.raises(ArgumentError, match=r"^workspace: has 0 bytes, expected at least 16, contiguous"):
        paged_attention(**call(), workspace=memory[:0])
    with pytest.raises(ArgumentError, match=r"^out: overlaps q in memory"):
        given = call()
        paged_attention(**given, out=given["q"])


@pytest.mark.parametrize("tokens", [32, 2048])
def test_a_workspace_has_partial_results_at_its_end(launches: list[dict[str, Any]], tokens: int) -> None:
    """Where tiles are few. Otherwise the kernel takes counters of its scheduler alone."""
    given = call(q=torch.randn(tokens, HEADS, D).half(), sink=torch.zeros(HEADS), seq_lens=None, cu_seqlens_q=None)
    given["block_table"] = torch.zeros(1, 512, dtype=torch.int32)
    kernel = paged_calls._prefill_kernel(None, "fp16", D, 4, cache="same", sink=True, softcap=None)
    with patch("runtime.kernels.paged_prefill.entered", lambda index: nullcontext()):
        size = kernel.workspace_bytes(torch.device("cpu"))
    assert size.partials == 2 * 132 * 2 * 128 * (D // 2 + 4) * 4
    memory = torch.zeros(size.total + 40, dtype=torch.uint8)
    paged_attention(**given, workspace=memory)
    (found,) = launches
    end = memory.data_ptr() + memory.numel() // 16 * 16
    splits = 16 if tokens == 32 else 1
    assert found["splits"] == splits and found["tiles"] == 2 * (tokens // 32 + 1) * splits
    assert found["scheduler"] == memory.data_ptr()
    assert found["partials"] == (end - size.partials if splits > 1 else 0)
    if splits > 1:
        assert found["parts_done"] == memory.data_ptr() + 8
        with pytest.raises(ArgumentError, match=r"^workspace: has "):
            paged_attention(**given, workspace=memory[: size.total - 16])


def test_a_workspace_of_any_call_serves_it(launches: list[dict[str, Any]]) -> None:
    kernel = paged_calls._kernel(None, "fp16", "same", D)
    with patch("runtime.kernels.paged_attention.entered", lambda index: nullcontext()):
        size = kernel.workspace_bytes(torch.device("cpu"), batch=1, tokens=1, heads=1, kv_heads=1)
    paged_attention(**call())
    assert WorkspaceBytes(16, 0).total <= size.counters and is_prefill(launches[0])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sink": torch.zeros(HEADS)}, r"^sink: is given, but h100_paged_prefill_d64 does not take it"),
        ({"softcap": 5.0}, r"^softcap: is 5.0, but h100_paged_prefill_d64 has None"),
        ({"lists": torch.zeros(1, TOKENS, 1, dtype=torch.int32)}, r"^lists: is given, but h100_paged_prefill_d64"),
        ({"q": torch.zeros(0, HEADS, D).half()}, r"^q: is empty: \(0, 8, 64\)"),
        (
            {name: torch.zeros(0, SIZE, KV_HEADS, D).half() for name in ("k_cache", "v_cache")},
            r"^k_cache: is empty: \(0, 16, 2, 64\)",
        ),
        ({"q": torch.zeros(TOKENS, HEADS, 72).half()}, r"^q: has head_dim 72, expected 64"),
        ({"window": Window(-1)}, r"^window: is Window\(left=-1"),
        (
            {name: torch.zeros(PAGES, 8, KV_HEADS, D).half() for name in ("k_cache", "v_cache")},
            r"^k_cache: has pages of 8 tokens, expected a multiple of 16",
        ),
        (
            {"block_table": torch.zeros(1, 1, dtype=torch.int32).expand(3, 1 << 21).contiguous()},
            r"^block_table: has room for 33554432 keys of a request, expected 16777216 or less",
        ),
    ],
)
def test_what_a_kernel_object_refuses(launches: list[dict[str, Any]], changes: dict[str, Any], message: str) -> None:
    kernel = paged_calls._prefill_kernel(None, "fp16", D, 1, cache="same", sink=False, softcap=None)
    given = call() | changes
    positional = [given.pop(name) for name in ("q", "k_cache", "v_cache")]
    del given["pattern"]
    with pytest.raises(ArgumentError, match=message):
        kernel(*positional, **given)
    assert not launches


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, r"^sink: is missing: float32 \(heads 8,\)"),
        ({"sink": torch.zeros(4)}, r"^sink: has shape \(4,\)"),
        ({"q": torch.randn(TOKENS, 8, D).half(), "sink": torch.zeros(8)}, r"^q: has 8 heads, 4 for each of k_cache: "),
        ({"sink": torch.zeros(8), "softcap": 5.0}, r"^softcap: is 5.0, but h100_paged_prefill_d64_gqa8_sink has None"),
    ],
)
def test_what_a_kernel_of_packs_refuses(launches: list[dict[str, Any]], changes: dict[str, Any], message: str) -> None:
    kernel = paged_calls._prefill_kernel(None, "fp16", D, 8, cache="same", sink=True, softcap=None)
    given = call() | changes
    positional = [given.pop(name) for name in ("q", "k_cache", "v_cache")]
    del given["pattern"]
    with pytest.raises(ArgumentError, match=message):
        kernel(*positional, **given)
    assert not launches


FIELDS = {"op": "attention", "arch": "sm_90a", "dtype": "fp16", "head_dim": 64, "layout": "paged"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pattern": {"kind": "causal"}}, r"^pattern: is causal, which is not written for layout paged"),
        ({"pattern": {"kind": "sink_window", "left": 9, "right": 0, "sink": 1}}, r"^pattern: .* layout paged"),
        ({"arch": "sm_89"}, r"^arch: is sm_89, which is not written for layout paged; allowed: sm_90a"),
        ({"dtype": "e4m3"}, r"^dtype: is e4m3, which is not written for layout paged"),
        ({"cache": "e4m3", "layout": "varlen"}, r"^cache: is e4m3; layout varlen does not support it: leave it out"),
        ({"cache": "e4m3", "head_dim": 256}, r"^head_dim: is 256; allowed with cache e4m3: 64, 128"),
        ({"cache": "e4m3", "softcap": 9.0}, r"^softcap: is 9.0; not supported with cache e4m3"),
        ({"cache": "e4m3", "tile": {"m": 192, "n": 64}}, r"^tile.m: is 192; allowed with cache e4m3: 128"),
        ({"layout": "varlen", "pack_gqa": 2}, r"^pack_gqa: is not written for layout varlen"),
    ],
)
def test_specs_that_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        plan_for(find_spec({**FIELDS, "pattern": {"kind": "sink_window"}, **changes}))


def test_gradients_have_no_pages() -> None:
    fields = {**FIELDS, "op": "attention_backward", "gradients": "dq", "pattern": {"kind": "sink_window"}}
    with pytest.raises(SpecError, match=r"^layout: is paged; allowed for gradients: padded, varlen"):
        plan_for(find_spec(fields))


def test_shipped_kernels_serve_all_head_sizes_and_types() -> None:
    every: list[Any] = [each.spec for each in shipped_specs() if each.spec.op == "attention"]
    specs = [spec for spec in every if spec.layout == "paged"]
    found = {(spec.cache, spec.head_dim, spec.pack_gqa, spec.sink, spec.softcap, spec.dtype) for spec in specs}
    assert found == {
        (cache, *kind, dtype)
        for cache, kernels in PREFILL_KERNELS_OF.items()
        for kind, dtypes in kernels.items()
        for dtype in dtypes
    }


def test_calls_take_only_kernels_with_a_receipt(monkeypatch: pytest.MonkeyPatch) -> None:
    def packs() -> list[frozenset[int]]:
        paged_calls.verified_packs.cache_clear()
        kinds = ((False, None), (False, 50.0), (True, None), (True, 50.0))
        return [paged_calls.verified_packs("sm_90a", "bf16", 256, sink=s, softcap=c) for s, c in kinds]

    assert packs() == [{1, 2}, {2}, set(), set()]
    monkeypatch.setattr(paged_calls, "is_verified", lambda named: named.stem == "h100_paged_prefill_d256_bf16")
    assert packs() == [{1}, set(), set(), set()]
    paged_calls.verified_packs.cache_clear()
