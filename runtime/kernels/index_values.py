"""Checks of index tensors. Those of values run only with ``validate``, because they synchronize."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from codegen.patterns import IndexTensor
from runtime.checks import check_dense
from runtime.errors import ArgumentError

PADDING = -1
"""Padding of lists after their last block."""
_AXES = ("batch", "head", "row", "column")


def check_index(name: str, tensor: Any, device: torch.device) -> None:
    """Check the type and the device of an index tensor of a call.

    Raises:
        ArgumentError: if they differ.
    """
    check_dense(name, tensor)
    if tensor.device != device:
        raise ArgumentError(name, f"is on {tensor.device}, q is on {device}: pass {name}.to(q.device)")
    if tensor.dtype != torch.int32:
        raise ArgumentError(name, f"is {tensor.dtype}, expected torch.int32: pass {name}.to(torch.int32)")


def check_index_values(
    indices: Sequence[IndexTensor], given: Mapping[str, torch.Tensor], limits: Mapping[str, int]
) -> None:
    """Check the values of index tensors.

    Lists with a count have that many blocks; later entries are not checked. Other lists are padded with -1 after their
    last block.

    Args:
        indices: index tensors of the kernel.
        given: index tensors of the call, by name, with checked dtypes and shapes.
        limits: exclusive upper bound of each tensor's values, if it has one.

    Raises:
        ArgumentError: for the first invalid value, with its batch, head, row and column.
    """
    counters = {tensor.upper: tensor.name for tensor in indices}
    for spec in indices:
        if spec.name not in given or not spec.upper:
            continue
        tensor, upper = given[spec.name], limits[spec.name]
        if spec.upper != "key_blocks":
            _check_range(spec.name, tensor, upper, torch.ones_like(tensor, dtype=torch.bool))
        elif spec.name in counters:
            _check_counted(spec.name, tensor, upper, counters[spec.name], given[counters[spec.name]])
        else:
            _check_padded(spec.name, tensor, upper)
        if spec.upper == "query_blocks":
            _check_each_once(spec.name, tensor, upper)


def _place(where: torch.Tensor) -> tuple[tuple[int, ...], str] | None:
    """Index and description of the first True element; None if there is none."""
    found = where.nonzero()
    if not found.shape[0]:
        return None
    place = tuple(int(i) for i in found[0])
    return place, ", ".join(f"{axis} {i}" for axis, i in zip(_AXES, place, strict=False))


def _check_range(name: str, tensor: torch.Tensor, upper: int, used: torch.Tensor, more: str = "") -> None:
    """Check that used values are in range."""
    first = _place(used & ((tensor < 0) | (tensor >= upper)))
    if first is not None:
        place, words = first
        raise ArgumentError(name, f"is {int(tensor[place])} at {words}; allowed: 0 to {upper - 1}{more}")


def _check_counted(name: str, lists: torch.Tensor, upper: int, counter: str, counts: torch.Tensor) -> None:
    """Check lists with a count."""
    used = torch.arange(lists.shape[3], device=lists.device) < counts.unsqueeze(3)
    used, lists = torch.broadcast_tensors(used, lists)
    _check_range(name, lists, upper, used, f" in the first {counter} entries")


def _check_padded(name: str, lists: torch.Tensor, upper: int) -> None:
    """Check lists that -1 terminates."""
    padding = lists == PADDING
    _check_range(name, lists, upper, ~padding, f", and {PADDING} after the last block of a list")
    first = _place(padding[..., :-1] & ~padding[..., 1:])
    if first is not None:
        (*row, column), words = first
        block = int(lists[(*row, column + 1)])
        reason = f"block {block} follows: {PADDING} may only pad the end of a list, so move it there"
        raise ArgumentError(name, f"is {PADDING} at {words}, and {reason}")


def _check_each_once(name: str, order: torch.Tensor, upper: int) -> None:
    """Check that orders with values in range have no duplicates."""
    numbers = order.sort(-1).values
    first = _place(numbers.diff() == 0)
    if first is not None:
        (batch, head, column), _ = first
        block = int(numbers[batch, head, column])
        reason = f"must contain each of the {upper} query blocks once, but has {block} twice"
        raise ArgumentError(name, f"{reason} at batch {batch}, head {head}")
