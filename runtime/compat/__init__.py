"""The calls of FlexAttention, FlashAttention and torch's SDPA, computed by the kernels of this package.

Each function takes the arguments of the original, in its layout. What has no counterpart here raises an
``ArgumentError`` that names the argument; nothing is ignored and nothing is computed differently.
"""

from __future__ import annotations

from runtime.compat.flash import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
)
from runtime.compat.flex import flex_attention
from runtime.compat.sdpa import scaled_dot_product_attention
from runtime.ops.block_mask import create_block_mask

__all__ = [
    "create_block_mask",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flex_attention",
    "scaled_dot_product_attention",
]
