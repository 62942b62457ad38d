"""Attention for SGLang."""

from __future__ import annotations

import sparse_kernel_codegen._ours
from runtime.integrations.sglang.registration import register_sglang
from runtime.integrations.sglang.selections import (
    flash_decode_with_gqa_share_sparse,
    flash_prefill_with_gqa_share_sparse,
    sparse_gqa_fwd_interface_triton,
    sparse_gqa_fwd_interface_triton_ck,
    sparse_gqa_paged_prefill_triton,
)

__all__ = [
    "flash_decode_with_gqa_share_sparse",
    "flash_prefill_with_gqa_share_sparse",
    "register_sglang",
    "sparse_gqa_fwd_interface_triton",
    "sparse_gqa_fwd_interface_triton_ck",
    "sparse_gqa_paged_prefill_triton",
]
