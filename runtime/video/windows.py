"""Sliding windows of tiles: each tile of a video sees those around it in time and space."""

from __future__ import annotations

import torch

from runtime.patterns import Pattern
from runtime.video.tiles import CPU, Sizes, VideoTiles, check_sizes, check_tiles


def tile_window(tiles: VideoTiles, window: Sizes) -> Pattern:
    """Return the pattern in which each tile sees the tiles of a window around it.

    At the borders of the video the window is moved inwards, so that every tile sees as many tiles (sliding tile
    attention, and NATTEN's neighborhoods, do the same): along an axis of n tiles, tile i sees those from
    min(max(i - window // 2, 0), n - window) on, ``window`` of them; all n of them where ``window`` is not less.

    Args:
        tiles: of the video.
        window: tiles that a tile sees along frames, rows and columns, its own among them.

    Returns:
        The pattern for q, k and v in tiles, on the device of ``tiles``.

    Raises:
        ArgumentError: naming the argument.
    """
    check_tiles(tiles)
    return tiles.pattern(window_map(tiles.counts, check_sizes("window", window)))


def window_map(counts: tuple[int, ...], window: Sizes) -> torch.Tensor:
    """Mask of the tiles that see each other: bool (tiles, tiles).

    Args:
        counts: tiles along frames, rows and columns.
        window: tiles that a tile sees along them.
    """
    seen = torch.ones(1, 1, dtype=torch.bool, device=CPU)
    for count, size in zip(counts, window, strict=True):
        numbers = torch.arange(count, device=CPU)
        first = (numbers - size // 2).clamp(min=0).clamp(max=max(count - size, 0))[:, None]
        axis = (numbers >= first) & (numbers < first + size)
        seen = torch.kron(seen.to(torch.uint8), axis.to(torch.uint8)).to(torch.bool)
    return seen
