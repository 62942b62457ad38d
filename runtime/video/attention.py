"""Attention of tokens in a video's own order, computed in tiles."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from runtime.checks import check_dense, present_device
from runtime.errors import ArgumentError
from runtime.kept import Kept, is_capturing, may_keep
from runtime.ops.attention import block_sparse_attention
from runtime.patterns import Pattern
from runtime.video.tiles import Sizes, VideoTiles, check_tiles
from runtime.video.windows import tile_window


def tiled_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tiles: VideoTiles, pattern: Pattern, **options: Any
) -> Any:
    """Compute attention with a pattern of tiles, of tokens that are not in tiles.

    q, k and v are copied into tiles, and the result back: four copies of its size. Where a model's tokens stay in tiles
    from its first layer to its last, ``block_sparse_attention`` with the same pattern needs none.

    Args:
        q: (batch, heads, tokens, head_dim), float16 or bfloat16, on the device of ``tiles``.
        k, v: (batch, kv_heads, tokens, head_dim).
        tiles: the permutation.
        pattern: its result, or that of ``tile_window``.
        options: ``scale``, ``softcap``, ``sink``, ``return_lse``, ``validate`` of ``block_sparse_attention``.

    Returns:
        (batch, heads, tokens, head_dim), or with ``return_lse`` an ``AttentionResult``, lse float32 (batch, heads,
        tokens): both in the order of q.

    Raises:
        ArgumentError: naming the argument; x stands for q, k or v of another length than the video's.
    """
    check_tiles(tiles)
    result = block_sparse_attention(tiles.tile(q), tiles.tile(k), tiles.tile(v), pattern, **options)
    if isinstance(result, torch.Tensor):
        return tiles.untile(result)
    return type(result)(*(tiles.untile(x) for x in result))


class _Made(NamedTuple):
    """The tensors of a window on a device."""

    tiles: VideoTiles
    pattern: Pattern


def _tensors_of(made: _Made) -> tuple[torch.Tensor | None, ...]:
    return made.tiles.to_tiles, made.tiles.from_tiles, *made.pattern.index_tensors()


def _none() -> Kept[_Made]:
    """A place for the tensors of a window on each device that it is called on."""
    return Kept(_DEVICES, _tensors_of)


RANK = 4  # of q and k
_DEVICES = 64  # that a process may use


@dataclass(frozen=True)
class VideoWindow:
    """A chooser: self-attention over a video's tokens sees a window of tiles; cross-attention stays as it is.

    Self-attention over another number of tokens than ``grid`` and ``text`` say is refused. A model that has some (over
    its text alone) needs a chooser of its own around this one.

    Attributes:
        grid: frames, rows and columns of tokens.
        window: tiles that a tile sees along them.
        tile: frames, rows and columns of a tile.
        text: tokens of text in the same sequence.
        text_first: whether they come before the video's.
    """

    grid: Sizes
    window: Sizes
    tile: Sizes = (2, 8, 8)
    text: int = 0
    text_first: bool = False
    _made: Kept[_Made] = field(default_factory=_none, init=False, repr=False, compare=False)

    def __call__(self, module: Any, q: torch.Tensor, k: torch.Tensor, exact: Pattern) -> Any:
        """Return the tiles and the pattern of a call, or ``exact`` where q and k are not of the same length.

        Args:
            module: the attention module; not used.
            q: (batch, heads, tokens, head_dim); only its length and device are read.
            k: (batch, kv_heads, tokens of q, head_dim), or of another length in cross-attention.
            exact: the pattern of the model's own mask.

        Returns:
            (tiles, pattern), a ``VideoTiles`` and the pattern of its tiles; or ``exact``.

        Raises:
            ArgumentError: naming what is wrong with the sizes.
        """
        for name, tensor in (("q", q), ("k", k)):
            check_dense(name, tensor)
            if tensor.dim() != RANK:
                raise ArgumentError(name, f"has {tensor.dim()} dimensions {tuple(tensor.shape)}, expected {RANK}")
        if q.shape[2] != k.shape[2]:
            return exact
        tiles, pattern = self.made(q.device)
        if tiles.tokens != q.shape[2]:
            grid = " x ".join(map(str, self.grid))
            reason = f"is {grid} and text is {self.text}: {tiles.tokens} tokens, the call has {q.shape[2]}"
            raise ArgumentError("grid", reason)
        return tiles, pattern

    def made(self, device: torch.device) -> tuple[VideoTiles, Pattern]:
        """Return the tiles and the pattern for tensors of a device, made at the first call.

        Under other dispatch modes and transforms they are made in each call, and belong to these.

        Args:
            device: of the tensors.

        Returns:
            (tiles, pattern), the tiles of the grid and the pattern of those that a tile sees.

        Raises:
            ArgumentError: at a first call within the capture of a CUDA graph, with fake tensors, or within what
                torch.compile or export traces; naming what is wrong with the sizes.
        """
        device = present_device("device", device)
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        found = self._made.find(device)
        if torch.compiler.is_compiling() or torch._guards.detect_fake_mode() is not None:
            if found is None:
                reason = f"has no lists on {device} yet, and fake tensors have no values: call the window once before"
                raise ArgumentError("grid", reason)
            return found
        if not may_keep():
            return self._make(device)
        if found is None and is_capturing(device):  # lists come from the CPU
            reason = f"has no lists on {device} yet, and a graph is being captured: call the window once before"
            raise ArgumentError("grid", reason)
        return self._made.get(device, lambda: self._make(device))

    def _make(self, device: torch.device) -> _Made:
        tiles = VideoTiles(self.grid, self.tile, text=self.text, text_first=self.text_first, device=device)
        return _Made(tiles, tile_window(tiles, self.window))

    def __getstate__(self) -> dict[str, Any]:
        """The sizes: copies and other processes make their own tensors."""
        return {**self.__dict__, "_made": _none()}
