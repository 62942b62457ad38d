"""Calls of transformers whose sequences lie one after the other: packed training, and batches of its generation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from runtime.errors import ArgumentError
from runtime.integrations.transformers_masks import AttentionMask, pattern_without_mask
from runtime.ops.paged import paged_attention
from runtime.ops.paged_calls import HEAD_DIMS
from runtime.ops.varlen import varlen_attention
from runtime.patterns import Pattern

NO_TABLE = "ContinuousBatchingConfig(max_blocks_per_request=0) reads K and V without block tables"


@dataclass(frozen=True)
class PackedCall:
    """Arguments of a call whose batch is one row of sequences.

    Attributes:
        cu_seq_lens_q: int32 (sequences + 1,), first token of each sequence in q, then the end of the last one.
        cu_seq_lens_k: the same of k; in a call with a block table, that of all keys of each request.
        is_batch: whether continuous batching makes the call. k and v then have the cached keys, or there is a table.
        block_table: int32 (sequences, pages of the longest request), or None.
        k_cache, v_cache: (pages, page_size, kv_heads, head_dim), with a block table.
    """

    cu_seq_lens_q: torch.Tensor
    cu_seq_lens_k: torch.Tensor
    is_batch: bool
    block_table: torch.Tensor | None
    k_cache: torch.Tensor | None
    v_cache: torch.Tensor | None

    @classmethod
    def of(
        cls, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: Mapping[str, Any]
    ) -> PackedCall | None:
        """The arguments of a call, checked; None for a call without ``cu_seq_lens_q`` and ``cu_seq_lens_k``.

        Args:
            query: (1, heads, tokens, head_dim).
            key, value: (1, kv_heads, key tokens, head_dim).
            options: arguments that transformers passes by keyword.

        Raises:
            ArgumentError: naming the argument.
        """
        given = {name: options.get(name) for name in ("cu_seq_lens_q", "cu_seq_lens_k")}
        if all(bounds is None for bounds in given.values()):
            return None
        is_batch = options.get("write_index") is not None
        for name, tensor in (("query", query), ("key", key), ("value", value)):
            if tensor.shape[0] != 1:
                raise ArgumentError(name, f"has batch size {tensor.shape[0]}, expected 1 with cu_seq_lens_q")
        if value.shape != key.shape or key.shape[3] != query.shape[3]:
            sizes = f"(heads, tokens, head size) {tuple(value.shape[1:])}, key {tuple(key.shape[1:])}"
            raise ArgumentError("value", f"has {sizes}, query {tuple(query.shape[1:])}: head sizes must be equal")
        if not is_batch and key.shape[2] != query.shape[2]:
            reason = f"has {key.shape[2]} tokens, query {query.shape[2]}, which cross attention and caches have"
            raise ArgumentError("key", f"{reason}: leave cu_seq_lens_q out, or use sdpa")
        q, k = (_bounds(name, bounds) for name, bounds in given.items())
        return cls(q, k, is_batch, *(options.get(name) for name in ("block_table", "k_cache", "v_cache")))

    def exact(self, mask: Any, is_causal: bool, window: int | None) -> Pattern:
        """The pattern of the model within each sequence.

        Args:
            mask: an ``AttentionMask``, or None.
            is_causal: used without a mask.
            window: used without a mask: number of keys that a causal query sees, including its own.

        Raises:
            ArgumentError: for a mask that restricts more than sequences do.
        """
        if isinstance(mask, AttentionMask) and mask.within is not None:
            return mask.within
        if mask is not None:
            reason = "has padding or a mask of its own beside cu_seq_lens_q, which gives the sequences"
            raise ArgumentError("attention_mask", f"{reason}: leave one of them out")
        return pattern_without_mask(is_causal=is_causal, window=window)

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, pattern: Pattern, **options: Any
    ) -> torch.Tensor:
        """Compute the call.

        Args:
            query: (1, heads, tokens, head_dim).
            key, value: (1, kv_heads, key tokens, head_dim).
            pattern: of each sequence.
            options: scale, softcap and sink.

        Returns:
            (1, tokens, heads, head_dim). Tokens of no sequence are 0 in a batch, whose padding the cache keeps.
        """
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        out = torch.zeros(q.shape, dtype=q.dtype, device=q.device) if self.is_batch else None
        if self.block_table is not None:
            return self._over_pages(q, k, v, pattern, out=out, **options)[None]
        bounds: dict[str, Any] = {"cu_seqlens_q": self.cu_seq_lens_q, "cu_seqlens_k": self.cu_seq_lens_k}
        attended: Any = varlen_attention(q, k, v, pattern, **bounds, out=out, **options)
        result: torch.Tensor = attended.contiguous()[None]
        return result

    def _over_pages(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pattern: Pattern, **options: Any
    ) -> torch.Tensor:
        """Write a key of each request to its page, and attend over pages: (requests, heads, head_dim)."""
        table, k_cache, v_cache = self.block_table, self.k_cache, self.v_cache
        if table is None or k_cache is None or v_cache is None:
            missing = "k_cache" if k_cache is None else "v_cache"
            raise ArgumentError(missing, "is missing beside block_table: the cache of continuous batching passes it")
        page_size = k_cache.shape[1]
        if q.shape[2] not in HEAD_DIMS["same"]:
            allowed = ", ".join(map(str, HEAD_DIMS["same"]))
            raise ArgumentError(
                "query", f"has head size {q.shape[2]}, expected {allowed} with a block table: {NO_TABLE}"
            )
        if page_size & (page_size - 1):
            reason = f"has pages of {page_size} tokens, expected a power of two: set page_size in"
            raise ArgumentError("k_cache", f"{reason} ContinuousBatchingConfig, or {NO_TABLE}")
        for name, cache, beside in (("k_cache", k_cache, "key"), ("v_cache", v_cache, "value")):
            if cache.dtype != k.dtype or cache.shape[2:] != k.shape[1:]:
                what = f"is {cache.dtype} {tuple(cache.shape)}, {beside} {k.dtype}"
                expected = ", ".join(map(str, ("pages", "page_size", *k.shape[1:])))
                raise ArgumentError(name, f"{what}, expected that type and ({expected})")
        if k.shape[0] != table.shape[0]:
            reason = f"has {table.shape[0]} requests, query {k.shape[0]} tokens, expected a token for each request"
            raise ArgumentError("block_table", reason)
        lengths = self.cu_seq_lens_k[1:] - self.cu_seq_lens_k[:-1]
        last = (lengths - 1).clamp(min=0)
        # Rows behind the requests of a batch pad it. They have no key, and write back what is there.
        exists = (lengths > 0)[:, None, None]
        page = table.gather(1, (last // page_size).long()[:, None])[:, 0].clamp(min=0).long()
        row = (last % page_size).long()
        for cache, new in ((k_cache, k), (v_cache, v)):
            cache[page, row] = torch.where(exists, new, cache[page, row])
        result: Any = paged_attention(
            q,
            k_cache,
            v_cache,
            pattern,
            block_table=table,
            seq_lens=lengths,
            cu_seqlens_q=self.cu_seq_lens_q,
            **options,
        )
        attended: torch.Tensor = result
        return attended


def _bounds(name: str, bounds: Any) -> torch.Tensor:
    """Bounds of sequences in int32."""
    if not isinstance(bounds, torch.Tensor) or bounds.dim() != 1 or bounds.dtype not in (torch.int32, torch.int64):
        is_tensor = isinstance(bounds, torch.Tensor)
        what = f"{bounds.dtype} {tuple(bounds.shape)}" if is_tensor else "None" if bounds is None else repr(bounds)
        raise ArgumentError(name, f"is {what}, expected int32 (sequences + 1,)")
    return bounds.to(torch.int32).contiguous()
