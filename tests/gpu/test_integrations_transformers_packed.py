"""transformers' packed training and continuous batching on a GPU, beside eager attention of each sequence alone."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.17")

from small_models import BESIDE_EAGER, CAUSAL, MODELS, NAME, built, tokens  # noqa: E402

from runtime.integrations import (  # noqa: E402
    register_transformers,
    register_transformers_batching,
    transformers_packed,
)
from runtime.integrations.transformers_batching import BATCHING, VERSIONS  # noqa: E402

CLOSE = 0.02  # of logits of about 1.3, in fp16; documents that see each other are 0.5 off
LENGTHS = (300, 1, 700, 129)
NEW = 40
PROMPTS = [[5], [7, 3] * 200, [1 + i % 90 for i in range(900)], [9, 8, 7] * 6]
batches = pytest.mark.skipif(
    not transformers.__version__.startswith(tuple(f"{series}." for series in VERSIONS)),
    reason=f"continuous batching needs transformers {' or '.join(VERSIONS)}",
)


def model_of(name: str) -> Any:
    model = (
        BESIDE_EAGER[name]("eager") if name in BESIDE_EAGER else built(*MODELS[name](), "eager", dtype=torch.float16)
    )
    return model.cuda()


@pytest.mark.parametrize("name", [*CAUSAL, *BESIDE_EAGER])
def test_packed_documents_have_the_logits_and_gradients_of_each_alone(name: str) -> None:
    register_transformers()
    model = model_of(name)
    collate = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    documents = tokens(max(LENGTHS), batch=len(LENGTHS))
    rows = [{"input_ids": row[:length].tolist()} for row, length in zip(documents, LENGTHS, strict=True)]
    batch = collate(rows, return_tensors="pt")
    batch = {key: value.cuda() if isinstance(value, torch.Tensor) else value for key, value in batch.items()}
    labels = batch.pop("labels")

    def run(implementation: str, dtype: torch.dtype) -> tuple[Any, dict[str, Any]]:
        model.to(dtype).set_attn_implementation(implementation)
        model.zero_grad()
        if implementation == NAME:
            logits = model(**batch, use_cache=False).logits[0]
        else:
            parts = batch["input_ids"][0].split(LENGTHS)
            logits = torch.cat([model(part[None], use_cache=False).logits[0] for part in parts])
        torch.nn.functional.cross_entropy(logits[:-1].float(), labels[0, 1:], ignore_index=-100).backward()
        gradients = {key: weight.grad.float() for key, weight in model.named_parameters() if weight.grad is not None}
        return logits.detach().float(), gradients

    # The weights are numbers of fp16 in each run, so fp32 gives the definition.
    (ours, mine), (theirs, eager), (right, exact) = (
        run(NAME, torch.float16),
        run("eager", torch.float16),
        run("eager", torch.float32),
    )
    torch.testing.assert_close(ours, theirs, atol=CLOSE, rtol=0)
    torch.testing.assert_close(ours, right, atol=CLOSE, rtol=0)
    assert mine.keys() == eager.keys() == exact.keys()
    whole, of_eager, definition = (torch.cat([g.flatten() for g in each.values()]) for each in (mine, eager, exact))
    error, rounding = (whole - definition).norm(), (of_eager - definition).norm()
    assert error <= 2 * rounding, f"{error} beside {rounding} in eager fp16, of {definition.norm()}"
    # Sums that cancel, such as the gradient of a bias of keys, have few right digits, but the right direction.
    for key, gradient in mine.items():
        assert torch.nn.functional.cosine_similarity(gradient.flatten(), exact[key].flatten(), dim=0) > 0.98, key


@batches
@pytest.mark.parametrize("graphs", [False, True], ids=["calls", "graphs"])
@pytest.mark.parametrize("name", ["grouped llama", "mistral, window 24", *BESIDE_EAGER])
def test_generations_have_the_log_probabilities_of_eager_attention(
    name: str, graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    register_transformers_batching()
    steps, attend = [], transformers_packed.paged_attention

    def counted(*tensors: Any, **given: Any) -> Any:
        steps.append(given["seq_lens"].shape)
        return attend(*tensors, **given)

    monkeypatch.setattr(transformers_packed, "paged_attention", counted)
    model = model_of(name)
    model.config._attn_implementation = BATCHING
    greedy = transformers.GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0)
    config = transformers.ContinuousBatchingConfig(
        page_size=64,
        num_blocks=256,
        max_batch_tokens=256,
        max_requests_per_batch=8,
        return_logprobs=True,
        use_cuda_graph=graphs,
    )
    found = model.generate_batch(PROMPTS, generation_config=greedy, continuous_batching_config=config)
    assert bool(steps) == (name == "grouped llama"), "caches of layers with a window have no block table"
    model.set_attn_implementation("eager")
    for prompt, output in zip(PROMPTS, found.values(), strict=True):
        assert output.error is None and len(output.generated_tokens) == NEW
        ids = torch.tensor([[*prompt, *output.generated_tokens]], device="cuda")
        with torch.no_grad():
            logits = model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float().cpu()
        right = logits.log_softmax(-1)[torch.arange(NEW), output.generated_tokens]
        torch.testing.assert_close(torch.tensor(output.logprobs), right, atol=CLOSE, rtol=0)
