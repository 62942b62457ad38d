"""Copies of strided rows, by copy engines or by the threads of one GPU, and gathering of listed blocks."""

from __future__ import annotations

import math
from contextlib import nullcontext

import torch

from runtime.driver.context import entered, is_elsewhere
from runtime.driver.copy_2d import MAX_PITCH, copy_2d
from runtime.driver.streams import current_stream

_WIDE = torch.complex128
"""Dtype of 16 bytes, a thread's widest load. torch copies strided tensors element by element, 2 bytes at a time."""


def copy_wide(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy a tensor of the same shape and dtype, 16 bytes at a time if alignment and strides allow it.

    Args:
        target, source: (..., row), any strides.
    """
    if _is_wide(target) and _is_wide(source):
        target, source = target.view(_WIDE), source.view(_WIDE)
    target.copy_(source)


def copy_heads(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy rows of heads with a copy engine, which uses no SM: one call for all heads of a batch.

    Args:
        target, source: (batch, heads, rows, ...), on one GPU or on two; the rows of one head are contiguous.
    """
    heads = target.shape[1]
    pitches = [tensor.stride(1) * tensor.element_size() for tensor in (target, source)]
    width = target[0, 0].nbytes
    in_one = target.is_cuda and heads > 1 and width > 0 and all(width <= pitch <= MAX_PITCH for pitch in pitches)
    for to, of in zip(target.unbind(0), source.unbind(0), strict=True):
        if in_one:
            with entered(target.device.index) if is_elsewhere(target) else nullcontext():
                stream = current_stream(target.device)
                both = (pitches[0], pitches[1])
                copy_2d(to.data_ptr(), of.data_ptr(), pitches=both, width=width, rows=heads, stream=stream)
        else:
            for rows, place in zip(of.unbind(0), to.unbind(0), strict=True):
                place.copy_(rows)


def _is_wide(tensor: torch.Tensor) -> bool:
    """Whether rows are contiguous, and start and end at multiples of 16 bytes."""
    *strides, last = tensor.stride()
    elements = _WIDE.itemsize // tensor.element_size()
    starts = tensor.storage_offset(), tensor.shape[-1], *strides
    found: bool = last == 1 and math.gcd(elements, *starts) == elements and tensor.data_ptr() % _WIDE.itemsize == 0
    return found


def taken_blocks(tensor: torch.Tensor, blocks: torch.Tensor, block: int) -> torch.Tensor:
    """Selected blocks of rows of each head.

    Args:
        tensor: (batch, heads, rows, head_dim).
        blocks: indices of the blocks, int64 (batch or 1, heads or 1, some).
        block: rows per block.

    Returns:
        (batch, heads, some * block, head_dim), contiguous.
    """
    batch, heads, rows, head_dim = tensor.shape
    every = tensor.reshape(batch * heads * (rows // block), block * head_dim)
    first = torch.arange(batch * heads, device=blocks.device).view(batch, heads, 1) * (rows // block)
    which = (first + blocks).flatten()
    wide = every.view(_WIDE) if _is_wide(every) else every
    found = wide.index_select(0, which).view(tensor.dtype)
    return found.view(batch, heads, blocks.shape[2] * block, head_dim)
