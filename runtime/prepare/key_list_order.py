"""Order in which thread blocks take the chunks of transposed lists of key blocks."""

from __future__ import annotations

import torch

from runtime.prepare.key_lists import TransposedKeyLists


def order_of_chunks(lists: TransposedKeyLists, *, kv_heads: int, chunk: int) -> torch.Tensor:
    """Chunks of each KV head in falling order of their first tokens, int32 (chunks at most,); missing ones come last.

    Chunks that run at one time then have queries near each other, and share what the L2 cache has of them. Nothing
    synchronizes.

    Args:
        lists: the transposed lists.
        kv_heads: heads of K and V.
        chunk: entries of a chunk.
    """
    tokens, tiles, missing = lists.positions.shape[0], lists.places.shape[0], lists.chunk_tiles.shape[0]
    tile = lists.chunk_tiles.clamp(max=kv_heads * tiles - 1).long()
    number = torch.arange(missing, dtype=torch.int32, device=tile.device) - lists.chunk_begins[tile]
    first = (lists.offsets[tile] + number * chunk).clamp(0, lists.entries.shape[0] - 1)
    place = (tile // tiles + 1) * tokens - lists.entries[first]
    place.masked_fill_(lists.chunk_tiles >= kv_heads * tiles, (kv_heads + 1) * tokens)
    return place.argsort(stable=True).int()
