"""vLLM's own attention layer and engine on a GPU: this package's backend beside vLLM's.

Both backends get the same batches, made by vLLM's classes, and write and read a cache each. ``scripts/pack_engine.py``
packs vLLM for a GPU machine that cannot install it.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm.v1.attention.backend", reason="needs vLLM: scripts/pack_engine.py", exc_type=ImportError)
transformers = pytest.importorskip("transformers")

from vllm.config import set_current_vllm_config  # noqa: E402
from vllm.engine.arg_utils import EngineArgs  # noqa: E402
from vllm.forward_context import set_forward_context  # noqa: E402
from vllm.model_executor.layers.attention import Attention  # noqa: E402
from vllm.v1.attention.backend import CommonAttentionMetadata  # noqa: E402
from vllm.v1.attention.backends.registry import AttentionBackendEnum  # noqa: E402
from vllm.v1.attention.backends.utils import get_supported_kv_cache_layouts  # noqa: E402

from runtime.integrations.vllm.registration import register_vllm  # noqa: E402

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
DEVICE = "cuda"
NAME, OURS = "model.layers.0.self_attn.attn", "CUSTOM"
HEADS, KV_HEADS, D = 8, 2, 128
WORST = 0.3
"""Error of vLLM's backend, which rounds queries to e4m3 beside an e4m3 cache."""
ROOT = Path(__file__).resolve().parents[2]
STEPS = {
    "prompts": (300, 128, 40, 5),
    "parts of prompts": (200, 64, 33, 9),
    "decoding": (1,) * 4,
    "mixed": (1, 1, 90, 7),
}
"""Queries of four requests in batches one after the other. vLLM places decoding steps before prompts."""
LAYERS = {
    "plain": {},
    "window": {"per_layer_sliding_window": 100},
    "softcap": {"logits_soft_cap": 20.0},
    "sinks": {"sinks": True},
}
"""Arguments of vLLM's layer."""


@dataclass
class Side:
    """A layer on a backend, with what vLLM makes for it."""

    config: Any
    layer: Any
    builder: Any


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama with random weights."""
    path = tmp_path_factory.mktemp("llama")
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 2, "vocab_size": 1000}
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": D}
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**sizes, **heads, initializer_range=0.05)
    transformers.LlamaForCausalLM(config).bfloat16().save_pretrained(path)
    return path


def needed(backend: str) -> None:
    """Skip a test of a backend whose extension is not installed."""
    if backend == "FLASH_ATTN":
        pytest.importorskip("vllm.vllm_flash_attn._vllm_fa3_C", exc_type=ImportError)


def side_of(folder: Path, backend: str, cache: str, page: int, **options: Any) -> Side:
    """A layer that selects its backend as in an engine."""
    register_vllm()
    arguments = {"dtype": "bfloat16", "max_model_len": 1024, "load_format": "dummy", "skip_tokenizer_init": True}
    config = EngineArgs(
        model=str(folder),
        attention_backend=backend,
        kv_cache_dtype=cache,
        block_size=page,
        enforce_eager=True,
        **arguments,
    ).create_engine_config()
    torch.set_default_dtype(BF16)
    try:
        with set_current_vllm_config(config), torch.device(DEVICE):
            settings = {"cache_config": config.cache_config, "prefix": NAME}
            layer = Attention(HEADS, D, D**-0.5, KV_HEADS, **settings, **options)
            layer.process_weights_after_loading(BF16)
            if cache == "fp8":
                layer._k_scale.fill_(0.03)
                layer._v_scale.fill_(0.02)
            spec = layer.get_kv_cache_spec(config)
            builder = layer.attn_backend.get_builder_cls()(spec, [NAME], config, torch.device(DEVICE))
    finally:
        torch.set_default_dtype(torch.float32)
    assert layer.backend is AttentionBackendEnum[backend]
    return Side(config, layer, builder)


def cache_of(backends: list[Any], pages: int, page: int, dtype: Any) -> Any:
    """An empty cache of a layer in the layout that vLLM prefers: (pages, kv_heads, page, 2 * head size)."""
    order = get_supported_kv_cache_layouts(backends)[0].stride_order
    shape = (1, pages, KV_HEADS, page, 2 * D)
    stored = torch.zeros([shape[axis] for axis in order], dtype=dtype, device=DEVICE)
    return stored.permute([order.index(axis) for axis in range(5)])[0]


def common(table: Any, lengths: list[int], queries: tuple[int, ...], page: int) -> Any:
    """vLLM's metadata of a batch."""
    bounds, keys = torch.tensor([0, *accumulate(queries)]).int(), torch.tensor(lengths).int()
    places = [torch.arange(n - count, n) for n, count in zip(lengths, queries, strict=True)]
    slots = [table[i, at // page].long() * page + at % page for i, at in enumerate(places)]
    return CommonAttentionMetadata(
        query_start_loc=bounds.to(DEVICE),
        query_start_loc_cpu=bounds,
        seq_lens=keys.to(DEVICE),
        num_reqs=len(lengths),
        num_actual_tokens=sum(queries),
        max_query_len=max(queries),
        max_seq_len=max(lengths),
        block_table_tensor=table.to(DEVICE),
        slot_mapping=torch.cat(slots).to(DEVICE),
        causal=True,
        seq_lens_cpu_upper_bound=keys,
    )


def computed(side: Side, batch: Any, q: Any, k: Any, v: Any) -> Any:
    """A forward pass of the layer in vLLM's context, which writes K and V to the cache."""
    found = side.builder.build(0, batch)
    with (
        set_current_vllm_config(side.config),
        set_forward_context({NAME: found}, side.config, slot_mapping={NAME: batch.slot_mapping}),
    ):
        return side.layer(q.clone(), k.clone(), v.clone()).float()


def exact(side: Side, table: Any, lengths: list[int], queries: tuple[int, ...], q: Any) -> Any:
    """Attention over the cache in float64."""
    layer, impl, found = side.layer, side.layer.impl, []
    cache = layer.kv_cache if layer.kv_cache.dtype == BF16 else layer.kv_cache.view(E4M3)
    window, softcap = layer.sliding_window, getattr(impl, "logits_soft_cap", 0)
    sinks = getattr(impl, "sinks", None)
    for i, (n, rows) in enumerate(zip(lengths, q.view(-1, HEADS, D).split(queries), strict=True)):
        pages = cache[table[i].long().to(DEVICE)].transpose(1, 2).flatten(0, 1)[:n].double()
        k, v = (each.repeat_interleave(HEADS // KV_HEADS, 1) for each in pages.split(D, -1))
        if cache.dtype == E4M3:
            k, v = k * layer._k_scale.double(), v * layer._v_scale.double()
        logits = torch.einsum("qhd,khd->hqk", rows.double(), k) * D**-0.5
        logits = softcap * torch.tanh(logits / softcap) if softcap else logits
        away = torch.arange(n - len(rows), n, device=DEVICE)[:, None] - torch.arange(n, device=DEVICE)
        logits.masked_fill_((away < 0) | (away >= (window or n)), float("-inf"))
        if sinks is not None:
            logits = torch.cat([logits, sinks.double()[:, None, None].expand(-1, len(rows), 1)], -1)
        found.append(torch.einsum("hqk,khd->qhd", logits.softmax(-1)[..., :n], v).flatten(1))
    return torch.cat(found)


CASES = [
    *(("TRITON_ATTN", "auto", kind, page) for kind in LAYERS for page in (16, 64)),
    *(("FLASH_ATTN", "auto", kind, 64) for kind in LAYERS),
    ("TRITON_ATTN", "fp8", "plain", 64),
]


@pytest.mark.parametrize(("backend", "cache", "kind", "page"), CASES)
def test_a_layer_computes_what_it_does_on_vllms_backend(
    folder: Path, backend: str, cache: str, kind: str, page: int, record_property: Any
) -> None:
    """Within rounding: the error against float64 is at most twice that of vLLM's backend, and caches are equal."""
    needed(backend)
    options: dict[str, Any] = dict(LAYERS[kind])
    if options.get("sinks"):
        options["sinks"] = torch.randn(HEADS, device=DEVICE).bfloat16()
    theirs, ours = (side_of(folder, name, cache, page, **options) for name in (backend, OURS))
    pages = 4 * (1024 // page)
    for side in (theirs, ours):
        dtype = BF16 if cache == "auto" else torch.uint8
        side.layer.kv_cache = cache_of([each.layer.attn_backend for each in (theirs, ours)], pages, page, dtype)
    table, lengths = torch.randperm(pages).int().view(4, -1), [0] * 4
    for step, queries in STEPS.items():
        lengths = [n + count for n, count in zip(lengths, queries, strict=True)]
        batch = common(table, lengths, queries, page)
        rows = torch.randn(sum(queries), (HEADS + 2 * KV_HEADS) * D, device=DEVICE).bfloat16()
        q, k, v = rows.split([HEADS * D, KV_HEADS * D, KV_HEADS * D], -1)
        right, found = (computed(side, batch, q, k, v) for side in (theirs, ours))
        assert torch.equal(*(side.layer.kv_cache.view(torch.uint8) for side in (theirs, ours))), step
        true = exact(theirs, table, lengths, queries, q)
        errors = [(each.double() - true).abs().max().item() for each in (found, right)]
        record_property(step, f"largest error against float64 {errors[0]:.2e}, of {backend} {errors[1]:.2e}")
        assert errors[0] <= 2 * errors[1] + 1e-3 and errors[1] < WORST, (step, errors)
        torch.testing.assert_close(found.double(), true, atol=2e-2, rtol=2e-2)


# The engine


ENGINE = """
import gc, json, sys
from vllm import LLM, SamplingParams
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
from vllm.plugins import load_general_plugins
load_general_plugins()
from runtime.integrations.vllm.registration import register_vllm
register_vllm()
folder, backends, options = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
prompts = [{"prompt_token_ids": [(7 * i * j) % 900 + 1 for j in range(1, n)]} for i, n in enumerate((700, 40, 300), 1)]
sampling = SamplingParams(temperature=0, max_tokens=20, logprobs=1, ignore_eos=True, detokenize=False)
for backend in backends:
    llm = LLM(folder, skip_tokenizer_init=True, seed=0, max_model_len=1024, max_num_batched_tokens=512,
              gpu_memory_utilization=0.3, kv_cache_memory_bytes=1 << 30, attention_backend=backend, **options)
    outs = [each.outputs[0] for each in llm.generate(prompts, sampling)]
    found = [[list(out.token_ids), [next(iter(p.values())).logprob for p in out.logprobs]] for out in outs]
    print("FOUND" + json.dumps(found), flush=True)
    del llm
    gc.collect()
    cleanup_dist_env_and_memory()
"""
FAST: dict[str, Any] = {
    "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4]}
}
"""CUDA graphs of decoding steps, without a compilation of the model."""


ALONE = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "HF_HUB_OFFLINE": "1",
}
"""The engine in one process, without a network and without FlashInfer, which a pack does not have."""


def generated(folder: Path, backends: list[str], options: dict[str, Any]) -> list[Any]:
    """Tokens and log-probabilities of three prompts on each backend, in one process."""
    command = [sys.executable, "-c", ENGINE, str(folder), json.dumps(backends), json.dumps(options)]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path, **ALONE}
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900, env=environment)
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-8000:]}"
    found = [line.removeprefix("FOUND") for line in done.stdout.splitlines() if line.startswith("FOUND")]
    return [json.loads(line) for line in found]


def pairs(found: list[Any], right: list[Any]) -> list[tuple[int, int, float, float]]:
    """Token, other token and both log-probabilities, up to the first other token of each prompt."""
    compared = []
    for (tokens, logs), (right_tokens, right_logs) in zip(found, right, strict=True):
        for pair in zip(tokens, right_tokens, logs, right_logs, strict=True):
            compared.append(pair)
            if pair[0] != pair[1]:
                break
    assert len(compared) >= 10
    return compared


@pytest.mark.parametrize(
    ("backend", "options"),
    [("TRITON_ATTN", {"enforce_eager": True}), ("FLASH_ATTN", FAST), ("FLASH_ATTN", {})],
    ids=["eager", "graphs", "compiled"],
)
def test_a_small_model_generates_what_it_does_on_vllms_backend(
    folder: Path, backend: str, options: dict[str, Any], record_property: Any
) -> None:
    """Random weights, prompts in parts: log-probabilities agree up to the first other token."""
    needed(backend)
    importlib.import_module("vllm._C_stable_libtorch")
    theirs, ours = generated(folder, [backend, OURS], options)
    compared = pairs(ours, theirs)
    assert all(abs(log - right) < 0.1 for _, _, log, right in compared)
    equal = sum(token == right for token, right, _, _ in compared)
    record_property("tokens", f"{equal} equal to those of {backend}, of {len(compared)} compared and 60 generated")


def test_a_small_model_with_an_fp8_cache_is_as_near_to_16_bits_as_on_vllms_backend(
    folder: Path, record_property: Any
) -> None:
    """Mean errors of log-probabilities, up to the first other token, beside a cache of 16 bits on vLLM's backend."""
    importlib.import_module("vllm._C_stable_libtorch")
    (right,) = generated(folder, ["TRITON_ATTN"], FAST)
    both = generated(folder, ["TRITON_ATTN", OURS], FAST | {"kv_cache_dtype": "fp8"})
    of_pairs = [[abs(log - exact) for _, _, log, exact in pairs(found, right)] for found in both]
    theirs, ours = (sum(errors) / len(errors) for errors in of_pairs)
    record_property("tokens", f"mean error {ours:.3f}, of TRITON_ATTN {theirs:.3f}")
    assert ours <= 1.2 * theirs + 0.01 and theirs < 0.3
