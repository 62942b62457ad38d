"""Conversion from and to FlexAttention's ``BlockMask``."""

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
"""Visibility of a pair, a function of the indices of batch, head, query and key."""


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
    """Convert a FlexAttention ``BlockMask`` to block lists.

    ``mask_mod`` is evaluated with vmap, as in torch, only on the pairs of the listed partial blocks, 2^24 pairs at a
    time (128 MiB per 64-bit intermediate tensor). Convert a mask that does not change from call to call only once.

    Args:
        block_mask: the mask, with any ``BLOCK_SIZE``.
        q_len: queries per head, at most the mask's. Default: the mask's.
        kv_len: keys per head, at most the mask's. Default: the mask's.
        batch: number of batches for which ``mask_mod`` is evaluated. Default: the number of batches of the mask's
            lists.
        heads: number of heads for which ``mask_mod`` is evaluated. Default: the number of heads of the mask's lists.
        target: queries and keys per block of the lists, 16 to 128. Default: ``BLOCK_SIZE`` or the largest equal parts
            of it; if there are none, blocks are merged, with mask bits. Kernels of sm_90a support blocks of 64 and 128
            keys.
        max_blocks: entries per list. Default: the number of key blocks. ``overflow`` has the number of blocks that the
            longest list lacks.
        max_partial_blocks: entries per list of partial blocks. Default: ``max_blocks``.

    Returns:
        Lists with ``mask="none"`` if there is no ``mask_mod`` and no block is merged. Otherwise lists with mask bits,
        which take block queries * block keys / 8 bytes per entry of each partial list (2 KiB with 128 x 128). With the
        default width this is as large as a dense bit mask; a causal mask needs only ``max_partial_blocks=1``.

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
        raise ArgumentError("block_mask", "is a slice without mask_mod: set its mask_mod to that of the whole mask")
    told_apart = [partial.shape[0] if batch is None else batch, partial.shape[1] if heads is None else heads]
    for name, count, there in zip(("batch", "heads"), told_apart, partial.shape, strict=False):
        if there not in (1, count):
            raise ArgumentError(name, f"is {count}, but the mask has lists for {there}")
    full, partial = (blocks.expand(*told_apart, rows, columns) for blocks in (full, partial))
    maps = BlockMaps(full, block, q_len, kv_len, partial, _evaluated(mask_mod))
    return maps.lists(target, max_blocks, max_partial_blocks)


def to_block_mask(pattern: TopK | BlockLists, *, q_len: int, kv_len: int, heads: int | None = None) -> BlockMask:
    """Convert lists to a FlexAttention ``BlockMask`` with an equivalent ``mask_mod``.

    Args:
        pattern: ``TopK`` or ``BlockLists``, without duplicates within a list.
        q_len: queries per head.
        kv_len: keys per head.
        heads: number of query heads, if packs of heads share lists (FlexAttention has no packs). Default: the number of
            heads of the lists.

    Returns:
        The mask, with the pattern's block size.

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
        raise ArgumentError("heads", f"is {heads}, expected a multiple of {list_heads}, the heads of the lists")
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
    """Length of a sequence: the given length, at most the mask's, by default the mask's."""
    if given is None:
        return of_mask
    check_count(name, given)
    if given > of_mask:
        raise ArgumentError(name, f"is {given}, but the mask is for at most {of_mask}")
    return given


def _map(name: str, counts: Any, indices: Any, rows: int, columns: int) -> torch.Tensor:
    """Lists of a mask as a 4-d map; lists of sliced masks may have fewer dimensions."""
    check_tensor(name, indices, INTEGERS, (2, 3, 4))
    if indices.shape[-2] < rows:
        raise ArgumentError(name, f"has lists for {indices.shape[-2]} query blocks, expected {rows}")
    blocks = map_of(counts[..., :rows], indices[..., :rows, :], columns)
    return blocks[(None,) * (4 - blocks.dim())]


def _evaluated(mask_mod: MaskMod) -> Visible:
    """A function that evaluates a ``mask_mod`` at the indices of many pairs, with vmap as torch does."""

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
    """Lists without -1, as wide as the number of key blocks; torch derives the transposed lists from them."""
    blocks = map_of(counts, indices, columns)
    lists = lists_of(blocks.repeat_interleave(pack, 1) if pack > 1 else blocks, None)
    return lists.counts, lists.indices.clamp(min=0)


def _causal(shift: int) -> MaskMod:
    """The causal mask of queries shifted by ``shift`` keys."""
    return lambda b, h, q, k: k <= q + shift


def _by_bits(pattern: BlockLists, columns: int, pack: int) -> MaskMod:
    """The mask that reads a pattern's mask bits."""
    bits, indices = pattern.mask_bits, pattern.kv_indices
    assert bits is not None
    queries, keys = pattern.block
    entries = torch.arange(indices.shape[3], device=indices.device).expand(indices.shape)
    used = is_listed(pattern.kv_num_blocks, indices) & (indices >= 0) & (indices < columns)
    shape = (*indices.shape[:3], columns + 1)
    # The entry of each listed key block in the list of its query block.
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
