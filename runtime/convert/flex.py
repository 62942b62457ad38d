"""FlexAttention's ``BlockMask``, both ways."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask, create_mask, noop_mask

from codegen.patterns.block_lists import NAMED_MASKS
from runtime.block_maps import ascending, ceil_div, is_listed, lists_of, map_of
from runtime.convert.bits import Visible
from runtime.convert.checks import INTEGERS, Shape, check_count, check_shape, check_tensor
from runtime.convert.expressions import mask_mod_of
from runtime.convert.regrid import BlockMaps
from runtime.errors import ArgumentError
from runtime.patterns import BlockLists, TopK

MaskMod = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Whether a query sees a key: of batch, head, query and key, each a number."""


def from_block_mask(
    block_mask: BlockMask,
    *,
    q_len: int | None = None,
    kv_len: int | None = None,
    batch: int | None = None,
    heads: int | None = None,
    target: Shape | None = None,
    max_blocks: int | None = None,
    max_partial_blocks: int | None = None,
) -> BlockLists:
    """Return the lists of a FlexAttention ``BlockMask``.

    ``mask_mod`` is evaluated as torch does it (vmap), on the pairs of the partial blocks that are listed and on no
    others, 2^24 at a time (128 MiB for each 64-bit tensor that it makes of them). A mask that does not change from call
    to call is converted once.

    Args:
        block_mask: the mask. Its ``BLOCK_SIZE`` is of any size.
        q_len: queries of a head, as many as the mask is for or fewer; by default as many.
        kv_len: keys of a head, in the same way.
        batch: how many batches ``mask_mod`` tells apart; by default those that the mask has lists for.
        heads: how many heads it tells apart; by default those that the mask has lists for.
        target: queries and keys of a block of the lists; by default 16 to 128, ``BLOCK_SIZE`` or equal parts of
            it; where there are none, blocks are merged, with bits. Kernels of sm_90a have blocks of 64 and 128 keys.
        max_blocks: entries of a list; by default all key blocks. What the longest is short of is in ``overflow``.
        max_partial_blocks: entries of the list of partial blocks; by default as ``max_blocks``.

    Returns:
        Lists with ``mask="none"``, if there is no ``mask_mod`` and no block is merged, else with bits: block queries *
        block keys / 8 bytes for each entry of each partial list (2 KiB with 128 x 128). With the default width that is
        as much as a dense mask has bits; a causal mask needs ``max_partial_blocks=1``.

    Raises:
        ArgumentError: naming the argument.
    """
    if not isinstance(block_mask, BlockMask):
        raise ArgumentError("block_mask", f"is {type(block_mask).__name__}, expected a BlockMask")
    for name, count in (("batch", batch), ("heads", heads)):
        if count is not None:
            check_count(name, count)
    block = block_mask.BLOCK_SIZE
    q_len, kv_len = (
        _length(name, given, of_mask)
        for name, given, of_mask in zip(("q_len", "kv_len"), (q_len, kv_len), block_mask.seq_lengths, strict=True)
    )
    rows, columns = ceil_div(q_len, block[0]), ceil_div(kv_len, block[1])
    partial = _map("kv_indices", block_mask.kv_num_blocks, block_mask.kv_indices, rows, columns)
    full = torch.zeros_like(partial)
    if block_mask.full_kv_indices is not None:
        full = _map("full_kv_indices", block_mask.full_kv_num_blocks, block_mask.full_kv_indices, rows, columns)
    mask_mod = block_mask.mask_mod
    if mask_mod is None or mask_mod is noop_mask:
        return BlockMaps(full | partial, block, q_len, kv_len).lists(target, max_blocks, max_partial_blocks)
    if getattr(mask_mod, "__name__", "") == "_sliced_mask_mod_error":
        raise ArgumentError("block_mask", "is a slice, which has no mask_mod: set it to that of the whole mask")
    told_apart = [partial.shape[0] if batch is None else batch, partial.shape[1] if heads is None else heads]
    for name, count, there in zip(("batch", "heads"), told_apart, partial.shape, strict=False):
        if there not in (1, count):
            raise ArgumentError(name, f"is {count}, the mask has lists for {there}")
    full, partial = (blocks.expand(*told_apart, rows, columns) for blocks in (full, partial))
    maps = BlockMaps(full, block, q_len, kv_len, partial, _evaluated(mask_mod))
    return maps.lists(target, max_blocks, max_partial_blocks)


def to_block_mask(pattern: TopK | BlockLists, *, q_len: int, kv_len: int, heads: int | None = None) -> BlockMask:
    """Return the FlexAttention ``BlockMask`` of lists; its ``mask_mod`` says what their mask says.

    Args:
        pattern: ``TopK`` or ``BlockLists``, no block of which is listed twice.
        q_len: queries of a head.
        kv_len: keys of a head.
        heads: query heads, if lists are of packs of them, which FlexAttention does not have; by default those that
            there are lists for.

    Returns:
        The mask, in blocks of the pattern's size.

    Raises:
        ArgumentError: naming the argument.
    """
    if not isinstance(pattern, TopK | BlockLists):
        raise ArgumentError("pattern", f"is {type(pattern).__name__}, expected TopK or BlockLists: it has no lists")
    check_count("q_len", q_len)
    check_count("kv_len", kv_len)
    if heads is not None:
        check_count("heads", heads)
    indices = pattern.kv_indices
    counts = ascending(indices).counts if isinstance(pattern, TopK) else pattern.kv_num_blocks
    check_shape(
        "pattern", counts, ("batch", None), ("heads", None), ("query_blocks", ceil_div(q_len, pattern.block[0]))
    )
    list_heads = indices.shape[1]
    pack = 1 if heads is None or list_heads == 1 else heads // list_heads
    if heads is not None and heads % list_heads:
        raise ArgumentError("heads", f"is {heads}, not a multiple of {list_heads}, which there are lists for")
    columns = ceil_div(kv_len, pattern.block[1])
    some = _for_flex(counts, indices, columns, pack)
    full: tuple[Any, Any] = (None, None)
    if isinstance(pattern, BlockLists) and pattern.full_kv_indices is not None:
        full = _for_flex(pattern.full_kv_num_blocks, pattern.full_kv_indices, columns, pack)
    mask_mod: MaskMod | None = None
    if isinstance(pattern, BlockLists) and pattern.mask == "causal":
        mask_mod = _causal(kv_len - q_len)
    elif isinstance(pattern, BlockLists) and pattern.mask not in NAMED_MASKS:
        mask_mod = mask_mod_of(pattern, q_len, kv_len)
    elif isinstance(pattern, BlockLists) and pattern.mask_bits is not None:
        mask_mod = _by_bits(pattern, columns, pack)
    lengths = (q_len, kv_len)
    return BlockMask.from_kv_blocks(*some, *full, BLOCK_SIZE=pattern.block, mask_mod=mask_mod, seq_lengths=lengths)


def _length(name: str, given: int | None, of_mask: int) -> int:
    """Return the length of a sequence: that of the mask, or fewer."""
    if given is None:
        return of_mask
    check_count(name, given)
    if given > of_mask:
        raise ArgumentError(name, f"is {given}, the mask is for {of_mask} at most")
    return given


def _map(name: str, counts: Any, indices: Any, rows: int, columns: int) -> torch.Tensor:
    """Return lists of a mask as a map of four dimensions; masks made of slices may have fewer."""
    check_tensor(name, indices, INTEGERS, (2, 3, 4))
    if indices.shape[-2] < rows:
        raise ArgumentError(name, f"has lists for {indices.shape[-2]} query blocks, expected {rows}")
    blocks = map_of(counts[..., :rows], indices[..., :rows, :], columns)
    return blocks[(None,) * (4 - blocks.dim())]


def _evaluated(mask_mod: MaskMod) -> Visible:
    """A function that evaluates a ``mask_mod`` at the indices of many pairs, as torch does."""

    def visible(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        batch, heads, rows, entries, _, block_keys = keys.shape
        block_queries = queries.shape[2]
        q, k = queries.reshape(-1), keys.reshape(batch, heads, rows, -1)

        def at(b: torch.Tensor, h: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
            return mask_mod(b, h, q[i], k[b, h, i // block_queries, j])

        pairs = create_mask(at, batch, heads, rows * block_queries, entries * block_keys, device=keys.device)
        return pairs.view(batch, heads, rows, block_queries, entries, block_keys).transpose(3, 4)

    return visible


def _for_flex(counts: Any, indices: Any, columns: int, pack: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return lists as wide as there are key blocks, from which torch derives the transposed ones, without -1."""
    blocks = map_of(counts, indices, columns)
    lists = lists_of(blocks.repeat_interleave(pack, 1) if pack > 1 else blocks, None)
    return lists.counts, lists.indices.clamp(min=0)


def _causal(shift: int) -> MaskMod:
    """Return the mask of queries that stand ``shift`` keys further on."""
    return lambda b, h, q, k: k <= q + shift


def _by_bits(pattern: BlockLists, columns: int, pack: int) -> MaskMod:
    """Return the mask that looks into a pattern's bits."""
    bits, indices = pattern.mask_bits, pattern.kv_indices
    assert bits is not None
    queries, keys = pattern.block
    entries = torch.arange(indices.shape[3], device=indices.device).expand(indices.shape)
    used = is_listed(pattern.kv_num_blocks, indices) & (indices >= 0) & (indices < columns)
    shape = (*indices.shape[:3], columns + 1)
    # The entry of each key block in the list of its query block; what is not listed has none.
    entry_of = torch.full(shape, -1, device=indices.device).scatter(
        -1, torch.where(used, indices, columns).long(), entries
    )
    lists_batch, lists_heads, bits_batch, bits_heads = (int(n > 1) for n in (*indices.shape[:2], *bits.shape[:2]))

    def mask_mod(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        row, column, head = q // queries, k // keys, h // pack
        entry = entry_of[b * lists_batch, head * lists_heads, row, column]
        word = q % queries * (keys // 32) + k % keys // 32
        found = bits[b * bits_batch, head * bits_heads, row, entry.clamp(min=0), word]
        return (entry >= 0) & ((found >> (k % 32)) & 1).to(torch.bool)

    return mask_mod
