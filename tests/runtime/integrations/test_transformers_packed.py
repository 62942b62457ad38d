"""transformers' packed batches: training with a collator that packs, and continuous batching, on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.17")

import oracle_kernel  # noqa: E402
import packed_kernel  # noqa: E402
from small_models import BESIDE_EAGER, CAUSAL, MODELS, NAME, built, tokens  # noqa: E402
from transformers import AttentionInterface, masking_utils  # noqa: E402

from runtime.errors import ArgumentError  # noqa: E402
from runtime.integrations import register_transformers  # noqa: E402
from runtime.integrations.transformers_attention import TransformersAttention  # noqa: E402
from runtime.patterns import SinkWindow  # noqa: E402

CLOSE = 0.02  # of logits of about 1.3, in fp16; documents that see each other are 0.5 off
LENGTHS = (37, 1, 60, 22)


@pytest.fixture(autouse=True)
def varlen(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Kernels of packed sequences that were called."""
    oracle_kernel.install(monkeypatch)
    loaded = packed_kernel.install(monkeypatch)
    register_transformers()
    yield loaded
    for registry in (AttentionInterface, masking_utils.AttentionMaskInterface):
        registry._global_mapping.pop(NAME, None)


def collated(flash: bool = True) -> dict[str, Any]:
    """The documents as one row."""
    collate = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=flash)
    documents = tokens(max(LENGTHS), batch=len(LENGTHS))
    rows = [{"input_ids": row[:length].tolist()} for row, length in zip(documents, LENGTHS, strict=True)]
    return dict(collate(rows, return_tensors="pt"))


def alone(model: Any, ids: Any) -> Any:
    """The logits of each document alone, by eager attention."""
    model.set_attn_implementation("eager")
    return torch.cat([model(part[None], use_cache=False).logits[0] for part in ids[0].split(LENGTHS)])


def packed(model: Any, batch: dict[str, Any], **more: Any) -> Any:
    model.set_attn_implementation(NAME)
    given = {name: value for name, value in batch.items() if name != "labels"}
    return model(**given, **more).logits[0]


def model_of(name: str) -> Any:
    if name in BESIDE_EAGER:
        return BESIDE_EAGER[name](NAME)
    return built(*MODELS[name](), dtype=torch.float16)


@pytest.mark.parametrize("use_cache", [False, True])
@pytest.mark.parametrize("name", [*CAUSAL, *BESIDE_EAGER])
def test_logits_are_those_of_each_document(name: str, use_cache: bool, varlen: Any) -> None:
    """With a cache, transformers makes the mask without documents, which are then in the bounds alone."""
    model, batch = model_of(name), collated()
    with torch.no_grad():
        ours, right = packed(model, batch, use_cache=use_cache), alone(model, batch["input_ids"])
    torch.testing.assert_close(ours, right, atol=CLOSE, rtol=0)
    assert sum(len(kernel.calls) for kernel in varlen.values()) == 2, "a layer was computed elsewhere"


def test_gradients_are_those_of_each_document(varlen: Any) -> None:
    model, batch = model_of("qwen2, full and window 16"), collated()
    found = []
    for logits in (packed(model, batch, use_cache=False), alone(model, batch["input_ids"])):
        model.zero_grad()
        loss = torch.nn.functional.cross_entropy(logits[:-1].float(), batch["labels"][0, 1:], ignore_index=-100)
        loss.backward()
        found.append((loss.detach(), {name: weight.grad.clone() for name, weight in model.named_parameters()}))
    (ours, mine), (right, theirs) = found
    torch.testing.assert_close(ours, right, atol=1e-3, rtol=0)
    for name, gradient in mine.items():
        assert (gradient - theirs[name]).norm() <= 0.02 * theirs[name].norm(), name
    assert len({type(kernel).__name__ for kernel in varlen.values()}) == 2, "forward and backward"


def test_positions_alone_become_lists(varlen: Any) -> None:
    model, batch = model_of("grouped llama"), collated(flash=False)
    with torch.no_grad():
        ours, right = packed(model, batch, use_cache=False), alone(model, batch["input_ids"])
    torch.testing.assert_close(ours, right, atol=CLOSE, rtol=0)
    assert not varlen


def test_a_chosen_pattern_is_that_of_each_document(varlen: Any) -> None:
    model, batch = model_of("grouped llama"), collated()
    register_transformers(pattern_for=lambda module, q, k, exact: SinkWindow(4, 9))
    with torch.no_grad():
        ours = packed(model, batch, use_cache=False)
        parts = [model(part[None], use_cache=False).logits[0] for part in batch["input_ids"][0].split(LENGTHS)]
    torch.testing.assert_close(ours, torch.cat(parts), atol=CLOSE, rtol=0)
    assert {named.spec.pattern.kind for named in varlen} == {"sink_window"}


def test_a_step_with_one_token_is_not_decoded_elsewhere(varlen: Any) -> None:
    register_transformers(decode="sdpa")
    bounds = torch.tensor([0, 1], dtype=torch.int32)
    q = torch.randn(1, 4, 1, 64).half()
    k = torch.randn(1, 2, 1, 64).half()
    AttentionInterface()[NAME](torch.nn.Module(), q, k, k, None, cu_seq_lens_q=bounds, cu_seq_lens_k=bounds)
    assert varlen


def test_padding_beside_bounds_is_refused() -> None:
    model, batch = model_of("grouped llama"), collated()
    mask = torch.ones(1, sum(LENGTHS), dtype=torch.int64)
    with torch.no_grad():
        packed(model, batch, use_cache=False, attention_mask=mask)  # hides nothing
        mask[0, -3:] = 0
        with pytest.raises(ArgumentError, match="attention_mask: has padding"):
            packed(model, batch, use_cache=False, attention_mask=mask)


def test_a_mask_of_ones_own_is_refused() -> None:
    model, batch = model_of("grouped llama"), collated()
    own = torch.ones(1, 1, sum(LENGTHS), sum(LENGTHS), dtype=torch.bool)
    with torch.no_grad(), pytest.raises(ArgumentError, match="attention_mask: has padding or a mask of its own"):
        packed(model, batch, use_cache=False, attention_mask=own)


def test_blocks_of_tokens_that_see_each_other_are_refused() -> None:
    """As those of an image: a mask that is more than its documents."""
    model, ids = model_of("grouped llama"), tokens(8, batch=1)
    embedded = model.get_input_embeddings()(ids)
    options = (None, None, torch.arange(8)[None] % 4)  # no mask, no cache, positions
    image = torch.tensor([[0, 0, -1, -1, -1, -1, -1, -1]])
    model.set_attn_implementation(NAME)
    plain = masking_utils.create_causal_mask(model.config, embedded, *options)
    more = masking_utils.create_causal_mask(model.config, embedded, *options, block_sequence_ids=image)
    assert plain.within is not None and plain.is_listed and more.within is None
    with pytest.raises(ArgumentError, match="attention_mask"):
        layer(attention_mask=more)


BOUNDS = torch.tensor([0, 3, 8], dtype=torch.int32)


def layer(**changes: Any) -> Any:
    q, k = torch.zeros(1, 4, 8, 64).bfloat16(), torch.zeros(1, 2, 8, 64).bfloat16()
    given = {"query": q, "key": k, "value": k, "attention_mask": None}
    given |= {"cu_seq_lens_q": BOUNDS, "cu_seq_lens_k": BOUNDS, **changes}
    return TransformersAttention()(torch.nn.Module(), **given)


@pytest.mark.parametrize(
    ("argument", "changes"),
    [
        ("query: has batch size 2", {"query": torch.zeros(2, 4, 8, 64).bfloat16()}),
        ("value: .*head sizes must be equal", {"value": torch.zeros(1, 2, 8, 32).bfloat16()}),
        ("value: .*head sizes must be equal", {"query": torch.zeros(1, 4, 8, 80).bfloat16()}),
        ("key: has 8 tokens, query 5, which cross attention", {"query": torch.zeros(1, 4, 5, 64).bfloat16()}),
        ("cu_seq_lens_q: is torch.float32", {"cu_seq_lens_q": torch.zeros(3)}),
        (r"cu_seq_lens_k: is None, expected int32", {"cu_seq_lens_k": None}),
        ("cu_seq_lens_q: is torch.int32 .*1, 3", {"cu_seq_lens_q": BOUNDS[None]}),
        ("sliding_window", {"sliding_window": 3, "is_causal": False}),
        ("dropout", {"dropout": 0.1}),
        ("q: is torch.float32", {name: torch.zeros(1, 2, 8, 64) for name in ("query", "key", "value")}),
        ("q: has head size 264", {name: torch.zeros(1, 2, 8, 264).half() for name in ("query", "key", "value")}),
    ],
)
def test_packed_calls_that_are_refused(argument: str, changes: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match=argument):
        layer(**changes)


def test_bounds_in_int64_are_those_in_int32() -> None:
    torch.manual_seed(0)
    q, k = torch.randn(1, 4, 8, 64).bfloat16(), torch.randn(1, 2, 8, 64).bfloat16()
    given = {"query": q, "key": k, "value": k}
    out, weights = layer(**given)
    again, _ = layer(**given, cu_seq_lens_q=BOUNDS.long(), cu_seq_lens_k=BOUNDS.long())
    assert torch.equal(out, again) and out.shape == (1, 8, 4, 64) and out.is_contiguous() and weights is None
    assert not torch.equal(out, layer(**given, is_causal=False)[0])
