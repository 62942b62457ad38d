"""Transposition of lists of key blocks: for each key block, the queries that list it."""

from __future__ import annotations

from typing import NamedTuple

import torch

NO_SEQUENCE = -(2**31)
"""Position of a token of no sequence."""
ABSENT = 2**30
"""Number of no block: more than any sequence has, and a multiple of the blocks of a tile."""
MOST_SHORT = 2**15 - 1
"""Most tiles of all heads whose numbers are sorted in 16 bits."""


class TransposedKeyLists(NamedTuple):
    """The queries of each key block, on the device of the lists.

    A tile is a key block of a KV head, or several blocks, its pieces. A query that lists a piece n times has n entries
    of the tile. The i-th of them has the pieces that the query lists i times or more. Tiles of a head come in ascending
    order of keys, sequence after sequence. A chunk is a part of a tile's entries that one thread block takes. Sizes
    depend on shapes alone.

    Attributes:
        entries: int32 (kv_heads * tokens * list length,): token of each entry, by tile, falling in each tile. Entries
            that no query sees come last.
        offsets: int32 (kv_heads * tiles + 1,): first entry of each tile, then the end of the last one.
        places: int32 (tiles, 4): of each tile of a head its first token in k, that token's position in its sequence,
            the number of its keys, and 0.
        chunk_begins: int32 (kv_heads * tiles + 1,): first chunk of each tile, then the number of chunks.
        chunk_tiles: int32 (chunks at most,): tile of each chunk; kv_heads * tiles behind the last one.
        positions: int32 (tokens,): position of each query, below 0 if it sees no key; ``NO_SEQUENCE`` for a token of no
            sequence.
        pieces: uint8 as entries: bit i is set if the entry has piece i; None if a tile is one block.
    """

    entries: torch.Tensor
    offsets: torch.Tensor
    places: torch.Tensor
    chunk_begins: torch.Tensor
    chunk_tiles: torch.Tensor
    positions: torch.Tensor
    pieces: torch.Tensor | None = None


def rising_bounds(cu_seqlens: torch.Tensor, tokens: int) -> torch.Tensor:
    """Bounds within a tensor: one below an earlier one counts as that one."""
    return cu_seqlens.clamp(0, tokens).cummax(0).values


def transposed_key_lists(
    indices: torch.Tensor,
    counts: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    *,
    keys: int,
    kv_heads: int,
    key_tokens: int,
    tiles: int,
    chunk: int,
    chunks: int,
    pieces: int = 1,
) -> TransposedKeyLists:
    """Transpose lists. The result has the same bits in every call; nothing synchronizes.

    Args:
        indices: int32 (kv_heads or 1, tokens, list length), as of ``KeyLists``.
        counts: int32 (kv_heads or 1, tokens), or None.
        cu_seqlens_q: int32 (sequences + 1,): bounds of the sequences in q.
        cu_seqlens_k: int32 (sequences + 1,): those in k.
        keys: keys of an entry.
        kv_heads: heads of K and V.
        key_tokens: tokens of k.
        tiles: tiles of a head at most.
        chunk: entries of a chunk.
        chunks: chunks of all heads at most.
        pieces: blocks of a tile, 8 at most.
    """
    tokens, device, tile_keys = indices.shape[1], indices.device, keys * pieces
    sequences = cu_seqlens_q.shape[0] - 1
    of_q, of_k = rising_bounds(cu_seqlens_q, tokens), rising_bounds(cu_seqlens_k, key_tokens)
    lengths = of_k[1:] - of_k[:-1]
    bases = of_k[:-1] // tile_keys  # first tile of each sequence, in a head
    bases += torch.arange(sequences, dtype=torch.int32, device=device)
    token = torch.arange(tokens, dtype=torch.int32, device=device)
    sequence = _place_in(of_q, token).clamp(0, sequences - 1)
    behind = lengths[sequence] - of_q[sequence + 1]
    inside = (token >= of_q[0]) & (token < of_q[-1])
    positions = torch.where(inside, behind + token, NO_SEQUENCE)
    seen = (indices >= 0) & (indices <= (positions // keys)[:, None])
    if counts is not None:
        seen &= torch.arange(indices.shape[2], device=device) < counts[..., None]
    of_tile = None
    if pieces > 1:
        indices, of_tile = tiles_of_lists(indices.where(seen, ABSENT), pieces)
        seen = of_tile > 0
    head = torch.arange(0, kv_heads * tiles, tiles, dtype=torch.int32, device=device)
    ids = torch.where(seen, indices + bases[sequence][:, None] + head[:, None, None], kv_heads * tiles)
    number = torch.int16 if kv_heads * tiles <= MOST_SHORT else torch.int32  # sorting takes half as many passes
    in_order, found = ids.flip(1).flatten().to(number).sort(stable=True)
    every = torch.arange(kv_heads * tiles + 1, dtype=torch.int32, device=device)
    offsets = torch.searchsorted(in_order, every.to(number), out_int32=True)
    chunk_begins = torch.zeros_like(every)
    torch.cumsum((offsets[1:] - offsets[:-1] + chunk - 1) // chunk, 0, out=chunk_begins[1:])
    chunk_numbers = torch.arange(chunks, dtype=torch.int32, device=device)
    return TransposedKeyLists(
        (tokens - 1 - found // ids.shape[2] % tokens).int(),
        offsets,
        _places(bases, of_k, every[:tiles], tile_keys),
        chunk_begins,
        torch.searchsorted(chunk_begins[1:], chunk_numbers, right=True, out_int32=True),
        positions,
        None if of_tile is None else of_tile.expand(ids.shape).flip(1).flatten()[found],
    )


def tiles_of_lists(lists: torch.Tensor, pieces: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Lists of tiles, and the pieces of each, from lists of blocks.

    If a list has a block n times, it has the block's tile n times at least: the first n of these have the block.

    Args:
        lists: int32 (..., list length): numbers of blocks in any order; ``ABSENT`` for entries that do not count.
        pieces: blocks of a tile, 8 at most.

    Returns:
        Tiles, int32, in rising order, and their pieces, uint8: bit i for block i of the tile. An entry without pieces
        counts as absent.
    """
    blocks = lists.sort(-1).values.contiguous()
    tiles = blocks // pieces
    ends = [torch.searchsorted(blocks, tiles * pieces + i, out_int32=True) for i in range(pieces + 1)]
    turn = torch.arange(blocks.shape[-1], dtype=torch.int32, device=blocks.device) - ends[0]  # among those of its tile
    found = torch.zeros_like(blocks, dtype=torch.uint8)
    for i in range(pieces):
        found |= (turn < ends[i + 1] - ends[i]).to(torch.uint8) << i
    return tiles, found.where(blocks != ABSENT, 0)


def _place_in(bounds: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Last bound at or before each number; -1 before the first one."""
    return torch.searchsorted(bounds, numbers, right=True, out_int32=True) - 1


def _places(bases: torch.Tensor, of_k: torch.Tensor, tile: torch.Tensor, keys: int) -> torch.Tensor:
    """Where the keys of the tiles of a head are, int32 (tiles, 4)."""
    sequence = _place_in(bases, tile)
    there = sequence.clamp(min=0)
    position = (tile - bases[there]) * keys
    number = (of_k[there + 1] - of_k[there] - position).clamp(0, keys)
    number = torch.where(sequence < 0, 0, number)
    return torch.stack((of_k[there] + position, position, number, torch.zeros_like(number)), 1)
