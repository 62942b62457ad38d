"""Conversion from and to lists of key blocks per query and K/V head, as in NSA and MSA."""

from __future__ import annotations

import torch

from codegen.wording import shown
from runtime.block_maps import any_in_blocks, ascending, ceil_div, map_of
from runtime.checks import check_flag
from runtime.convert.bits import numbers_of, partial_and_full
from runtime.convert.blocks import whole_lists
from runtime.convert.checks import INTEGERS, Shape, check_block, check_count, check_tensor, check_width
from runtime.errors import ArgumentError
from runtime.patterns import BlockLists, TopK

LARGEST_PACK = 64
"""Upper bound of the query heads per K/V head that kernels pack; their number is a power of 2."""


def from_token_lists(
    indices: torch.Tensor,
    *,
    block: Shape,
    heads: int,
    layout: str = "htk",
    causal: bool = False,
    kv_len: int | None = None,
    max_blocks: int | None = None,
    max_partial_blocks: int | None = None,
) -> TopK | BlockLists:
    """Convert lists of key blocks per query and K/V head.

    The query heads of a K/V head share its lists. If there are 1, 2, 4, ... or 64 query heads per K/V head, the result
    keeps one list per K/V head, for kernels with ``pack_gqa``. Otherwise lists are repeated for each query head.

    A query block of one query has as many rows as packed heads, and kernels need at least 16 rows. With fewer heads, or
    to get fewer and longer lists, use a ``block`` of several queries: their list is the union of their lists, and mask
    bits record the visible keys of each query.

    Args:
        indices: int32 or int64 (heads of K and V, queries, entries), or in the order of ``layout``: the blocks that
            each query sees, in any order, without duplicates; negative entries are ignored.
        block: queries per block of the result, and keys per block of the lists. (1, 64) keeps the lists as they are.
        heads: number of query heads, a multiple of the heads of ``indices``.
        layout: order of the dimensions, one letter each: b batch, h heads of K and V, t queries, k entries. Without b,
            there is one batch. ``htk`` is MSA's, ``bthk`` that of flash-linear-attention's NSA.
        causal: hide keys after the query within listed blocks, as in NSA: key <= query + kv_len - queries.
        kv_len: keys per head. Default: the number of queries. Ignored if the lists stay as they are.
        max_blocks: entries per list of several queries. Default: the number of key blocks. ``overflow`` has the number
            of blocks that the longest list lacks.
        max_partial_blocks: entries per list of partial blocks. Default: ``max_blocks``.

    Returns:
        ``TopK``, or ``BlockLists`` with ``mask="causal"``, both as wide as ``indices``. For several queries,
        ``BlockLists`` with mask bits: block queries * block keys / 8 bytes per entry of each partial list; during the
        conversion, one byte per query, K/V head and key block.

    Raises:
        ArgumentError: naming the argument.
    """
    lists = _in_order(indices, layout)
    check_block("block", block)
    check_count("heads", heads)
    check_flag("causal", causal)
    kv_heads = lists.shape[1]
    if heads % kv_heads:
        raise ArgumentError("heads", f"is {heads}, expected a multiple of {kv_heads}, the heads of the lists")
    check_width(max_blocks, max_partial_blocks)
    group = heads // kv_heads
    if group & (group - 1) or group > LARGEST_PACK:
        lists = lists.repeat_interleave(group, 1)
    if block[0] > 1:
        return _merged(lists, block, kv_len, causal=causal, most=(max_blocks, max_partial_blocks))
    for name, value in (("max_blocks", max_blocks), ("max_partial_blocks", max_partial_blocks)):
        if value is not None:
            raise ArgumentError(name, f"is {value}, but lists of single queries keep their width: leave it out")
    counts, found, _ = ascending(lists)
    return BlockLists(counts, found, block=block, mask="causal") if causal else TopK(found, block=block)


def to_token_lists(pattern: TopK | BlockLists, *, layout: str = "htk") -> torch.Tensor:
    """Convert a pattern with blocks of one query to lists per query.

    Args:
        pattern: ``TopK``, or ``BlockLists`` with ``mask="none"``, or ``BlockLists`` with ``mask="causal"`` and no full
            list (the result does not record the causal mask). Query blocks have one query.
        layout: order of the dimensions, as in :func:`from_token_lists`; without b, the pattern must have one batch.

    Returns:
        int32, ascending, padded with -1.

    Raises:
        ArgumentError: naming the argument.
    """
    order = _order(layout)
    if isinstance(pattern, BlockLists) and pattern.mask == "causal" and pattern.full_kv_indices is None:
        pattern = BlockLists(pattern.kv_num_blocks, pattern.kv_indices, block=pattern.block)
    lists = whole_lists(pattern, "a list of single queries").indices
    if pattern.block[0] != 1:
        raise ArgumentError("pattern", f"has blocks of {pattern.block[0]} queries, expected 1")
    if "b" not in layout and lists.shape[0] != 1:
        raise ArgumentError("layout", f"is {layout!r}, but the pattern has {lists.shape[0]} batches: it needs a b")
    found = lists.permute([("bhtk").index(letter) for letter in order])
    return found if "b" in layout else found[0]


def _order(layout: str) -> str:
    """The letters of all four dimensions in the order of a layout."""
    if not isinstance(layout, str) or sorted(layout) not in (sorted("htk"), sorted("bhtk")):
        raise ArgumentError("layout", f"is {shown(layout)}, expected each of h, t, k once, and b with several batches")
    return layout if "b" in layout else "b" + layout


def _in_order(indices: torch.Tensor, layout: str) -> torch.Tensor:
    """Lists as (batch, heads of K and V, queries, entries)."""
    order = _order(layout)
    check_tensor("indices", indices, INTEGERS, (len(layout),))
    lists = indices if "b" in layout else indices[None]
    return lists.permute([order.index(letter) for letter in "bhtk"])


def _merged(
    lists: torch.Tensor,
    block: Shape,
    kv_len: int | None,
    *,
    causal: bool,
    most: tuple[int | None, int | None],
) -> BlockLists:
    """Lists of blocks of several queries, with mask bits. ``most`` bounds the entries of all and of partial lists."""
    check_block("block", block, has_bits=True)
    queries, keys = block
    q_len, device = lists.shape[2], lists.device
    kv_len = q_len if kv_len is None else kv_len
    check_count("kv_len", kv_len)
    seen = map_of(torch.full(lists.shape[:3], lists.shape[3], device=device), lists, ceil_div(kv_len, keys))
    positions = torch.arange(q_len, device=device) + (kv_len - q_len)
    first = torch.arange(seen.shape[3], device=device) * keys
    whole = seen
    if causal:
        seen = seen & (first <= positions[:, None])
        whole = seen & ((first + keys).clamp(max=kv_len) - 1 <= positions[:, None])
    listed = any_in_blocks(seen, -2, queries)
    full = ~any_in_blocks(~whole, -2, queries)

    def visible(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        pairs = seen[*numbers_of(seen), q, k // keys]
        return pairs & (k <= positions[q]) if causal else pairs

    return partial_and_full(
        listed & ~full,
        full,
        visible,
        block=block,
        lengths=(q_len, kv_len),
        max_blocks=most[0],
        max_partial_blocks=most[1],
    )
