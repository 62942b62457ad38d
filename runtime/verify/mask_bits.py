"""Mask bits of partial blocks: random bits for cases, and the pairs that they make visible."""

from __future__ import annotations

import torch

from codegen.patterns import Block

WORD = 32  # bits


def draw_bits(
    shape: tuple[int, int, int, int], block: Block, masks: str, source: torch.Generator, device: torch.device
) -> torch.Tensor:
    """Draw ``mask_bits``.

    Half of the pairs are visible. One in eight queries of a block sees no key; one in six blocks is fully hidden, and
    one in six fully visible.

    Args:
        shape: (batch, heads, query_blocks, entries).
        block: shape of a block.
        masks: ``random``; ``shared``, one mask for all batches and heads; ``apart``, with gaps between entries;
            ``hidden``, no visible pair.
        source: random generator.
        device: device of the tensor.

    Returns:
        int32, (batch|1, heads|1, query_blocks, entries, block.q * block.kv / 32).
    """
    batch, heads, *lists = (1, 1, *shape[2:]) if masks == "shared" else shape
    words = (batch, heads, *lists, block.q, block.kv // WORD)

    def chance(*dims: int) -> torch.Tensor:
        return torch.rand(dims, generator=source, device=device)

    bits = torch.randint(-(2**31), 2**31, words, generator=source, device=device).to(torch.int32)
    bits = bits.masked_fill(chance(*words[:5], 1) < 1 / 8, 0)
    blocks = chance(*words[:4], 1, 1)
    bits = bits.masked_fill(blocks < 1 / 6, 0).masked_fill(blocks > 5 / 6, -1)
    if masks == "hidden":
        bits = torch.zeros_like(bits)
    bits = bits.flatten(4)
    if masks == "apart":
        wider = torch.full((batch, heads, lists[0], lists[1] + 2, bits.shape[4] + 3), -1, device=device)
        wider = wider.to(torch.int32)[..., 1 : 1 + lists[1], 2 : 2 + bits.shape[4]]
        bits = wider.copy_(bits)
    return bits


def visible_pairs(
    bits: torch.Tensor, lists: torch.Tensor, used: torch.Tensor, block: Block, key_blocks: int
) -> torch.Tensor:
    """Multiplicity of each pair in the listed blocks.

    Args:
        bits: ``mask_bits``.
        lists: (batch|1, heads|1, query_blocks, any), the partial blocks.
        used: bool of the same shape, whether an entry is a block.
        block: shape of a block.
        key_blocks: number of KV blocks.

    Returns:
        float64 (batch|1, heads|1, query_blocks * block.q, key_blocks * block.kv).
    """
    entries = min(bits.shape[3], lists.shape[3])
    assert not bool(used[..., entries:].any()), "an entry that is used has no bits"
    words = bits[..., :entries, :].unflatten(4, (block.q, block.kv // WORD))[..., None]
    seen = (words >> torch.arange(WORD, device=bits.device) & 1).flatten(5).double()
    seen = (seen * used[..., :entries, None, None]).transpose(3, 4)
    index = lists[..., :entries].clamp(0, key_blocks - 1).long()[:, :, :, None, :, None].expand_as(seen)
    total = torch.zeros((*seen.shape[:4], key_blocks, block.kv), dtype=torch.float64, device=bits.device)
    return total.scatter_add_(4, index, seen).flatten(4).flatten(2, 3)
