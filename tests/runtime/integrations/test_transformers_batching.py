"""transformers' continuous batching with this package's attention, on the CPU: generations, and what is refused."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.17")

import oracle_kernel  # noqa: E402
import packed_kernel  # noqa: E402
import paged_oracle  # noqa: E402
from scripts import imported  # noqa: E402
from small_models import BESIDE_EAGER, GROUPED, MODELS, built  # noqa: E402
from transformers import AttentionInterface, masking_utils, modeling_flash_attention_utils  # noqa: E402

from runtime.errors import ArgumentError, ToolchainError  # noqa: E402
from runtime.integrations import register_transformers_batching, transformers_packed  # noqa: E402
from runtime.integrations.transformers_attention import TransformersAttention  # noqa: E402
from runtime.integrations.transformers_batching import BATCHING, VERSIONS  # noqa: E402
from runtime.ops import paged  # noqa: E402
from runtime.patterns import Causal, SinkWindow, SlidingWindow  # noqa: E402

INSTALLED = ".".join(transformers.__version__.split(".")[:2])
if INSTALLED not in VERSIONS:
    pytest.skip(f"continuous batching needs transformers {' or '.join(VERSIONS)}", allow_module_level=True)

from transformers.generation.continuous_batching import initialization, model_runner  # noqa: E402

CLOSE = 0.02  # of log-probabilities, in fp16; see test_hidden_keys_show
PROMPTS = [[5], [7, 3] * 20, list(range(1, 60)), [9, 8, 7] * 6]
NEW = 6


class Calls:
    """Calls of kernels: the patterns of those over pages, and the stand-ins of packed sequences."""

    def __init__(self, varlen: Any) -> None:
        self.paged: list[dict[str, Any]] = []
        self.varlen = varlen

    def attend(self, q: Any, k_cache: Any, v_cache: Any, pattern: Any, **given: Any) -> Any:
        """Compute by the definition. As in the kernel, tokens of no request are not written."""
        self.paged.append({"pattern": pattern, **given})
        return paged_oracle.attend(q, k_cache, v_cache, pattern, **given)

    @property
    def packed(self) -> int:
        return sum(len(kernel.calls) for kernel in self.varlen.values())


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[Calls]:
    found = Calls(packed_kernel.install(monkeypatch))
    monkeypatch.setattr(transformers_packed, "paged_attention", found.attend)
    for name in ("_lazy_imports", "_loaded_implementation"):
        monkeypatch.setattr(modeling_flash_attention_utils, name, getattr(modeling_flash_attention_utils, name))
    register_transformers_batching()
    yield found
    for registry in (AttentionInterface, masking_utils.AttentionMaskInterface):
        registry._global_mapping.pop(BATCHING, None)


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let transformers pass block tables without a GPU, by its own check of the implementation."""
    check = initialization.ensure_decode_fast_path_is_available

    def with_gpu(*arguments: Any) -> None:
        with mock.patch.object(torch.cuda, "is_available", lambda: True):
            check(*arguments)

    monkeypatch.setattr(initialization, "ensure_decode_fast_path_is_available", with_gpu)


@pytest.fixture
def padded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pad batches, as CUDA graphs need it."""
    always = property(lambda self: True, lambda self, value: None)
    monkeypatch.setattr(model_runner.ModelRunner, "pad_inputs", always, raising=False)


def generated(model: Any, implementation: str = BATCHING, prompts: Any = PROMPTS, **changes: Any) -> list[Any]:
    """Generate greedily. The smallest batches let a long prompt enter in parts, beside steps of other requests."""
    settings = {"page_size": 16, "num_blocks": 64, "max_batch_tokens": 32, "max_requests_per_batch": 8}
    settings |= {"return_logprobs": True, "auto_switch_to_flash": False, **changes}
    if model._compatible_flash_implementations is None:
        model.set_attn_implementation(implementation)
    else:  # transformers replaces all others of them
        model.config._attn_implementation = implementation
    assert model.config._attn_implementation == implementation
    greedy = transformers.GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0)
    config = transformers.ContinuousBatchingConfig(**settings)
    found = model.generate_batch(prompts, generation_config=greedy, continuous_batching_config=config)
    assert len(found) == len(prompts)
    return list(found.values())


@torch.no_grad()
def check(model: Any, found: list[Any], prompts: Any = PROMPTS) -> None:
    """Compare log-probabilities of what was generated with those of eager attention without a cache."""
    model.set_attn_implementation("eager")
    for prompt, output in zip(prompts, found, strict=True):
        assert output.error is None and len(output.generated_tokens) == NEW
        ids = torch.tensor([[*prompt, *output.generated_tokens]])
        logits = model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
        right = logits.log_softmax(-1)[torch.arange(NEW), output.generated_tokens]
        torch.testing.assert_close(torch.tensor(output.logprobs), right, atol=CLOSE, rtol=0)
        best = logits.log_softmax(-1).max(-1).values
        assert (best - right).max() <= 2 * CLOSE, "another token was chosen"


def model_of(name: str) -> Any:
    if name in BESIDE_EAGER:
        return BESIDE_EAGER[name]("eager")
    return built(*MODELS[name](), implementation="eager", dtype=torch.float16)


@pytest.mark.usefixtures("tables")
@pytest.mark.parametrize("padding", [False, True], ids=["as they are", "padded"])
def test_steps_are_computed_over_pages(padding: bool, calls: Calls, request: pytest.FixtureRequest) -> None:
    if padding:
        request.getfixturevalue("padded")
    model = model_of("grouped llama")
    check(model, generated(model))
    assert calls.paged and calls.packed, "prompts are packed, steps are over pages"
    assert all(isinstance(call["pattern"], Causal) for call in calls.paged)
    if padding:
        assert any(0 in call["seq_lens"] for call in calls.paged), "no batch was padded"


@pytest.mark.parametrize("padding", [False, True], ids=["as they are", "padded"])
@pytest.mark.parametrize("name", ["grouped llama", "mistral, window 24", "qwen2, full and window 16", *BESIDE_EAGER])
def test_without_tables_all_is_packed(name: str, padding: bool, calls: Calls, request: pytest.FixtureRequest) -> None:
    """Windows, softcaps and sinks too. Caches of layers with a window have no tables."""
    if padding:
        request.getfixturevalue("padded")
    model = model_of(name)
    check(model, generated(model, max_blocks_per_request=0))
    assert not calls.paged and calls.packed


@pytest.mark.usefixtures("tables")
def test_softcaps_and_sinks_over_pages(calls: Calls) -> None:
    """In models without windows, whose caches have tables."""
    for kind, config in (
        (
            transformers.GptOssForCausalLM,
            transformers.GptOssConfig(**GROUPED, num_local_experts=2, num_experts_per_tok=2),
        ),
        (transformers.Gemma2ForCausalLM, transformers.Gemma2Config(**{**GROUPED, "query_pre_attn_scalar": 64})),
    ):
        config.layer_types = ["full_attention"] * config.num_hidden_layers
        config.attn_logit_softcapping = 5.0
        model = built(kind, config, "eager", dtype=torch.float16)
        calls.paged.clear()
        check(model, generated(model))
        given = calls.paged[0]
        is_sunk = kind is transformers.GptOssForCausalLM
        assert (given["sink"] is not None, given["softcap"]) == (is_sunk, None if is_sunk else 5.0)


@pytest.mark.usefixtures("tables", "padded")
def test_tensors_of_the_cache_pass_the_checks_of_calls_over_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Views of K and V that overlap in one tensor. Launches do nothing, so the results are not compared."""
    seen: list[Any] = []

    def attend(*tensors: Any, **given: Any) -> Any:
        with imported("pretended") as script, script.pretended():
            seen.append(paged.paged_attention(*tensors, **given, validate=True))
        return seen[-1]

    monkeypatch.setattr(transformers_packed, "paged_attention", attend)
    model = model_of("grouped llama")
    assert errors(generated(model)) == " ".join(["None"] * len(PROMPTS)) and seen


@pytest.mark.usefixtures("tables")
@pytest.mark.parametrize("where", ["pages", "packed"])
def test_hidden_keys_show(where: str, calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tolerance finds a wrong mask: a window that the model has not."""
    model = model_of("grouped llama")
    if where == "pages":
        attend = calls.attend
        monkeypatch.setattr(
            transformers_packed,
            "paged_attention",
            lambda q, k, v, pattern, **given: attend(q, k, v, SlidingWindow(20), **given),
        )
    else:
        register_transformers_batching(pattern_for=lambda module, q, k, exact: SlidingWindow(20))
    found = generated(model)
    with pytest.raises(AssertionError):
        check(model, found)


@pytest.mark.usefixtures("tables")
def test_a_chosen_pattern_is_that_of_prompts_and_steps(calls: Calls) -> None:
    model = model_of("grouped llama")
    model.config.block_sparse = {"kind": "sink_window", "sink": 4, "left": 9}
    generated(model)
    assert {type(call["pattern"]) for call in calls.paged} == {SinkWindow}
    assert {named.spec.pattern.kind for named in calls.varlen} == {"sink_window"}


def test_calls_outside_of_a_batch_are_those_of_the_other_name(monkeypatch: pytest.MonkeyPatch) -> None:
    oracle_kernel.install(monkeypatch)
    model, ids = model_of("grouped llama"), torch.arange(1, 41)[None]
    with torch.no_grad():
        right = model(ids).logits
        model.set_attn_implementation(BATCHING)
        torch.testing.assert_close(model(ids).logits, right, atol=CLOSE, rtol=0)
        greedy = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": -1, "pad_token_id": 0}
        assert model.generate(ids, **greedy).shape == (1, 40 + NEW)


def errors(found: list[Any]) -> str:
    return " ".join(str(output.error) for output in found)


@pytest.mark.usefixtures("tables")
def test_what_a_model_has_is_refused_by_name() -> None:
    config = transformers.LlamaConfig(**{**GROUPED, "head_dim": 80})
    model = built(transformers.LlamaForCausalLM, config, "eager", dtype=torch.float16)
    assert "query: has head size 80, expected 64, 128, 192, 256" in errors(generated(model, prompts=[[1, 2]]))
    assert errors(generated(model, prompts=[[1, 2]], max_blocks_per_request=0)) == "None"
    model = built(*MODELS["grouped llama"](), implementation="eager", dtype=torch.float32)
    assert "q: is torch.float32" in errors(generated(model, prompts=[[1, 2]]))
    model = model_of("grouped llama")
    assert "k_cache: has pages of 24 tokens" in errors(generated(model, prompts=[[1, 2]], page_size=24))
    model = model_of("mistral, window 24")
    register_transformers_batching(pattern_for=lambda module, q, k, exact: SinkWindow(4, 9))
    assert "sliding_window: is 24, and the cache has no other keys" in errors(generated(model, prompts=[[1, 2]]))


def step(**changes: Any) -> Any:
    """A step of two requests, as the cache passes it."""
    q, k = torch.randn(1, 4, 2, 64).half(), torch.randn(1, 2, 2, 64).half()
    cache = torch.zeros(2, 6, 16, 2, 64).half()
    bounds = torch.tensor([0, 1, 2], dtype=torch.int32)
    given = {
        "query": q,
        "key": k,
        "value": k,
        "attention_mask": None,
        "cu_seq_lens_q": bounds,
        "cu_seq_lens_k": torch.tensor([0, 17, 20], dtype=torch.int32),
        "block_table": torch.tensor([[3, 4], [5, -1]], dtype=torch.int32),
        "k_cache": cache[0],
        "v_cache": cache[1],
        "write_index": [],
        "is_causal": True,
        **changes,
    }
    out, _ = TransformersAttention()(torch.nn.Module(), **given)
    return out, given


def test_a_step_writes_the_keys_of_its_requests_alone() -> None:
    out, given = step()
    assert out.shape == (1, 2, 4, 64)
    for cache, new in (("k_cache", given["key"]), ("v_cache", given["value"])):
        written = given[cache].flatten(2).abs().sum(-1).nonzero().tolist()
        assert written == [[4, 0], [5, 2]], "rows 17 and 3 of the requests"
        assert torch.equal(given[cache][4, 0], new[0, :, 0]) and torch.equal(given[cache][5, 2], new[0, :, 1])


def test_rows_of_no_request_write_nothing_and_are_zero() -> None:
    bounds = torch.tensor([0, 1, 1], dtype=torch.int32)
    table = torch.tensor([[3, 4], [-1, -1]], dtype=torch.int32)
    out, given = step(cu_seq_lens_q=bounds, cu_seq_lens_k=torch.tensor([0, 17, 17]), block_table=table)
    assert given["k_cache"].flatten(2).abs().sum(-1).nonzero().tolist() == [[4, 0]]
    assert out[0, 0].any() and not out[0, 1].any()


@pytest.mark.parametrize(
    ("argument", "changes"),
    [
        ("k_cache: is missing", {"k_cache": None}),
        ("v_cache: is missing", {"v_cache": None}),
        ("block_table: has 1 requests, query 2 tokens", {"block_table": torch.zeros(1, 2, dtype=torch.int32)}),
        (r"k_cache: is torch.bfloat16 .*, key torch.float16", {"k_cache": torch.zeros(6, 16, 2, 64).bfloat16()}),
        ("value: .*head sizes must be equal", {"value": torch.zeros(1, 2, 2, 32).half()}),
    ],
)
def test_steps_that_are_refused(argument: str, changes: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match=argument):
        step(**changes)


def test_registering_again_replaces_the_function_and_keeps_one_loader() -> None:
    loader = modeling_flash_attention_utils._lazy_imports
    register_transformers_batching(pattern_for=lambda module, q, k, exact: exact)
    assert modeling_flash_attention_utils._lazy_imports is loader
    with pytest.raises(ValueError, match="no_flash_of_this_name"):
        modeling_flash_attention_utils.lazy_import_flash_attention("no_flash_of_this_name")
    (function, *_), _ = modeling_flash_attention_utils.lazy_import_flash_attention(BATCHING)
    with pytest.raises(ArgumentError, match="the model calls FlashAttention itself"):
        function(None, None, None)
    with pytest.raises(ArgumentError, match="pattern_for: is int"):
        register_transformers_batching(pattern_for=3)  # type: ignore[arg-type]


@pytest.mark.parametrize("version", ["5.23.1", "5.240.0", "6.0", "what"])
def test_other_versions_are_refused(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["transformers"], "__version__", version)
    with pytest.raises(ToolchainError, match=f"tested with transformers 5.24.*{version} is installed"):
        register_transformers_batching()
