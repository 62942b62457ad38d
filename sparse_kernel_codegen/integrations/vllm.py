"""Attention for vLLM."""

from __future__ import annotations

import sparse_kernel_codegen._ours
from runtime.integrations.vllm.registration import register_vllm
from runtime.integrations.vllm.selections import (
    minimax_m3_sparse_attn,
    minimax_m3_sparse_attn_decode,
    qsa_sparse_paged_attention,
)

__all__ = ["minimax_m3_sparse_attn", "minimax_m3_sparse_attn_decode", "qsa_sparse_paged_attention", "register_vllm"]
