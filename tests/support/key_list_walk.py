"""Gradients of attention over lists of keys by plain torch: transposed lists are walked as a kernel walks them."""

from __future__ import annotations

import math

import torch

from runtime.prepare.key_lists import TransposedKeyLists
from runtime.verify.key_lists import Exact, Inputs


def walked(
    inputs: Inputs, exact: Exact, lists: TransposedKeyLists, *, chunk: int, scale: float | None, piece_keys: int = 0
) -> dict[str, torch.Tensor]:
    """Gradients dq, dk and dv in float64, of sums chunk by chunk in the order of their numbers.

    Raises:
        AssertionError: if the tokens of a chunk do not fall, or if an entry has no piece.
    """
    q, k, v, dout = (t.double() for t in (inputs.q, inputs.k, inputs.v, inputs.dout))
    kv_heads, tiles = k.shape[1], lists.places.shape[0]
    group = q.shape[1] // kv_heads
    scale = 1 / math.sqrt(q.shape[2]) if scale is None else scale
    delta = (exact.out * dout).sum(-1)
    if inputs.dlse is not None:
        delta = delta - inputs.dlse.T
    found = {"dq": torch.zeros_like(q), "dk": torch.zeros_like(k), "dv": torch.zeros_like(v)}
    for number, tile in enumerate(lists.chunk_tiles.tolist()):
        if tile >= kv_heads * tiles:
            continue
        head, place = divmod(tile, tiles)
        first_key, first_position, keys, _ = lists.places[place].tolist()
        first = int(lists.offsets[tile]) + (number - int(lists.chunk_begins[tile])) * chunk
        entries = slice(first, min(first + chunk, int(lists.offsets[tile + 1])))
        tokens = lists.entries[entries].long()
        assert len(tokens) and bool((tokens[1:] <= tokens[:-1]).all())
        heads, at = slice(head * group, (head + 1) * group), slice(first_key, first_key + keys)
        mine, of_out = q[tokens, heads], dout[tokens, heads]
        there = first_position + torch.arange(keys) <= lists.positions[tokens, None]
        if lists.pieces is not None:
            pieces = lists.pieces[entries].int()
            assert bool((pieces != 0).all())
            there &= (pieces[:, None] >> torch.arange(keys) // piece_keys & 1).bool()
        p = (scale * mine @ k[at, head].T - exact.lse[heads, tokens].T[..., None]).exp() * there[:, None]
        ds = p * (of_out @ v[at, head].T - delta[tokens, heads][..., None])
        found["dq"].index_put_(
            (tokens[:, None], torch.arange(heads.start, heads.stop)), scale * ds @ k[at, head], accumulate=True
        )
        found["dk"][at, head] += scale * (ds.flatten(0, 1).T @ mine.flatten(0, 1))
        found["dv"][at, head] += p.flatten(0, 1).T @ of_out.flatten(0, 1)
    return found
