"""explain_varlen_attention and explain_paged_attention name the kernels that calls take."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from runtime import KeyLists, explain_paged_attention, explain_varlen_attention  # noqa: E402
from runtime.errors import ArgumentError  # noqa: E402
from runtime.ops import paged_calls  # noqa: E402
from runtime.patterns import Causal, Dense, SinkWindow, SlidingWindow  # noqa: E402

HALF, BF16, E4M3 = torch.float16, torch.bfloat16, torch.float8_e4m3fn


def meta(*shape: int, dtype: Any = BF16) -> Any:
    return torch.empty(shape, dtype=dtype, device="meta")


def packed(tokens: int = 4096, d: int = 128, dtype: Any = BF16) -> tuple[Any, ...]:
    return meta(tokens, 32, d, dtype=dtype), meta(tokens, 8, d, dtype=dtype), meta(tokens, 8, d, dtype=dtype)


def bounds(sequences: int = 2) -> Any:
    return meta(sequences + 1, dtype=torch.int32)


@pytest.mark.parametrize(
    ("pattern", "name"),
    [
        (Causal(), "h100_varlen_causal_bf16"),
        (Dense(), "h100_varlen_dense_bf16"),
        (SlidingWindow(99), "h100_varlen_window_bf16"),
    ],
    ids=str,
)
def test_packed_sequences(pattern: Any, name: str) -> None:
    found = explain_varlen_attention(*packed(), pattern, cu_seqlens_q=bounds(), arch="sm_90a", gradients=True)
    assert found.kernels["O"].stem.removesuffix("_bf16").removesuffix("_short") == name.removesuffix("_bf16")
    assert set(found.kernels) == {"O", "dQ, dK and dV", "dQ alone", "dK and dV alone"}
    assert all(each.is_verified for each in found.provenance.values())
    text = str(found)
    assert "receipt" in text and "rule: " in text and "256 queries per sequence" in text


def test_packed_sequences_without_gradients_or_one_kernel() -> None:
    found = explain_varlen_attention(*packed(), Causal(), cu_seqlens_q=bounds(), arch="sm_90a")
    assert set(found.kernels) == {"O"} and len(found.reasons) == 1
    of_ada = explain_varlen_attention(*packed(), Causal(), cu_seqlens_q=bounds(), arch="sm_89", gradients=True)
    assert set(of_ada.kernels) == {"O", "dQ alone", "dK and dV alone"}


def paged(queries: int = 1, requests: int = 4, page: int = 16, d: int = 128, cache: Any = BF16, **changes: Any) -> Any:
    shape = 64, page, 8, d
    given: dict[str, Any] = {"q": meta(requests * queries, 32, d), "pattern": Causal(), "arch": "sm_90a"}
    given |= {name: meta(*shape, dtype=cache) for name in ("k_cache", "v_cache")}
    given["block_table"] = meta(requests, 16, dtype=torch.int32)
    return explain_paged_attention(**{**given, **changes})


@pytest.mark.parametrize(
    ("call", "name", "reason"),
    [
        ({}, "h100_paged_d128_bf16", "it has 4 queries for 4 requests, fewer than 32 for each"),
        (dict(queries=128), "h100_paged_prefill_d128_bf16", "prefill kernel: the call has many queries per request, "),
        (dict(queries=128), "h100_paged_prefill_d128_bf16", "which fill tiles of one head"),
        (dict(queries=32), "h100_paged_prefill_d128_gqa4_bf16", "4 query heads of a KV head share a tile"),
        (dict(queries=64, softcap=9.0), "h100_paged_d128_bf16", "no prefill kernel with a softcap of 9 has a receipt"),
        (dict(queries=64, page=8), "h100_paged_d128_bf16", "its pages have 8 tokens, no multiple of 16"),
        (dict(queries=64, batch_invariant=True), "h100_paged_d128_bf16", "it is batch-invariant"),
        (
            dict(queries=64, pattern=KeyLists(meta(1, 256, 5, dtype=torch.int32))),
            "h100_paged_d128_bf16",
            "it has lists",
        ),
        (dict(queries=64, arch="sm_89"), "l4_paged_d128_bf16", "the GPU has no WGMMA"),
        (
            dict(queries=64, block_table=meta(4, 1 << 21, dtype=torch.int32)),
            "h100_paged_d128_bf16",
            "more than 16777216 keys",
        ),
        (dict(queries=64, block_table=None), "h100_paged_d128_bf16", "it has 256 queries for 64 requests"),
    ],
)
def test_pages(call: dict[str, Any], name: str, reason: str) -> None:
    found = paged(**call)
    assert found.kernels["O"].stem == name
    assert found.provenance["O"].is_verified
    assert reason in str(found) and str(found).startswith("O: ")


@pytest.mark.parametrize(
    ("changes", "by_keys"),
    [
        ({}, True),
        (dict(sink=meta(32, dtype=torch.float32)), False),
        (dict(batch_invariant=True), False),
        (dict(queries=64), False),
        (dict(page=8), False),
        (dict(pattern=KeyLists(meta(1, 2048, 16, dtype=torch.int32), keys=32)), False),
    ],
)
def test_lists_of_many_queries_take_the_kernel_by_key_blocks_if_it_has_a_receipt(
    changes: dict[str, Any], by_keys: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paged_calls, "has_receipt", lambda fields: True)
    many = {"queries": 512, "pattern": KeyLists(meta(1, 2048, 16, dtype=torch.int32), keys=128)}
    found = paged(**{**many, **changes})
    assert ("kernel by key blocks: many queries" in str(found)) == by_keys
    assert (getattr(found.kernels["O"].spec, "layout", None) == "paged") == by_keys


@pytest.mark.parametrize(
    ("call", "pack", "reason"),
    [
        (dict(queries=32), 4, "4 query heads of a KV head share a tile"),
        (dict(queries=128, pattern=SinkWindow(4, 9)), 4, "of one head have more"),
        (dict(queries=128, cu_seqlens_q=meta(5, dtype=torch.int32)), 4, "of one head have more steps"),
        (dict(queries=64, softcap=9.0), 4, "calls with a softcap of 9 pack heads"),
        (dict(queries=64, softcap=9.0, sink=meta(32, dtype=torch.float32)), 4, "a sink and a softcap of 9"),
    ],
)
def test_kernels_that_pack_heads_if_they_have_a_receipt(
    call: dict[str, Any], pack: int, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paged_calls, "verified_packs", lambda *kind, **options: frozenset({1, 2, 4}))
    found = paged(**call)
    spec: Any = found.kernels["O"].spec
    assert (spec.layout, spec.pack_gqa, spec.softcap) == ("paged", pack, call.get("softcap"))
    assert reason in str(found) and spec.sink == ("sink" in call)


@pytest.mark.parametrize(
    ("packs", "name", "reason"),
    [
        ({1, 4}, "h100_paged_prefill_e4m3_d128_gqa4_bf16", "4 query heads of a KV head share a tile"),
        ({1}, "h100_paged_prefill_e4m3_d128_bf16", "which fill tiles of one head"),
        ((), "h100_paged_e4m3_d128_bf16", "no prefill kernel with an e4m3 cache has a receipt"),
    ],
    ids=str,
)
def test_an_e4m3_cache_has_prefill_kernels(packs: Any, name: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged_calls, "verified_packs", lambda *kind, cache, **options: frozenset(packs))
    found = paged(64, cache=E4M3)
    assert found.kernels["O"].stem == name and reason in str(found)


def test_heads_of_256_in_float16() -> None:
    caches = {name: meta(64, 16, 8, 256, dtype=HALF) for name in ("k_cache", "v_cache")}
    found = paged(64, q=meta(256, 32, 256, dtype=HALF), **caches)
    assert found.kernels["O"].stem == "h100_paged_d256" and "256 elements in fp16" in str(found)


def test_arguments_are_checked() -> None:
    with pytest.raises(ArgumentError, match=r"^arch: is missing: q is on meta"):
        paged(arch=None)
    with pytest.raises(ArgumentError, match=r"^layout: is 'BSHD'"):
        paged(layout="BSHD")
    with pytest.raises(ArgumentError, match=r"^q: has head_dim 96"):
        paged(d=96)
    with pytest.raises(ArgumentError, match=r"^gradients: is 1"):
        explain_varlen_attention(*packed(), Causal(), cu_seqlens_q=bounds(), arch="sm_90a", gradients=1)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"^cu_seqlens_q: is torch.int64"):
        explain_varlen_attention(*packed(), Causal(), cu_seqlens_q=meta(3, dtype=torch.int64), arch="sm_90a")
    with pytest.raises(ArgumentError, match=r"^pattern: is str"):
        explain_varlen_attention(*packed(), "causal", cu_seqlens_q=bounds(), arch="sm_90a")  # type: ignore[arg-type]
