"""The backend against vLLM's own Python: classes, signatures, metadata, selection, and an attention layer on the CPU.

``python scripts/engines.py vllm`` downloads vLLM's wheels and runs this file.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import json
import pickle
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm.v1.attention.backend", reason="needs vLLM: python scripts/engines.py vllm")

import paged_oracle  # noqa: E402
from vllm import envs  # noqa: E402
from vllm.config import CacheConfig, DeviceConfig, VllmConfig, set_current_vllm_config  # noqa: E402
from vllm.forward_context import set_forward_context  # noqa: E402
from vllm.model_executor.layers.attention import attention as vllm_layer  # noqa: E402
from vllm.platforms.interface import DeviceCapability  # noqa: E402
from vllm.v1.attention import backend as interface  # noqa: E402
from vllm.v1.attention.backends.registry import AttentionBackendEnum  # noqa: E402
from vllm.v1.attention.backends.utils import get_supported_kv_cache_layouts  # noqa: E402
from vllm.v1.attention.selector import AttentionSelectorConfig  # noqa: E402
from vllm.v1.kv_cache_interface import FullAttentionSpec  # noqa: E402
from vllm.v1.kv_cache_layout import KVCacheLayout  # noqa: E402
from vllm.v1.worker.utils import customize_attention_spec, select_common_block_size  # noqa: E402

from runtime.errors import ArgumentError, ToolchainError  # noqa: E402
from runtime.integrations.vllm import layers, registration, selections  # noqa: E402
from runtime.integrations.vllm.backend import PagedBackend, PagedImpl, PagedMetadataBuilder  # noqa: E402

H100 = DeviceCapability(9, 0)
BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
NAME = "model.layers.0.self_attn.attn"
HEADS, KV_HEADS, D, PAGE = 8, 2, 64, 16
SOURCES = {
    "minimax_m3_sparse_attn": "models/minimax_m3/common/ops/sparse_attn.py",
    "minimax_m3_sparse_attn_decode": "models/minimax_m3/common/ops/sparse_attn.py",
    "qsa_sparse_paged_attention": "models/qwen4_exp/nvidia/ops/qsa.py",
}


@pytest.fixture(autouse=True)
def unregistered() -> Iterator[None]:
    yield
    AttentionBackendEnum.CUSTOM.clear_override()


def config(**fields: Any) -> Any:
    return VllmConfig(device_config=DeviceConfig("cpu"), **fields)


# Classes


@pytest.mark.parametrize("cls", [PagedBackend, PagedImpl, PagedMetadataBuilder])
def test_each_method_takes_the_arguments_of_vllms(cls: type) -> None:
    assert not inspect.isabstract(cls)
    base = next(each for each in cls.__mro__ if each.__module__ == interface.__name__)
    checked = 0
    for name, ours in vars(cls).items():
        theirs = inspect.getattr_static(base, name, None)
        if not callable(getattr(cls, name)) or theirs is None or name == "get_name":
            continue
        assert type(ours) is type(theirs), name  # a static method, a class method, a function
        own, expected = (inspect.signature(getattr(each, name)).parameters for each in (cls, base))
        if any(each.kind is each.VAR_KEYWORD for each in own.values()) and name != "__init__":
            continue
        assert list(own)[: len(expected)] == list(expected), name
        for parameter in expected.values():
            assert own[parameter.name].default == parameter.default or own[parameter.name].default is None, name
        checked += 1
    assert checked >= 3
    for name, value in vars(cls).items():  # no attribute that vLLM does not read
        if not name.startswith("_") and not callable(getattr(cls, name)) and name != "supports_kv_cache_update_bypass":
            assert hasattr(base, name), (name, value)


def test_graphs_of_steps_are_supported() -> None:
    support = PagedMetadataBuilder.get_cudagraph_support(config(), None)
    assert support is interface.AttentionCGSupport.UNIFORM_BATCH
    assert PagedMetadataBuilder.get_varlen_cudagraph_max_query_len(config(), None) == 1


def test_blocks_are_divided_into_pages_that_are_powers_of_two() -> None:
    for block, page in ((16, 16), (48, 16), (64, 64), (528, 16), (1056, 32), (2048, 1024)):
        assert PagedBackend.supports_block_size(block)
        assert select_common_block_size(block, [PagedBackend]) == page
    assert not PagedBackend.supports_block_size(8) and PagedBackend.get_preferred_block_size(16) == 16
    spec = customize_attention_spec(PagedBackend, spec_of(48))
    assert spec.get_block_stride_alignment() == 16 * KV_HEADS * 2 * D * 2


def test_layouts_are_left_to_vllm() -> None:
    assert len(get_supported_kv_cache_layouts([PagedBackend])) == len(KVCacheLayout)


# Registration


def test_vllm_loads_the_plugin_and_resolves_the_class() -> None:
    (point,) = (each for each in metadata.entry_points(group="vllm.general_plugins") if each.name == "block_sparse")
    for _ in range(2):
        point.load()()
    member = AttentionBackendEnum["CUSTOM"]
    assert member.get_class() is PagedBackend and AttentionBackendEnum[PagedBackend.get_name()] is member
    assert pickle.loads(pickle.dumps(member)) is member  # a setting that vLLM sends to its processes


def test_another_version_is_refused_when_a_layer_selects_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: "0.31.0")
    with pytest.raises(ToolchainError, match=r"vLLM 0.32.\* and 0.33.\*, and 0.31.0 is installed"):
        registration.register_vllm()
    registration.plugin()
    with pytest.raises(ToolchainError, match=r"0.31.0 is installed"):
        AttentionBackendEnum.CUSTOM.get_class()


# Selection


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM's platform of CUDA, on a GPU that there need not be."""
    for name in ("vllm._C_stable_libtorch", "vllm._C", "vllm._moe_C_stable_libtorch"):
        if importlib.util.find_spec(name) is None:
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
    from vllm.platforms import cuda as platform

    monkeypatch.setattr(platform.CudaPlatformBase, "get_device_capability", classmethod(lambda cls: H100))
    registration.plugin()
    return platform.CudaPlatformBase


def selected(cuda: Any, head_size: int = 128, dtype: Any = BF16, cache: str = "auto", **fields: Any) -> Any:
    asked = AttentionSelectorConfig(head_size, dtype, cache, fields.pop("block_size", None), **fields)
    return cuda.get_attn_backend_cls(AttentionBackendEnum.CUSTOM, asked)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"head_size": 64, "cache": "fp8"},
        {"head_size": 192, "dtype": torch.float16},
        {"head_size": 256, "cache": "fp8_e4m3", "block_size": 48},
        {"cache": "bfloat16", "has_sink": True, "has_sliding_window": True},
        {"use_non_causal": True, "use_batch_invariant": True, "use_per_head_quant_scales": True},
        {"use_kv_connector": True, "use_adaptive_verification": True},
    ],
)
def test_a_layer_that_is_served_selects_the_backend(cuda: Any, fields: dict[str, Any]) -> None:
    assert selected(cuda, **fields) == "runtime.integrations.vllm.backend.PagedBackend"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"head_size": 80}, "head_size not supported .head sizes are 64, 128, 192, 256"),
        ({"head_size": 192, "cache": "fp8"}, "head_size 192 with kv_cache_dtype fp8"),
        ({"dtype": torch.float32}, "dtype not supported .dtypes are float16 and bfloat16: --dtype"),
        ({"cache": "fp8_e5m2"}, "kv_cache_dtype not supported .caches are auto, .*fp8_e4m3: --kv-cache-dtype"),
        ({"cache": "float16"}, "kv_cache_dtype float16 with queries in torch.bfloat16"),
        ({"block_size": 24}, "block_size not supported .blocks are multiples of 16 tokens"),
        ({"use_mla": True}, "MLA not supported"),
        ({"use_sparse": True}, "sparse not supported .*sparse_kernel_codegen.integrations.vllm"),
        ({"use_mm_prefix": True}, "partial multimodal token full attention not supported"),
        ({"use_rswa": True}, "R-SWA not supported"),
        ({"use_dcp": True}, "DCP not supported .*--decode-context-parallel-size 1"),
        ({"use_pcp": True}, "PCP not supported"),
        ({"attn_type": "encoder_decoder"}, "attention type encoder_decoder not supported .only layers of decoders"),
        ({"attn_type": "encoder_only"}, "attention type encoder_only not supported"),
    ],
)
def test_a_layer_that_is_not_served_is_refused_by_name(cuda: Any, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"CUSTOM is not valid for this configuration.*{message}.*FLASH_ATTN"):
        selected(cuda, **fields)


def test_a_gpu_without_kernels_is_refused() -> None:
    fields = AttentionSelectorConfig(128, BF16, "auto", None)._asdict()
    assert PagedBackend.validate_configuration(device_capability=H100, **fields) == []
    (reason, _) = PagedBackend.validate_configuration(device_capability=DeviceCapability(7, 5), **fields)
    assert reason.startswith("compute capability not supported (kernels are written for sm_80")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"alibi_slopes": [0.5] * HEADS}, "alibi_slopes: is given, which is not supported: select another"),
        ({"attn_type": interface.AttentionType.ENCODER_ONLY}, "attn_type: is .*expected .*DECODER|decoder"),
        ({"chunk_lookback": 3}, "chunk_lookback: is given"),
        ({"sinks": torch.zeros(3)}, "sinks: has shape"),
    ],
)
def test_a_layer_with_other_features_is_refused(fields: dict[str, Any], message: str) -> None:
    assert PagedImpl(HEADS, D, 0.1, KV_HEADS, chunk_lookback=-1).num_heads == HEADS
    with pytest.raises(ArgumentError, match=message):
        PagedImpl(HEADS, D, 0.1, KV_HEADS, **fields)


# Metadata


def spec_of(block_size: int = PAGE, **fields: Any) -> Any:
    return FullAttentionSpec(block_size=block_size, num_kv_heads=KV_HEADS, head_size=D, dtype=BF16, **fields)


def common(lengths: list[int], queries: list[int], page: int = PAGE, padding: int = 0, causal: Any = True) -> Any:
    """vLLM's metadata of a batch, padded by requests and tokens as for a CUDA graph."""
    pages = [-(-length // page) for length in lengths]
    table = torch.zeros(len(lengths) + padding, max(pages), dtype=torch.int32)
    for row, numbers in zip(table, torch.randperm(sum(pages)).int().split(pages), strict=False):
        row[: len(numbers)] = numbers
    bounds = torch.tensor([0, *queries, *[0] * padding]).cumsum(0).int()
    slots = []
    for i, (length, count) in enumerate(zip(lengths, queries, strict=True)):
        place = torch.arange(length - count, length)
        slots.append(table[i, place // page].long() * page + place % page)
    return interface.CommonAttentionMetadata(
        query_start_loc=bounds,
        query_start_loc_cpu=bounds,
        seq_lens=torch.tensor([*lengths, *[0] * padding], dtype=torch.int32),
        num_reqs=len(lengths) + padding,
        num_actual_tokens=sum(queries) + padding,
        max_query_len=max(queries),
        max_seq_len=max(lengths),
        block_table_tensor=table,
        slot_mapping=torch.cat([*slots, torch.full((padding,), -1)]),
        causal=causal,
        seq_lens_cpu_upper_bound=torch.tensor([*lengths, *[0] * padding], dtype=torch.int32),
    )


def builder(**fields: Any) -> Any:
    return PagedMetadataBuilder(spec_of(**fields), [NAME], config(), torch.device("cpu"))


def test_metadata_of_steps_are_vllms_own_tensors() -> None:
    """A CUDA graph of steps reads the tensors that vLLM fills again."""
    batch = common([40, 20], [1, 1], padding=2)
    made = builder()
    for found in (made.build(0, batch), made.build_for_cudagraph_capture(batch), made.build_for_drafting(batch, 0)):
        assert found.slot_mapping is batch.slot_mapping
        ((table, lengths, bounds, longest, causal, tokens, are_new),) = found.parts
        pairs = ((table, batch.block_table_tensor), (lengths, batch.seq_lens), (bounds, batch.query_start_loc))
        assert all(ours.data_ptr() == theirs.data_ptr() and ours.shape == theirs.shape for ours, theirs in pairs)
        assert (longest, causal, tokens, are_new) == (1, True, slice(0, 4), False)
        made.update_draft_decode_metadata(found)


@pytest.mark.parametrize(
    ("lengths", "queries", "found"),
    [([80, 70], [80, 70], True), ([90, 70], [80, 70], False), ([30, 5], [30, 5], False), ([40, 80], [1, 80], True)],
)
def test_prompts_without_earlier_keys_are_known(lengths: list[int], queries: list[int], found: bool) -> None:
    assert builder().build(0, common(lengths, queries)).parts[-1].are_new == found


def test_steps_and_prompts_are_two_parts() -> None:
    batch = common([40, 20, 90, 8], [1, 1, 80, 5])
    made = builder()
    found = made.build(0, batch)
    steps, prompts = found.parts
    assert (steps.tokens, prompts.tokens) == (slice(0, 2), slice(2, 87))
    assert (steps.cu_seqlens_q.tolist(), prompts.cu_seqlens_q.tolist()) == ([0, 1, 2], [0, 80, 85])
    assert (steps.seq_lens.tolist(), prompts.seq_lens.tolist()) == ([40, 20], [90, 8])
    assert (steps.max_query_len, prompts.max_query_len) == (1, 80) and prompts.cu_seqlens_q.dtype == torch.int32
    other, slots = batch.block_table_tensor + 1, batch.slot_mapping + 1
    again = made.update_block_table(found, other, slots)
    assert again.slot_mapping is slots
    assert all(torch.equal(part.block_table, rows) for part, rows in zip(again.parts, other.split(2), strict=True))
    assert found.parts[1].block_table[0, 0] == batch.block_table_tensor[2, 0]
    assert again.parts[1].seq_lens is prompts.seq_lens


def test_verified_drafts_are_steps() -> None:
    """The requests of a step may have as many queries as are verified at once, and one of a prompt less."""
    settings = config()
    settings.speculative_config = SimpleNamespace(num_speculative_tokens=3, parallel_drafting=False)
    made = PagedMetadataBuilder(spec_of(), [NAME], settings, torch.device("cpu"))
    assert made.reorder_batch_threshold == 4
    assert PagedMetadataBuilder.get_varlen_cudagraph_max_query_len(settings, None) == 4
    (steps,) = made.build(0, common([40, 20], [4, 2])).parts
    assert steps.max_query_len == 4 and steps.cu_seqlens_q.tolist() == [0, 4, 6]
    steps, prompts = made.build(0, common([40, 20], [4, 9])).parts
    assert (steps.max_query_len, prompts.max_query_len) == (4, 9)


def test_metadata_that_are_not_served_are_refused() -> None:
    with pytest.raises(ArgumentError, match="causal: is Tensor, one value for each request, expected a bool"):
        builder().build(0, common([40, 20], [1, 5], causal=torch.ones(2, dtype=torch.int32)))
    with pytest.raises(
        ArgumentError, match=r"head_size_v: is 128 in model.layers.0.self_attn.attn, expected head_size"
    ):
        builder(head_size_v=128)


# A layer


@pytest.fixture
def computing(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Calls of ``paged_attention`` by the definition, and vLLM's operation that writes the cache by torch."""
    torch.manual_seed(0)
    calls: list[dict[str, Any]] = []

    def attend(q: Any, k_cache: Any, v_cache: Any, pattern: Any, **given: Any) -> Any:
        calls.append({"q": q, "pattern": pattern, "k_cache": k_cache, **given})
        return paged_oracle.attend(q, k_cache, v_cache, pattern, **given)

    def write(*given: Any) -> None:
        key, value, k_cache, v_cache, slots, kind, k_scale, v_scale = given
        page = k_cache.shape[1]
        for j, slot in enumerate(slots.tolist()):
            if slot < 0:
                continue
            for rows, cache, scale in ((key, k_cache, k_scale), (value, v_cache, v_scale)):
                row = rows[j] if kind == "auto" else (rows[j].float() / scale).to(E4M3).view(torch.uint8)
                cache[slot // page, slot % page] = row

    monkeypatch.setattr(layers, "paged_attention", attend)
    from runtime.integrations.vllm import backend

    monkeypatch.setattr(backend, "ops", SimpleNamespace(reshape_and_cache_flash=write))
    return calls


def layer_of(settings: Any, cache_dtype: str = "auto", **fields: Any) -> Any:
    cache = CacheConfig(cache_dtype=cache_dtype) if cache_dtype != "auto" else settings.cache_config
    with set_current_vllm_config(settings):
        layer = vllm_layer.Attention(
            HEADS, D, 0.2, KV_HEADS, prefix=NAME, attn_backend=PagedBackend, cache_config=cache, **fields
        )
    layer.use_direct_call = True
    return layer


def view_of(layout: KVCacheLayout, pages: int, dtype: Any) -> Any:
    """The cache of the second of three layers, as vLLM views it: (pages, kv_heads, page, 2 * head size)."""
    shape = (3, pages, KV_HEADS, PAGE, 2 * D)
    order = layout.stride_order
    stored = torch.zeros([shape[axis] for axis in order], dtype=dtype)
    return stored.permute([order.index(axis) for axis in range(5)])[1]


def run(layer: Any, settings: Any, batch: Any, q: Any, k: Any, v: Any, made: Any = None) -> Any:
    """A forward pass of the layer in vLLM's context."""
    found = (made or builder()).build(0, batch)
    with set_forward_context({NAME: found}, settings, slot_mapping={NAME: batch.slot_mapping}):
        return layer(q, k, v)


def right(q: Any, history: Any, batch: Any, window: int | None) -> Any:
    """Attention of the latest queries by torch, over whole sequences."""
    out = []
    for i, (keys, values) in enumerate(history):
        first, end = int(batch.query_start_loc[i]), int(batch.query_start_loc[i + 1])
        length = keys.shape[0]
        away = torch.arange(length - (end - first), length)[:, None] - torch.arange(length)
        mask = away.abs() < (window or length)
        if batch.causal:
            mask &= away >= 0
        operands = (x.float().transpose(0, 1) for x in (q[first:end], keys, values))
        found = torch.nn.functional.scaled_dot_product_attention(*operands, attn_mask=mask, scale=0.2, enable_gqa=True)
        out.append(found.transpose(0, 1).flatten(1))
    return torch.cat(out)


@pytest.mark.parametrize("layout", list(KVCacheLayout), ids=lambda layout: layout.name)
@pytest.mark.parametrize("cache_dtype", ["auto", "fp8"])
def test_vllms_layer_writes_and_reads_each_layout(computing: Any, layout: KVCacheLayout, cache_dtype: str) -> None:
    """Two steps of three requests: prompts, then a step of two beside the rest of a prompt, padded as for a graph."""
    torch.set_default_dtype(BF16)
    try:
        settings = config()
        layer = layer_of(settings, cache_dtype)
    finally:
        torch.set_default_dtype(torch.float32)
    if cache_dtype == "fp8":
        layer._k_scale.fill_(0.03)
        layer._v_scale.fill_(0.02)
    layer.kv_cache = view_of(layout, 20, BF16 if cache_dtype == "auto" else torch.uint8)
    lengths = [37, 5, 60]
    tokens = [(torch.randn(n + 8, KV_HEADS, D).bfloat16(), torch.randn(n + 8, KV_HEADS, D).bfloat16()) for n in lengths]
    first = common(lengths, lengths)
    for step, counts in enumerate((lengths, [1, 1, 8])):
        now = lengths if step == 0 else [n + count for n, count in zip(lengths, counts, strict=True)]
        batch = common(now, counts, padding=0 if step == 0 else 2)
        if step == 0:
            table = torch.zeros(3, 5, dtype=torch.int32)
            table[:, :5] = torch.randperm(15).view(3, 5)
        batch.block_table_tensor = torch.cat([table, torch.zeros(batch.num_reqs - 3, 5, dtype=torch.int32)])
        places = [torch.arange(n - count, n) for n, count in zip(now, counts, strict=True)]
        slots = [table[i, place // PAGE].long() * PAGE + place % PAGE for i, place in enumerate(places)]
        batch.slot_mapping = torch.cat([*slots, torch.full((batch.num_reqs - 3,), -1)])
        rows = batch.num_actual_tokens
        q = torch.randn(rows, HEADS * D).bfloat16()
        k, v = (
            torch.cat(
                [*(pair[j][place] for pair, place in zip(tokens, places, strict=True)), torch.zeros(rows, KV_HEADS, D)]
            )[:rows].bfloat16()
            for j in range(2)
        )
        out = run(layer, settings, batch, q, k.flatten(1), v.flatten(1))
        history = [(keys[:n], values[:n]) for (keys, values), n in zip(tokens, now, strict=True)]
        close = 2e-2 if cache_dtype == "auto" else 0.2
        expected = right(q.view(-1, HEADS, D), history, batch, None)
        torch.testing.assert_close(out[: len(expected)].float(), expected, atol=close, rtol=close)
    assert first.num_reqs == 3 and len(computing) == 3  # prompts; a step and the rest of a prompt
    assert [call["q"].shape[0] for call in computing] == [102, 2, 8 + 2]
    assert (computing[0].get("k_scale") is not None) == (cache_dtype == "fp8")
    assert computing[0]["k_cache"].dtype == (BF16 if cache_dtype == "auto" else E4M3)


@pytest.mark.parametrize("causal", [True, False])
def test_windows_sinks_and_softcap_of_a_layer(computing: Any, causal: bool) -> None:
    settings, batch = config(), common([40], [40], causal=causal)
    q, k, v = (torch.randn(43, heads * D).bfloat16() for heads in (HEADS, KV_HEADS, KV_HEADS))  # 3 of padding
    history = [(k[:40].view(40, KV_HEADS, D), v[:40].view(40, KV_HEADS, D))]
    for plain in (True, False):
        others = {} if plain else {"logits_soft_cap": 30.0, "sinks": torch.full((HEADS,), 3.0)}
        settings.compilation_config.static_forward_context.clear()
        torch.set_default_dtype(BF16)
        layer = layer_of(settings, per_layer_sliding_window=9, **others)
        torch.set_default_dtype(torch.float32)
        layer.kv_cache = view_of(KVCacheLayout.LBNHC, 8, BF16)
        out = run(layer, settings, batch, q, k, v)[:40].float()
        expected = right(q.view(-1, HEADS, D), history, batch, 9)
        if plain:
            torch.testing.assert_close(out, expected, atol=2e-2, rtol=2e-2)
        assert plain or not torch.allclose(out, expected, atol=2e-2, rtol=2e-2)
    assert (computing[0]["softcap"], computing[0]["sink"]) == (None, None) and computing[0]["q"].shape[0] == 40
    assert computing[1]["softcap"] == 30.0 and computing[1]["sink"].shape == (HEADS,)
    pattern = computing[1]["pattern"]
    assert (pattern.left, pattern.right) == (8, 0 if causal else 8)


def test_a_layer_of_a_profiling_run_is_zero(computing: Any) -> None:
    settings = config()
    layer = layer_of(settings)
    with set_forward_context(None, settings, slot_mapping={}):
        out = layer(torch.randn(3, HEADS * D), torch.randn(3, KV_HEADS * D), torch.randn(3, KV_HEADS * D))
    assert not out.any() and not computing


def test_a_quantized_result_is_refused(computing: Any) -> None:
    impl = PagedImpl(HEADS, D, 0.2, KV_HEADS)
    q = torch.zeros(1, HEADS, D)
    with pytest.raises(ArgumentError, match="output_scale: is given, but results are not quantized"):
        impl.forward(None, q, q, q, q, None, q, torch.ones(1))


def test_settings_of_the_engine_reach_the_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert envs.VLLM_BATCH_INVARIANT
    window = {"kind": "sink_window", "sink": 4, "left": 30}
    settings = config(additional_config={"block_sparse": window})
    json.dumps(settings.additional_config)  # vLLM hashes it
    layer = layer_of(settings).impl._layer
    assert layer.batch_invariant and layer.policy(None).sink == 4
    assert layer.most == (settings.scheduler_config.max_num_seqs, settings.scheduler_config.max_num_batched_tokens)
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "0")
    plain = PagedImpl(HEADS, D, 0.2, KV_HEADS)._layer  # outside of an engine
    assert not plain.batch_invariant and plain.policy is None and plain.most is None


def test_loading_prepares_the_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(layers.Layer, "prepare", lambda self, dtype, sink: asked.append((dtype, sink)))
    sinks = torch.zeros(HEADS)
    layer_of(config(), sinks=sinks).process_weights_after_loading(BF16)
    assert asked[0][0] is BF16 and asked[0][1] is sinks


# Models that select keys


@pytest.mark.parametrize("name", SOURCES)
def test_functions_have_vllms_signatures(name: str) -> None:
    """From the source: the module of a model imports much more."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.origin is not None
    tree = ast.parse((Path(spec.origin).parent / SOURCES[name]).read_text(encoding="utf-8"))
    (theirs,) = (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name)
    (ours,) = (
        node
        for node in ast.parse(inspect.getsource(getattr(selections, name))).body
        if isinstance(node, ast.FunctionDef)
    )
    assert ast.dump(theirs.args) == ast.dump(ours.args)
