"""Small stand-ins for the parts of vLLM that its attention backend uses: on the CPU and on a GPU, without vLLM."""

from __future__ import annotations

import enum
from types import SimpleNamespace
from typing import Any, Generic, TypeVar

import pytest
import sglang_stand_in
import torch

KEPT = "runtime.integrations.vllm.backend"
T = TypeVar("T")


class AttentionBackend:
    """vLLM's base class."""


class AttentionMetadata:
    """vLLM's base class of the metadata of a batch."""


class AttentionImpl(Generic[T]):
    """vLLM's base class of a layer's attention."""


class AttentionMetadataBuilder(Generic[T]):
    """vLLM's base class of what makes metadata."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: Any) -> None:
        self.reorder_batch_threshold = 1

    def _init_reorder_batch_threshold(self, most: int, supports_spec_as_decode: bool = False) -> None:
        self.reorder_batch_threshold = most


class AttentionCGSupport(enum.Enum):
    """Support of CUDA graphs."""

    UNIFORM_BATCH = 2


def split_decodes_and_prefills(batch: Any, threshold: int) -> tuple[int, int, int, int]:
    """Requests with few queries, which come first, and with many, then the tokens of both."""
    queries = batch.query_start_loc_cpu.diff()
    few = int((queries <= threshold).cumprod(0).sum())
    tokens = int(batch.query_start_loc_cpu[few])
    return few, len(queries) - few, tokens, int(batch.query_start_loc_cpu[-1]) - tokens


def install(monkeypatch: pytest.MonkeyPatch, additional_config: dict[str, Any] | None = None) -> Any:
    """Put stand-ins in place of vLLM's modules; return the module of the backend, imported with them.

    Args:
        monkeypatch: pytest's.
        additional_config: vLLM's option of that name; None for a layer without a configuration.
    """
    config = None
    if additional_config is not None:
        config = SimpleNamespace(
            additional_config=additional_config,
            compilation_config=SimpleNamespace(max_cudagraph_capture_size=512),
            scheduler_config=SimpleNamespace(max_num_seqs=256, max_num_batched_tokens=8192),
        )
    interface = {
        "AttentionBackend": AttentionBackend,
        "AttentionCGSupport": AttentionCGSupport,
        "AttentionImpl": AttentionImpl,
        "AttentionMetadata": AttentionMetadata,
        "AttentionMetadataBuilder": AttentionMetadataBuilder,
        "AttentionType": SimpleNamespace(DECODER="decoder"),
        "max_decode_query_len": lambda vllm_config: 1,
    }
    contents: dict[str, dict[str, Any]] = {
        "vllm._custom_ops": {},
        "vllm.envs": {"VLLM_BATCH_INVARIANT": False},
        "vllm.config": {"get_current_vllm_config_or_none": lambda: config},
        "vllm.v1.attention.backend": interface,
        "vllm.v1.attention.backends.utils": {"split_decodes_and_prefills": split_decodes_and_prefills},
    }
    return sglang_stand_in.imported(monkeypatch, KEPT, contents)


def common_metadata(bounds: list[int], lengths: Any, table: Any) -> Any:
    """vLLM's metadata of a batch, as far as the builder reads it.

    Args:
        bounds: first token of each request, then the end of the last one.
        lengths: int32 (batch,), keys of each request.
        table: int32 (batch, pages of the longest request).
    """
    on_cpu = torch.tensor(bounds, dtype=torch.int32)
    return SimpleNamespace(
        query_start_loc=on_cpu.to(lengths.device),
        query_start_loc_cpu=on_cpu,
        seq_lens=lengths,
        seq_lens_cpu_upper_bound=lengths.cpu(),
        num_reqs=len(bounds) - 1,
        num_actual_tokens=bounds[-1],
        max_query_len=int(on_cpu.diff().max()),
        block_table_tensor=table,
        slot_mapping=torch.zeros(bounds[-1], dtype=torch.int64, device=lengths.device),
        causal=True,
    )
