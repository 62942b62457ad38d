"""Conversion of the page tables, caches and lists of serving engines to arguments of ``paged_attention``.

Caches are not copied: results are views. Tables and lists are torch operations on their device.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from runtime.convert.checks import INTEGERS, check_count, check_shape, check_tensor
from runtime.errors import ArgumentError
from runtime.key_lists import KeyLists

_CACHE_RANK = 4
_STACKED = "(pages, 2, page_size, kv_heads, head_dim) or (pages, 2, kv_heads, page_size, head_dim)"


class PageTable(NamedTuple):
    """Pages of each request.

    Attributes:
        block_table: int32 (batch, max_pages), numbers of pages in order; -1 behind the last one.
        seq_lens: int32 (batch,), keys of each request.
    """

    block_table: torch.Tensor
    seq_lens: torch.Tensor


class PagedCache(NamedTuple):
    """Views of a cache, with the same strides.

    Attributes:
        k_cache: K in pages.
        v_cache: V in pages.
    """

    k_cache: torch.Tensor
    v_cache: torch.Tensor


def from_page_csr(
    indptr: torch.Tensor,
    indices: torch.Tensor,
    last_page_len: torch.Tensor,
    *,
    page_size: int,
    max_pages: int | None = None,
) -> PageTable:
    """Convert FlashInfer's page table, which has the pages of all requests in one list.

    Args:
        indptr: int32 or int64 (batch + 1,), the offset of each request in ``indices``, then the end of the last one;
            nondecreasing. A request may have no page.
        indices: int32 or int64 (pages of all requests,), numbers of pages.
        last_page_len: int32 or int64 (batch,), keys in the last page of each request. Ignored for a request without
            pages.
        page_size: tokens of a page.
        max_pages: columns of the table. Default: the length of ``indices``. ``paged_attention`` sees only the first
            ``max_pages`` pages of a longer request.

    Returns:
        ``block_table`` and ``seq_lens`` of ``paged_attention``. ``qo_indptr`` is its ``cu_seqlens_q``.

    Raises:
        ArgumentError: naming the argument.
    """
    check_tensor("indptr", indptr, INTEGERS, (1,))
    check_count("indptr: its length", indptr.shape[0], 2)
    check_tensor("indices", indices, INTEGERS, (1,), indptr.device)
    batch, room = indptr.shape[0] - 1, indices.shape[0]
    check_tensor("last_page_len", last_page_len, INTEGERS, (1,), indptr.device)
    check_shape("last_page_len", last_page_len, ("batch", batch))
    check_count("page_size", page_size)
    width = max(room, 1) if max_pages is None else max_pages
    check_count("max_pages", width)
    starts, ends = indptr[:-1, None], indptr[1:, None]
    counts = (ends - starts).clamp(min=0)[:, 0]
    lengths = torch.where(counts > 0, (counts - 1) * page_size + last_page_len, 0).int()
    if room == 0:
        return PageTable(torch.full((batch, width), -1, dtype=torch.int32, device=indptr.device), lengths)
    places = starts + torch.arange(width, device=indptr.device, dtype=indptr.dtype)
    pages = indices[places.clamp(0, room - 1)]
    listed = (places < ends) & (places >= 0) & (places < room)
    return PageTable(torch.where(listed, pages, -1).int(), lengths)


def from_stacked_cache(kv_cache: torch.Tensor) -> PagedCache:
    """View FlashInfer's cache, a tensor with K and V of each page one after the other, as two.

    Args:
        kv_cache: (pages, 2, page_size, kv_heads, head_dim), for ``layout="NHD"``, or (pages, 2, kv_heads, page_size,
            head_dim), for ``layout="HND"``. Transpose the first two dimensions of a cache (2, pages, ...).

    Returns:
        ``k_cache`` and ``v_cache`` of ``paged_attention``, in the same layout.

    Raises:
        ArgumentError: naming the argument.
    """
    _check_cache("kv_cache", kv_cache, _CACHE_RANK + 1)
    if kv_cache.shape[1] != 2:
        turned = "; pass kv_cache.transpose(0, 1)" if kv_cache.shape[0] == 2 else ""
        raise ArgumentError("kv_cache", f"has shape {tuple(kv_cache.shape)}, expected {_STACKED}{turned}")
    return PagedCache(*kv_cache.unbind(1))


def from_joined_cache(kv_cache: torch.Tensor) -> PagedCache:
    """View a cache whose rows have K and then V of a token as two: that of MSA (MiniMax M3) in vLLM.

    Args:
        kv_cache: (pages, kv_heads, page_size, 2 * head_dim), for ``layout="HND"``, or (pages, page_size, kv_heads, 2 *
            head_dim), for ``layout="NHD"``.

    Returns:
        ``k_cache`` and ``v_cache`` of ``paged_attention``, in the same layout.

    Raises:
        ArgumentError: naming the argument.
    """
    _check_cache("kv_cache", kv_cache, _CACHE_RANK)
    if kv_cache.shape[3] % 2:
        raise ArgumentError("kv_cache", f"has rows of {kv_cache.shape[3]} elements, expected 2 * head_dim")
    return PagedCache(*kv_cache.chunk(2, -1))


def from_msa_lists(topk_idx: torch.Tensor, *, block: int = 128) -> KeyLists:
    """Convert lists of blocks, one for each query and KV head: MSA's in vLLM and FlashInfer (``q2k_indices``).

    Args:
        topk_idx: int32 or int64 (kv_heads, tokens, entries), logical blocks of each query's request; negative entries
            are ignored.
        block: keys of a block, a power of two up to 256.

    Returns:
        A pattern of ``paged_attention``. An int32 tensor with contiguous entries is not copied.

    Raises:
        ArgumentError: naming the argument.
    """
    check_tensor("topk_idx", topk_idx, INTEGERS, (3,))
    return _key_lists("topk_idx", topk_idx, None, "block", block)


def from_qsa_lists(logical_indices: torch.Tensor, *, group: int = 1) -> KeyLists:
    """Convert lists of tokens, which all KV heads share: QSA's in vLLM and FlashInfer.

    Args:
        logical_indices: int32 or int64 (tokens, entries + 1). The last column has the number of entries that count.
            The others have positions of tokens in the query's request; negative ones are ignored.
        group: consecutive tokens of an entry of the result, a power of two up to 256. With more than 1, each ``group``
            entries in turn must be consecutive positions from a multiple of ``group`` on. The last ones that count may
            be fewer, if they end at the query's own position.

    Returns:
        A pattern of ``paged_attention``. With ``group=1``, int32 positions are not copied.

    Raises:
        ArgumentError: naming the argument.
    """
    check_tensor("logical_indices", logical_indices, INTEGERS, (2,))
    check_count("logical_indices: its columns", logical_indices.shape[1], 2)
    check_count("group", group)
    entries = logical_indices.shape[1] - 1
    if entries % group:
        raise ArgumentError("group", f"is {group}, expected a divisor of the {entries} entries")
    positions, counts = logical_indices[:, :-1], logical_indices[:, -1]
    if group > 1:
        positions = positions[:, ::group].div(group, rounding_mode="floor")
        counts = (counts + group - 1).div(group, rounding_mode="floor")
    return _key_lists("logical_indices", positions[None], counts[None], "group", group)


def from_token_requests(token_to_req: torch.Tensor, *, batch: int) -> torch.Tensor:
    """Convert the request of each token to bounds, as in QSA.

    Args:
        token_to_req: int32 or int64 (tokens,), the request of each token, ascending. Tokens of negative requests, at
            the beginning, and of requests from ``batch`` on, at the end, are of none.
        batch: number of requests.

    Returns:
        int32 (batch + 1,), ``cu_seqlens_q`` of ``paged_attention``.

    Raises:
        ArgumentError: naming the argument.
    """
    check_tensor("token_to_req", token_to_req, INTEGERS, (1,))
    check_count("batch", batch)
    requests = torch.arange(batch + 1, device=token_to_req.device, dtype=token_to_req.dtype)
    return torch.searchsorted(token_to_req.contiguous(), requests, out_int32=True)


def from_slots(indices: torch.Tensor, topk_length: torch.Tensor | None = None) -> PageTable:
    """Convert lists of places in a cache, one for each query, to a table of pages of one token.

    A place is page * page_size + offset, as in FlashMLA's ``indices`` and in vLLM's slots. Each query becomes a request
    of its own: call ``paged_attention`` with ``Dense()``, the caches of :func:`to_token_pages`, and no
    ``cu_seqlens_q``. A place counts as often as it is listed.

    Args:
        indices: int32 or int64 (tokens, entries), or (batch, queries, entries), whose first two dimensions are joined.
            Negative places are ignored.
        topk_length: int32 or int64 (tokens,), or (batch, queries), or (batch,), as ``indices``: the number of entries
            that count, from the first one on. Default: all of them.

    Returns:
        ``block_table`` and ``seq_lens`` of ``paged_attention``. A length is that of the list up to its last place.

    Raises:
        ArgumentError: naming the argument.
    """
    check_tensor("indices", indices, INTEGERS, (2, 3))
    check_count("indices: its entries", indices.shape[-1])
    places = torch.arange(1, indices.shape[-1] + 1, device=indices.device)
    ends = torch.where(indices >= 0, places, 0).amax(-1)
    if topk_length is not None:
        check_tensor("topk_length", topk_length, INTEGERS, range(1, indices.dim()), indices.device)
        names = zip(("batch", "queries") if indices.dim() == 3 else ("tokens",), indices.shape, strict=False)
        check_shape("topk_length", topk_length, *list(names)[: topk_length.dim()])
        counts = topk_length if topk_length.dim() == ends.dim() else topk_length[:, None]
        ends = torch.minimum(ends, counts.clamp(min=0))
    table = indices.flatten(0, -2).int()
    return PageTable(table if table.stride(-1) == 1 else table.contiguous(), ends.flatten().int())


def to_token_pages(cache: torch.Tensor) -> torch.Tensor:
    """View the tokens of a cache as pages of one token, for the tables of :func:`from_slots`.

    Args:
        cache: (pages, page_size, kv_heads, head_dim). The tokens of all pages lie in equal steps: no layout with heads
            first, unless there is one head.

    Returns:
        (pages * page_size, 1, kv_heads, head_dim), a view.

    Raises:
        ArgumentError: naming the argument.
    """
    _check_cache("cache", cache, _CACHE_RANK)
    pages, size = cache.shape[:2]
    if pages > 1 and size > 1 and cache.stride(0) != size * cache.stride(1):
        steps = (
            f"has steps of {cache.stride(0)} elements from page to page and of {cache.stride(1)} from token to token"
        )
        raise ArgumentError("cache", f"{steps}, expected {size} times as many from page to page")
    return cache.view(-1, 1, *cache.shape[2:])


def _check_cache(name: str, cache: Any, rank: int) -> None:
    """Check a tensor with K, V or both in pages.

    Raises:
        ArgumentError: for another rank, or elements of a row that are not contiguous.
    """
    dtypes = (torch.float16, torch.bfloat16, torch.float8_e4m3fn)
    check_tensor(name, cache, dtypes, (rank,))
    if cache.shape[-1] > 1 and cache.stride(-1) != 1:
        raise ArgumentError(name, f"has stride {cache.stride(-1)} in its last dimension, which must be contiguous")


def _key_lists(name: str, indices: torch.Tensor, counts: torch.Tensor | None, of_keys: str, keys: int) -> KeyLists:
    """Lists with contiguous int32 entries, and errors that name the converter's arguments."""
    check_count(f"{name}: its entries", indices.shape[2])
    entries = indices.int()
    entries = entries if entries.stride(-1) == 1 or entries.shape[2] == 1 else entries.contiguous()
    try:
        return KeyLists(entries, None if counts is None else counts.int().contiguous(), keys)
    except ArgumentError as error:
        raise ArgumentError(of_keys, error.reason) from None
