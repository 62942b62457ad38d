"""The backend of SGLang without SGLang: batches, CUDA graph state, pages of slots, and what it refuses."""

from __future__ import annotations

import sys
import tomllib
from importlib import metadata
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import paged_oracle  # noqa: E402
import sglang_stand_in as stand_in  # noqa: E402

from runtime import verified_only  # noqa: E402
from runtime.errors import ArgumentError, ToolchainError  # noqa: E402
from runtime.integrations.sglang import layers, registration  # noqa: E402
from runtime.patterns import Causal, SlidingWindow  # noqa: E402

PROJECT = Path(__file__).resolve().parents[3]
BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
HEADS, KV_HEADS, D = 8, 2, 64
ROWS, LENGTHS, QUERIES = [5, 0, 3], [300, 70, 5], [9, 70, 1]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Calls of ``paged_attention``, which are computed by the definition, on an H100 that there need not be."""
    torch.manual_seed(0)
    found: list[dict[str, Any]] = []

    def attend(q: Any, k_cache: Any, v_cache: Any, pattern: Any, **given: Any) -> Any:
        found.append({"q": q, "k_cache": k_cache, "v_cache": v_cache, "pattern": pattern, **given})
        return paged_oracle.attend(q, k_cache, v_cache, pattern, **given)

    monkeypatch.setattr(layers, "paged_attention", attend)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: (9, 0))
    return found


def layer_of(**fields: Any) -> Any:
    return stand_in.RadixAttention(HEADS, KV_HEADS, D, **fields)


def operands(tokens: int) -> tuple[Any, Any, Any]:
    """Q, K and V as SGLang passes them."""
    q = torch.randn(tokens, HEADS * D).bfloat16()
    return q, torch.randn(tokens, KV_HEADS, D).bfloat16(), torch.randn(tokens, KV_HEADS, D).bfloat16()


# Batches


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("window", [-1, 33])
def test_prompts_and_steps_are_those_of_the_definition(
    calls: Any, monkeypatch: pytest.MonkeyPatch, page_size: int, window: int
) -> None:
    module, layer = stand_in.install(monkeypatch), layer_of(sliding_window_size=window)
    runner = stand_in.runner_of([layer], page_size, slots=4096 + page_size)
    backend = module.PagedBackend(runner)
    for queries, forward in ((QUERIES, backend.forward_extend), ([1, 1, 1], backend.forward_decode)):
        batch = stand_in.batch_of(runner, ROWS, LENGTHS, queries)
        q, k, v = operands(sum(queries))
        backend.init_forward_metadata(batch)
        out = forward(q, k, v, layer, batch)
        assert out.shape == q.shape and out.dtype == q.dtype
        written = runner.token_to_kv_pool.get_kv_buffer(0)[0][batch.out_cache_loc]
        assert torch.equal(written, k)
        expected = stand_in.right(runner, layer, q, ROWS, LENGTHS, queries)
        torch.testing.assert_close(out.float(), expected, atol=2e-2, rtol=2e-2)
    prompts, steps = calls
    assert prompts["cu_seqlens_q"].tolist() == [0, 9, 79, 80] and steps["cu_seqlens_q"] is None
    assert prompts["k_cache"].shape == ((4096 + page_size) // page_size, page_size, KV_HEADS, D)
    kind = Causal if window < 0 else SlidingWindow
    assert isinstance(prompts["pattern"], kind) and "k_scale" not in prompts and prompts["batch_invariant"] is False


@pytest.mark.parametrize("window", [-1, 33])
@pytest.mark.parametrize("lengths", [[90, 70, 5], [300, 70, 5]], ids=["without a prefix", "behind a prefix"])
def test_prompts_in_small_pages_are_packed(
    calls: Any, monkeypatch: pytest.MonkeyPatch, lengths: list[int], window: int
) -> None:
    packed: list[Any] = []
    monkeypatch.setattr(
        layers, "varlen_attention", lambda *given, **more: packed.append(stand_in.attend_packed(*given, **more))
    )
    module, layer = stand_in.install(monkeypatch), layer_of(sliding_window_size=window)
    runner = stand_in.runner_of([layer], 1, slots=4097)
    backend, queries = module.PagedBackend(runner), [90, 70, 5]
    batch = stand_in.batch_of(runner, ROWS, lengths, queries)
    q, k, v = operands(sum(queries))
    backend.init_forward_metadata(batch)
    out = backend.forward_extend(q, k, v, layer, batch)
    expected = stand_in.right(runner, layer, q, ROWS, lengths, queries)
    torch.testing.assert_close(out.float(), expected, atol=2e-2, rtol=2e-2)
    assert len(packed) == 1 and not calls
    # A layer that reads the cache of another has no K of its own.
    again = backend.forward_extend(q, None, None, layer, batch)
    torch.testing.assert_close(again.float(), expected, atol=2e-2, rtol=2e-2)
    assert (len(packed), len(calls)) == ((1, 1) if lengths == queries else (2, 0))


@pytest.mark.parametrize("prefix", [0, 30])
def test_a_window_of_keys_is_read_in_pages_behind_a_prefix(
    calls: Any, monkeypatch: pytest.MonkeyPatch, prefix: int
) -> None:
    """The pool may have dropped older keys."""
    packed: list[Any] = []
    monkeypatch.setattr(
        layers, "varlen_attention", lambda *given, **more: packed.append(stand_in.attend_packed(*given, **more))
    )
    module = stand_in.install(monkeypatch)
    model = [layer_of(), layer_of(layer_id=1, sliding_window_size=40)]
    runner = stand_in.runner_of(model, 1, pool=stand_in.WindowPool)
    backend, batch = module.PagedBackend(runner), stand_in.batch_of(runner, [1], [60 + prefix], [60])
    backend.init_forward_metadata(batch)
    q, k, v = operands(60)
    for layer in model:
        out = backend.forward_extend(q, k, v, layer, batch)
        expected = stand_in.right(runner, layer, q, [1], [60 + prefix], [60])
        torch.testing.assert_close(out.float(), expected, atol=2e-2, rtol=2e-2)
    assert (len(packed), len(calls)) == ((1, 1) if prefix else (2, 0))


@pytest.mark.parametrize(
    ("fields", "settings"),
    [({"page_size": 16}, {}), ({"page_size": 1, "cache": E4M3}, {}), ({"page_size": 1}, {"deterministic": True})],
    ids=["large pages", "an e4m3 cache", "deterministic inference"],
)
def test_other_prompts_read_pages(calls: Any, monkeypatch: pytest.MonkeyPatch, fields: Any, settings: Any) -> None:
    module, layer = stand_in.install(monkeypatch, **settings), layer_of()
    runner = stand_in.runner_of([layer], slots=4096, **fields)
    backend, batch = module.PagedBackend(runner), stand_in.batch_of(runner, [1], [200], [100])
    backend.init_forward_metadata(batch)
    backend.forward_extend(*operands(100), layer, batch)
    assert len(calls) == 1 and backend.forward_metadata.packed is None


def test_which_prompts_are_packed() -> None:
    def packs(capability: tuple[int, int] = (9, 0), page: int = 1, **given: int) -> bool:
        server = layers.Server(BF16, BF16, "auto", page, capability, {})
        return server.packs(**{"requests": 2, "queries": 64, "keys": 64} | given)

    assert packs() and packs(page=8) and not packs(page=16) and packs((8, 9), page=64)
    with verified_only():
        assert not packs()  # kernels of packed sequences may have no receipt
    assert not packs(queries=63) and packs(keys=layers.MOST_PACKED) and not packs(keys=layers.MOST_PACKED + 1)


def test_places_of_keys_need_no_exact_number_of_them() -> None:
    """A batch that is padded may count more keys than its requests have."""
    table = torch.arange(40).view(4, 10).int()
    found = layers.packed_slots(table, torch.tensor([2, 0, 1]), torch.tensor([3, 0, 2]), 7)
    assert found.cu_seqlens.tolist() == [0, 3, 3, 5] and found.slots is not None
    assert found.slots[:5].tolist() == [20, 21, 22, 10, 11] and found.slots.shape == (7,)


def test_a_layer_without_k_reads_the_cache_alone(calls: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module, layer = stand_in.install(monkeypatch), layer_of()
    runner = stand_in.runner_of([layer], 16)
    backend, batch = module.PagedBackend(runner), stand_in.batch_of(runner, [1], [20], [1])
    backend.init_forward_metadata(batch)
    before = runner.token_to_kv_pool.buffers.clone()
    q, k, v = operands(1)
    first = backend.forward_decode(q, None, None, layer, batch)
    assert torch.equal(first, backend.forward_decode(q, k, v, layer, batch, save_kv_cache=False))
    assert torch.equal(runner.token_to_kv_pool.buffers, before) and len(calls) == 2


def test_sinks_softcap_and_factors_reach_the_call(calls: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module = stand_in.install(monkeypatch, deterministic=True)
    scales = {"k_scale": torch.tensor(0.5), "v_scale": torch.nn.Parameter(torch.tensor([0.75]), requires_grad=False)}
    layer = layer_of(logit_cap=3.0, **scales)
    runner = stand_in.runner_of([layer], 16, cache=E4M3)
    backend, batch = module.PagedBackend(runner), stand_in.batch_of(runner, [2, 4], [50, 90], [1, 1])
    backend.init_forward_metadata(batch)
    q, k, v = operands(2)
    sinks = torch.nn.Parameter(torch.randn(HEADS).bfloat16())
    out = backend.forward_decode(q, k, v, layer, batch, sinks=sinks)
    expected = stand_in.right(runner, layer, q, [2, 4], [50, 90], [1, 1], sinks=sinks.detach())
    torch.testing.assert_close(out.float(), expected, atol=3e-2, rtol=3e-2)
    (call,) = calls
    assert call["batch_invariant"] is True and call["workspace"] is None and call["softcap"] == 3.0
    assert type(call["sink"]) is type(call["k_scale"]) is type(call["v_scale"]) is torch.Tensor
    assert call["sink"].dtype == torch.float32 and (call["k_scale"].item(), call["v_scale"].item()) == (0.5, 0.75)


def test_an_e4m3_cache_without_factors_has_none(calls: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module, layer = stand_in.install(monkeypatch), layer_of()
    runner = stand_in.runner_of([layer], 16, cache=E4M3)
    backend, batch = module.PagedBackend(runner), stand_in.batch_of(runner, [2], [50], [1])
    backend.init_forward_metadata(batch)
    backend.forward_decode(*operands(1), layer, batch)
    assert calls[0]["k_cache"].dtype == E4M3 and "k_scale" not in calls[0]


@pytest.mark.parametrize("page_size", [1, 16])
def test_layers_that_keep_a_window_have_slots_of_their_own(
    calls: Any, monkeypatch: pytest.MonkeyPatch, page_size: int
) -> None:
    module = stand_in.install(monkeypatch)
    model = [layer_of(), layer_of(layer_id=1, sliding_window_size=40)]
    runner = stand_in.runner_of(model, page_size, pool=stand_in.WindowPool)
    order = torch.randperm(1024 // page_size)[:, None] * page_size + torch.arange(page_size)
    runner.token_to_kv_pool.mapping[:-1] = order.flatten()
    backend = module.PagedBackend(runner)
    rows, lengths, queries = [1], [120], [20]
    batch, (q, k, v) = stand_in.batch_of(runner, rows, lengths, queries), operands(20)
    backend.init_forward_metadata(batch)
    for layer in model:
        out = backend.forward_extend(q, k, v, layer, batch)
        expected = stand_in.right(runner, layer, q, rows, lengths, queries)
        torch.testing.assert_close(out.float(), expected, atol=2e-2, rtol=2e-2)
    full, window = calls
    assert not torch.equal(full["block_table"], window["block_table"])
    places = runner.token_to_kv_pool.mapping[batch.out_cache_loc]
    assert torch.equal(runner.token_to_kv_pool.get_kv_buffer(1)[0][places], k)


def test_a_graph_reads_memory_that_replays_fill_again(calls: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """``init_forward_metadata_in_graph`` is what a graph repeats: it reads the batch's own tensors."""
    module = stand_in.install(monkeypatch)
    model = [layer_of(), layer_of(layer_id=1, sliding_window_size=40)]
    runner = stand_in.runner_of(model, 16, pool=stand_in.WindowPool)
    backend = module.PagedBackend(runner)
    batch = stand_in.batch_of(runner, [0, 0, 0], [1, 1, 1], [1, 1, 1])
    with pytest.raises(ArgumentError, match="before init_cuda_graph_state"):
        backend.init_forward_metadata_out_graph(batch, in_capture=True)
    backend.init_cuda_graph_state(4, 4)
    assert backend.get_cuda_graph_seq_len_fill_value() == 1
    backend.init_forward_metadata_out_graph(batch, in_capture=True)
    backend.init_forward_metadata_in_graph(batch)
    captured = backend.forward_metadata
    assert captured.cu_seqlens_q is None and captured.seq_lens.shape == (3,)
    backend.init_forward_metadata(stand_in.batch_of(runner, [5], [9], [9]))  # a prompt between two replays
    live = stand_in.batch_of(runner, [6, 2], [200, 31], [1, 1])
    batch.req_pool_indices[:2], batch.seq_lens[:2] = live.req_pool_indices, live.seq_lens
    batch.out_cache_loc[:2] = live.out_cache_loc
    backend.init_forward_metadata_out_graph(batch)
    backend.init_forward_metadata_in_graph(batch)
    again = backend.forward_metadata
    for name in ("block_table", "seq_lens", "window_table"):
        assert getattr(again, name).data_ptr() == getattr(captured, name).data_ptr()
    q, k, v = operands(3)
    for layer in model:
        out = backend.forward_decode(q, k, v, layer, batch)[:2]
        expected = stand_in.right(runner, layer, q[:2], [6, 2], [200, 31], [1, 1])
        torch.testing.assert_close(out.float(), expected, atol=2e-2, rtol=2e-2)
    smaller = stand_in.batch_of(runner, [6], [200], [1])
    backend.init_forward_metadata_out_graph(smaller, in_capture=True)
    assert backend.forward_metadata.block_table.data_ptr() == captured.block_table.data_ptr()


# Speculative decoding

DRAFTS = 4


def drafting(tree_topk: int = 1, layout: Any = None) -> Any:
    """SGLang's data of a verification, as far as a batch reads it."""
    return SimpleNamespace(tree_topk=tree_topk, ragged_verify_layout=layout, num_tokens_per_req=DRAFTS)


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("window", [-1, 33])
@pytest.mark.parametrize("mode", ["TARGET_VERIFY", "DRAFT_EXTEND_V2"])
def test_drafts_of_a_request_see_those_before_them(
    calls: Any, monkeypatch: pytest.MonkeyPatch, mode: str, page_size: int, window: int
) -> None:
    module, layer = stand_in.install(monkeypatch, topk=1, drafts=DRAFTS), layer_of(sliding_window_size=window)
    runner = stand_in.runner_of([layer], page_size, slots=4096 + page_size, drafts=DRAFTS)
    backend, queries = module.PagedBackend(runner), [DRAFTS] * 3
    for info in (None, drafting()):
        batch, (q, k, v) = stand_in.batch_of(runner, ROWS, LENGTHS, queries, mode), operands(3 * DRAFTS)
        batch.spec_info = info
        backend.init_forward_metadata(batch)
        out = backend.forward_extend(q, k, v, layer, batch)
        expected = stand_in.right(runner, layer, q, ROWS, LENGTHS, queries)
        torch.testing.assert_close(out.float(), expected, atol=2e-2, rtol=2e-2)
        assert torch.equal(runner.token_to_kv_pool.get_kv_buffer(0)[0][batch.out_cache_loc], k)
    assert calls[0]["seq_lens"].tolist() == LENGTHS
    bounds = calls[0]["cu_seqlens_q"]
    assert bounds is None if mode == "TARGET_VERIFY" else bounds.tolist() == [0, 4, 8, 12]


@pytest.mark.parametrize("mode", ["TARGET_VERIFY", "DRAFT_EXTEND_V2"])
def test_a_graph_verifies_drafts(calls: Any, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    module, layer = stand_in.install(monkeypatch, topk=1, drafts=DRAFTS), layer_of()
    runner = stand_in.runner_of([layer], 16, drafts=DRAFTS)
    backend = module.PagedBackend(runner)
    backend.init_cuda_graph_state(4, 4 * DRAFTS)
    fill = [1 + DRAFTS if mode == "TARGET_VERIFY" else DRAFTS] * 3
    batch = stand_in.batch_of(runner, [0] * 3, fill, [DRAFTS] * 3, mode)
    backend.init_forward_metadata_out_graph(batch, in_capture=True)
    backend.init_forward_metadata_in_graph(batch)
    captured = backend.forward_metadata
    assert captured.cu_seqlens_q is None and captured.seq_lens.tolist() == fill
    live = stand_in.batch_of(runner, [6, 2], [200, 31], [DRAFTS] * 2, mode)
    batch.req_pool_indices[:2], batch.seq_lens[:2] = live.req_pool_indices, live.seq_lens
    batch.out_cache_loc[: 2 * DRAFTS] = live.out_cache_loc
    for _ in range(2):  # each replay counts the drafts once
        backend.init_forward_metadata_out_graph(batch)
        backend.init_forward_metadata_in_graph(batch)
    assert backend.forward_metadata.seq_lens.data_ptr() == captured.seq_lens.data_ptr()
    q, k, v = operands(3 * DRAFTS)
    out = backend.forward_extend(q, k, v, layer, batch)[: 2 * DRAFTS]
    expected = stand_in.right(runner, layer, q[: 2 * DRAFTS], [6, 2], [200, 31], [DRAFTS] * 2)
    torch.testing.assert_close(out.float(), expected, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("window", [False, True])
def test_steps_of_a_draft_model_see_the_tokens_before_them(
    calls: Any, monkeypatch: pytest.MonkeyPatch, graph: bool, window: bool
) -> None:
    """All steps have one batch, which counts the keys before the first of them. SGLang changes its slots."""
    module = stand_in.install(monkeypatch, topk=1, drafts=DRAFTS)
    model = [layer_of(), layer_of(layer_id=1, sliding_window_size=40)][: 1 + window]
    runner = stand_in.runner_of(model, 16, pool=stand_in.WindowPool if window else stand_in.Pool, is_draft_worker=True)
    if window:
        runner.token_to_kv_pool.mapping[:-1] = (torch.randperm(64)[:, None] * 16 + torch.arange(16)).flatten()
    backend, rows, lengths = module.PagedDraftBackend(runner, DRAFTS), [5, 3], [100, 30]
    assert len(backend.attn_backends) == DRAFTS - 1
    batch = stand_in.batch_of(runner, rows, lengths, [1, 1])
    if graph:
        backend.init_cuda_graph_state(2, 2)
        backend.init_forward_metadata_out_graph(batch, in_capture=True)
        backend.init_forward_metadata_in_graph(batch)
    else:
        backend.init_forward_metadata(batch)
    for step, each in enumerate(backend.attn_backends):
        keys = [n + step + 1 for n in lengths]
        batch.out_cache_loc = stand_in.batch_of(runner, rows, keys, [1, 1]).out_cache_loc
        for layer in model:
            q, k, v = operands(2)
            out = each.forward_decode(q, k, v, layer, batch)
            expected = stand_in.right(runner, layer, q, rows, keys, [1, 1])
            torch.testing.assert_close(out.float(), expected, atol=2e-2, rtol=2e-2)
            places = SimpleNamespace(loc=batch.out_cache_loc, swa_loc=None)
            if layer.layer_id:
                places.swa_loc = runner.token_to_kv_pool.mapping[batch.out_cache_loc]
            place = runner.token_to_kv_pool.place(layer, places)
            assert torch.equal(runner.token_to_kv_pool.get_kv_buffer(layer.layer_id)[0][place], k)


@pytest.mark.parametrize(
    ("info", "message"),
    [
        (
            drafting(tree_topk=2),
            r"spec_info: is SimpleNamespace with a tree of drafts \(tree_topk 2\), expected a chain",
        ),
        (drafting(tree_topk=-1), r"tree_topk -1\), expected a chain: set --speculative-eagle-topk 1"),
        (drafting(layout=object()), "ragged_verify_layout: gives requests different numbers of drafts"),
    ],
)
def test_trees_of_drafts_are_refused(calls: Any, monkeypatch: pytest.MonkeyPatch, info: Any, message: str) -> None:
    module, layer = stand_in.install(monkeypatch, drafts=DRAFTS), layer_of()
    runner = stand_in.runner_of([layer], 16, drafts=DRAFTS)
    backend, batch = module.PagedBackend(runner), stand_in.batch_of(runner, [1], [20], [DRAFTS], "TARGET_VERIFY")
    batch.spec_info = info
    with pytest.raises(ArgumentError, match=message):
        backend.init_forward_metadata(batch)
    backend.init_cuda_graph_state(1, DRAFTS)
    with pytest.raises(ArgumentError, match=message):
        backend.init_forward_metadata_out_graph(batch, in_capture=True)


def test_the_mask_of_drafts_is_written_and_not_read(calls: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module, layer = stand_in.install(monkeypatch, topk=1, drafts=DRAFTS), layer_of()
    runner = stand_in.runner_of([layer], 16, drafts=DRAFTS)
    about = module.PagedBackend(runner).verify_mask
    assert (about["max_bs"], about["num_draft_tokens"], about["is_read"]) == (8, DRAFTS, False)
    assert about["max_context_len"] == module.PagedBackend(runner).max_context_len == 512
    assert not about["skip_prefill"] and module.PagedBackend(runner, 0).verify_mask["skip_prefill"]


@pytest.mark.parametrize("several", [False, True])
def test_draft_models_find_the_backend(calls: Any, monkeypatch: pytest.MonkeyPatch, several: bool) -> None:
    module, backends = stand_in.install(monkeypatch, topk=1, drafts=DRAFTS), {}
    runner = stand_in.runner_of([layer_of()], 16, is_draft_worker=True)
    factory = SimpleNamespace(draft_model_runner=runner, speculative_num_steps=3)
    registration.offer_drafts(factory, "decode_attention_backend", backends, "", several)
    name, made = backends["block_sparse"]()
    assert name == "block_sparse" and type(made) is (module.PagedDraftBackend if several else module.PagedBackend)


def test_batches_without_requests_and_slots_of_none(calls: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module, layer = stand_in.install(monkeypatch), layer_of()
    runner = stand_in.runner_of([layer], 16)
    backend, batch = module.PagedBackend(runner), stand_in.batch_of(runner, [], [], [], "IDLE")
    backend.init_forward_metadata(batch)
    assert backend.forward_decode(*operands(0), layer, batch).shape == (0, HEADS * D) and not calls
    slots = torch.tensor([[-1, 0, 15, 16, 1039]])
    out = layers.write_page_table(slots, 16, torch.empty(1, 5, dtype=torch.int32))
    assert out.tolist() == [[-1, 0, 0, 1, 64]]
    assert layers.write_page_table(slots, 1, torch.empty(1, 5, dtype=torch.int32)).tolist() == slots.tolist()


def test_slots_behind_the_last_page_belong_to_none() -> None:
    layer = layers.Layer(HEADS, KV_HEADS, D, 0.2, None, Causal())
    buffer = torch.zeros(70, KV_HEADS, D)
    view = layers.in_pages("k_buffer", buffer, layer, 16)
    assert view.shape == (4, 16, KV_HEADS, D) and view.data_ptr() == buffer.data_ptr()
    with pytest.raises(ArgumentError, match=r"k_buffer: has shape \(4, 2, 16, 64\).*unset SGLANG_USE_HND_KVCACHE"):
        layers.in_pages("k_buffer", torch.zeros(4, KV_HEADS, 16, D), layer, 16)


# Refusals


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"use_mla_backend": True}, "MLA: is not supported: .*MLA's have two; select another --attention-backend"),
        ({"model_config": SimpleNamespace(is_encoder_decoder=True)}, "cross attention: is not supported"),
        ({"spec_algorithm": SimpleNamespace(name="NGRAM")}, "--speculative-algorithm NGRAM: .*set EAGLE, .*omit it"),
        ({"kv_index_translator": SimpleNamespace(is_translating=True)}, "--enable-unified-memory: .*omit it"),
        ({"prefill_aware_swa": True}, "prefill-aware windows: is not supported"),
        ({"dtype": torch.float32}, "--dtype: is torch.float32, expected float16 or bfloat16"),
        ({"kv_cache_dtype": torch.float8_e5m2, "kv_cache_dtype_str": "fp8_e5m2"}, "--kv-cache-dtype: is fp8_e5m2"),
        ({"kv_cache_dtype": E4M3, "kv_cache_dtype_str": "mxfp8"}, "--kv-cache-dtype: is mxfp8"),
        ({"dtype": torch.float16, "kv_cache_dtype": BF16, "kv_cache_dtype_str": "bf16"}, "--kv-cache-dtype: is bf16"),
        ({"page_size": 24}, "--page-size: is 24, expected a power of two"),
    ],
)
def test_settings_that_are_not_served_are_refused_by_name(
    calls: Any, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], message: str
) -> None:
    module, layer = stand_in.install(monkeypatch), layer_of()
    runner = stand_in.runner_of([layer], 16)
    vars(runner).update(settings)
    with pytest.raises(ArgumentError, match=message):
        module.PagedBackend(runner)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dllm": "low"}, "--dllm-algorithm: is not supported"),
        ({"dcp": 2}, "set --dcp-size to 1"),
        ({"topk": 4}, "--speculative-eagle-topk 4: .*chain, not a tree: set --speculative-eagle-topk 1"),
    ],
)
def test_settings_of_the_process_are_refused(
    calls: Any, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], message: str
) -> None:
    module, layer = stand_in.install(monkeypatch, **settings), layer_of()
    with pytest.raises(ArgumentError, match=message):
        module.PagedBackend(stand_in.runner_of([layer], 16))


@pytest.mark.parametrize(
    ("capability", "cache", "message"),
    [
        ((7, 5), BF16, "--attention-backend: runs on sm_75, kernels are written for sm_80"),
        ((8, 0), E4M3, "--kv-cache-dtype: runs on sm_80, which has no FP8 instructions"),
    ],
)
def test_gpus_without_kernels_are_refused(
    calls: Any, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], cache: Any, message: str
) -> None:
    module, layer = stand_in.install(monkeypatch), layer_of()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: capability)
    with pytest.raises(ArgumentError, match=message):
        module.PagedBackend(stand_in.runner_of([layer], 16, cache=cache))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"is_cross_attention": True}, "cross attention: is True in layer 3"),
        ({"attn_type": SimpleNamespace(value="encoder_only")}, "attn_type: is encoder_only in layer 3, expected decod"),
        ({"pos_encoding_mode": "ALIBI"}, "pos_encoding_mode: is ALIBI in layer 3, expected NONE"),
        ({"xai_temperature_len": 8}, "xai_temperature_len: is 8"),
        ({"v_head_dim": 32}, "v_head_dim: is 32 in layer 3, expected 64"),
        ({"logit_cap": 3.0, "logit_capping_method": "other"}, "logit_capping_method: is other"),
        ({"use_irope": True}, "attention_chunk_size: is 8192 in layer 3"),
        ({"qk_head_dim": 80, "v_head_dim": 80}, "head_dim: is 80 in layer 3 .*64, 128, 192, 256, with an e4m3 cache"),
    ],
)
def test_layers_that_are_not_served_are_refused_at_the_start(
    calls: Any, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], message: str
) -> None:
    module, layer = stand_in.install(monkeypatch), layer_of(layer_id=3, **fields)
    with pytest.raises(ArgumentError, match=f"{message}.*select another --attention-backend, such as fa3"):
        module.PagedBackend(stand_in.runner_of([layer], 16, attention_chunk_size=8192))


def test_head_sizes_of_e4m3_caches_are_fewer(calls: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module = stand_in.install(monkeypatch)
    layer = stand_in.RadixAttention(HEADS, KV_HEADS, 192)
    module.PagedBackend(stand_in.runner_of([layer], 16))
    with pytest.raises(ArgumentError, match=r"head_dim: is 192 in layer 0 with a cache of torch.float8_e4m3fn"):
        module.PagedBackend(stand_in.runner_of([layer], 16, cache=E4M3))


def test_calls_that_are_not_served_are_refused_before_the_cache_is_written(
    calls: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, layer = stand_in.install(monkeypatch), layer_of()
    runner = stand_in.runner_of([layer], 16)
    backend, batch = module.PagedBackend(runner), stand_in.batch_of(runner, [1], [20], [1])
    backend.init_forward_metadata(batch)
    before = runner.token_to_kv_pool.buffers.clone()
    for name in ("score_mod", "return_lse", "q_rope"):
        with pytest.raises(ArgumentError, match=f"{name}: is given in layer 0, which is not supported"):
            backend.forward_decode(*operands(1), layer, batch, **{name: True})
    with pytest.raises(ArgumentError, match=r"sinks: has shape \(4,\), expected \(heads 8,\)"):
        backend.forward_decode(*operands(1), layer, batch, sinks=torch.zeros(4))
    assert torch.equal(runner.token_to_kv_pool.buffers, before) and not calls
    backend.forward_decode(*operands(1), layer, batch, score_mod=None, return_lse=False)
    assert len(calls) == 1


@pytest.mark.parametrize("mode", ["DLLM_EXTEND", "PREBUILT"])
def test_other_modes_are_refused(calls: Any, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    module, layer = stand_in.install(monkeypatch), layer_of()
    runner = stand_in.runner_of([layer], 16)
    backend = module.PagedBackend(runner)
    with pytest.raises(ArgumentError, match=f"forward_mode: is {mode}, expected DECODE, EXTEND, MIXED, TARGET_V"):
        backend.init_forward_metadata(stand_in.batch_of(runner, [1], [20], [4], mode))
    backend.init_cuda_graph_state(4, 4)
    with pytest.raises(ArgumentError, match="--cuda-graph-backend-prefill to breakable or disabled"):
        backend.init_forward_metadata_out_graph(stand_in.batch_of(runner, [1], [20], [4], "EXTEND"))


# Registration


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """SGLang's registry and lists of choices."""
    backends: dict[str, Any] = {}
    registry = SimpleNamespace(
        ATTENTION_BACKENDS=backends,
        register_attention_backend=lambda name: lambda function: backends.__setitem__(name, function),
    )
    choices = SimpleNamespace(ATTENTION_BACKEND_CHOICES=["triton"], DETERMINISTIC_ATTENTION_BACKEND_CHOICES=["triton"])
    choices.add_attention_backend_choices = choices.ATTENTION_BACKEND_CHOICES.extend
    choices.add_deterministic_attention_backend_choices = choices.DETERMINISTIC_ATTENTION_BACKEND_CHOICES.extend
    hooked: list[Any] = []
    hooks = SimpleNamespace(
        HookRegistry=SimpleNamespace(register=lambda *given: hooked.append(given)), HookType=SimpleNamespace(BEFORE="b")
    )
    modules = {registration.REGISTRY: registry, registration.CHOICES: choices, registration.HOOKS: hooks}
    monkeypatch.setattr(registration, "optional", lambda name, extra: modules[name])
    monkeypatch.setattr(metadata, "version", lambda name: "0.5.23")
    return SimpleNamespace(registry=registry, choices=choices, hooked=hooked)


def test_the_backend_is_registered_once(engine: Any) -> None:
    for _ in range(2):
        registration.register_sglang()
    assert engine.registry.ATTENTION_BACKENDS["block_sparse"] is registration.create
    assert engine.choices.ATTENTION_BACKEND_CHOICES == ["triton", "block_sparse"]
    assert engine.hooked == [(registration.DRAFTS, registration.offer_drafts, "b")]
    assert engine.choices.DETERMINISTIC_ATTENTION_BACKEND_CHOICES == ["triton", "block_sparse"]


def test_another_package_keeps_its_name(engine: Any) -> None:
    engine.registry.ATTENTION_BACKENDS["block_sparse"] = pytest.importorskip
    with pytest.raises(ToolchainError, match=r"block_sparse is of .*, of another package: uninstall one of the two"):
        registration.register_sglang()


@pytest.mark.parametrize("version", ["0.5.21", "0.5.24", "0.5.23rc1", "0.6.0"])
def test_another_version_is_refused_with_those_that_work(
    engine: Any, monkeypatch: pytest.MonkeyPatch, version: str, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: version)
    with pytest.raises(ToolchainError, match=rf"SGLang 0.5.22 and 0.5.23, and {version} is installed"):
        registration.register_sglang()
    registration.plugin()
    assert not engine.registry.ATTENTION_BACKENDS
    assert engine.choices.ATTENTION_BACKEND_CHOICES == ["triton"]


def test_a_missing_sglang_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", version)
    with pytest.raises(ToolchainError, match=r"needs SGLang 0.5.22 or 0.5.23, which is not installed: pip install"):
        registration.register_sglang()


def test_the_server_creates_the_backend(calls: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in.install(monkeypatch)
    assert isinstance(sys.modules[stand_in.KEPT], ModuleType)
    backend = registration.create(stand_in.runner_of([layer_of()], 16))
    assert type(backend).__name__ == "PagedBackend" and backend.needs_cpu_seq_lens is False


def test_the_entry_point_is_declared() -> None:
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    points = project["entry-points"]["sglang.srt.plugins"]
    assert points == {"block_sparse": f"{registration.__name__}:{registration.plugin.__name__}"}
    (extra,) = project["optional-dependencies"]["sglang"]
    assert extra == f"sglang>={registration.VERSIONS[0]},<0.5.{int(registration.VERSIONS[-1].rpartition('.')[2]) + 1}"
