"""The backend of vLLM without vLLM: what it computes of a layer, its settings, and what it refuses."""

from __future__ import annotations

import sys
import tomllib
from importlib import metadata
from itertools import accumulate
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import paged_oracle  # noqa: E402

from runtime import verified_only  # noqa: E402
from runtime.errors import ArgumentError, ToolchainError  # noqa: E402
from runtime.integrations.vllm import layers, policies, registration, selections  # noqa: E402
from runtime.integrations.vllm.layers import Layer, Most, Requests  # noqa: E402
from runtime.key_lists import KeyLists  # noqa: E402
from runtime.patterns import Causal, Dense, SinkWindow, SlidingWindow  # noqa: E402

PROJECT = Path(__file__).resolve().parents[3]
BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
LENGTHS, QUERIES = (300, 70, 5, 0), (1, 70, 2, 0)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Calls of ``paged_attention``, which are computed by the definition."""
    torch.manual_seed(0)
    found: list[dict[str, Any]] = []

    def attend(q: Any, k_cache: Any, v_cache: Any, pattern: Any, **given: Any) -> Any:
        found.append({"q": q, "k_cache": k_cache, "v_cache": v_cache, "pattern": pattern, **given})
        return paged_oracle.attend(q, k_cache, v_cache, pattern, **given)

    monkeypatch.setattr(layers, "paged_attention", attend)
    monkeypatch.setattr(selections, "paged_attention", attend)
    return found


def requests(page_size: int, causal: bool = True) -> Requests:
    pages = [-(-length // page_size) for length in LENGTHS]
    table = torch.zeros(len(LENGTHS), max(pages), dtype=torch.int32)
    order = torch.randperm(sum(pages)).int().split(pages)
    for row, numbers in zip(table, order, strict=True):
        row[: len(numbers)] = numbers
    bounds = torch.tensor([0, *accumulate(QUERIES)], dtype=torch.int32)
    tokens = slice(0, sum(QUERIES))
    return Requests(table, torch.tensor(LENGTHS, dtype=torch.int32), bounds, max(QUERIES), causal, tokens)


def cache_of(batch: Requests, page_size: int, kv_heads: int = 2, d: int = 64, dtype: Any = BF16) -> Any:
    """vLLM's cache (pages, kv_heads, page_size, 2 * d), with tokens before heads in memory."""
    pages = int(batch.block_table.max()) + 1
    return torch.randn(pages, page_size, kv_heads, 2 * d).to(dtype).transpose(1, 2)


def dense(q: Any, cache: Any, batch: Requests, factors: tuple[float, float] = (1, 1), **options: Any) -> Any:
    """Attention of each request by torch, over gathered keys."""
    d, out = q.shape[2], torch.zeros_like(q)
    for i, (length, queries) in enumerate(zip(LENGTHS, QUERIES, strict=True)):
        rows = cache.float().transpose(1, 2)[batch.block_table[i].long()].flatten(0, 1)[:length].transpose(0, 1)
        keys, values = rows[..., :d] * factors[0], rows[..., d:] * factors[1]
        position = torch.arange(length - queries, length)[:, None] if length else torch.zeros(0, 1)
        away = position - torch.arange(length)
        window, first = options.get("window"), int(batch.cu_seqlens_q[i])
        mask = (away >= 0) if batch.causal else torch.ones_like(away, dtype=torch.bool)
        if window is not None:
            mask &= away.abs() < window
        mine = q[first : first + queries].float().transpose(0, 1)
        mine = torch.nn.functional.scaled_dot_product_attention(
            mine, keys, values, attn_mask=mask, scale=options.get("scale"), enable_gqa=True
        )
        out[first : first + queries] = mine.transpose(0, 1).to(q.dtype)
    return out


def computed(layer: Layer, cache: Any, batch: Requests, q: Any = None, **scales: Any) -> tuple[Any, Any]:
    q = torch.randn(sum(QUERIES), layer.heads, layer.head_size).bfloat16() if q is None else q
    out = torch.full_like(q, float("nan"))
    one = torch.tensor(1.0)
    layer.attend(
        "model.layers.3.attn", q, cache, batch, out, k_scale=scales.get("k", one), v_scale=scales.get("v", one)
    )
    return q, out


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 33])
def test_a_batch_of_prompts_and_steps_is_that_of_torch(calls: Any, window: int | None, causal: bool) -> None:
    batch = requests(16, causal)
    cache = cache_of(batch, 16)
    q, out = computed(Layer(8, 2, 64, 0.2, window), cache, batch)
    torch.testing.assert_close(out, dense(q, cache, batch, window=window, scale=0.2), atol=2e-2, rtol=2e-2)
    kinds = {(True, None): Causal, (False, None): Dense}
    assert isinstance(calls[0]["pattern"], kinds.get((causal, window), SlidingWindow))
    assert calls[0]["out"].data_ptr() == out.data_ptr() and calls[0]["layout"] == "HND"


def test_prompts_without_a_prefill_kernel_are_packed(calls: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """If all of their keys are new, and no policy chooses among these."""
    packed: list[Any] = []

    def attend_packed(*tensors: Any, **given: Any) -> None:
        packed.append((*tensors, given))

    monkeypatch.setattr(layers, "varlen_attention", attend_packed)
    layer, tokens = Layer(8, 2, 64, 0.2, softcap=30.0, sink=torch.zeros(8)), 70
    layer._packs = layer._has_slow_prompts("sm_90a", BF16)
    batch = requests(16)._replace(tokens=slice(1, 1 + tokens), are_new=True)
    cache, one = cache_of(batch, 16), torch.tensor(1.0)
    q, k, v = (torch.randn(sum(QUERIES), heads, 64).bfloat16() for heads in (8, 2, 2))
    out = torch.zeros_like(q)
    scales: dict[str, Any] = {"k_scale": one, "v_scale": one}
    layer.attend("model.layers.3.attn", q, cache, batch, out, new=(k, v), **scales)
    ((*tensors, pattern, options),) = packed
    assert all(torch.equal(found, whole[1:71]) for found, whole in zip(tensors, (q, k, v), strict=True))
    assert isinstance(pattern, Causal) and options["out"].data_ptr() == out[1:].data_ptr()
    assert (options["softcap"], options["scale"], options["sink"]) == (30.0, 0.2, layer.sink)
    plain = Layer(8, 2, 64, 0.2)
    plain._packs = True
    for is_new, rows in ((False, (k, v)), (True, None)):
        plain.attend("layer", q, cache, requests(16)._replace(are_new=is_new), out, new=rows, **scales)
    assert len(packed) == 1 and len(calls) == 2


@pytest.mark.parametrize(
    ("layer", "arch", "packs"),
    [
        (Layer(8, 2, 64, 0.2), "sm_90a", False),
        (Layer(8, 2, 64, 0.2), "sm_89", True),
        (Layer(8, 2, 64, 0.2, sink=torch.zeros(8)), "sm_90a", True),
        (Layer(8, 2, 64, 0.2, softcap=30.0), "sm_90a", True),
        (Layer(8, 2, 64, 0.2, is_e4m3=True), "sm_89", False),
        (Layer(8, 2, 64, 0.2, batch_invariant=True), "sm_89", False),
    ],
    ids=["fast prompts", "Ada", "sinks", "softcap", "e4m3", "batch-invariant"],
)
def test_which_layers_pack_prompts(layer: Layer, arch: str, packs: bool) -> None:
    assert layer._has_slow_prompts(arch, BF16) == packs
    with verified_only():
        assert not layer._has_slow_prompts(arch, BF16)  # kernels of packed sequences may have no receipt


def test_prompts_whose_keys_are_all_new() -> None:
    def new(queries: list[int], keys: list[int] | None) -> bool:
        return layers.are_new(torch.tensor(queries), None if keys is None else torch.tensor(keys))

    assert new([40, 60], [40, 60]) and new([1, 63], [1, 63])
    assert not new([40, 60], [40, 61]) and not new([1, 62], [1, 62]) and not new([40], None)


@pytest.mark.parametrize("scales", [(0.5, 0.75), ([0.5, 0.5], [0.75, 0.75])], ids=["one", "of heads"])
def test_factors_of_an_e4m3_cache_are_the_layers(calls: Any, scales: Any) -> None:
    """vLLM keeps e4m3 as uint8, and a factor without dimensions or one for each KV head."""
    batch = requests(32)
    cache = cache_of(batch, 32, dtype=E4M3)
    k, v = (torch.tensor(scale) for scale in scales)
    q, out = computed(Layer(8, 2, 64, 0.125, is_e4m3=True), cache.view(torch.uint8), batch, k=k, v=v)
    torch.testing.assert_close(out, dense(q, cache, batch, (0.5, 0.75)), atol=3e-2, rtol=3e-2)
    assert calls[0]["k_scale"].dim() == 1


def test_sinks_softcap_and_invariance_reach_the_call(calls: Any) -> None:
    batch = requests(16)
    layer = Layer(8, 2, 64, 0.2, softcap=3.0, sink=torch.zeros(8), batch_invariant=True)
    computed(layer, cache_of(batch, 16), batch)
    call = calls[0]
    assert (call["softcap"], call["scale"], call["batch_invariant"]) == (3.0, 0.2, True) and call["sink"] is layer.sink
    assert "k_scale" not in call and call["workspace"] is None
    with pytest.raises(ArgumentError, match=r"sinks: has shape \(4,\), expected \(num_heads 8,\)"):
        Layer(8, 2, 64, 0.2, sink=torch.zeros(4))


def test_memory_serves_calls_up_to_the_largest_batch() -> None:
    memory = torch.zeros(4, dtype=torch.uint8)
    plain = Layer(8, 2, 64, 0.2, workspace=memory)
    assert plain._memory(10**6, 10**6) is memory
    invariant = Layer(8, 2, 64, 0.2, batch_invariant=True, most=Most(8, 100), workspace=memory)
    assert invariant._memory(100, 8) is memory
    assert invariant._memory(101, 8) is None and invariant._memory(100, 9) is None


def test_preparing_allocates_memory_once_and_clears_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    def allocate(**sizes: Any) -> Any:
        asked.append(sizes)
        return torch.ones(4, dtype=torch.uint8)

    layers._workspace.cache_clear()
    monkeypatch.setattr(layers, "paged_workspace", allocate)
    monkeypatch.setattr(layers, "_load", lambda *args, **options: None)
    packed: list[Any] = []
    monkeypatch.setattr(layers, "arch_of", lambda device: "sm_90a")
    monkeypatch.setattr(Layer, "_load_packed", lambda self, *given: packed.append(self.sink))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    one, other = (Layer(8, 2, 64, 0.2) for _ in range(2))
    one.prepare(BF16, torch.ones(8, dtype=BF16))
    assert one.workspace is not None and not one.workspace.any() and one.sink.dtype == torch.float32
    one.workspace.fill_(1)
    assert len(packed) == 1  # prompts with sinks
    other.prepare(BF16, None)
    assert len(packed) == 1 and other.workspace is one.workspace and not one.workspace.any() and len(asked) == 1
    Layer(8, 2, 64, 0.2, batch_invariant=True, most=Most(8, 100)).prepare(BF16, None)
    assert (asked[1]["batch"], asked[1]["tokens"], asked[1]["heads"], asked[1]["batch_invariant"]) == (8, 100, 8, True)
    listed = Layer(8, 2, 64, 0.2, batch_invariant=True, most=Most(8, 100), policy=lambda call: None)
    listed.prepare(BF16, None)
    assert asked[2]["batch"] == 100  # a list is a request
    unknown = Layer(8, 2, 64, 0.2, batch_invariant=True)
    unknown.prepare(BF16, None)
    assert unknown.workspace is None and len(asked) == 3
    layers._workspace.cache_clear()


# Policies


def last_pages(call: policies.LayerCall) -> KeyLists:
    """The last two pages of 16 keys of each request."""
    ends = (call.seq_lens - 1) // 16
    of_tokens = torch.repeat_interleave(torch.arange(4), call.cu_seqlens_q.diff())
    entries = torch.stack([ends - 1, ends], -1)[of_tokens].int()
    return KeyLists(entries[None].contiguous(), keys=16)


def test_a_policy_names_the_pages_of_a_layer(calls: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("my_policies")
    module.last_pages = last_pages  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "my_policies", module)
    policy = policies.policy_of({"policy": "my_policies:last_pages"})
    assert policy is not None
    batch = requests(16)
    cache = cache_of(batch, 16)
    q, out = computed(Layer(8, 2, 64, 0.125, policy=policy), cache, batch)
    assert isinstance(calls[0]["pattern"], KeyLists)
    right = dense(q, cache, batch, window=300 - 272)  # keys 272 to 299 of the first request
    torch.testing.assert_close(out[:1], right[:1], atol=2e-2, rtol=2e-2)


def test_a_policy_is_not_asked_for_windows_and_later_keys(calls: Any) -> None:
    asked = []
    batch = requests(16)
    cache = cache_of(batch, 16)
    policy = asked.append
    computed(Layer(8, 2, 64, 0.125, 20, policy=policy), cache, batch)
    computed(Layer(8, 2, 64, 0.125, policy=policy), cache, batch._replace(causal=False))
    assert not asked
    computed(Layer(8, 2, 64, 0.125, policy=policy), cache, batch)  # it returns None: all keys
    assert [call.layer for call in asked] == ["model.layers.3.attn"] and isinstance(calls[-1]["pattern"], Causal)
    assert asked[0].k_cache.shape == (cache.shape[0], 2, 16, 64) and asked[0].seq_lens is batch.seq_lens


def test_a_window_is_a_policy(calls: Any) -> None:
    policy = policies.policy_of({"kind": "sink_window", "sink": 4, "left": 30})
    batch = requests(16)
    computed(Layer(8, 2, 64, 0.125, policy=policy), cache_of(batch, 16), batch)
    pattern = calls[0]["pattern"]
    assert isinstance(pattern, SinkWindow) and (pattern.sink, pattern.left) == (4, 30)
    assert policies.policy_of(None) is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ("sink_window", "block_sparse: is str, expected a mapping"),
        ({"kind": "strided"}, "block_sparse.kind: is 'strided', expected sliding_window or sink_window"),
        ({"kind": ["a"]}, "block_sparse.kind: is"),
        ({"kind": "sink_window", "left": 3}, "block_sparse: has fields .'left'. of kind 'sink_window'"),
        ({"kind": "sliding_window", "left": 3, "right": 2}, "block_sparse.right: is 2, expected 0"),
        ({"policy": "a:b", "left": 3}, "expected 'policy' alone"),
        ({"policy": 3}, "block_sparse.policy: is 3, expected 'package.module:function'"),
        ({"policy": "no_such_module:f"}, "which cannot be imported: No module named 'no_such_module'"),
        ({"policy": "math:no_such"}, "which cannot be imported"),
        ({"policy": "math:pi"}, "which is float, not a function"),
    ],
)
def test_a_wrong_setting_is_named(fields: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        policies.policy_of(fields)


# Layers that are not served


def test_parts_that_are_served_alone_but_not_together_are_named() -> None:
    assert layers.unserved(128, BF16, "auto", (9, 0)) is None and layers.unserved(192, BF16, "auto", (9, 0)) is None
    assert (
        layers.unserved(256, torch.float16, "fp8", (8, 9)) is None and layers.unserved(64, BF16, None, (9, 0)) is None
    )
    assert "--kv-cache-dtype auto" in str(layers.unserved(128, BF16, "float16", (9, 0)))
    assert "head_size 192 with kv_cache_dtype fp8 (head sizes are" in str(layers.unserved(192, BF16, "fp8", (9, 0)))
    assert "on sm_80, which has no FP8 instructions" in str(layers.unserved(128, BF16, "fp8_e4m3", (8, 0)))


def test_reasons_come_with_what_is_served() -> None:
    assert layers.explained([]) == []
    first, second, third, last = layers.explained(
        ["head_size not supported", "attention type encoder not supported", "R-SWA not supported"]
    )
    assert first == "head_size not supported (head sizes are 64, 128, 192, 256, with an e4m3 cache 64, 128, 256)"
    assert "only layers of decoders" in second and third == "R-SWA not supported" and "FLASH_ATTN" in last


# Registration


class Member:
    def __init__(self) -> None:
        self.path: str | None = None

    def is_overridden(self) -> bool:
        return self.path is not None

    def get_path(self) -> str | None:
        return self.path


@pytest.fixture
def custom(monkeypatch: pytest.MonkeyPatch) -> Member:
    """vLLM's member CUSTOM, with the registry that vLLM has."""
    member = Member()
    registry = SimpleNamespace(
        AttentionBackendEnum={"CUSTOM": member}, register_backend=lambda it, path: setattr(it, "path", path)
    )
    monkeypatch.setattr(registration, "optional", lambda module, extra: registry)
    monkeypatch.setattr(metadata, "version", lambda name: "0.33.0")
    return member


def test_registering_again_changes_nothing(custom: Member) -> None:
    registration.plugin()
    registration.register_vllm()
    registration.plugin()
    assert custom.path == registration.BACKEND


@pytest.mark.parametrize("version", ["0.31.0", "0.34.0rc1", "0.3.3", "1.0", "dev", "0.33-x"])
def test_another_version_is_refused_with_those_that_work(
    custom: Member, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: version)
    with pytest.raises(ToolchainError, match=r"vLLM 0.32.\* and 0.33.\*, and " + version + " is installed"):
        registration.register_vllm()
    assert custom.path is None
    registration.plugin()  # of a process that may use another backend
    assert custom.path == registration.BACKEND
    with pytest.raises(ToolchainError, match="select another --attention-backend"):
        _ = registration.PagedBackend


@pytest.mark.parametrize("version", ["0.32.0", "0.33.1", "0.33.0+cu129", "0.33.1.dev3", "0.33"])
def test_patch_releases_are_accepted(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: version)
    registration.check_version()


def test_the_backend_of_another_package_stays(custom: Member, caplog: pytest.LogCaptureFixture) -> None:
    custom.path = "their.Backend"
    registration.plugin()
    assert custom.path == "their.Backend" and "CUSTOM is their.Backend, of another package" in caplog.text
    with pytest.raises(ToolchainError, match=r"is their.Backend, of another package"):
        registration.register_vllm()


def test_without_vllm_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    monkeypatch.setitem(sys.modules, "vllm", None)
    monkeypatch.setitem(sys.modules, registration.REGISTRY, None)
    with pytest.raises(ToolchainError, match=r"needs vLLM 0.32 or 0.33, which is not installed: pip install"):
        registration.register_vllm()
    registration.plugin()
    assert "needs vllm" in caplog.text
    with pytest.raises(AttributeError, match="no attribute 'Other'"):
        _ = registration.Other


def test_the_entry_point_is_the_plugin() -> None:
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    (point,) = project["entry-points"]["vllm.general_plugins"].values()
    assert metadata.EntryPoint("block_sparse", point, "vllm.general_plugins").load() is registration.plugin


# Models that select keys


def msa(decode: bool) -> dict[str, Any]:
    """Arguments of MSA's functions: three requests, 2 KV heads, pages of 128."""
    lengths, queries = torch.tensor([300, 1000, 0 if decode else 129]).int(), [2, 2, 2] if decode else [5, 1, 129]
    pages = [-(-int(length) // 128) for length in lengths]
    table = torch.full((3, 8), -1, dtype=torch.int32)
    for row, numbers in zip(table, torch.randperm(sum(pages)).int().split(pages), strict=True):
        row[: len(numbers)] = numbers
    tokens = sum(queries)
    topk = torch.full((2, tokens, 3), -1, dtype=torch.int32)
    for i, (length, first) in enumerate(zip(lengths.tolist(), [0, *accumulate(queries)], strict=False)):
        for j in range(queries[i]):
            blocks = (length - queries[i] + j) // 128 + 1
            for head in range(2):
                chosen = torch.randperm(max(blocks, 0))[:3]
                topk[head, first + j, : len(chosen)] = chosen.int()
    # the buffer of the indexer: tokens first, and longer
    buffer = torch.full((tokens + 7, 2, 3), 5, dtype=torch.int32)
    buffer[:tokens] = topk.transpose(0, 1)
    given = {
        "q": torch.randn(tokens, 8, 128).bfloat16(),
        "kv_cache": torch.randn(sum(pages), 2, 128, 256).bfloat16(),
        "topk_idx": buffer[:tokens].transpose(0, 1),
        "block_table": table,
        "seq_lens": lengths,
        "num_kv_heads": 2,
        "sm_scale": 0.1,
        "output": torch.full((tokens, 8, 128), float("nan")).bfloat16(),
    }
    if decode:
        return given | {"decode_query_len": 2}
    bounds = torch.tensor([0, *accumulate(queries)], dtype=torch.int32)
    prefix = lengths - bounds.diff()
    return given | {"cu_seqlens_q": bounds, "prefix_lens": prefix, "max_query_len": max(queries)}


def right_of_msa(given: dict[str, Any], k: Any = 1.0, v: Any = 1.0) -> Any:
    """Each query by a loop over its blocks, from vLLM's description of the arguments."""
    out = torch.zeros_like(given["output"])
    bounds = given.get("cu_seqlens_q", torch.arange(4) * 2).tolist()
    for i, length in enumerate(given["seq_lens"].tolist()):
        for j in range(bounds[i], bounds[i + 1]):
            position = length - bounds[i + 1] + j
            for head in range(8):
                blocks = [int(block) for block in given["topk_idx"][head // 4, j] if block >= 0]
                keys = [key for block in blocks for key in range(128 * block, 128 * block + 128) if key <= position]
                if not keys:
                    continue
                places = [(int(given["block_table"][i, key // 128]), key % 128) for key in keys]
                rows = torch.stack([given["kv_cache"][page, head // 4, row].float() for page, row in places])
                logits = rows[:, :128] * k @ given["q"][j, head].float() * given["sm_scale"]
                out[j, head] = (logits.softmax(0) @ (rows[:, 128:] * v)).bfloat16()
    return out


@pytest.mark.parametrize("decode", [True, False], ids=["steps", "prompts"])
def test_msa_reads_the_listed_blocks(calls: Any, decode: bool) -> None:
    given = msa(decode)
    (selections.minimax_m3_sparse_attn_decode if decode else selections.minimax_m3_sparse_attn)(**given)
    torch.testing.assert_close(given["output"], right_of_msa(given), atol=2e-2, rtol=2e-2)
    assert calls[0]["pattern"].indices.data_ptr() == given["topk_idx"].data_ptr()  # no copy


def test_msa_takes_factors_of_the_cache_and_of_tokens(calls: Any) -> None:
    given = msa(True)
    given["kv_cache"] = given["kv_cache"].to(E4M3)
    one = given | {"k_scale": torch.tensor(0.5), "v_scale": torch.tensor([2.0])}
    selections.minimax_m3_sparse_attn_decode(**one)
    torch.testing.assert_close(given["output"], right_of_msa(given, 0.5, 2.0), atol=3e-2, rtol=3e-2)
    first = given["output"].clone()
    tokens = (2, given["kv_cache"].shape[0] * 128 + 64)
    selections.minimax_m3_sparse_attn_decode(**given, k_scale=torch.full(tokens, 0.5), v_scale=torch.full(tokens, 2.0))
    assert torch.equal(given["output"], first) and calls[1]["k_scale"].shape == (given["kv_cache"].shape[0], 2, 128)
    drawn = torch.rand(tokens)
    selections.minimax_m3_sparse_attn_decode(**given, k_scale=drawn, v_scale=drawn)
    assert calls[2]["k_scale"][3, 1, 7] == drawn[1, 3 * 128 + 7]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_kv_heads": 4}, r"kv_cache: has shape .*, expected \(pages, num_kv_heads 4, 128, 2 \* head_dim\)"),
        ({"decode_query_len": 3}, "q: has 6 tokens, expected 3 for each of 3 requests"),
        ({"k_scale": torch.ones(3, 5)}, r"k_scale: has shape \(3, 5\), expected one element, or \(num_kv_heads 2"),
    ],
)
def test_msa_names_what_is_wrong(calls: Any, change: dict[str, Any], message: str) -> None:
    given = msa(True)
    given["kv_cache"] = given["kv_cache"].to(E4M3)
    with pytest.raises(ArgumentError, match=message):
        selections.minimax_m3_sparse_attn_decode(**given | change)
    assert not calls


def qsa(queries: list[int], lengths: list[int], padding: int = 0) -> dict[str, Any]:
    """Arguments of QSA's function: lists of 12 tokens and a count, pages of 16."""
    pages = [-(-length // 16) for length in lengths]
    table = torch.zeros(len(lengths), max(pages) + 1, dtype=torch.int32)
    for row, numbers in zip(table, torch.randperm(sum(pages)).int().split(pages), strict=True):
        row[: len(numbers)] = numbers
    rows = sum(queries) + padding
    listed = torch.full((rows, 13), -1, dtype=torch.int32)
    to_req = torch.zeros(rows, dtype=torch.int32)
    row = 0
    for i, (count, length) in enumerate(zip(queries, lengths, strict=True)):
        for j in range(count):
            chosen = torch.randperm(length - count + j + 1)[:12].int()
            listed[row, : len(chosen)], listed[row, 12], to_req[row] = chosen, len(chosen), i
            row += 1
    listed[row:, 12] = 0
    return {
        "q": torch.randn(rows, 4, 64).bfloat16(),
        **{name: torch.randn(sum(pages), 16, 2, 64).bfloat16() for name in ("k_cache", "v_cache")},
        "logical_indices": listed,
        "block_table": table,
        "token_to_req": to_req,
        "output_gate": torch.randn(rows, 4 * 64).bfloat16(),
    }


def right_of_qsa(given: dict[str, Any], rows: int, k: float = 1.0, v: float = 1.0) -> Any:
    out = torch.zeros_like(given["q"])
    for j in range(rows):
        keys = given["logical_indices"][j, : int(given["logical_indices"][j, 12])]
        pages = given["block_table"][int(given["token_to_req"][j]), keys.long() // 16].long()
        for head in range(4):
            keys_of, values_of = (
                given[name][pages, keys.long() % 16, head // 2].float() * factor
                for name, factor in (("k_cache", k), ("v_cache", v))
            )
            logits = keys_of @ given["q"][j, head].float() / 8
            gate = torch.sigmoid(given["output_gate"][j].view(4, 64)[head].float())
            out[j, head] = (logits.softmax(0) @ values_of * gate).bfloat16()
    return out


@pytest.mark.parametrize("prefill", [True, False])
@pytest.mark.parametrize("padding", [0, 3])
def test_qsa_reads_the_listed_tokens(calls: Any, prefill: bool, padding: int) -> None:
    """vLLM pads the batch of a graph with tokens that name request 0."""
    queries, lengths = ([1, 6, 2], [40, 6, 64]) if prefill else ([1, 1, 1], [40, 7, 64])
    given = qsa(queries, lengths, padding)
    out = torch.zeros_like(given["q"])
    assert selections.qsa_sparse_paged_attention(**given, use_prefill_config=prefill, out=out) is out
    rows = sum(queries)
    torch.testing.assert_close(out[:rows], right_of_qsa(given, rows)[:rows], atol=2e-2, rtol=2e-2)
    if prefill:
        assert calls[0]["cu_seqlens_q"].tolist() == [0, 1, 7, 9] and not out[rows:].any()


def test_a_padded_step_of_one_request_sees_the_end_of_its_pages(calls: Any) -> None:
    given = qsa([1], [32], padding=3)
    given["block_table"] = given["block_table"][:, :2]  # as long as the longest request may be
    given["logical_indices"][0] = torch.tensor([31, 30, *[-1] * 10, 2])
    out = selections.qsa_sparse_paged_attention(**given, use_prefill_config=False)
    torch.testing.assert_close(out[:1], right_of_qsa(given, 1)[:1], atol=2e-2, rtol=2e-2)


def test_qsa_takes_factors_of_an_e4m3_cache(calls: Any) -> None:
    given = qsa([1, 1], [40, 20])
    for name in ("k_cache", "v_cache"):
        given[name] = given[name].to(E4M3)
    out = selections.qsa_sparse_paged_attention(**given, use_prefill_config=False, k_scale=0.5, v_scale=2.0)
    torch.testing.assert_close(out, right_of_qsa(given, 2, 0.5, 2.0), atol=3e-2, rtol=3e-2)
    with pytest.raises(ArgumentError, match=r"v_scale: is None, with a cache of torch.float8_e4m3fn"):
        selections.qsa_sparse_paged_attention(**given, use_prefill_config=False, k_scale=0.5)


def test_empty_batches_compute_nothing(calls: Any) -> None:
    given = qsa([1, 1], [40, 20])
    for name in ("q", "logical_indices", "token_to_req", "output_gate"):
        given[name] = given[name][:0]
    assert selections.qsa_sparse_paged_attention(**given, use_prefill_config=True).shape == (0, 4, 64)
    decode = msa(True)
    for name in ("q", "output", "seq_lens", "block_table"):
        decode[name] = decode[name][:0]
    selections.minimax_m3_sparse_attn_decode(**decode)
    assert not calls
