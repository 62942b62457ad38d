"""Calls of SGLang's functions for models that select keys, with what they should return; on any device."""

from __future__ import annotations

from itertools import accumulate
from typing import Any, NamedTuple

import torch

HEADS, KV_HEADS, D = 8, 2, 128


class Case(NamedTuple):
    """A call.

    Attributes:
        given: arguments by name.
        right: float32 (tokens, heads, head_dim).
    """

    given: dict[str, Any]
    right: Any


class Pool(NamedTuple):
    """A KV pool and its requests.

    Attributes:
        k: (slots, kv_heads, head_dim).
        v: as k.
        req_to_token: int32 (requests, context), in pages in any order.
    """

    k: Any
    v: Any
    req_to_token: Any


def pool_of(page: int, device: str, dtype: Any, requests: int = 4, context: int = 1024) -> Pool:
    """A pool with room for all requests, and a few slots behind the last page."""
    pages = context // page
    order = torch.randperm(requests * pages).view(requests, pages, 1) * page + torch.arange(page)
    k, v = (torch.randn(requests * context + 3, KV_HEADS, D, device=device).to(dtype) for _ in range(2))
    return Pool(k, v, order.flatten(1).int().to(device))


def attended(q: Any, pool: Pool, slots: Any, keys: Any, scale: float) -> Any:
    """One query (heads, head_dim) over listed positions of each KV head, float32."""
    grouped, parts = q.float().unflatten(0, (KV_HEADS, -1)), []
    for head in range(KV_HEADS):
        own = slots[keys[head]].long()
        weights = (grouped[head] @ pool.k[own, head].float().T * scale).softmax(-1)
        parts.append(weights @ pool.v[own, head].float())
    return torch.cat(parts)


def drawn_blocks(rows: int, last: Any, entries: int, block: int, device: str) -> Any:
    """Blocks of each KV head and query (kv_heads, rows, entries), its own among them; -1 behind the last one."""
    count = 1024 // block
    ranks = torch.rand(KV_HEADS, rows, count, device=device)
    number = torch.arange(count, device=device)
    ranks = ranks - (number > last[:, None]).float() * 2 + (number == last[:, None]).float()
    found = ranks.topk(entries).indices
    return torch.where(found <= last[:, None], found, -1).int()


def keys_of(blocks: Any, block: int, position: int) -> list[Any]:
    """Positions of the keys of blocks of each KV head, up to a query's own."""
    keys = []
    for row in blocks:
        found = (row[row >= 0].long()[:, None] * block + torch.arange(block, device=row.device)).flatten()
        keys.append(found[found <= position])
    return keys


def decode_case(device: str, page: int, block: int = 128, dtype: Any = torch.bfloat16, **scales: float) -> Case:
    """Rows of one query each; two of them are drafts of one request."""
    pool, slot_ids, lengths = pool_of(page, device, dtype), [2, 0, 0, 3], [1000, 300, 301, 5]
    positions = torch.tensor(lengths, device=device) - 1
    blocks = drawn_blocks(4, positions // block, 4, block, device)
    q = torch.randn(4, HEADS, D, device=device).bfloat16()
    scale = 0.07 * scales.get("q_scale", 1.0) * scales.get("k_scale", 1.0)
    right = [
        attended(q[i], pool, pool.req_to_token[row], keys_of(blocks[:, i], block, lengths[i] - 1), scale)
        for i, row in enumerate(slot_ids)
    ]
    given = {
        "q": q,
        "sink": None,
        "k_cache": pool.k,
        "v_cache": pool.v,
        "req_to_token": pool.req_to_token,
        "seq_lens": positions + 1,
        "slot_ids": torch.tensor(slot_ids, device=device),
        "block_size": block,
        "topk_idx": blocks,
        "sm_scale": 0.07,
        "page_size": page,
    }
    return Case(given | scales, torch.stack(right) * scales.get("v_scale", 1.0))


def prefill_case(device: str, block_q: int, page: int = 1, block: int = 128) -> Case:
    """Chunks of three requests, whose query blocks share lists."""
    pool, slot_ids = pool_of(page, device, torch.bfloat16), [2, 0, 3]
    lengths, queries = [900, 40, 300], [100, 40, 1]
    bounds = [0, *accumulate(queries)]
    firsts = [0, *accumulate(-(-count // block_q) for count in queries)]
    last = [
        (length - count + min((i + 1) * block_q, count) - 1) // block
        for length, count in zip(lengths, queries, strict=True)
        for i in range(-(-count // block_q))
    ]
    blocks = drawn_blocks(firsts[-1], torch.tensor(last, device=device), 4, block, device)
    # A block before the first query, so that each query sees a key.
    blocks[:, :, -1] = torch.where((blocks == 0).any(-1), blocks[:, :, -1], 0)
    q = torch.randn(bounds[-1], HEADS, D, device=device).bfloat16()
    right = []
    for r, row in enumerate(slot_ids):
        for i in range(queries[r]):
            of_block = blocks[:, firsts[r] + i // block_q]
            keys = keys_of(of_block, block, lengths[r] - queries[r] + i)
            right.append(attended(q[bounds[r] + i], pool, pool.req_to_token[row], keys, D**-0.5))
    given = {
        "q": q,
        "k_cache": pool.k,
        "v_cache": pool.v,
        "sink": None,
        "req_to_token": pool.req_to_token,
        "slot_ids": torch.tensor(slot_ids, device=device),
        "topk_idx": blocks,
        "block_size_q": block_q,
        "block_size_k": block,
        "cu_seqlens": torch.tensor(bounds, dtype=torch.int32, device=device),
        "seq_lens": torch.tensor(lengths, device=device),
        "prefix_lens": torch.tensor(lengths, device=device) - torch.tensor(queries, device=device),
        "max_seqlen_q": max(queries),
    }
    return Case(given, torch.stack(right))


def token_case(device: str, kind: str, dtype: Any = torch.bfloat16, entries: int = 20) -> Case:
    """Lists of tokens: of whole ``prompts``, of ``packed`` chunks, or of chunks in a ``pool``, two for each request."""
    lengths, queries = ([60, 7, 33], [60, 7, 33]) if kind == "prompts" else ([400, 90, 33, 420], [20, 9, 33, 15])
    lengths, queries = (lengths, queries) if kind != "packed" else (lengths[:3], queries[:3])
    bounds, starts = [0, *accumulate(queries)], [0, *accumulate(lengths)]
    pool = pool_of(1, device, dtype)
    if kind == "pool":
        tables = [pool.req_to_token[row] for row in (2, 1, 2, 1)]
    else:
        total = torch.arange(starts[-1], device=device)
        tables = [total[start:] for start in starts[:-1]]
        pool = Pool(pool.k[: starts[-1]], pool.v[: starts[-1]], pool.req_to_token)
    position = torch.cat([torch.arange(n - count, n) for n, count in zip(lengths, queries, strict=True)]).to(device)
    ranks = torch.rand(bounds[-1], 512, device=device) - (torch.arange(512, device=device) > position[:, None]).float()
    chosen = ranks.topk(entries).indices
    chosen = torch.where(chosen <= position[:, None], chosen, -1).int()
    q = torch.randn(bounds[-1], HEADS, D, device=device).bfloat16()
    right = []
    for r, table in enumerate(tables):
        for token in range(bounds[r], bounds[r + 1]):
            own = chosen[token][chosen[token] >= 0].long()
            right.append(attended(q[token], pool, table, [own] * KV_HEADS, 0.07))
    device_bounds = torch.tensor(bounds, dtype=torch.int32, device=device)
    kv_lens = torch.tensor(lengths, dtype=torch.int32, device=device)
    if kind == "prompts":
        more: dict[str, Any] = {"k": pool.k, "v": pool.v, "max_seqlen_k": max(lengths), "cu_seqlens": device_bounds}
    elif kind == "packed":
        firsts = torch.tensor(starts, dtype=torch.int32, device=device)
        more = {"k": pool.k, "v": pool.v, "cu_q": device_bounds, "cu_k": firsts, "kv_lens": kv_lens}
    else:
        table = pool.req_to_token[[2, 1]]
        more = {"k_cache": pool.k, "v_cache": pool.v, "slot_table": table, "cu_q": device_bounds, "kv_lens": kv_lens}
        more["max_q"] = max(queries)
    return Case({"q": q, "indices": chosen, "scale": 0.07, **more}, torch.stack(right))
