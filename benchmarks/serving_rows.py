"""Rows of benchmarks/serving.py: sizes, inputs, and results in float32."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from runtime import KeyLists
from runtime.patterns import Causal

E4M3 = torch.float8_e4m3fn
LENGTHS = {
    "64x4K": (4096,) * 64,
    "16x8K": (8192,) * 16,
    "1x32K": (32768,),
    "1x64K+31x4K": (65536, *(4096,) * 31),
    "32x128+32x4K": (*(128,) * 32, *(4096,) * 32),
    "128x4K": (4096,) * 128,
}
"""Keys of each request, by the name of the batch."""
FRONT_DOOR = "front door"
"""Work of rows that call ``block_sparse_attention``."""
FRONT_DOOR_CALLS = ("16x8K", 32), ("64x4K", 64), ("1x32K", 32)
"""Batches and query heads of those."""
SPARE_PAGES = 3
"""Pages of a cache that no request has."""
MSA_BLOCK, MSA_ENTRIES, MSA_KEYS = 128, 16, 32768
QSA_GROUP, QSA_TOKENS = 4, 2048


@dataclass(frozen=True)
class Row:
    """One step of decoding, or the prefill of a chunk of each request.

    Attributes:
        work: dense, contiguous, front door, MSA or QSA; prefill, MSA prefill or QSA prefill. The front door is
            ``block_sparse_attention``.
        batch: name of the row's batch.
        lengths: keys of each request.
        heads: query heads.
        kv_heads: heads of K and V.
        head_dim: elements per head.
        page: tokens of a page; 0 if K and V of a request are contiguous.
        queries: queries of each request.
        cache: type of K and V.
        entries: entries of a list, 0 without lists.
        entry_keys: keys of an entry.
    """

    work: str
    batch: str
    lengths: tuple[int, ...]
    heads: int
    kv_heads: int
    head_dim: int
    page: int
    queries: int = 1
    cache: str = "bf16"
    entries: int = 0
    entry_keys: int = 1

    @property
    def name(self) -> str:
        """Name in results."""
        parts = [self.work, self.batch, f"h{self.heads}:{self.kv_heads}"]
        parts += [f"page {self.page}"] if self.work in ("dense", "prefill") else []
        parts += [self.cache] if self.work == "MSA" or (self.work == "prefill" and self.cache != "bf16") else []
        parts += [f"d{self.head_dim}"] if self.work == "prefill" and self.head_dim != 128 else []
        return " ".join(parts)

    @property
    def is_prefill(self) -> bool:
        """Whether a request has many queries."""
        return self.work.endswith("prefill")

    @property
    def flops(self) -> int:
        """Floating-point operations of both products, over the pairs that are seen."""
        if self.entries:
            pairs = len(self.lengths) * self.queries * self.entries * self.entry_keys
        else:
            pairs = sum(self.queries * (2 * length - self.queries + 1) // 2 for length in self.lengths)
        return 4 * self.heads * self.head_dim * pairs

    @property
    def shape(self) -> dict[str, Any]:
        """Sizes of the row, for its record."""
        sizes = {name: value for name, value in vars(self).items() if name not in ("work", "batch", "lengths")}
        runs = [[length, len(list(group))] for length, group in itertools.groupby(self.lengths)]
        return {"lengths": runs, **sizes}


def _dense(batch: str, heads: int, page: int) -> Row:
    return Row("dense", batch, LENGTHS[batch], heads, 8, 128, page)


def _msa(batch: int, queries: int, cache: str) -> Row:
    name = f"batch {batch}, {queries} quer{'y' if queries == 1 else 'ies'}"
    lists = {"entries": MSA_ENTRIES, "entry_keys": MSA_BLOCK}
    return Row("MSA", name, (MSA_KEYS,) * batch, 64, 4, 128, MSA_BLOCK, queries, cache, **lists)


def _qsa(batch: int, length: int) -> Row:
    lists = {"entries": QSA_TOKENS // QSA_GROUP, "entry_keys": QSA_GROUP}
    return Row("QSA", f"batch {batch}", (length,) * batch, 24, 2, 256, 64, **lists)


def _prefill(requests: int, length: int, queries: int, page: int = 64) -> Row:
    name = f"{requests} x {queries} queries over {length} keys"
    return Row("prefill", name, (length,) * requests, 32, 8, 128, page, queries)


def _listed_prefill(of: Row, name: str, queries: int) -> Row:
    return replace(of, work=f"{of.work} prefill", batch=name, queries=queries)


ROWS = (
    *(_dense(batch, 32, 64) for batch in LENGTHS),
    *(_dense(batch, heads, 16) for batch in ("64x4K", "1x32K") for heads in (32, 64)),
    Row("contiguous", "16x8K", LENGTHS["16x8K"], 32, 8, 128, 0),
    Row("contiguous", "64x4K", LENGTHS["64x4K"], 64, 8, 128, 0),
    *(Row(FRONT_DOOR, batch, LENGTHS[batch], heads, 8, 128, 0) for batch, heads in FRONT_DOOR_CALLS),
    *(
        _msa(*each, cache)
        for cache in ("bf16", "e4m3")
        for each in ((1, 1), (1, 4), (8, 1), (32, 1), (32, 4), (128, 1))
    ),
    *(_qsa(batch, length) for batch, length in ((1, 32768), (32, 32768), (128, 16384))),
    *(_prefill(1, 32768, queries) for queries in (512, 4096)),
    _prefill(1, 32768, 4096, page=16),
    *(replace(_prefill(1, 32768, queries), cache="e4m3") for queries in (512, 4096)),
    _prefill(1, 8192, 8192),
    _prefill(4, 8192, 2048),
    *(_prefill(16, 4096, queries) for queries in (128, 64, 32, 16)),
    *(replace(_prefill(1, 32768, 512), heads=16, head_dim=head_dim) for head_dim in (192, 256)),
    replace(_prefill(16, 4096, 64), heads=64, head_dim=64),
    _listed_prefill(_msa(1, 1, "bf16"), "8192 queries over 32768 keys", 8192),
    _listed_prefill(_qsa(1, 32768), "4096 queries over 32768 keys", 4096),
)


@dataclass(frozen=True)
class Inputs:
    """Tensors of a row.

    Attributes:
        row: the row.
        q: (tokens, heads, head_dim), bf16.
        k: (pages, page_size, kv_heads, head_dim), a view if the cache has another order.
        v: as k.
        table: int32 (batch, pages of the longest request), or None for contiguous K and V.
        lengths: int32 (batch,).
        bounds: int32 (batch + 1,): first query of each request, then the end of the last one.
        lists: the list of each query, or None.
        rows: (pages, kv_heads, page_size, 2 * head_dim): the cache with K and V of a token in one row, or None.
        scale: float32 (1,): 1, the scale of an e4m3 cache, or None.
    """

    row: Row
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    table: torch.Tensor | None
    lengths: torch.Tensor
    bounds: torch.Tensor
    lists: KeyLists | None
    rows: torch.Tensor | None
    scale: torch.Tensor | None

    @property
    def pattern(self) -> Causal | KeyLists:
        """Pattern of the call."""
        return Causal() if self.lists is None else self.lists

    def keys_of(self, request: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of a request, (keys, kv_heads, head_dim) each."""
        length = self.row.lengths[request]
        if self.table is None:
            return self.k[request, :length], self.v[request, :length]
        pages = self.table[request, : -(-length // self.row.page)].long()
        k, v = (cache[pages].flatten(0, 1)[:length] for cache in (self.k, self.v))
        return k, v

    def contiguous(self) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of all requests, (batch, kv_heads, keys, head_dim) each; lengths are equal.

        Raises:
            ValueError: for unequal lengths.
        """
        if len(set(self.row.lengths)) > 1:
            raise ValueError("requests of different lengths")
        if self.table is None:
            return self.k.transpose(1, 2), self.v.transpose(1, 2)
        pages = self.table[:, : self.row.lengths[0] // self.row.page].long()
        k, v = (cache[pages].flatten(1, 2).transpose(1, 2).contiguous() for cache in (self.k, self.v))
        return k, v

    def bytes_read(self) -> int:
        """Bytes of K and V that some query sees, each counted once for a request and K/V head."""
        row = self.row
        each = 2 * row.head_dim * self.k.element_size()
        if self.lists is None:
            return sum(row.lengths) * row.kv_heads * each
        listed = self.lists.indices.expand(row.kv_heads, -1, -1).reshape(row.kv_heads, len(row.lengths), -1).long()
        seen = torch.zeros(
            (*listed.shape[:2], max(row.lengths) // row.entry_keys), dtype=torch.bool, device=self.q.device
        )
        return int(seen.scatter_(2, listed, True).sum()) * row.entry_keys * each

    def exact(self) -> torch.Tensor:
        """float32 (tokens, heads, head_dim): the result."""
        found = torch.empty(self.q.shape, dtype=torch.float32, device=self.q.device)
        if self.lists is None and self.row.queries > 1:
            for request in range(len(self.row.lengths)):
                _fill_chunk(self, request, found)
            return found
        one = _listed if self.lists is not None else _whole
        for request in range(len(self.row.lengths)):
            for token in range(request * self.row.queries, (request + 1) * self.row.queries):
                found[token] = one(self, request, token)
        return found


def _attended(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """float32 (heads, head_dim): attention of q (heads, head_dim) over k and v (kv_heads, keys, head_dim)."""
    grouped = q.float().unflatten(0, (k.shape[0], -1))
    weights = (grouped @ k.float().mT * q.shape[1] ** -0.5).softmax(-1)
    return (weights @ v.float()).flatten(0, 1)


def _whole(inputs: Inputs, request: int, token: int) -> torch.Tensor:
    """Attention of the only query of a request over all its keys."""
    k, v = inputs.keys_of(request)
    return _attended(inputs.q[token], k.transpose(0, 1), v.transpose(0, 1))


def _fill_chunk(inputs: Inputs, request: int, found: torch.Tensor) -> None:
    """Write the causal attention of the queries of a request, whose last query has the position of the last key."""
    row = inputs.row
    tokens = slice(request * row.queries, (request + 1) * row.queries)
    k, v = inputs.keys_of(request)
    key = torch.arange(len(k), device=k.device)
    hidden = key > torch.arange(len(k) - row.queries, len(k), device=k.device)[:, None]
    for head in range(row.heads):
        of_kv = head * row.kv_heads // row.heads
        scores = inputs.q[tokens, head].float() @ k[:, of_kv].float().T * row.head_dim**-0.5
        found[tokens, head] = scores.masked_fill_(hidden, -torch.inf).softmax(-1) @ v[:, of_kv].float()


def _listed(inputs: Inputs, request: int, token: int) -> torch.Tensor:
    """Attention of a query over its lists, whose keys are all before it."""
    assert inputs.lists is not None and inputs.table is not None
    row, each = inputs.row, inputs.row.entry_keys
    entries = inputs.lists.indices[:, token].long()
    keys = (entries[..., None] * each + torch.arange(each, device=entries.device)).flatten(1)
    keys = keys.expand(row.kv_heads, -1)
    pages, places = inputs.table[request][keys // row.page].long(), keys % row.page
    heads = torch.arange(row.kv_heads, device=keys.device)[:, None]
    return _attended(inputs.q[token], inputs.k[pages, places, heads], inputs.v[pages, places, heads])


def make_table(lengths: tuple[int, ...], page: int, device: torch.device) -> tuple[torch.Tensor, int]:
    """A table of pages in random order, and the number of pages of the cache."""
    counts = [-(-length // page) for length in lengths]
    total = sum(counts) + SPARE_PAGES
    order = torch.randperm(total, dtype=torch.int32)
    table = torch.zeros((len(counts), max(counts)), dtype=torch.int32)
    at = 0
    for request, count in enumerate(counts):
        table[request, :count] = order[at : at + count]
        at += count
    return table.to(device), total


def _lists(row: Row, device: torch.device) -> KeyLists | None:
    """Ascending random lists. None has an entry at the end of a request, so that all its queries see every entry."""
    if not row.entries:
        return None
    of_heads = row.work.startswith("MSA")
    heads = row.kv_heads if of_heads else 1
    last = -(-row.queries // row.entry_keys) if row.queries > 1 or of_heads else 0
    choices = row.lengths[0] // row.entry_keys - last
    drawn = torch.rand((heads, len(row.lengths) * row.queries, choices), device=device)
    entries = drawn.topk(min(row.entries, choices), -1).indices.sort(-1).values.int().contiguous()
    return KeyLists(entries, keys=row.entry_keys)


def make_inputs(row: Row, device: torch.device) -> Inputs:
    """Normal numbers, pages in random order."""

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, device=device)

    batch, table, rows = len(row.lengths), None, None
    if not row.page:
        k, v = (normal(batch, row.kv_heads, row.lengths[0], row.head_dim).transpose(1, 2) for _ in "kv")
    else:
        table, pages = make_table(row.lengths, row.page, device)
        if row.work.startswith("MSA"):
            rows = normal(pages, row.kv_heads, row.page, 2 * row.head_dim)
            rows = rows.to(E4M3) if row.cache == "e4m3" else rows
            k, v = rows.transpose(1, 2).split(row.head_dim, -1)
        else:
            k, v = (normal(pages, row.page, row.kv_heads, row.head_dim) for _ in "kv")
            k, v = (each.to(E4M3) if row.cache == "e4m3" else each for each in (k, v))
    return Inputs(
        row,
        normal(batch * row.queries, row.heads, row.head_dim),
        k,
        v,
        table,
        torch.tensor(row.lengths, dtype=torch.int32, device=device),
        torch.arange(batch + 1, dtype=torch.int32, device=device) * row.queries,
        _lists(row, device),
        rows,
        torch.ones(1, device=device) if row.cache == "e4m3" else None,
    )


Make = Callable[[Inputs], Callable[[], torch.Tensor]]
"""Function that makes a call of a row's inputs; the call returns (tokens, heads, head_dim)."""
