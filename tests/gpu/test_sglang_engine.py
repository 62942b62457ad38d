"""SGLang's own attention layer and engine on a GPU: this package's backend beside SGLang's Triton backend.

Both backends get the same batches and pools, made by SGLang's classes. ``scripts/pack_engine.py`` packs SGLang for a
GPU machine that cannot install it.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
if importlib.util.find_spec("sglang") is None:
    pytest.skip("needs SGLang: scripts/pack_engine.py", allow_module_level=True)

import absent  # noqa: E402

absent.without_torchvision()
absent.without_sglangs_kernels()

from sglang.srt import runtime_context  # noqa: E402
from sglang.srt.configs.model_config import ModelConfig  # noqa: E402
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend  # noqa: E402
from sglang.srt.layers.radix_attention import RadixAttention  # noqa: E402
from sglang.srt.mem_cache.kv_index_translator import KVIndexTranslator  # noqa: E402
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool  # noqa: E402
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode  # noqa: E402
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context  # noqa: E402
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm  # noqa: E402

from runtime.integrations.sglang.backend import PagedBackend  # noqa: E402

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
DEVICE = "cuda"
HEADS, KV_HEADS, D = 8, 2, 128
REQUESTS, CONTEXT = 4, 1024
WORST = {BF16: 0.1, E4M3: 0.2}
"""Largest error of SGLang's backend, by type of the pool: it rounds weights to that (0.13 for e4m3 on an H200)."""
STEPS = {
    "prompts": (300, 128, 40, 5),
    "parts of prompts": (200, 64, 33, 9),
    "decoding": (1,) * 4,
    "mixed": (90, 7, 1, 1),
}
"""Queries of four requests in batches one after the other."""
LAYERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"sliding_window_size": 100},
    "softcap": {"logit_cap": 20.0},
    "sinks": {},
}
"""Arguments of SGLang's layer."""


@pytest.fixture(autouse=True)
def settings() -> Iterator[None]:
    """SGLang's default settings."""
    torch.manual_seed(0)
    ranks = {"attn_dcp_rank": 0}
    with runtime_context.get_context().override_server_args(), runtime_context.get_parallel().override(**ranks):
        yield


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


def runner_of(folder: Path, layer: Any, page: int, cache: Any) -> Any:
    """What SGLang's model runner gives a backend, with its pools: requests have pages in any order."""
    places = ReqToTokenPool(REQUESTS, CONTEXT, DEVICE, False)
    slots = REQUESTS * CONTEXT
    pages = (torch.randperm(slots // page) + 1)[:, None] * page + torch.arange(page)
    places.req_to_token[1:] = pages.view(REQUESTS, -1).int().to(DEVICE)
    pool = MHATokenToKVPool(slots, page, cache, KV_HEADS, D, 1, DEVICE, False)
    window = layer.sliding_window_size
    return SimpleNamespace(
        model=torch.nn.ModuleList([layer]),
        model_config=ModelConfig(str(folder), context_length=CONTEXT),
        device=DEVICE,
        gpu_id=0,
        use_mla_backend=False,
        sliding_window_size=window if window > 0 else None,
        spec_algorithm=SpeculativeAlgorithm.NONE,
        is_draft_worker=False,
        decode_num_tokens_per_req=lambda: 1,
        kv_index_translator=KVIndexTranslator(
            req_to_token=places.req_to_token,
            token_to_kv_pool_allocator=None,
            token_to_kv_pool=pool,
            page_size=page,
            device=DEVICE,
        ),
        dtype=BF16,
        kv_cache_dtype=cache,
        kv_cache_dtype_str="auto" if cache == BF16 else "fp8_e4m3",
        page_size=page,
        attention_chunk_size=None,
        req_to_token_pool=places,
        token_to_kv_pool=pool,
        token_to_kv_pool_allocator=None,
    )


def batch_of(runner: Any, lengths: list[int], queries: tuple[int, ...]) -> Any:
    """SGLang's batch of the latest tokens of all requests."""
    rows = torch.arange(1, REQUESTS + 1)
    table = runner.req_to_token_pool.req_to_token
    slots = [table[row, n - count : n] for row, n, count in zip(rows, lengths, queries, strict=True)]
    is_decode = set(queries) == {1}
    prefixes = [n - count for n, count in zip(lengths, queries, strict=True)]
    batch = ForwardBatch(
        forward_mode=ForwardMode.DECODE if is_decode else ForwardMode.EXTEND,
        batch_size=REQUESTS,
        input_ids=torch.zeros(sum(queries), dtype=torch.long, device=DEVICE),
        req_pool_indices=rows.to(DEVICE),
        seq_lens=torch.tensor(lengths, device=DEVICE),
        seq_lens_cpu=torch.tensor(lengths),
        out_cache_loc=torch.cat(slots).long(),
        seq_lens_sum=sum(lengths),
        extend_seq_lens=None if is_decode else torch.tensor(queries, dtype=torch.int32, device=DEVICE),
        extend_prefix_lens=None if is_decode else torch.tensor(prefixes, dtype=torch.int32, device=DEVICE),
        extend_seq_lens_cpu=None if is_decode else list(queries),
        extend_prefix_lens_cpu=None if is_decode else prefixes,
    )
    translator = runner.kv_index_translator
    translator.own_plan(batch).bind(batch, translator)
    return batch


def computed(backend: Any, layer: Any, batch: Any, operands: Any, **others: Any) -> Any:
    """A forward pass of the layer, which writes K and V to the pool."""
    backend.init_forward_metadata(batch)
    with forward_context(ForwardContext(attn_backend=backend)):
        return layer(*(each.clone() for each in operands), batch, **others).float()


def exact(runner: Any, layer: Any, lengths: list[int], queries: tuple[int, ...], q: Any, sinks: Any) -> Any:
    """Attention over the pool in float64."""
    found = []
    scales = [1.0 if each is None else each.double() for each in (layer.k_scale, layer.v_scale)]
    buffers = runner.token_to_kv_pool.get_kv_buffer(0)
    table = runner.req_to_token_pool.req_to_token
    for i, (n, rows) in enumerate(zip(lengths, q.view(-1, HEADS, D).split(queries), strict=True)):
        slots = table[i + 1, :n].long()
        k, v = (
            (buffer[slots].double() * scale).repeat_interleave(HEADS // KV_HEADS, 1)
            for buffer, scale in zip(buffers, scales, strict=True)
        )
        logits = torch.einsum("qhd,khd->hqk", rows.double(), k) * layer.scaling
        if layer.logit_cap:
            logits = layer.logit_cap * torch.tanh(logits / layer.logit_cap)
        away = torch.arange(n - len(rows), n, device=DEVICE)[:, None] - torch.arange(n, device=DEVICE)
        most = layer.sliding_window_size if layer.sliding_window_size > 0 else n
        logits.masked_fill_((away < 0) | (away > most), float("-inf"))
        if sinks is not None:
            logits = torch.cat([logits, sinks.double()[:, None, None].expand(-1, len(rows), 1)], -1)
        found.append(torch.einsum("hqk,khd->qhd", logits.softmax(-1)[..., :n], v).flatten(1))
    return torch.cat(found)


CASES = [
    *((BF16, kind, page) for kind in LAYERS for page in (1, 64)),
    (BF16, "plain", 16),
    (E4M3, "plain", 64),
]


@pytest.mark.parametrize(("cache", "kind", "page"), CASES)
def test_a_layer_computes_what_it_does_on_sglangs_backend(
    folder: Path, cache: Any, kind: str, page: int, record_property: Any
) -> None:
    """Within rounding: the error against float64 is at most twice that of SGLang's backend, and pools are equal."""
    sinks = torch.randn(HEADS, device=DEVICE).bfloat16() if kind == "sinks" else None
    others = {} if sinks is None else {"sinks": sinks}
    layer = RadixAttention(HEADS, D, D**-0.5, KV_HEADS, 0, **LAYERS[kind])
    if cache == E4M3:
        layer.k_scale_float, layer.v_scale_float = 0.03125, 0.0625
        layer.k_scale, layer.v_scale = (
            torch.nn.Parameter(torch.tensor(scale, device=DEVICE), requires_grad=False)
            for scale in (layer.k_scale_float, layer.v_scale_float)
        )
    torch.manual_seed(1)
    runner = runner_of(folder, layer, page, cache)
    ours, theirs = PagedBackend(runner), TritonAttnBackend(runner)
    lengths = [0] * REQUESTS
    for step, queries in STEPS.items():
        lengths = [n + count for n, count in zip(lengths, queries, strict=True)]
        batch = batch_of(runner, lengths, queries)
        rows = torch.randn(sum(queries), (HEADS + 2 * KV_HEADS) * D, device=DEVICE).bfloat16()
        operands = rows.split([HEADS * D, KV_HEADS * D, KV_HEADS * D], -1)
        found, pools = [], []
        for backend in (ours, theirs):
            found.append(computed(backend, layer, batch, operands, **others).double())
            pools.append([each.view(torch.uint8).clone() for each in runner.token_to_kv_pool.get_kv_buffer(0)])
        assert all(torch.equal(*pair) for pair in zip(*pools, strict=True)), step
        true = exact(runner, layer, lengths, queries, operands[0], sinks)
        errors = [(each - true).abs().max().item() for each in found]
        record_property(step, f"largest error against float64 {errors[0]:.2e}, of triton {errors[1]:.2e}")
        assert errors[0] <= 2 * errors[1] + 1e-3 and errors[1] < WORST[cache], (step, errors)
        torch.testing.assert_close(found[0], true, atol=2e-2, rtol=2e-2)


# The engine


ROOT = Path(__file__).resolve().parents[2]
ENGINE = """
import json, sys
import absent
absent.without_torchvision()
absent.without_sglangs_kernels()
import sglang
from sglang.srt.layers.dual_gemm import DualGemm
from runtime.integrations.sglang.registration import register_sglang
DualGemm._select_mode = lambda *_: None  # imports CUTLASS, also on GPUs that its kernel is not for
register_sglang()
if __name__ == "__main__":
    folder, backend, options = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    engine = sglang.Engine(model_path=folder, skip_tokenizer_init=True, random_seed=0, context_length=1024,
                           max_total_tokens=8192, max_running_requests=8, mem_fraction_static=0.3, page_size=64,
                           chunked_prefill_size=512, attention_backend=backend, sampling_backend="pytorch", **options)
    prompts = [[(7 * i * j) % 900 + 1 for j in range(1, n)] for i, n in enumerate((700, 40, 300), 1)]
    sampling = {"temperature": 0, "max_new_tokens": 20, "ignore_eos": True}
    found = engine.generate(input_ids=prompts, sampling_params=sampling, return_logprob=True)
    rows = [each["meta_info"]["output_token_logprobs"] for each in found]
    print("FOUND" + json.dumps([[[row[1] for row in one], [row[0] for row in one]] for one in rows]), flush=True)
    engine.shutdown()
"""
ALONE = {
    "SGLANG_FORCE_FUSED_OP_BACKEND": "torch",
    "SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK": "1",
    "HF_HUB_OFFLINE": "1",
}
"""Norms, rotary embeddings and activations by torch: a pack has no kernels of SGLang. No network."""
EAGER: dict[str, Any] = {"disable_cuda_graph": True}
GRAPHS: dict[str, Any] = {"disable_prefill_cuda_graph": True, "cuda_graph_bs_decode": [1, 2, 4]}
"""CUDA graphs of decoding steps. Those of prompts need a function of SGLang's kernels."""
PORTS = {"triton": 30000, "block_sparse": 32000}
"""First ports of the engines, by backend: the two of a test run at the same time."""


def generated(folder: Path, backend: str, options: dict[str, Any]) -> list[Any]:
    """Tokens and log-probabilities of three prompts."""
    script = folder / f"engine_of_{backend}.py"  # SGLang starts processes, which import the main module
    script.write_text(ENGINE)
    ports = {"port": PORTS[backend], "nccl_port": PORTS[backend] + 1}
    command = [sys.executable, str(script), str(folder), backend, json.dumps(options | ports)]
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "support"), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | ALONE | {"PYTHONPATH": path}
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, env=environment)
    found = [line.removeprefix("FOUND") for line in done.stdout.splitlines() if line.startswith("FOUND")]
    assert found, f"rc {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-8000:]}"
    rows: list[Any] = json.loads(found[0])
    return rows


@pytest.mark.parametrize(
    "options", [EAGER, GRAPHS, GRAPHS | {"kv_cache_dtype": "fp8_e4m3"}], ids=["eager", "graphs", "fp8"]
)
def test_a_small_model_generates_what_it_does_on_sglangs_backend(
    folder: Path, options: dict[str, Any], record_property: Any
) -> None:
    """Random weights, prompts in parts: log-probabilities agree up to the first other token."""
    with ThreadPoolExecutor() as both:  # most of the time is imports
        theirs, ours = both.map(generated, repeat(folder), PORTS, repeat(options))
    compared, equal = 0, 0
    for (tokens, logs), (right_tokens, right_logs) in zip(ours, theirs, strict=True):
        for token, right_token, log, right_log in zip(tokens, right_tokens, logs, right_logs, strict=True):
            assert abs(log - right_log) < 0.1
            compared, equal = compared + 1, equal + (token == right_token)
            if token != right_token:
                break
    record_property("tokens", f"{equal} equal to those of triton, of {compared} compared and 60 generated")
    assert compared >= 10
