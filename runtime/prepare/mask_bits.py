"""Packing of pair masks into the words of ``mask_bits``."""

from __future__ import annotations

import torch


def pack_mask_bits(visible: torch.Tensor) -> torch.Tensor:
    """Pack the visible pairs of partial blocks for kernels with ``mask: bits``.

    Args:
        visible: bool (batch|1, heads|1, query_blocks, entries, block.q, block.kv), for the listed blocks in their
            order.

    Returns:
        int32 (batch|1, heads|1, query_blocks, entries, block.q * block.kv / 32): bit c % 32, counted from the lowest
        bit, of word r * (block.kv / 32) + c // 32 is pair (r, c) of the block.
    """
    eights = visible.reshape(*visible.shape[:-2], -1, 8)
    places = torch.arange(8, dtype=torch.uint8, device=visible.device)
    numbers = (eights.to(torch.uint8) << places).sum(-1, dtype=torch.uint8)  # bytes first: an eighth of the memory
    # Added up, because torch.vmap does not support views as another dtype.
    shifts = torch.arange(0, 32, 8, dtype=torch.int32, device=visible.device)
    return (numbers.reshape(*numbers.shape[:-1], -1, 4).to(torch.int32) << shifts).sum(-1, dtype=torch.int32)
