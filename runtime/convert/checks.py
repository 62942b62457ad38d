"""Checks of the arguments of conversions: types, shapes and numbers, but never values of a tensor on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

import torch

from codegen.patterns.base import KeyBlockSize, QueryBlockSize
from codegen.wording import shown
from runtime.errors import ArgumentError

Shape = tuple[int, int]
"""Queries and keys per block."""
QUERY_SIZES: tuple[int, ...] = get_args(get_args(QueryBlockSize)[0])
KEY_SIZES: tuple[int, ...] = get_args(get_args(KeyBlockSize)[0])
MOST = 2**31 - 1
"""Upper bound of queries, keys, batches and heads: kernels index them in 32 bits."""
WORD = 32
"""Keys per word of ``mask_bits``."""
INTEGERS = (torch.int32, torch.int64)
BOOLEANS = (torch.bool, torch.uint8, torch.int8, *INTEGERS)
"""Dtypes of maps and masks; every non-zero value is True. Floats are excluded: in additive masks, 0 is visible."""


def words(values: Sequence[object]) -> str:
    """Values as an enumeration."""
    return ", ".join(map(str, values))


def check_tensor(
    name: str,
    tensor: Any,
    dtypes: Sequence[torch.dtype],
    ranks: Sequence[int],
    device: torch.device | None = None,
) -> None:
    """Check type, dtype, number of dimensions and, if given, device of a tensor.

    Raises:
        ArgumentError: for the first failed check.
    """
    if not isinstance(tensor, torch.Tensor):
        raise ArgumentError(name, f"is {type(tensor).__name__}, expected a torch.Tensor")
    if tensor.is_nested or tensor.layout != torch.strided:
        raise ArgumentError(name, "is a nested or sparse tensor, expected a dense one")
    if tensor.dtype not in dtypes:
        raise ArgumentError(name, f"is {tensor.dtype}, expected {words(dtypes)}")
    if tensor.dim() not in ranks:
        shape, wanted = tuple(tensor.shape), words(ranks)
        raise ArgumentError(name, f"has {tensor.dim()} dimensions {shape}, expected {wanted}")
    if device is not None and tensor.device != device:
        raise ArgumentError(name, f"is on {tensor.device}, the first tensor is on {device}")


def check_shape(name: str, tensor: torch.Tensor, *sizes: tuple[str, int | None]) -> None:
    """Check the sizes of a tensor's dimensions. ``sizes`` has (name, size) per dimension; a size of None is free.

    Raises:
        ArgumentError: with the whole shape.
    """
    for (label, wanted), size in zip(sizes, tensor.shape, strict=True):
        if wanted is not None and size != wanted:
            raise ArgumentError(name, f"has shape {tuple(tensor.shape)}: {label} is {size}, expected {wanted}")


def check_count(name: str, value: Any, least: int = 1, most: int | None = MOST) -> None:
    """Check a whole number.

    Raises:
        ArgumentError: if it is not an int, or out of range.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ArgumentError(name, f"is {shown(value)}, expected a whole number, {least} or more")
    if most is not None and value > most:
        raise ArgumentError(name, f"is {shown(value)}, expected {most} at most")


def check_block(name: str, block: Any, *, has_bits: bool = False) -> None:
    """Check that kernels support a block size.

    Raises:
        ArgumentError: with the allowed sizes.
    """
    check_pair(name, block)
    queries, keys = block
    key_sizes = [size for size in KEY_SIZES if not has_bits or size % WORD == 0]
    if queries not in QUERY_SIZES or keys not in key_sizes:
        allowed = f"queries {words(QUERY_SIZES)}; keys {words(key_sizes)}"
        raise ArgumentError(name, f"is {shown(tuple(block))}, allowed are{' with mask_bits' * has_bits} {allowed}")


def check_pair(name: str, block: Any) -> None:
    """Check that a block size is two whole numbers.

    Raises:
        ArgumentError: if it is not.
    """
    if not isinstance(block, tuple | list) or len(block) != 2:
        raise ArgumentError(name, f"is {shown(block)}, expected (queries, keys) of a block, such as (128, 128)")
    for size in block:
        check_count(name, size)


def check_width(max_blocks: Any, max_partial_blocks: Any = None) -> None:
    """Check the upper bounds of the lists' widths.

    Raises:
        ArgumentError: naming the argument.
    """
    for name, value in (("max_blocks", max_blocks), ("max_partial_blocks", max_partial_blocks)):
        if value is not None:
            check_count(name, value, most=None)
