"""Checks of the values of index tensors, which only ``validate`` looks at: it synchronizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from codegen.patterns import IndexTensor
from runtime.errors import ArgumentError

PADDING = -1
"""What lists are filled up with, behind their last block."""
_AXES = ("batch", "head", "row", "column")


def check_index_values(
    indices: Sequence[IndexTensor], given: Mapping[str, torch.Tensor], limits: Mapping[str, int]
) -> None:
    """Check the values of index tensors.

    Lists with a count have that many blocks; what lies behind is not looked at. Others have blocks, and behind the last
    one -1, if they are shorter than the tensor is wide.

    Args:
        indices: all that the kernel takes.
        given: those that a call has, by name; their types and shapes are checked.
        limits: what the values of each are less than, where not every value is legal.

    Raises:
        ArgumentError: for the first value that is wrong, with its batch, head, row and column.
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
    """Return the first place that is True, also in words; None if there is none."""
    found = where.nonzero()
    if not found.shape[0]:
        return None
    place = tuple(int(i) for i in found[0])
    return place, ", ".join(f"{axis} {i}" for axis, i in zip(_AXES, place, strict=False))


def _check_range(name: str, tensor: torch.Tensor, upper: int, used: torch.Tensor, more: str = "") -> None:
    """Check the values that are used."""
    first = _place(used & ((tensor < 0) | (tensor >= upper)))
    if first is not None:
        place, words = first
        raise ArgumentError(name, f"is {int(tensor[place])} at {words}; allowed: 0 to {upper - 1}{more}")


def _check_counted(name: str, lists: torch.Tensor, upper: int, counter: str, counts: torch.Tensor) -> None:
    """Check lists of which a count says how long they are."""
    used = torch.arange(lists.shape[3], device=lists.device) < counts.unsqueeze(3)
    used, lists = torch.broadcast_tensors(used, lists)
    _check_range(name, lists, upper, used, f" in the blocks that {counter} counts")


def _check_padded(name: str, lists: torch.Tensor, upper: int) -> None:
    """Check lists that end where -1 begins."""
    padding = lists == PADDING
    _check_range(name, lists, upper, ~padding, f", and {PADDING} behind the last block of a list")
    first = _place(padding[..., :-1] & ~padding[..., 1:])
    if first is not None:
        (*row, column), words = first
        block = int(lists[(*row, column + 1)])
        reason = f"block {block} follows: a list is filled up with {PADDING} at its end, so move it there"
        raise ArgumentError(name, f"is {PADDING} at {words}, and {reason}")


def _check_each_once(name: str, order: torch.Tensor, upper: int) -> None:
    """Check that orders, whose values are in range, repeat none."""
    numbers = order.sort(-1).values
    first = _place(numbers.diff() == 0)
    if first is not None:
        (batch, head, column), _ = first
        block = int(numbers[batch, head, column])
        reason = f"does not name each of the {upper} query blocks once: it has {block} twice"
        raise ArgumentError(name, f"{reason} at batch {batch}, head {head}")
