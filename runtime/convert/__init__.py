"""Conversion between the mask formats of other libraries and :mod:`sparse_kernel_codegen.patterns`.

All conversions are torch operations on the device of the tensors. They do not synchronize, their shapes do not depend
on tensor values, and a CUDA graph can capture them. Lists of patterns are ascending and padded with -1. Page tables,
caches and lists of serving engines become arguments of ``paged_attention``.
"""

from __future__ import annotations

from runtime.convert.causal import from_causal_lists
from runtime.convert.csr import Csr, from_csr, to_csr
from runtime.convert.cudnn import Q2K, from_q2k, to_q2k
from runtime.convert.flex import from_block_mask, to_block_mask
from runtime.convert.key_masks import from_key_mask, kv_lengths_from_mask, mask_from_kv_lengths
from runtime.convert.maps import from_bool_blocks, to_bool_blocks
from runtime.convert.packed_lists import from_sequence_lists, packed_list_rows, to_key_lists
from runtime.convert.paged import (
    PagedCache,
    PageTable,
    from_joined_cache,
    from_msa_lists,
    from_page_csr,
    from_qsa_lists,
    from_slots,
    from_stacked_cache,
    from_token_requests,
    to_token_pages,
)
from runtime.convert.ranges import from_cu_seqlens, from_key_ranges
from runtime.convert.token_lists import from_token_lists, to_token_lists
from runtime.convert.token_masks import from_token_mask, to_token_mask

__all__ = [
    "Q2K",
    "Csr",
    "PageTable",
    "PagedCache",
    "from_block_mask",
    "from_bool_blocks",
    "from_causal_lists",
    "from_csr",
    "from_cu_seqlens",
    "from_joined_cache",
    "from_key_mask",
    "from_key_ranges",
    "from_msa_lists",
    "from_page_csr",
    "from_q2k",
    "from_qsa_lists",
    "from_sequence_lists",
    "from_slots",
    "from_stacked_cache",
    "from_token_lists",
    "from_token_mask",
    "from_token_requests",
    "kv_lengths_from_mask",
    "mask_from_kv_lengths",
    "packed_list_rows",
    "to_block_mask",
    "to_bool_blocks",
    "to_csr",
    "to_key_lists",
    "to_q2k",
    "to_token_lists",
    "to_token_mask",
    "to_token_pages",
]
