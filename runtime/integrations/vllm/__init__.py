"""Attention for vLLM: a backend for layers with a KV cache, and the attention of models that select keys."""

from __future__ import annotations

from runtime.integrations.vllm.registration import VERSIONS, plugin, register_vllm
from runtime.integrations.vllm.selections import (
    minimax_m3_sparse_attn,
    minimax_m3_sparse_attn_decode,
    qsa_sparse_paged_attention,
)

__all__ = [
    "VERSIONS",
    "minimax_m3_sparse_attn",
    "minimax_m3_sparse_attn_decode",
    "plugin",
    "qsa_sparse_paged_attention",
    "register_vllm",
]
