"""Attention of models that select keys for each query, with the signatures of vLLM's functions.

A model's file in vLLM imports these instead of its own: those of MiniMax M3 (MSA) in ``vllm.models.minimax_m3``, and of
Qwen4Exp (QSA) in ``vllm.models.qwen4_exp``. Argument names, order and defaults are vLLM's. Only listed keys are read.
"""

from __future__ import annotations

from typing import Any

import torch

from runtime.convert import from_joined_cache, from_msa_lists, from_qsa_lists, from_token_requests
from runtime.errors import ArgumentError
from runtime.ops.paged import paged_attention

BLOCK = 128
"""Keys of a block of MSA, which are a page."""
_PER_TOKEN = 2
"""Dimensions of factors of each KV head and token."""


def minimax_m3_sparse_attn(  # noqa: PLR0917 - vLLM's signature
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    topk_idx: torch.Tensor,
    block_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    prefix_lens: torch.Tensor,
    max_query_len: int,
    num_kv_heads: int,
    sm_scale: float,
    output: torch.Tensor,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    """Compute attention of MiniMax M3 over selected blocks, for requests with different numbers of queries.

    Args:
        q: (tokens, heads, head_dim), float16 or bfloat16.
        kv_cache: (pages, kv_heads, 128, 2 * head_dim), K and then V of a token in a row, in q's type or float8_e4m3fn.
        topk_idx: int32 (kv_heads, tokens, entries), logical blocks of 128 keys; negative entries are ignored.
        block_table: int32 (batch, pages of the longest request).
        cu_seqlens_q: int32 (batch + 1,), first token of each request, then the end of the last one.
        seq_lens: int32 (batch,), keys of each request, with those of the queries.
        prefix_lens: keys before the queries; not read, since the last query has the position of the last key.
        max_query_len: not read.
        num_kv_heads: heads of K and V.
        sm_scale: softmax scale.
        output: (tokens, heads, head_dim), where to write the result.
        k_scale: factors of a float8_e4m3fn cache: float32 of one element, or (kv_heads, pages * 128).
        v_scale: as k_scale.

    Raises:
        ArgumentError: naming the argument, before anything is launched.
    """
    _attend_blocks(
        q,
        kv_cache,
        topk_idx,
        num_kv_heads,
        scale=sm_scale,
        scales={"k_scale": k_scale, "v_scale": v_scale},
        block_table=block_table,
        seq_lens=seq_lens,
        cu_seqlens_q=cu_seqlens_q,
        out=output,
    )


def minimax_m3_sparse_attn_decode(  # noqa: PLR0917 - vLLM's signature
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    topk_idx: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    num_kv_heads: int,
    sm_scale: float,
    output: torch.Tensor,
    decode_query_len: int,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    """Compute attention of MiniMax M3 over selected blocks, for requests with the same number of queries.

    Args:
        q: (batch * decode_query_len, heads, head_dim), float16 or bfloat16.
        kv_cache: as for :func:`minimax_m3_sparse_attn`.
        topk_idx: as for :func:`minimax_m3_sparse_attn`.
        block_table: as for :func:`minimax_m3_sparse_attn`.
        seq_lens: int32 (batch,), keys of each request, with those of the queries.
        num_kv_heads: heads of K and V.
        sm_scale: softmax scale.
        output: (batch * decode_query_len, heads, head_dim), where to write the result.
        decode_query_len: queries of each request.
        k_scale: as for :func:`minimax_m3_sparse_attn`.
        v_scale: as for :func:`minimax_m3_sparse_attn`.

    Raises:
        ArgumentError: naming the argument, before anything is launched.
    """
    tokens = seq_lens.shape[0] * decode_query_len
    if q.shape[0] != tokens:
        reason = f"has {q.shape[0]} tokens, expected {decode_query_len} for each of {seq_lens.shape[0]} requests"
        raise ArgumentError("q", reason)
    _attend_blocks(
        q,
        kv_cache,
        topk_idx,
        num_kv_heads,
        scale=sm_scale,
        scales={"k_scale": k_scale, "v_scale": v_scale},
        block_table=block_table,
        seq_lens=seq_lens,
        out=output,
    )


def qsa_sparse_paged_attention(  # noqa: PLR0917 - vLLM's signature
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    logical_indices: torch.Tensor,
    block_table: torch.Tensor,
    token_to_req: torch.Tensor,
    use_prefill_config: bool,
    out: torch.Tensor | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    *,
    output_gate: torch.Tensor,
) -> torch.Tensor:
    """Compute attention of Qwen4Exp over selected tokens, and multiply it by the sigmoid of the gate.

    Args:
        q: (tokens, heads, head_dim), bfloat16 or float16.
        k_cache: (pages, page_size, kv_heads, head_dim), in q's type or float8_e4m3fn.
        v_cache: as k_cache, with the same strides.
        logical_indices: int32 (tokens, entries + 1), positions of tokens in the query's request, none behind the query;
            the last column has the number of entries that count.
        block_table: int32 (batch, pages of the longest request).
        token_to_req: int32 (tokens,), the request of each token, from 0 to batch - 1.
        use_prefill_config: whether a request has many queries. Requests are then one behind the other, and tokens
            behind the last one, whose ``token_to_req`` falls, belong to none. Otherwise each token is computed as a
            request of its own, with a copy of its row of ``block_table``.
        out: (tokens, heads, head_dim), where to write the result; by default a new tensor. Tokens of no request are not
            written, and 0 in a new tensor.
        k_scale: the factor of a float8_e4m3fn k_cache.
        v_scale: the same for V.
        output_gate: tokens * heads * head_dim elements, contiguous.

    Returns:
        ``out``.

    Raises:
        ArgumentError: naming the argument, before anything is launched.
    """
    out = torch.zeros_like(q) if out is None else out
    is_fp8 = k_cache.dtype == torch.float8_e4m3fn
    if is_fp8 and (k_scale is None or v_scale is None):
        raise ArgumentError("k_scale" if k_scale is None else "v_scale", f"is None, with a cache of {k_cache.dtype}")
    if q.shape[0] == 0:
        return out
    lists = from_qsa_lists(logical_indices)
    bounds = None
    if use_prefill_config:
        bounds = from_token_requests(_rising(token_to_req, block_table.shape[0]), batch=block_table.shape[0])
    else:
        block_table = block_table.index_select(0, token_to_req)
    scale = q.shape[2] ** -0.5
    paged_attention(
        q,
        k_cache,
        v_cache,
        lists,
        block_table=block_table,
        cu_seqlens_q=bounds,
        scale=scale * float(k_scale) if is_fp8 and k_scale is not None else scale,
        out=out,
    )
    gate = torch.sigmoid(output_gate.view(q.shape).float())
    return out.mul_(gate if not is_fp8 or v_scale in (None, 1.0) else gate * v_scale)


def _rising(token_to_req: torch.Tensor, batch: int) -> torch.Tensor:
    """Requests of tokens, ``batch`` for those behind the last request: vLLM names request 0 there."""
    highest = token_to_req.cummax(0).values
    return torch.where(token_to_req < highest, batch, token_to_req)


def _attend_blocks(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    topk_idx: torch.Tensor,
    kv_heads: int,
    *,
    scale: float,
    scales: dict[str, torch.Tensor | None],
    **arguments: Any,
) -> None:
    """Compute attention over blocks of 128 keys."""
    if kv_cache.dim() != 4 or kv_cache.shape[1:3] != (kv_heads, BLOCK):
        expected = f"(pages, num_kv_heads {kv_heads}, {BLOCK}, 2 * head_dim)"
        raise ArgumentError("kv_cache", f"has shape {tuple(kv_cache.shape)}, expected {expected}")
    if q.shape[0] == 0:
        return
    factors: dict[str, Any] = {}
    if kv_cache.dtype == torch.float8_e4m3fn:
        factors = {
            name: None if factor is None else _factors(name, factor, kv_cache) for name, factor in scales.items()
        }
    k_cache, v_cache = from_joined_cache(kv_cache)
    lists = from_msa_lists(topk_idx, block=BLOCK)
    paged_attention(q, k_cache, v_cache, lists, layout="HND", scale=scale, **arguments, **factors)


def _factors(name: str, factor: torch.Tensor, kv_cache: torch.Tensor) -> torch.Tensor:
    """Factors of a cache as ``paged_attention`` takes them: (1,), or (pages, kv_heads, 128)."""
    pages, kv_heads = kv_cache.shape[:2]
    if factor.numel() == 1:
        return factor.view(1)
    if factor.dim() != _PER_TOKEN or factor.shape[0] != kv_heads or factor.shape[1] < pages * BLOCK:
        expected = f"one element, or (num_kv_heads {kv_heads}, {pages * BLOCK})"
        raise ArgumentError(name, f"has shape {tuple(factor.shape)}, expected {expected}")
    by_page: torch.Tensor = factor[:, : pages * BLOCK].unflatten(1, (pages, BLOCK))
    return by_page.transpose(0, 1)
