"""Lists of key blocks of single queries, for the heads of K and V: NSA, MSA and what is written like them."""

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
"""Query heads of a K/V head that kernels take as one pack at most; their number is a power of 2."""


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
    """Return lists of key blocks that each query has for each head of K and V.

    The query heads of a K/V head share its lists: where they are 1, 2, 4, ... or 64 the lists stay those of the K/V
    heads, which kernels with ``pack_gqa`` take; otherwise they are repeated for each query head.

    A query block of one query has as many rows as heads are packed, and kernels want 16 at least. With fewer heads, or
    for fewer and longer lists, ``block`` takes several queries together: their list has what any of them lists, and
    bits say which of them sees what.

    Args:
        indices: int32 or int64 (heads of K and V, queries, entries), or what else ``layout`` says: the blocks that each
            query sees, each once and in any order; negative entries name none.
        block: queries of a block of the result, and keys of a block of the lists: (1, 64) takes the lists as they are.
        heads: query heads, a multiple of the heads of ``indices``.
        layout: order of the dimensions, a letter for each: b batch, h heads of K and V, t queries, k entries; without b
            there is one batch. ``htk`` is MSA's, ``bthk`` that of flash-linear-attention's NSA.
        causal: whether queries do not see later keys of the blocks that they list, as in NSA: key <= query + kv_len -
            queries.
        kv_len: keys of a head; by default as many as there are queries. Not looked at where lists stay as they are.
        max_blocks: entries of a list of several queries; by default all key blocks. What the longest is short of is in
            ``overflow``.
        max_partial_blocks: entries of the list of blocks that some of them do not see whole; by default ``max_blocks``.

    Returns:
        ``TopK``, or ``BlockLists`` with ``mask="causal"``, both as wide as ``indices``. For several queries
        ``BlockLists`` with bits: block queries * block keys / 8 bytes for each entry of each partial list; while they
        are made, a byte for each query, head of K and V and key block.

    Raises:
        ArgumentError: naming the argument.
    """
    lists = _in_order(indices, layout)
    check_block("block", block)
    check_count("heads", heads)
    check_flag("causal", causal)
    kv_heads = lists.shape[1]
    if heads % kv_heads:
        raise ArgumentError("heads", f"is {heads}, not a multiple of {kv_heads}, which there are lists for")
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
    """Return the lists of single queries.

    Args:
        pattern: ``TopK``, or ``BlockLists`` with ``mask="none"`` or, which its user has to know, ``"causal"`` and one
            list; its query blocks are of one query.
        layout: order of the dimensions, as of :func:`from_token_lists`; without b there must be one batch.

    Returns:
        int32, ascending, -1 behind the last block of a list.

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
    """Return the letters of all four dimensions in the order of a layout."""
    if not isinstance(layout, str) or sorted(layout) not in (sorted("htk"), sorted("bhtk")):
        raise ArgumentError("layout", f"is {shown(layout)}, expected each of h, t, k once, and b with several batches")
    return layout if "b" in layout else "b" + layout


def _in_order(indices: torch.Tensor, layout: str) -> torch.Tensor:
    """Return lists as (batch, heads of K and V, queries, entries)."""
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
    """Return the lists of several queries together, with bits; ``most``: entries of all lists, and of partial ones."""
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
