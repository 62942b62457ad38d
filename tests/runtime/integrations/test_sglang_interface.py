"""The backend against SGLang's own Python: registration, signatures, and its layers, pools and batches on the CPU.

``python scripts/engines.py sglang`` downloads SGLang's wheels and runs this file.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import inspect
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
if importlib.util.find_spec("sglang") is None:
    pytest.skip("needs SGLang: python scripts/engines.py sglang", allow_module_level=True)


import absent  # noqa: E402

absent.without_torchvision()

import paged_oracle  # noqa: E402
import sglang_selections as cases  # noqa: E402
import sglang_stand_in  # noqa: E402
from sglang.srt import plugins, runtime_context  # noqa: E402
from sglang.srt.arg_groups import choices  # noqa: E402
from sglang.srt.layers.attention import attention_registry  # noqa: E402
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend  # noqa: E402
from sglang.srt.layers.attention.qsa.kernel import qsa_sparse_attention  # noqa: E402
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend  # noqa: E402
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention  # noqa: E402
from sglang.srt.mem_cache import kv_index_translator  # noqa: E402
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool  # noqa: E402
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool  # noqa: E402
from sglang.srt.model_executor import model_runner  # noqa: E402
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode  # noqa: E402
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context  # noqa: E402
from sglang.srt.model_executor.model_runner_components import attention_backend_setup  # noqa: E402
from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # noqa: E402
from sglang.srt.server_args import ServerArgs  # noqa: E402
from sglang.srt.speculative import draft_utils, eagle_info, ngram_info  # noqa: E402
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm  # noqa: E402

from runtime.errors import ArgumentError, ToolchainError  # noqa: E402
from runtime.integrations.sglang import backend as ours  # noqa: E402
from runtime.integrations.sglang import layers, registration, selections  # noqa: E402

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
HEADS, KV_HEADS, D = 8, 2, 64


@pytest.fixture(autouse=True)
def unregistered() -> Iterator[None]:
    yield
    attention_registry.ATTENTION_BACKENDS.pop("block_sparse", None)
    for names in (choices.ATTENTION_BACKEND_CHOICES, choices.DETERMINISTIC_ATTENTION_BACKEND_CHOICES):
        if "block_sparse" in names:
            names.remove("block_sparse")
    plugins._plugins_loaded = False
    HookRegistry._hooks.pop(registration.DRAFTS, None)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """Calls of ``paged_attention`` and ``varlen_attention`` by the definition, on an H100 that there need not be."""
    torch.manual_seed(0)
    found: list[dict[str, Any]] = []

    def attend(q: Any, k_cache: Any, v_cache: Any, pattern: Any, **given: Any) -> Any:
        found.append({"q": q, "k_cache": k_cache, "pattern": pattern, **given})
        return paged_oracle.attend(q, k_cache, v_cache, pattern, **given)

    def attend_packed(*tensors: Any, **given: Any) -> None:
        found.append(given)
        sglang_stand_in.attend_packed(*tensors, **given)

    monkeypatch.setattr(layers, "paged_attention", attend)
    monkeypatch.setattr(layers, "varlen_attention", attend_packed)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: (9, 0))
    with runtime_context.get_context().override_server_args():  # SGLang's default settings
        yield found


# Registration


def test_sglang_loads_the_plugin_and_offers_the_backend() -> None:
    assert plugins.GENERAL_PLUGINS_GROUP == "sglang.srt.plugins"
    (point,) = (each for each in metadata.entry_points(group="sglang.srt.plugins") if each.name == "block_sparse")
    assert point.load() is registration.plugin
    for _ in range(2):
        plugins._plugins_loaded = False
        plugins.load_plugins()
    assert attention_registry.ATTENTION_BACKENDS["block_sparse"] is registration.create
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    for option in ("--attention-backend", "--decode-attention-backend", "--prefill-attention-backend"):
        given = parser.parse_args(["--model-path", "model", option, "block_sparse"])
        assert getattr(given, option.strip("-").replace("-", "_")) == "block_sparse"


def test_an_untested_version_leaves_sglang_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: "0.5.21")
    with pytest.raises(ToolchainError, match=r"SGLang 0.5.22 and 0.5.23, and 0.5.21 is installed"):
        registration.register_sglang()
    registration.plugin()
    assert "block_sparse" not in attention_registry.ATTENTION_BACKENDS
    assert "block_sparse" not in choices.ATTENTION_BACKEND_CHOICES


def test_sglang_builds_the_backend_for_a_runner(calls: Any) -> None:
    registration.register_sglang()
    runner = runner_of([layer_of()], 16)
    build = attention_backend_setup._build_full_attention_backend_from_str
    assert type(build(model_runner=runner, backend_str="block_sparse", init_new_workspace=False)) is ours.PagedBackend


# Interface


def test_each_method_takes_the_arguments_of_sglangs() -> None:
    checked = set()
    for name, method in vars(ours.PagedBackend).items():
        theirs = getattr(AttentionBackend, name, None)
        if name == "__init__" or not callable(method) or theirs is None:
            continue
        own, expected = (inspect.signature(each).parameters for each in (method, theirs))
        assert list(own) == list(expected), name
        assert [each.default for each in own.values()] == [each.default for each in expected.values()], name
        checked.add(name)
    assert checked == {
        "forward_decode",
        "forward_extend",
        "get_cuda_graph_seq_len_fill_value",
        "init_cuda_graph_state",
        "init_forward_metadata",
        "init_forward_metadata_in_graph",
        "init_forward_metadata_out_graph",
    }
    for name, method in vars(ours.PagedDraftBackend).items():
        if not name.startswith("_") and callable(method):
            assert list(inspect.signature(method).parameters) == list(
                inspect.signature(getattr(AttentionBackend, name)).parameters
            )
    assert isinstance(inspect.getattr_static(AttentionBackend, "verify_mask"), property)
    for name, value in vars(ours.PagedBackend).items():  # no attribute that SGLang does not read
        if not name.startswith("_") and not callable(value):
            assert hasattr(AttentionBackend, name), name


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dcp_size": 2, "tp_size": 2}, "decode context parallelism: .*set --dcp-size to 1"),
        ({"dllm_algorithm": "LowConfidence"}, "--dllm-algorithm: is not supported"),
    ],
)
def test_settings_of_the_process_are_sglangs(calls: Any, settings: dict[str, Any], message: str) -> None:
    runner = runner_of([layer_of()], 16)
    context = runtime_context.get_context()
    with context.override_server_args(**settings), pytest.raises(ArgumentError, match=message):
        ours.PagedBackend(runner)
    with context.override_server_args(enable_deterministic_inference=True):
        assert ours.PagedBackend(runner)._batch_invariant
    assert not ours.PagedBackend(runner)._batch_invariant


def test_options_that_errors_name_are_sglangs() -> None:
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    options = set(parser._option_string_actions)
    named = {
        "--speculative-algorithm",
        "--speculative-eagle-topk",
        "--dllm-algorithm",
        "--dcp-size",
        "--kv-cache-dtype",
        "--page-size",
        "--dtype",
    }
    assert named | {"--enable-unified-memory", "--cuda-graph-backend-prefill"} <= options
    for mode in ("breakable", "disabled"):
        parser.parse_args(["--model-path", "model", "--cuda-graph-backend-prefill", mode])


def test_attributes_of_the_runner_are_sglangs() -> None:
    """Those that a runner of these tests has are set by SGLang's."""
    source = inspect.getsource(model_runner)
    assert callable(model_runner.ModelRunner.decode_num_tokens_per_req)
    for name in set(vars(runner_of([layer_of()], 16))) - {"decode_num_tokens_per_req"} | {"prefill_aware_swa"}:
        assert f"self.{name} = " in source or f"self.{name}: " in source or f"self.{name},\n" in source, name
    assert "is_translating" in inspect.getsource(kv_index_translator.KVIndexTranslator.__init__)


# Layers


def layer_of(layer_id: int = 0, window: int = -1, **fields: Any) -> Any:
    return RadixAttention(HEADS, D, 0.2, KV_HEADS, layer_id, sliding_window_size=window, **fields)


def runner_of(model: list[Any], page_size: int, cache: Any = BF16, pool: Any = None, **settings: Any) -> Any:
    """A model runner with SGLang's pools: 4 requests of up to 256 tokens, in pages in any order."""
    requests, context, slots = 4, 256, 2048
    places = ReqToTokenPool(requests, context, "cpu", False)
    pages = (torch.randperm(slots // page_size) + 1)[: requests * context // page_size].view(requests, -1)
    tokens = (pages[..., None] * page_size + torch.arange(page_size)).flatten(1)
    places.req_to_token[1:] = tokens.int()
    if pool is None:
        pool = MHATokenToKVPool(slots, page_size, cache, KV_HEADS, D, len(model), "cpu", False)
    runner = SimpleNamespace(
        model=torch.nn.ModuleList(model),
        device="cpu",
        use_mla_backend=False,
        model_config=SimpleNamespace(is_encoder_decoder=False, hf_config=None, hf_text_config=None),
        spec_algorithm=SpeculativeAlgorithm.NONE,
        is_draft_worker=False,
        decode_num_tokens_per_req=lambda: 1,
        kv_index_translator=SimpleNamespace(is_translating=False),
        dtype=BF16,
        kv_cache_dtype=cache,
        kv_cache_dtype_str="auto" if cache == BF16 else "fp8_e4m3",
        page_size=page_size,
        attention_chunk_size=None,
        req_to_token_pool=places,
        token_to_kv_pool=pool,
    )
    vars(runner).update(settings)
    return runner


def batch_of(runner: Any, rows: list[int], lengths: list[int], queries: list[int]) -> Any:
    """SGLang's batch of requests whose latest ``queries`` tokens are computed."""
    table = runner.req_to_token_pool.req_to_token
    slots = [table[row, n - count : n] for row, n, count in zip(rows, lengths, queries, strict=True)]
    is_decode = set(queries) == {1}
    prefixes = [n - count for n, count in zip(lengths, queries, strict=True)]
    return ForwardBatch(
        forward_mode=ForwardMode.DECODE if is_decode else ForwardMode.EXTEND,
        batch_size=len(rows),
        input_ids=torch.zeros(sum(queries), dtype=torch.long),
        req_pool_indices=torch.tensor(rows),
        seq_lens=torch.tensor(lengths),
        out_cache_loc=torch.cat(slots).long(),
        seq_lens_sum=sum(lengths),
        extend_seq_lens=None if is_decode else torch.tensor(queries, dtype=torch.int32),
        extend_prefix_lens=None if is_decode else torch.tensor(prefixes, dtype=torch.int32),
        extend_seq_lens_cpu=None if is_decode else queries,
        extend_prefix_lens_cpu=None if is_decode else prefixes,
    )


def run(backend: Any, layer: Any, batch: Any, q: Any, k: Any, v: Any, **others: Any) -> Any:
    """A forward pass of SGLang's layer."""
    backend.init_forward_metadata(batch)
    with forward_context(ForwardContext(attn_backend=backend)):
        return layer(q.clone(), k.clone(), v.clone(), batch, **others)


def operands(tokens: int) -> tuple[Any, Any, Any]:
    q, k, v = (torch.randn(tokens, heads * D).bfloat16() for heads in (HEADS, KV_HEADS, KV_HEADS))
    return q, k, v


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("window", [-1, 30])
def test_a_layer_computes_what_it_does_with_sglangs_backend(calls: Any, page_size: int, window: int) -> None:
    """Prompts, more of them beside a step, then steps: each with SGLang's pools and its torch backend."""
    layer = layer_of(window=window)
    runner = runner_of([layer], page_size)
    own, theirs = ours.PagedBackend(runner), TorchNativeAttnBackend(runner)
    for lengths, queries in (([70, 9], [70, 9]), ([90, 10], [20, 1]), ([91, 11], [1, 1])):
        batch, given = batch_of(runner, [3, 1], lengths, queries), operands(sum(queries))
        expected = run(theirs, layer, batch, *given)
        out = run(own, layer, batch, *given)
        assert out.shape == expected.shape and out.dtype == expected.dtype
        torch.testing.assert_close(out.float(), expected.float(), atol=3e-2, rtol=3e-2)
    assert len(calls) == 3 and calls[-1]["block_table"].shape == (2, 256 // page_size)
    assert ("cu_seqlens_k" in calls[0]) == (page_size == 1)  # prompts in small pages are packed


def test_a_layer_with_an_e4m3_pool_uses_its_factors(calls: Any) -> None:
    layer = layer_of()
    layer.k_scale = torch.nn.Parameter(torch.tensor(0.5), requires_grad=False)
    layer.v_scale = torch.nn.Parameter(torch.tensor(0.25), requires_grad=False)
    runner = runner_of([layer], 16, E4M3)
    backend, batch, (q, k, v) = ours.PagedBackend(runner), batch_of(runner, [2], [40], [40]), operands(40)
    out = run(backend, layer, batch, q, k, v)
    keys, values = (x.view(40, KV_HEADS, D).float().transpose(0, 1) for x in (k, v))
    mine = q.view(40, HEADS, D).float().transpose(0, 1)
    expected = torch.nn.functional.scaled_dot_product_attention(
        mine, keys, values, is_causal=True, scale=0.2, enable_gqa=True
    )
    torch.testing.assert_close(out.float(), expected.transpose(0, 1).flatten(1), atol=0.2, rtol=0.2)
    assert calls[0]["k_cache"].dtype == E4M3
    assert (calls[0]["k_scale"].item(), calls[0]["v_scale"].item()) == (0.5, 0.25)


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_hybrid_pool_has_slots_of_its_own_for_windows(calls: Any, page_size: int) -> None:
    model = [layer_of(), layer_of(1, 30)]
    sizes = {"head_num": KV_HEADS, "head_dim": D, "swa_attention_layer_ids": [1], "full_attention_layer_ids": [0]}
    pool = SWAKVPool(2048, 2048, page_size, BF16, device="cpu", **sizes)
    order = torch.randperm(2048 // page_size) + 1
    mapping = torch.cat([torch.zeros(1, dtype=torch.long), order])[:, None] * page_size + torch.arange(page_size)
    pool.register_mapping(torch.cat([mapping.flatten(), torch.tensor([-1])]))
    runner = runner_of(model, page_size, pool=pool)
    own, theirs = ours.PagedBackend(runner), TorchNativeAttnBackend(runner)
    for lengths, queries in (([70], [70]), ([71], [1])):
        batch, given = batch_of(runner, [2], lengths, queries), operands(sum(queries))
        full = run(own, model[0], batch, *given)
        torch.testing.assert_close(full, run(theirs, model[0], batch, *given), atol=3e-2, rtol=3e-2)
        window = run(own, model[1], batch, *given)
        slots = mapping.flatten()[batch.out_cache_loc]
        assert torch.equal(pool.swa_kv_pool.get_key_buffer(0)[slots].flatten(1), given[1])
        plain = runner_of([model[0], model[1]], page_size)
        plain.req_to_token_pool = runner.req_to_token_pool
        if queries == [70]:
            expected = run(TorchNativeAttnBackend(plain), model[1], batch, *given)
            torch.testing.assert_close(window, expected, atol=3e-2, rtol=3e-2)
    assert not torch.equal(calls[-2]["block_table"], calls[-1]["block_table"])


def test_graphs_prepare_outside_and_compute_inside(calls: Any) -> None:
    layer = layer_of()
    runner = runner_of([layer], 16)
    backend = ours.PagedBackend(runner)
    backend.init_cuda_graph_state(4, 4)
    batch, given = batch_of(runner, [3, 1], [91, 11], [1, 1]), operands(2)
    backend.init_forward_metadata_out_graph(batch, in_capture=True)
    with forward_context(ForwardContext(attn_backend=backend)):
        backend.init_forward_metadata_in_graph(batch)
        out = layer(*given, batch)
    assert torch.equal(out, run(backend, layer, batch, *given))
    with pytest.raises(ArgumentError, match="--cuda-graph-backend-prefill"):
        backend.init_forward_metadata_out_graph(batch_of(runner, [3], [90], [20]))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"attn_type": AttentionType.ENCODER_ONLY}, "attn_type: is encoder_only in layer 0"),
        ({"attn_type": AttentionType.DECODER_BIDIRECTIONAL}, "attn_type: is decoder_bidirectional in layer 0"),
        ({"is_cross_attention": True}, "cross attention: is True"),
        ({"pos_encoding_mode": "ALIBI"}, "pos_encoding_mode: is ALIBI"),
        ({"v_head_dim": 32}, "v_head_dim: is 32"),
        ({"logit_cap": 3.0, "logit_capping_method": "sigmoid"}, "logit_capping_method: is sigmoid"),
    ],
)
def test_layers_that_are_not_served_are_refused(calls: Any, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=f"{message}.*such as fa3"):
        ours.PagedBackend(runner_of([layer_of(**fields)], 16))


# Models that select keys

SOURCES = {
    "flash_decode_with_gqa_share_sparse": "kernels/ops/attention/minimax_sparse/decode/topk_sparse.py",
    "flash_prefill_with_gqa_share_sparse": "kernels/ops/attention/minimax_sparse/prefill/topk_sparse.py",
    "sparse_gqa_fwd_interface_triton": "srt/layers/attention/qsa/sparse_attn.py",
    "sparse_gqa_fwd_interface_triton_ck": "srt/layers/attention/qsa/sparse_attn.py",
    "sparse_gqa_paged_prefill_triton": "srt/layers/attention/qsa/sparse_attn.py",
}
IMPORTS = (
    "srt/layers/attention/minimax_sparse_ops/minimax_sparse.py",
    "srt/layers/attention/qwen_sparse_attn_backend.py",
)
"""Files that call them."""
NEWER = ("sparse_gqa_paged_prefill_triton",)
"""Functions that SGLang 0.5.22 does not have."""


def source_of(path: str) -> str:
    spec = importlib.util.find_spec("sglang")
    assert spec is not None and spec.origin is not None
    return (Path(spec.origin).parent / path).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", SOURCES)
def test_functions_have_sglangs_arguments(name: str) -> None:
    """From the source: its modules need Triton. Ours may have later arguments with defaults."""
    found = [
        node
        for node in ast.parse(source_of(SOURCES[name])).body
        if isinstance(node, ast.FunctionDef) and node.name == name
    ]
    if not found and metadata.version("sglang") == "0.5.22" and name in NEWER:
        return
    theirs, ours_ = found[0].args, ast.parse(inspect.getsource(getattr(selections, name))).body[0]
    assert isinstance(ours_, ast.FunctionDef)
    names = [each.arg for each in theirs.args]
    assert [each.arg for each in ours_.args.args][: len(names)] == names
    extra = len(ours_.args.args) - len(names)
    defaults = [ast.dump(each) for each in ours_.args.defaults]
    assert defaults[: len(defaults) - extra] == [ast.dump(each) for each in theirs.defaults] and extra <= 1
    assert [each.arg for each in ours_.args.kwonlyargs] == [each.arg for each in theirs.kwonlyargs]
    assert any(f"{name}(" in source_of(path) and f"    {name},\n" in source_of(path) for path in IMPORTS)


def test_lists_of_tokens_are_those_of_sglangs_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang computes the same slots by torch where there is no GPU."""
    monkeypatch.setattr(selections, "paged_attention", paged_oracle.attend)
    torch.manual_seed(0)
    case = cases.token_case("cpu", "pool")
    given, entry = case.given, torch.bucketize(torch.arange(len(case.right)), case.given["cu_q"][1:], right=True)
    slots = given["slot_table"][entry % 2].gather(1, given["indices"].clamp(min=0).long())
    slots = torch.where(given["indices"] >= 0, slots, -1)
    expected = qsa_sparse_attention(given["q"], given["k_cache"], given["v_cache"], slots, given["scale"])
    out = selections.sparse_gqa_paged_prefill_triton(**given)
    torch.testing.assert_close(out.float(), expected.float(), atol=2e-2, rtol=2e-2)


def test_the_page_size_is_that_of_the_server(calls: Any) -> None:
    assert runtime_context.__name__ == selections.SETTINGS
    with runtime_context.get_context().override_server_args(page_size=128):
        assert selections._page_size() == 128


# Speculative decoding

DRAFTS = 4


def drafting_runner(model: list[Any], page_size: int = 16, **settings: Any) -> Any:
    more = {"spec_algorithm": SpeculativeAlgorithm.EAGLE, "decode_num_tokens_per_req": lambda: DRAFTS}
    return runner_of(model, page_size, **{**more, **settings})


@pytest.fixture
def drafting(calls: Any) -> Iterator[list[dict[str, Any]]]:
    """SGLang's settings of a chain of drafts."""
    settings = {"speculative_algorithm": "EAGLE", "speculative_eagle_topk": 1, "speculative_num_steps": DRAFTS - 1}
    with runtime_context.get_context().override_server_args(**settings, speculative_num_draft_tokens=DRAFTS):
        yield calls


def verify_input(requests: int, topk: int = 1) -> Any:
    """SGLang's input of a verification, without what attention does not read."""
    made = eagle_info.EagleVerifyInput.create_idle_input(topk, DRAFTS - 1, DRAFTS, "cpu")
    assert made.num_tokens_per_req == DRAFTS and made.tree_topk == topk and made.ragged_verify_layout is None
    return made


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("window", [-1, 30])
def test_a_verification_computes_what_sglangs_backend_does_for_a_prompt(
    drafting: Any, page_size: int, graph: bool, window: int
) -> None:
    """Drafts of a chain are the last tokens of a prompt; SGLang counts their keys apart."""
    layer = layer_of(window=window)
    runner = drafting_runner([layer], page_size)
    own, theirs = ours.PagedBackend(runner), TorchNativeAttnBackend(runner)
    prompt, given = batch_of(runner, [3, 1], [90, 20], [DRAFTS] * 2), operands(2 * DRAFTS)
    expected = run(theirs, layer, prompt, *given)
    batch = batch_of(runner, [3, 1], [90, 20], [DRAFTS] * 2)
    batch.forward_mode, batch.spec_info = ForwardMode.TARGET_VERIFY, verify_input(2)
    batch.seq_lens = batch.seq_lens - DRAFTS
    if not graph:
        out = run(own, layer, batch, *given)
    else:
        own.init_cuda_graph_state(4, 4 * DRAFTS)
        own.init_forward_metadata_out_graph(batch, in_capture=True)
        with forward_context(ForwardContext(attn_backend=own)):
            own.init_forward_metadata_in_graph(batch)
            out = layer(*(x.clone() for x in given), batch)
    torch.testing.assert_close(out.float(), expected.float(), atol=3e-2, rtol=3e-2)
    assert drafting[-1]["seq_lens"].tolist() == [90, 20] and drafting[-1]["cu_seqlens_q"] is None


def test_a_draft_model_extends_its_cache(drafting: Any) -> None:
    layer = layer_of()
    runner = drafting_runner([layer], is_draft_worker=True)
    own, theirs = ours.PagedBackend(runner), TorchNativeAttnBackend(runner)
    batch, given = batch_of(runner, [3, 1], [90, 20], [DRAFTS] * 2), operands(2 * DRAFTS)
    expected = run(theirs, layer, batch, *given)
    batch.forward_mode, batch.spec_info = ForwardMode.DRAFT_EXTEND_V2, eagle_info.EagleDraftExtendInput()
    out = run(own, layer, batch, *given)
    torch.testing.assert_close(out.float(), expected.float(), atol=3e-2, rtol=3e-2)


def test_steps_of_a_draft_model_are_decoding_steps(drafting: Any) -> None:
    layer = layer_of()
    runner = drafting_runner([layer], is_draft_worker=True)
    own, theirs = ours.PagedDraftBackend(runner, DRAFTS), TorchNativeAttnBackend(runner)
    batch = batch_of(runner, [3, 1], [90, 20], [1, 1])
    batch.spec_info = eagle_info.EagleDraftInput.create_idle_input(
        **{
            name: {"device": "cpu", "dtype": BF16, "topk": 1}.get(name)
            for name in inspect.signature(eagle_info.EagleDraftInput.create_idle_input).parameters
        }
    )
    assert batch.spec_info.is_draft_input()
    own.init_forward_metadata(batch)
    for step, each in enumerate(own.attn_backends):
        alone, given = batch_of(runner, [3, 1], [91 + step, 21 + step], [1, 1]), operands(2)
        expected = run(theirs, layer, alone, *given)
        batch.out_cache_loc = alone.out_cache_loc
        with forward_context(ForwardContext(attn_backend=each)):
            out = layer(*(x.clone() for x in given), batch)
        torch.testing.assert_close(out.float(), expected.float(), atol=3e-2, rtol=3e-2)


def test_sglang_creates_the_backends_of_draft_models(drafting: Any) -> None:
    """By its factory, once the plug-in is loaded. Without it, SGLang refuses names that it does not know."""
    runner = drafting_runner([layer_of()], is_draft_worker=True, draft_attention_backend="block_sparse")
    factory = draft_utils.DraftBackendFactory(runner, 1, DRAFTS - 1)
    registration.register_sglang()
    ((kind, hook, _),) = HookRegistry._hooks[registration.DRAFTS]
    assert kind is HookType.BEFORE and hook is registration.offer_drafts
    plugins.load_plugins()
    steps, extension = factory.create_decode_backend(), factory.create_draft_extend_backend()
    assert type(steps) is ours.PagedDraftBackend and len(steps.attn_backends) == DRAFTS - 2
    assert type(extension) is ours.PagedBackend and extension.verify_mask is None
    made = (steps, extension, *steps.attn_backends)
    assert {each.decode_attention_backend_str for each in made} == {"block_sparse"}
    runner.draft_attention_backend = "none"
    other = draft_utils.DraftBackendFactory(runner, 1, DRAFTS - 1)
    with pytest.raises(ValueError, match="EAGLE is not supported in decode attention backend none"):
        other.create_decode_backend()


def test_the_mask_of_drafts_is_small(drafting: Any) -> None:
    """SGLang writes only which drafts see each other, not which keys."""
    runner = drafting_runner([layer_of()])
    backend = ours.PagedBackend(runner)
    mask = backend.verify_mask
    assert mask.mode.name == "QLEN_ONLY" and not mask.is_read and mask.fits(4)
    assert mask.buffer.numel() == runner.req_to_token_pool.req_to_token.shape[0] * DRAFTS**2
    assert backend.max_context_len == runner.req_to_token_pool.req_to_token.shape[1]
    assert ours.PagedBackend(runner_of([layer_of()], 16, is_draft_worker=True)).verify_mask is None


def test_trees_of_drafts_are_refused(drafting: Any) -> None:
    runner = drafting_runner([layer_of()])
    backend, batch = ours.PagedBackend(runner), batch_of(runner, [3], [20], [DRAFTS])
    batch.forward_mode = ForwardMode.TARGET_VERIFY
    ngram = ngram_info.NgramVerifyInput(custom_mask=torch.ones(1, dtype=torch.bool), draft_token_num=DRAFTS)
    for found in (verify_input(1, topk=2), ngram):
        batch.spec_info = found
        with pytest.raises(ArgumentError, match=f"spec_info: is {type(found).__name__} with a tree of drafts"):
            backend.init_forward_metadata(batch)
    batch.forward_mode = ForwardMode.DLLM_EXTEND
    with pytest.raises(ArgumentError, match="forward_mode: is DLLM_EXTEND"):
        backend.init_forward_metadata(batch)
    context = runtime_context.get_context()
    message = r"--speculative-eagle-topk 4: .*a chain, not a tree"
    with context.override_server_args(speculative_eagle_topk=4), pytest.raises(ArgumentError, match=message):
        ours.PagedBackend(runner)
    for name in SpeculativeAlgorithm:
        served = name.name in ours.ALGORITHMS
        runner.spec_algorithm = name
        if served:
            ours.PagedBackend(runner)
            continue
        with pytest.raises(ArgumentError, match=f"--speculative-algorithm {name.name}: .*set EAGLE"):
            ours.PagedBackend(runner)
