"""Small stand-ins for the parts of SGLang that its attention backend uses: on the CPU and on a GPU, without SGLang."""

from __future__ import annotations

import importlib
import itertools
import sys
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

KEPT = "runtime.integrations.sglang.backend"


class AttentionBackend:
    """SGLang's base class, as far as a batch needs it."""

    kv_index_translator: Any = None
    forward_metadata: Any = None


class RadixAttention(torch.nn.Module):
    """A layer with SGLang's attributes."""

    def __init__(self, heads: int, kv_heads: int, head_dim: int, layer_id: int = 0, **others: Any) -> None:
        super().__init__()
        self.tp_q_head_num, self.tp_k_head_num, self.tp_v_head_num = heads, kv_heads, kv_heads
        self.head_dim = self.qk_head_dim = self.v_head_dim = head_dim
        self.layer_id, self.scaling, self.logit_cap, self.sliding_window_size = layer_id, 0.2, 0.0, -1
        self.is_cross_attention = self.use_irope = False
        self.attn_type, self.pos_encoding_mode, self.logit_capping_method = "decoder", "NONE", "tanh"
        self.xai_temperature_len = -1
        self.k_scale: Any = None
        self.v_scale: Any = None
        for name, value in others.items():
            setattr(self, name, value)


class Pool:
    """A KV pool (slots, kv_heads, head_dim) for each layer."""

    def __init__(self, slots: int, kv_heads: int, head_dim: int, layers: int, dtype: Any, device: str) -> None:
        self.buffers = torch.randn(layers, 2, slots, kv_heads, head_dim, device=device).to(dtype)
        self.dtype = dtype

    def get_kv_buffer(self, layer_id: int) -> tuple[Any, Any]:
        k_buffer, v_buffer = self.buffers[layer_id]
        return k_buffer, v_buffer

    def set_kv_buffer(self, layer: Any, places: Any, k: Any, v: Any, k_scale: Any = None, v_scale: Any = None) -> None:
        for buffer, rows, scale in zip(self.buffers[layer.layer_id], (k, v), (k_scale, v_scale), strict=True):
            buffer[self.place(layer, places)] = (rows if scale is None else rows / scale).to(self.dtype)

    def place(self, layer: Any, places: Any) -> Any:
        return places.loc


class WindowPool(Pool):
    """A pool whose layer 1 keeps a window of keys in slots of its own."""

    def __init__(self, *sizes: Any) -> None:
        super().__init__(*sizes)
        self.layers_mapping = {0: (0, False), 1: (0, True)}
        self.mapping = torch.arange(sizes[0] + 1, device=sizes[-1])
        self.mapping[-1] = -1

    def translate_loc_from_full_to_swa(self, slots: Any) -> Any:
        return self.mapping[slots]

    def place(self, layer: Any, places: Any) -> Any:
        return places.swa_loc if self.layers_mapping[layer.layer_id][1] else places.loc


@dataclass
class KVWriteLoc:
    """Places of K and V."""

    loc: Any
    swa_loc: Any = None


class Mode:
    """A forward mode."""

    def __init__(self, name: str) -> None:
        self.name = name

    def is_decode_or_idle(self) -> bool:
        return self.name in ("DECODE", "IDLE")

    def is_extend(self, include_draft_extend_v2: bool = False) -> bool:
        drafts = include_draft_extend_v2 and self.is_draft_extend_v2()
        return drafts or self.name in ("EXTEND", "MIXED", "TARGET_VERIFY", "DLLM_EXTEND")

    def is_draft_extend_v2(self) -> bool:
        return self.name == "DRAFT_EXTEND_V2"

    def is_target_verify(self) -> bool:
        return self.name == "TARGET_VERIFY"

    def is_dllm_extend(self) -> bool:
        return self.name == "DLLM_EXTEND"


def install(monkeypatch: pytest.MonkeyPatch, **settings: Any) -> Any:
    """Put stand-ins in place of SGLang's modules; return the module of the backend, imported with them."""
    execution = SimpleNamespace(
        deterministic=SimpleNamespace(enable_deterministic_inference=settings.get("deterministic", False)),
        dllm=SimpleNamespace(dllm_algorithm=settings.get("dllm")),
    )
    parallel = SimpleNamespace(attn_dcp_size=settings.get("dcp", 1))
    drafts = SimpleNamespace(
        speculative_eagle_topk=settings.get("topk"), speculative_num_draft_tokens=settings.get("drafts")
    )
    contents: dict[str, dict[str, Any]] = {
        "layers.attention.base_attn_backend": {"AttentionBackend": AttentionBackend},
        "layers.radix_attention": {"RadixAttention": RadixAttention},
        "mem_cache.base_swa_memory_pool": {"BaseSWAKVPool": WindowPool},
        "mem_cache.memory_pool": {"KVWriteLoc": KVWriteLoc},
        "layers.attention.verify_mask": {"VerifyMask": object, "maybe_create_verify_mask": lambda **about: about},
        "runtime_context": {
            "get_exec": lambda: execution,
            "get_parallel": lambda: parallel,
            "get_spec": lambda: drafts,
        },
    }
    contents = {f"sglang.srt.{path}": names for path, names in contents.items()}
    return imported(monkeypatch, KEPT, contents)


def imported(monkeypatch: pytest.MonkeyPatch, kept: str, contents: dict[str, dict[str, Any]]) -> Any:
    """Import a module of the integration beside stand-ins, until the test ends.

    Args:
        monkeypatch: pytest's.
        kept: name of the module.
        contents: names of SGLang's modules, each with what it has.
    """
    for path, names in contents.items():
        parts = path.split(".")
        for end in range(1, len(parts) + 1):
            name = ".".join(parts[:end])
            if end == len(parts) or name not in sys.modules:
                monkeypatch.setitem(sys.modules, name, ModuleType(name))
        vars(sys.modules[path]).update(names)
    package, _, own = kept.rpartition(".")
    monkeypatch.delitem(sys.modules, kept, raising=False)
    backend = importlib.import_module(kept)
    monkeypatch.setitem(sys.modules, kept, backend)  # removed when the test ends
    monkeypatch.delattr(importlib.import_module(package), own)
    return backend


def runner_of(
    layers: list[Any],
    page_size: int,
    *,
    pool: type[Pool] = Pool,
    dtype: Any = torch.bfloat16,
    cache: Any = None,
    slots: int = 1024,
    context: int = 512,
    requests: int = 8,
    device: str = "cpu",
    drafts: int = 1,
    **settings: Any,
) -> Any:
    """A model runner, whose requests have pages in any order; page 0 belongs to none.

    Args:
        drafts: tokens of a request that are verified at once.
    """
    cache = dtype if cache is None else cache
    first = layers[0]
    pages = (torch.randperm(slots // page_size - 1) + 1)[: requests * (context // page_size)]
    wanted = requests * (context // page_size)
    pages = pages.repeat(-(-wanted // len(pages)))[:wanted].view(requests, -1)
    table = (pages[..., None] * page_size + torch.arange(page_size)).flatten(1).int().to(device)
    runner = SimpleNamespace(
        model=torch.nn.ModuleList(layers),
        use_mla_backend=False,
        model_config=SimpleNamespace(is_encoder_decoder=False),
        spec_algorithm=SimpleNamespace(name="EAGLE" if drafts > 1 else "NONE"),
        is_draft_worker=False,
        decode_num_tokens_per_req=lambda: drafts,
        kv_index_translator=SimpleNamespace(is_translating=False),
        dtype=dtype,
        kv_cache_dtype=cache,
        kv_cache_dtype_str="auto" if cache == dtype else "fp8_e4m3",
        page_size=page_size,
        attention_chunk_size=None,
        req_to_token_pool=SimpleNamespace(req_to_token=table),
        token_to_kv_pool=pool(slots, first.tp_k_head_num, first.qk_head_dim, len(layers), cache, device),
    )
    for name, value in settings.items():
        setattr(runner, name, value)
    return runner


def batch_of(runner: Any, rows: list[int], lengths: list[int], queries: list[int], mode: str | None = None) -> Any:
    """A batch of the requests of ``rows``, whose latest ``queries`` tokens are computed.

    SGLang does not count tokens that are verified among the keys of a batch.
    """
    table = runner.req_to_token_pool.req_to_token
    counted = [n - (count if mode == "TARGET_VERIFY" else 0) for n, count in zip(lengths, queries, strict=True)]
    places = [table[r, n - count : n] for r, n, count in zip(rows, lengths, queries, strict=True)]
    is_decode = mode == "DECODE" or (mode is None and set(queries) <= {1})
    return SimpleNamespace(
        batch_size=len(rows),
        forward_mode=Mode(mode or ("DECODE" if is_decode else "EXTEND")),
        req_pool_indices=torch.tensor(rows, dtype=torch.long, device=table.device),
        seq_lens=torch.tensor(counted, dtype=torch.long, device=table.device),
        spec_info=None,
        extend_seq_lens=None if is_decode else torch.tensor(queries, dtype=torch.int32, device=table.device),
        extend_seq_lens_cpu=None if is_decode else list(queries),
        extend_prefix_lens_cpu=None if is_decode else [n - m for n, m in zip(lengths, queries, strict=True)],
        out_cache_loc=torch.cat(places).long() if places else torch.zeros(0, dtype=torch.long, device=table.device),
    )


def attend_packed(q: Any, k: Any, v: Any, pattern: Any, **given: Any) -> None:
    """``varlen_attention`` by its definition, into ``out``."""
    window = getattr(pattern, "left", k.shape[0])
    queries, keys = (list(itertools.pairwise(given[name].tolist())) for name in ("cu_seqlens_q", "cu_seqlens_k"))
    for (first, end), (begin, stop) in zip(queries, keys, strict=True):
        k_rows, v_rows = (t[begin:stop].float().repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
        logits = torch.einsum("qhd,khd->hqk", q[first:end].float(), k_rows) * given["scale"]
        away = torch.arange(stop - begin - (end - first), stop - begin)[:, None] - torch.arange(stop - begin)
        logits.masked_fill_((away < 0) | (away > window), float("-inf"))
        given["out"][first:end] = torch.einsum("hqk,khd->qhd", logits.softmax(-1), v_rows).to(q.dtype)


def right(
    runner: Any, layer: Any, q: Any, rows: list[int], lengths: list[int], queries: list[int], **given: Any
) -> Any:
    """Attention of each request by its slots, one after the other: (tokens, heads * head_dim), float32."""
    pool, table = runner.token_to_kv_pool, runner.req_to_token_pool.req_to_token
    buffers, found, first = pool.get_kv_buffer(layer.layer_id), [], 0
    for r, n, count in zip(rows, lengths, queries, strict=True):
        slots = table[r, :n].long()
        if isinstance(pool, WindowPool) and pool.layers_mapping[layer.layer_id][1]:
            slots = pool.mapping[slots]
        keys, values = (
            buffer[slots].float() * (1 if scale is None else scale)
            for buffer, scale in zip(buffers, (layer.k_scale, layer.v_scale), strict=True)
        )
        mine = q[first : first + count].float().view(count, layer.tp_k_head_num, -1, layer.qk_head_dim)
        logits = torch.einsum("qhgd,khd->hgqk", mine, keys) * layer.scaling
        if layer.logit_cap:
            logits = layer.logit_cap * torch.tanh(logits / layer.logit_cap)
        away = torch.arange(n - count, n, device=q.device)[:, None] - torch.arange(n, device=q.device)
        seen = away >= 0
        if layer.sliding_window_size >= 0:
            seen &= away <= layer.sliding_window_size
        logits = logits.masked_fill(~seen, float("-inf"))
        if given.get("sinks") is not None:
            sink = given["sinks"].float().view(layer.tp_k_head_num, -1, 1, 1).expand(*logits.shape[:3], 1)
            logits = torch.cat([logits, sink], -1)
        weights = torch.softmax(logits, -1)[..., :n]
        found.append(torch.einsum("hgqk,khd->qhgd", weights, values).flatten(1))
        first += count
    return torch.cat(found)
