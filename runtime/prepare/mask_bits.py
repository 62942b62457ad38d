"""Masks of pairs as the words of ``mask_bits``."""

from __future__ import annotations

import torch

WORD = 32  # pairs of a word


def pack_mask_bits(visible: torch.Tensor) -> torch.Tensor:
    """Pack which pairs of partial blocks are visible, as kernels with ``mask: bits`` take it.

    Args:
        visible: bool (batch|1, heads|1, query_blocks, entries, block.q, block.kv), of the listed blocks in their order.

    Returns:
        int32 (batch|1, heads|1, query_blocks, entries, block.q * block.kv / 32): bit c % 32, from the lowest on, of
        word r * (block.kv / 32) + c // 32 is pair (r, c) of the block.
    """
    places = torch.arange(WORD, device=visible.device)
    words: torch.Tensor = (visible.unflatten(-1, (-1, WORD)).long() << places).sum(-1)
    return words.flatten(4).to(torch.int32)  # bit 31 becomes the sign
