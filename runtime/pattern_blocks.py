"""The blocks of the attention matrix that a pattern shows: their share, and a picture of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

from codegen.patterns import PATTERNS
from codegen.wording import shown
from runtime.block_maps import any_in_blocks, ceil_div, map_of
from runtime.errors import ArgumentError

Shape = tuple[int, int]
CELLS = 32
"""Rows and columns of a picture at most."""
DEFAULT_BLOCK = (128, 128)
_PAIRS_AT_ONCE = 1 << 24
_FULL, _PARTIAL, _NONE = "█", "░", " "


class Blocks(NamedTuple):
    """Maps of blocks.

    Attributes:
        seen: bool (batch or 1, heads or 1, query_blocks, key_blocks), blocks with a visible pair, or that are listed.
        full: as ``seen``, blocks whose pairs are all visible.
    """

    seen: torch.Tensor
    full: torch.Tensor


def blocks_of(pattern: Any, q_len: int | None, kv_len: int | None, block: Shape | None) -> Blocks:
    """The blocks of a pattern; it synchronizes for lists without ``kv_len``.

    Args:
        pattern: any pattern.
        q_len: queries of a head; not needed for lists.
        kv_len: keys of a head; by default as many key blocks as lists are wide or name.
        block: queries and keys of a block: of lists their own one, of other patterns (128, 128) by default.

    Raises:
        ArgumentError: naming the argument.
    """
    for name, length in (("q_len", q_len), ("kv_len", kv_len)):
        if length is not None and (type(length) is not int or length < 1):
            raise ArgumentError(name, f"is {shown(length)}, expected a whole number, 1 or more")
    if pattern.kind in ("topk", "block_lists"):
        return _of_lists(pattern, q_len, kv_len, block)
    if q_len is None or kv_len is None:
        raise ArgumentError("q_len" if q_len is None else "kv_len", f"is missing: {pattern.kind} is for any length")
    size = DEFAULT_BLOCK if block is None else block
    if len(size) != 2 or not all(type(each) is int and each > 0 for each in size):
        raise ArgumentError("block", f"is {shown(block)}, expected (queries, keys) of a block, such as (128, 128)")
    tensors = pattern.index_tensors()
    model = PATTERNS[pattern.kind].model_validate(pattern.spec_pattern())
    values = {name: value.view(-1, 1, 1, 1) for name, value in model.values_of(tensors).items()}
    device = next((value.device for value in values.values()), torch.device("cpu"))
    parts = [_reduced(*part, size) for part in _visible(model, (q_len, kv_len), size[0], values, device)]
    seen, full = (torch.cat([getattr(part, name) for part in parts], 2) for name in Blocks._fields)
    return Blocks(seen, full)


def _visible(
    model: Any, lengths: Shape, rows: int, values: Mapping[str, Any], device: torch.device
) -> Iterator[tuple[torch.Tensor]]:
    """The visible pairs of a pattern without lists, some query blocks at a time."""
    q_len, kv_len = lengths
    batch = max([1, *(value.shape[0] for value in values.values())])
    at_once = max(1, _PAIRS_AT_ONCE // (kv_len * rows * batch)) * rows
    keys = torch.arange(kv_len, device=device, dtype=torch.int32)
    for first in range(0, q_len, at_once):
        queries = torch.arange(first, min(first + at_once, q_len), device=device, dtype=torch.int32)[:, None]
        pairs: torch.Tensor = model.visible(queries, keys, q_len, kv_len, values)
        yield (pairs.expand(batch if pairs.dim() == 4 else 1, 1, len(queries), kv_len),)


def _reduced(pairs: torch.Tensor, block: Shape) -> Blocks:
    """The blocks of pairs."""
    seen = any_in_blocks(any_in_blocks(pairs, -1, block[1]), -2, block[0])
    return Blocks(seen, ~any_in_blocks(any_in_blocks(~pairs, -1, block[1]), -2, block[0]))


def _of_lists(pattern: Any, q_len: int | None, kv_len: int | None, block: Shape | None) -> Blocks:
    """The blocks of lists."""
    if block is not None and tuple(block) != tuple(pattern.block):
        raise ArgumentError("block", f"is {shown(block)}, the blocks of the lists are {tuple(pattern.block)}")
    indices = pattern.kv_indices
    rows = indices.shape[2]
    if q_len is not None and ceil_div(q_len, pattern.block[0]) != rows:
        raise ArgumentError("q_len", f"is {q_len}, and the lists are of {rows} blocks of {pattern.block[0]} queries")
    lists = [(getattr(pattern, "kv_num_blocks", None), indices)]
    if getattr(pattern, "full_kv_indices", None) is not None:
        lists.append((pattern.full_kv_num_blocks, pattern.full_kv_indices))
    if kv_len is None:
        named = [int(each.max()) + 1 for _, each in lists if each.numel()]
        columns = max([1, *named, *(each.shape[-1] for counts, each in lists if counts is not None)])
    else:
        columns = ceil_div(kv_len, pattern.block[1])
    maps = []
    for counts, each in lists:
        every = torch.full(each.shape[:3], each.shape[3], device=each.device) if counts is None else counts
        maps.append(map_of(every, each, columns))
    whole = pattern.kind == "topk" or pattern.mask == "none"
    none = torch.zeros_like(maps[0])
    full = (maps[0] if whole else none) | (maps[1] if len(maps) > 1 else none)
    return Blocks(maps[0] | full, full)


def sparsity_of(blocks: Blocks) -> float:
    """Percent of blocks that are not seen."""
    return 100 * (1 - float(blocks.seen.double().mean()))


def picture_of(blocks: Blocks, batch: int, head: int, cells: int = CELLS) -> str:
    """A picture of the blocks of a head, in ``cells`` rows and columns at most, each two characters wide.

    Raises:
        ArgumentError: naming ``batch`` or ``head``, for one that has no lists.
    """
    for name, number, count in zip(("batch", "head"), (batch, head), blocks.seen.shape, strict=False):
        if type(number) is not int or not 0 <= number < count:
            raise ArgumentError(name, f"is {shown(number)}, expected 0 to {count - 1}")
    seen, full = (each[batch, head].cpu() for each in blocks)
    step = [ceil_div(size, cells) for size in seen.shape]

    def glyph(row: int, column: int) -> str:
        cell = slice(row, row + step[0]), slice(column, column + step[1])
        return _FULL if bool(full[cell].all()) else _PARTIAL if bool(seen[cell].any()) else _NONE

    rows, columns = seen.shape
    lines = (
        "".join(2 * glyph(row, column) for column in range(0, columns, step[1])) for row in range(0, rows, step[0])
    )
    return "\n".join(lines)


def summary_of(pattern: Any, blocks: Blocks, block: Shape, batch: int = 0, head: int = 0) -> str:
    """The number of blocks, their sparsity and the picture of a head."""
    batches, heads, rows, columns = blocks.seen.shape
    which = f", batch {batch} of {batches}, head {head} of {heads}" if batches * heads > 1 else ""
    size = f"{rows} x {columns} blocks of {block[0]} x {block[1]}"
    return f"{pattern!r}\n{size}, sparsity={sparsity_of(blocks):.2f}%{which}:\n{picture_of(blocks, batch, head)}"


def described(value: Any) -> str:
    """A field of a pattern: tensors by type, shape and device, without their values."""
    if isinstance(value, torch.Tensor):
        where = "" if value.device.type == "cpu" else f" {value.device}"
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}{where}"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{name!r}: {described(each)}' for name, each in value.items())}}}"
    return shown(value)


def has_values(*tensors: Any) -> bool:
    """Whether tensors have values that can be read: they are no fakes, and on no meta device."""
    given = [tensor for tensor in tensors if tensor is not None]
    return all(type(tensor) in (torch.Tensor, torch.nn.Parameter) and not tensor.is_meta for tensor in given)


def is_empty(value: Any) -> bool:
    """Whether a field holds no tensors where it may hold some by name."""
    return isinstance(value, Mapping) and not value
