"""The lists of patterns without partial blocks, and the shortage of list entries."""

from __future__ import annotations

import torch

from runtime.block_maps import Lists, ascending, is_listed
from runtime.errors import ArgumentError
from runtime.patterns import BlockLists, Pattern, TopK


def most_short(*overflows: torch.Tensor | None) -> torch.Tensor | None:
    """The largest of several shortages; None if no list can be short."""
    found = [overflow for overflow in overflows if overflow is not None]
    return torch.cat(found).amax(0, keepdim=True) if found else None


def whole_lists(pattern: Pattern, what: str) -> Lists:
    """The lists of a pattern without partial blocks, full lists merged in.

    Args:
        pattern: ``TopK``, or ``BlockLists`` without a mask.
        what: the target format, for the error message.

    Raises:
        ArgumentError: if the pattern has a mask, or no lists.
    """
    if isinstance(pattern, TopK):
        return ascending(pattern.kv_indices)
    if not isinstance(pattern, BlockLists):
        raise ArgumentError("pattern", f"is {type(pattern).__name__}, expected TopK or BlockLists: it has no lists")
    if pattern.mask != "none":
        raise ArgumentError("pattern", f"has mask={pattern.mask!r}, but {what} has only full blocks: mask='none'")
    partial = is_listed(pattern.kv_num_blocks, pattern.kv_indices)
    if pattern.full_kv_indices is None or pattern.full_kv_num_blocks is None:
        return ascending(pattern.kv_indices, partial)
    full = is_listed(pattern.full_kv_num_blocks, pattern.full_kv_indices)
    both = torch.cat([pattern.kv_indices, pattern.full_kv_indices], -1)
    return ascending(both, torch.cat([partial, full], -1))
