"""Attention of models that select keys for each query, with the signatures of SGLang's functions.

A file of SGLang imports these instead of its own: ``minimax_sparse_ops/minimax_sparse.py`` those of MiniMax M3 (MSA),
``qwen_sparse_attn_backend.py`` those of Qwen4Exp (QSA). Argument names, order and defaults are SGLang's. Only listed
keys are read. Pages of MSA's pool have the tokens of ``--page-size``.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from runtime.convert import from_msa_lists
from runtime.errors import ArgumentError
from runtime.integrations.sglang.layers import write_page_table
from runtime.key_lists import KeyLists
from runtime.ops.paged import paged_attention

SETTINGS = "sglang.srt.runtime_context"
"""SGLang's module with the settings of the process."""
_RANK = 3


def flash_decode_with_gqa_share_sparse(  # noqa: PLR0917 - SGLang's signature
    q: torch.Tensor,
    sink: torch.Tensor | None,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    req_to_token: torch.Tensor,
    seq_lens: torch.Tensor,
    slot_ids: torch.Tensor,
    block_size: int,
    topk_idx: torch.Tensor,
    sm_scale: float | None = None,
    use_tma: bool = True,
    page_size: int = 0,
    q_scale: float | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    hisparse_slots: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute attention of MiniMax M3 over selected blocks, for rows of one query each.

    Args:
        q: (rows, heads, head_dim), float16 or bfloat16. Drafts of a request that are verified are rows of their own.
        sink: None; sinks of MSA, which are vectors, are not supported.
        k_cache: (slots, kv_heads, head_dim), in q's type or float8_e4m3fn.
        v_cache: as k_cache, with the same strides.
        req_to_token: int32 (requests, context), slot of each token.
        seq_lens: integers (rows,), keys up to the query.
        slot_ids: integers (rows,), the row of ``req_to_token`` of each query.
        block_size: keys of a block.
        topk_idx: int32 (kv_heads, rows, entries), blocks of each query; negative entries are ignored.
        sm_scale: softmax scale. Default: 1 / sqrt(head_dim).
        use_tma: not read.
        page_size: tokens of a page, a power of two; 0 for that of SGLang's settings, or 1 without them.
        q_scale: a factor of the logits.
        k_scale: the factor of a float8_e4m3fn k_cache.
        v_scale: the same for V.
        hisparse_slots: None; keys in the memory of the host are not supported.

    Returns:
        (rows, heads, head_dim), in q's type.

    Raises:
        ArgumentError: naming the argument, before anything is launched.
    """
    _refuse(sink=sink, hisparse_slots=hisparse_slots)
    return _attend_blocks(
        q,
        (k_cache, v_cache),
        from_msa_lists(topk_idx, block=block_size),
        req_to_token,
        slot_ids,
        page_size=page_size or _page_size(),
        scale=sm_scale,
        scales=(q_scale, k_scale, v_scale),
        seq_lens=seq_lens,
    )


def flash_prefill_with_gqa_share_sparse(  # noqa: PLR0917 - SGLang's signature
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    sink: torch.Tensor | None,
    req_to_token: torch.Tensor,
    slot_ids: torch.Tensor,
    topk_idx: torch.Tensor,
    block_size_q: int,
    block_size_k: int,
    cu_seqlens: torch.Tensor,
    seq_lens: torch.Tensor,
    prefix_lens: torch.Tensor,
    max_seqlen_q: int,
    sm_scale: float | None = None,
    use_tma: bool = True,
    cu_seqblocks_q: torch.Tensor | None = None,
    max_seqblock_q: int | None = None,
    q_scale: float | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    loc_mapping: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute attention of MiniMax M3 over selected blocks, for requests with different numbers of queries.

    Args:
        q: (tokens, heads, head_dim), float16 or bfloat16.
        k_cache: as for :func:`flash_decode_with_gqa_share_sparse`.
        v_cache: as k_cache, with the same strides.
        sink: None, as for :func:`flash_decode_with_gqa_share_sparse`.
        req_to_token: int32 (requests, context), slot of each token.
        slot_ids: integers (batch,), the row of ``req_to_token`` of each request.
        topk_idx: int32 (kv_heads, query blocks, entries), key blocks of each query block; negative entries are ignored.
        block_size_q: queries of a query block. Each request begins a block of its own.
        block_size_k: keys of a block.
        cu_seqlens: integers (batch + 1,), first token of each request, then the end of the last one.
        seq_lens: integers (batch,), keys of each request, with those of the queries.
        prefix_lens: keys before the queries; not read, since the last query has the position of the last key.
        max_seqlen_q: not read.
        sm_scale: softmax scale. Default: 1 / sqrt(head_dim).
        use_tma: not read.
        cu_seqblocks_q: integers (batch + 1,), first query block of each request, then the end of the last one; None to
            compute them.
        max_seqblock_q: not read.
        q_scale: a factor of the logits.
        k_scale: the factor of a float8_e4m3fn k_cache.
        v_scale: the same for V.
        loc_mapping: None; keys in the memory of the host are not supported.

    Returns:
        (tokens, heads, head_dim), in q's type. Tokens of no request are not written.

    Raises:
        ArgumentError: naming the argument, before anything is launched.
    """
    _refuse(sink=sink, loc_mapping=loc_mapping)
    if block_size_q > 1:
        topk_idx = _of_tokens(topk_idx, q.shape[0], block_size_q, cu_seqlens, cu_seqblocks_q)
    return _attend_blocks(
        q,
        (k_cache, v_cache),
        from_msa_lists(topk_idx, block=block_size_k),
        req_to_token,
        slot_ids,
        page_size=_page_size(),
        scale=sm_scale,
        scales=(q_scale, k_scale, v_scale),
        seq_lens=seq_lens,
        bounds=cu_seqlens,
    )


def sparse_gqa_fwd_interface_triton(  # noqa: PLR0917 - SGLang's signature
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    max_seqlen_k: int,
    indices: torch.Tensor,
    cu_seqlens: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Compute attention of Qwen4Exp over selected tokens, for whole prompts.

    Args:
        q: (tokens, heads, head_dim), float16 or bfloat16.
        k: (tokens, kv_heads, head_dim), in q's type.
        v: as k, with the same strides.
        max_seqlen_k: tokens of the longest prompt.
        indices: int32 (tokens, entries) or (tokens, kv_heads, entries), positions of tokens in the query's prompt, none
            behind the query; negative entries are ignored.
        cu_seqlens: int32 (batch + 1,), first token of each prompt, then the end of the last one.
        scale: softmax scale.

    Returns:
        (tokens, heads, head_dim), in q's type. Tokens of no prompt are not written.

    Raises:
        ArgumentError: naming the argument, before anything is launched.
    """
    table = _rows(cu_seqlens[:-1], max_seqlen_k)
    return _attend_tokens(q, (k, v), table, indices, bounds=cu_seqlens, lengths=cu_seqlens.diff(), scale=scale)


def sparse_gqa_fwd_interface_triton_ck(  # noqa: PLR0917 - SGLang's signature
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    indices: torch.Tensor,
    cu_q: torch.Tensor,
    cu_k: torch.Tensor,
    kv_lens: torch.Tensor,
    scale: float,
    max_q: int | None = None,
) -> torch.Tensor:
    """Compute attention of Qwen4Exp over selected tokens, for chunks of prompts whose keys are packed.

    Args:
        q: (tokens, heads, head_dim), float16 or bfloat16.
        k: (keys of all entries, kv_heads, head_dim), in q's type or float8_e4m3fn.
        v: as k, with the same strides.
        indices: as for :func:`sparse_gqa_fwd_interface_triton`, positions in the query's entry.
        cu_q: int32 (entries + 1,), first query of each entry, then the end of the last one.
        cu_k: integers (entries,) or more, first key of each entry.
        kv_lens: integers (entries,), keys of each entry up to its last query.
        scale: softmax scale.
        max_q: not read.

    Returns:
        (tokens, heads, head_dim), in q's type. Tokens of no entry are not written.

    Raises:
        ArgumentError: naming the argument, before anything is launched.
    """
    table = _rows(cu_k[: cu_q.shape[0] - 1], k.shape[0])
    return _attend_tokens(q, (k, v), table, indices, bounds=cu_q, lengths=kv_lens, scale=scale)


def sparse_gqa_paged_prefill_triton(  # noqa: PLR0917 - SGLang's signature
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_table: torch.Tensor,
    indices: torch.Tensor,
    cu_q: torch.Tensor,
    kv_lens: torch.Tensor,
    scale: float,
    *,
    max_q: int,
) -> torch.Tensor:
    """Compute attention of Qwen4Exp over selected tokens, for chunks of prompts whose keys are in the pool.

    Args:
        q: (tokens, heads, head_dim), float16 or bfloat16.
        k_cache: (slots, kv_heads, head_dim), in q's type or float8_e4m3fn.
        v_cache: as k_cache, with the same strides.
        slot_table: int32 (rows, keys), slots of the keys of entry e, e + rows, e + 2 * rows and so on in row e.
        indices: int32 (tokens or more, entries), positions of tokens in the query's entry; negative ones are ignored.
        cu_q: int32 (entries + 1,), first query of each entry, then the end of the last one.
        kv_lens: integers (entries,), keys of each entry up to its last query.
        scale: softmax scale.
        max_q: not read.

    Returns:
        (tokens, heads, head_dim), in q's type. Tokens of no entry are not written.

    Raises:
        ArgumentError: naming the argument, before anything is launched.
    """
    entries, rows = cu_q.shape[0] - 1, slot_table.shape[0]
    table = slot_table if entries == rows else slot_table.repeat(-(-entries // max(rows, 1)), 1)[:entries]
    caches = k_cache, v_cache
    return _attend_tokens(q, caches, table, indices[: q.shape[0]], bounds=cu_q, lengths=kv_lens, scale=scale)


def _refuse(**given: Any) -> None:
    """Refuse arguments that change attention.

    Raises:
        ArgumentError: for the first of them.
    """
    for name, value in given.items():
        if value is not None:
            raise ArgumentError(name, "is given, which is not supported: import SGLang's own function for this model")


def _page_size() -> int:
    """Tokens of a page in SGLang's settings; 1 without them."""
    settings = sys.modules.get(SETTINGS)
    return 1 if settings is None else int(settings.get_schedule().page_size or 1)


def _of_tokens(
    topk_idx: torch.Tensor, tokens: int, block: int, bounds: torch.Tensor, firsts: torch.Tensor | None
) -> torch.Tensor:
    """Lists of tokens from those of query blocks: (kv_heads, tokens, entries)."""
    if firsts is None:
        blocks = (bounds.diff() + block - 1) // block
        firsts = torch.nn.functional.pad(blocks.cumsum(0), (1, 0))
    token = torch.arange(tokens, device=bounds.device, dtype=bounds.dtype)
    request = torch.searchsorted(bounds[1:], token, right=True).clamp(max=bounds.shape[0] - 2)
    of_token = firsts[request].long() + (token - bounds[request]) // block
    return topk_idx.index_select(1, of_token.clamp(max=max(topk_idx.shape[1] - 1, 0)))


def _pages(name: str, cache: torch.Tensor, page_size: int) -> torch.Tensor:
    """A pool (slots, kv_heads, head_dim) in pages.

    Raises:
        ArgumentError: for another number of dimensions.
    """
    if cache.dim() != _RANK:
        raise ArgumentError(name, f"has shape {tuple(cache.shape)}, expected (slots, kv_heads, head_dim)")
    pages = cache.shape[0] // page_size
    whole: torch.Tensor = cache[: pages * page_size].unflatten(0, (pages, page_size))
    return whole


def _attend_blocks(
    q: torch.Tensor,
    caches: tuple[torch.Tensor, torch.Tensor],
    lists: KeyLists,
    req_to_token: torch.Tensor,
    slot_ids: torch.Tensor,
    *,
    page_size: int,
    scale: float | None,
    scales: tuple[float | None, ...],
    seq_lens: torch.Tensor,
    bounds: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute attention over blocks of keys."""
    if page_size < 1 or page_size & (page_size - 1):
        raise ArgumentError("page_size", f"is {page_size}, expected a power of two")
    slots = req_to_token[:, ::page_size].index_select(0, slot_ids)
    table = write_page_table(slots, page_size, torch.empty(slots.shape, dtype=torch.int32, device=slots.device))
    q_scale, k_scale, v_scale = (1.0 if each is None else float(each) for each in scales)
    scale = (q.shape[-1] ** -0.5 if scale is None else scale) * q_scale * k_scale
    out = _attend(q, caches, lists, table, page_size, bounds=bounds, lengths=seq_lens, scale=scale)
    return out if v_scale == 1.0 else out.mul_(v_scale)


def _attend_tokens(
    q: torch.Tensor,
    caches: tuple[torch.Tensor, torch.Tensor],
    table: torch.Tensor,
    indices: torch.Tensor,
    **about: Any,
) -> torch.Tensor:
    """Compute attention over lists of tokens in pages of one token."""
    by_head = indices[None] if indices.dim() < _RANK else indices.transpose(0, 1)
    return _attend(q, caches, KeyLists(by_head.int().contiguous()), table, 1, **about)


def _rows(firsts: torch.Tensor, width: int) -> torch.Tensor:
    """Table of keys that lie one after the other: int32 (rows, width)."""
    return firsts.int()[:, None] + torch.arange(width, dtype=torch.int32, device=firsts.device)


def _attend(
    q: torch.Tensor,
    caches: tuple[torch.Tensor, torch.Tensor],
    lists: KeyLists,
    table: torch.Tensor,
    page_size: int,
    *,
    bounds: torch.Tensor | None,
    lengths: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Compute a call: (tokens, heads, head_dim)."""
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    if q.shape[0] == 0:
        return out
    k_cache, v_cache = (
        _pages(name, cache, page_size) for name, cache in zip(("k_cache", "v_cache"), caches, strict=True)
    )
    paged_attention(
        q,
        k_cache,
        v_cache,
        lists,
        block_table=table.int(),
        seq_lens=lengths.int(),
        cu_seqlens_q=None if bounds is None else bounds.int(),
        scale=scale,
        out=out,
    )
    return out
