"""The order of a video's tokens in which each tile of the 3-D grid is a run of tokens, and lists of tiles."""

from __future__ import annotations

import math
from typing import Any

import torch

from codegen.wording import shown
from runtime.checks import check_dense, check_dim, check_flag, present_device
from runtime.convert.bits import partial_and_full
from runtime.convert.checks import check_count, check_shape, check_tensor
from runtime.errors import ArgumentError
from runtime.patterns import BlockLists, Pattern, TopK

CPU = torch.device("cpu")  # named with each new tensor, as torch's default may be another device
Sizes = tuple[int, int, int]
"""Of frames, rows and columns of tokens."""
BLOCKS = (128, 64)
"""Queries and keys of the blocks that tiles consist of, the larger one first."""


def check_sizes(name: str, sizes: Any) -> Sizes:
    """Return three whole numbers, 1 or more.

    Raises:
        ArgumentError: if they are not.
    """
    if not isinstance(sizes, tuple | list) or len(sizes) != 3:
        raise ArgumentError(name, f"is {shown(sizes)}, expected three numbers (frames, rows, columns)")
    for size in sizes:
        check_count(name, size)
    return sizes[0], sizes[1], sizes[2]


class VideoTiles:
    """A permutation of a video's tokens into tiles, so that blocks of attention are neighborhoods in time and space.

    Tokens come in the order of a (frames, rows, columns) grid, as patch embeddings leave them, with text tokens behind
    or before them where a model has both in one sequence. In tiles they are ordered by tile, within a tile by frame,
    row and column, and text is behind all tiles. A tile that the grid does not fill, and the end of the text, have
    slots of padding, which no query sees: the patterns made here hide them.

    Attributes:
        grid: frames, rows and columns of tokens.
        tile_size: frames, rows and columns of a tile.
        text: tokens of text.
        text_first: whether they come before the video's.
        counts: tiles along frames, rows and columns.
        tokens: of the sequence: frames * rows * columns + text.
        length: of the sequence in tiles, padding counted: a multiple of ``block``.
        block: queries and keys of a block of the lists: 128 or 64. A tile is one block, or several.
    """

    def __init__(
        self,
        grid: Sizes,
        tile: Sizes,
        *,
        text: int = 0,
        text_first: bool = False,
        device: torch.device | str = "cpu",
    ) -> None:
        """Compute the permutation, on the CPU.

        Args:
            grid: frames, rows and columns of tokens: those of the latents over the patch size.
            tile: frames, rows and columns of a tile; their product is a multiple of 64, such as (2, 8, 8), (4, 4, 4).
            text: tokens of text in the same sequence.
            text_first: whether they come before the video's.
            device: of the tensors that :meth:`tile` is called with, and of the patterns.

        Raises:
            ArgumentError: naming the argument.
        """
        self.grid, self.tile_size = check_sizes("grid", grid), check_sizes("tile", tile)
        check_count("text", text, 0)
        check_flag("text_first", text_first)
        where = present_device("device", device)
        volume = math.prod(self.tile_size)
        fitting = [block for block in BLOCKS if volume % block == 0]
        if not fitting:
            some = "such as (2, 8, 8), (4, 4, 4), (1, 8, 8)"
            raise ArgumentError("tile", f"is {tuple(tile)}, {volume} tokens; expected a multiple of 64, {some}")
        self.text, self.text_first = text, text_first
        self.block = fitting[0]
        self.blocks_of_tile = volume // self.block
        self.counts = tuple(-(-size // part) for size, part in zip(self.grid, self.tile_size, strict=True))
        self.tokens = math.prod(self.grid) + text
        self.text_blocks = -(-text // self.block)
        slots = torch.cat([self._video_slots(), self._text_slots()])
        self.length = slots.shape[0]
        self.is_token = slots >= 0
        """Bool (length,) on the CPU, which slots are no padding."""
        # Padding has the first token's values: finite ones, whatever a kernel makes of hidden keys.
        self.to_tiles = slots.clamp(min=0).to(where)
        """int64 (length,), the token of each slot; of padding 0."""
        self.from_tiles = slots.argsort(stable=True)[self.length - self.tokens :].to(where)  # padding is first
        """int64 (tokens,), the slot of each token."""

    def _video_slots(self) -> torch.Tensor:
        """Return the token of each slot of the tiles, -1 for padding."""
        numbers = torch.arange(math.prod(self.grid), device=CPU).reshape(self.grid) + (
            self.text if self.text_first else 0
        )
        padded = torch.full([n * size for n, size in zip(self.counts, self.tile_size, strict=True)], -1, device=CPU)
        padded[: self.grid[0], : self.grid[1], : self.grid[2]] = numbers
        (t, h, w), (tile_t, tile_h, tile_w) = self.counts, self.tile_size
        return padded.reshape(t, tile_t, h, tile_h, w, tile_w).permute(0, 2, 4, 1, 3, 5).reshape(-1)

    def _text_slots(self) -> torch.Tensor:
        """Return the token of each slot of the text, -1 for padding."""
        slots = torch.full((self.text_blocks * self.block,), -1, device=CPU)
        slots[: self.text] = torch.arange(self.text, device=CPU) + (0 if self.text_first else math.prod(self.grid))
        return slots

    def tile(self, x: torch.Tensor, dim: int = 2) -> torch.Tensor:
        """Return a tensor with its tokens in tiles.

        Args:
            x: any, ``tokens`` long along ``dim``, such as q (batch, heads, tokens, head_dim).
            dim: of the tokens.

        Returns:
            The same, ``length`` long along ``dim``; padding repeats the first token.

        Raises:
            ArgumentError: for another length.
        """
        self._check_length(x, dim, self.tokens, "tokens")
        return x.index_select(dim, self.to_tiles)

    def untile(self, x: torch.Tensor, dim: int = 2) -> torch.Tensor:
        """Return a tensor with its tokens in the video's order: the inverse of :meth:`tile`.

        Args:
            x: any, ``length`` long along ``dim``, such as (batch, heads, length, head_dim).
            dim: of the tokens.

        Returns:
            The same, ``tokens`` long along ``dim``; padding is left out.

        Raises:
            ArgumentError: for another length.
        """
        self._check_length(x, dim, self.length, "slots")
        return x.index_select(dim, self.from_tiles)

    def _check_length(self, x: torch.Tensor, dim: int, expected: int, what: str) -> None:
        check_dense("x", x)
        check_dim("dim", dim, x)
        if x.shape[dim] != expected:
            grid = " x ".join(map(str, self.grid))
            text = f" and {self.text} of text" if self.text else ""
            reason = f"has {x.shape[dim]} {what}, expected {expected}: a grid of {grid} tokens{text}"
            raise ArgumentError("x", reason)

    def pattern(self, visible: torch.Tensor) -> Pattern:
        """Return the pattern of a map of tiles, for q, k and v in tiles; text sees all, and all see it.

        Args:
            visible: bool (tiles, tiles) on the CPU, which tiles a tile's queries see; tiles in the order of the slots.

        Returns:
            ``TopK``, where all lists are equally long and no tile has padding; else ``BlockLists``, with a bit for each
            pair of blocks with padding. Made once for a video's size: the CPU works it out.

        Raises:
            ArgumentError: naming the argument.
        """
        tiles = math.prod(self.counts)
        check_tensor("visible", visible, (torch.bool,), (2,))
        if visible.device.type != "cpu":
            raise ArgumentError("visible", f"is on {visible.device}, expected the CPU: pass visible.cpu()")
        check_shape("visible", visible, ("query tiles", tiles), ("key tiles", tiles))
        blocks = visible.repeat_interleave(self.blocks_of_tile, 0).repeat_interleave(self.blocks_of_tile, 1)
        ends = (0, self.text_blocks, 0, self.text_blocks)
        seen = torch.nn.functional.pad(blocks, ends, value=True)[None, None]
        real = self.is_token.reshape(-1, self.block)
        whole, empty = real.all(1), ~real.any(1)
        most = int((seen & ~empty).sum(-1).max())
        partial = seen & ~whole & ~empty
        if not partial.any():
            return self._whole(seen & whole, most)
        lists = partial_and_full(
            partial,
            seen & whole,
            lambda q, k: self.is_token[k],
            block=(self.block, self.block),
            lengths=(self.length, self.length),
            max_blocks=most,
            max_partial_blocks=int(partial.sum(-1).max()),
        )
        tensors = [self._moved(tensor) for tensor in lists.index_tensors()]
        return BlockLists(*tensors[:4], block=lists.block, mask="bits", mask_bits=tensors[4])

    def _whole(self, seen: torch.Tensor, most: int) -> Pattern:
        """Return the pattern of blocks that are visible as a whole."""
        counts = seen.sum(-1, dtype=torch.int32)
        numbers = (
            torch.where(seen, torch.arange(seen.shape[-1], device=CPU), seen.shape[-1]).sort(-1).values[..., :most]
        )
        lists = torch.where(numbers < seen.shape[-1], numbers, -1).to(torch.int32).contiguous().to(self.to_tiles.device)
        block = self.block, self.block
        if bool((counts == most).all()):
            return TopK(lists, block=block)
        return BlockLists(counts.to(lists.device), lists, block=block)

    def _moved(self, tensor: torch.Tensor | None) -> Any:
        return None if tensor is None else tensor.to(self.to_tiles.device)


def check_tiles(tiles: Any) -> None:
    """Check that an argument is a permutation into tiles.

    Raises:
        ArgumentError: for anything else.
    """
    if not isinstance(tiles, VideoTiles):
        raise ArgumentError("tiles", f"is {type(tiles).__name__}, expected a VideoTiles")
