"""Attention over videos: tokens in tiles, and which tiles see each other."""

from __future__ import annotations

from runtime.video.attention import VideoWindow, tiled_attention
from runtime.video.tiles import VideoTiles
from runtime.video.windows import tile_window

__all__ = ["VideoTiles", "VideoWindow", "tile_window", "tiled_attention"]
