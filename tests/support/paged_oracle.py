"""Attention over pages by the definition, on any device, in place of ``paged_attention``, with the same checks."""

from __future__ import annotations

import math
from typing import Any

import torch

from runtime.kernels.arguments import check_strides
from runtime.key_lists import KeyLists
from runtime.ops.paged_calls import check_operands, window_of
from runtime.patterns import Pattern


def seen_of(pattern: Pattern | KeyLists, tokens: slice, length: int, kv_heads: int, device: Any) -> Any:
    """How often each query of a request sees each key, float32 (kv_heads, queries, keys)."""
    window = window_of(pattern)
    position = torch.arange(length - (tokens.stop - tokens.start), length, device=device)[:, None]
    key = torch.arange(length, device=device)
    seen = (key <= position + window.right) & ((key >= position - window.left) | (key < window.sink))
    counts = seen.float().expand(kv_heads, -1, -1)
    if not isinstance(pattern, KeyLists):
        return counts
    lists = pattern.indices[:, tokens].long()
    there = lists >= 0
    if pattern.counts is not None:
        there &= torch.arange(lists.shape[2], device=device) < pattern.counts[:, tokens, None]
    listed = (lists[..., None] * pattern.keys + torch.arange(pattern.keys, device=device)).flatten(2)
    there = there[..., None].expand(*lists.shape, pattern.keys).flatten(2) & (listed < length)
    found = torch.zeros(*lists.shape[:2], length + 1, device=device)
    found.scatter_add_(2, torch.where(there, listed, length), there.float())
    return counts * found[..., :length]


def attend(q: Any, k_cache: Any, v_cache: Any, pattern: Pattern | KeyLists, **given: Any) -> Any:
    """The result of ``paged_attention`` with a table of pages."""
    heads_first = given.get("layout") == "HND"
    check_operands(q, k_cache, v_cache, heads_first=heads_first)
    if heads_first:
        k_cache, v_cache = k_cache.transpose(1, 2), v_cache.transpose(1, 2)
    for name, tensor in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache)):
        check_strides(name, tensor)
    assert k_cache.stride() == v_cache.stride() and k_cache.shape == v_cache.shape
    table, page_size, kv_heads = given["block_table"], k_cache.shape[1], k_cache.shape[2]
    assert page_size & (page_size - 1) == 0 and table.dtype == torch.int32 and table.stride(1) == 1
    batch, room = table.shape[0], table.shape[1] * page_size
    lengths = [room] * batch if given.get("seq_lens") is None else given["seq_lens"].tolist()
    bounds = given.get("cu_seqlens_q")
    if bounds is None:
        assert q.shape[0] % batch == 0
        bounds = torch.arange(batch + 1) * (q.shape[0] // batch)
    assert len(lengths) == batch and len(bounds) == batch + 1
    out = given["out"] if given.get("out") is not None else torch.zeros_like(q)
    assert out.shape == q.shape and out.dtype == q.dtype
    for i, (first, end) in enumerate(zip(bounds.tolist(), bounds[1:].tolist(), strict=False)):
        length, tokens = min(lengths[i], room), slice(first, end)
        if end <= first:
            continue
        key = torch.arange(length, device=q.device)
        page, row = table[i, key // page_size].long(), key % page_size
        inside = (page >= 0) & (page < k_cache.shape[0])
        page = page.clamp(0, k_cache.shape[0] - 1)
        keys, values = (
            (cache[page, row].float() * _factor(given.get(name), page, row, heads_first)).transpose(0, 1)
            for name, cache in (("k_scale", k_cache), ("v_scale", v_cache))
        )
        counts = seen_of(pattern, tokens, length, kv_heads, q.device) * inside
        mine = q[tokens].float().unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3)
        scale = given.get("scale")
        logits = mine @ keys.mT[:, None] * (1 / math.sqrt(q.shape[2]) if scale is None else scale)
        softcap, sink = given.get("softcap"), given.get("sink")
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        logits = logits + counts.log()[:, None]
        if sink is not None:
            assert sink.dtype == torch.float32
            logits = torch.cat([logits, sink.view(kv_heads, -1, 1, 1).expand(*logits.shape[:3], 1)], -1)
        weights = torch.softmax(logits, -1).nan_to_num(0)[..., :length]
        out[tokens] = (weights @ values[:, None]).permute(2, 0, 1, 3).flatten(1, 2).to(out.dtype)
    return out


def _factor(scale: Any, page: Any, row: Any, heads_first: bool) -> Any:
    """Factors of K or V, to be multiplied by (keys, kv_heads, head_dim)."""
    if scale is None:
        return 1.0
    assert scale.dtype == torch.float32
    if scale.dim() == 1:
        return scale[:, None]
    return (scale[page, :, row] if heads_first else scale[page, row])[..., None]
