"""The lists of patterns whose blocks are visible as a whole, and how many entries lists are short of."""

from __future__ import annotations

import torch

from runtime.block_maps import Lists, ascending, is_listed
from runtime.errors import ArgumentError
from runtime.patterns import BlockLists, Pattern, TopK


def most_short(*overflows: torch.Tensor | None) -> torch.Tensor | None:
    """Return the worse of several shortages; None if no list can be short."""
    found = [overflow for overflow in overflows if overflow is not None]
    return torch.cat(found).amax(0, keepdim=True) if found else None


def whole_lists(pattern: Pattern, what: str) -> Lists:
    """Return the lists of a pattern whose blocks are all visible as a whole, both in one.

    Args:
        pattern: ``TopK``, or ``BlockLists`` without a mask.
        what: what it is to become, for the message.

    Raises:
        ArgumentError: if it has a mask, or no lists.
    """
    if isinstance(pattern, TopK):
        return ascending(pattern.kv_indices)
    if not isinstance(pattern, BlockLists):
        raise ArgumentError("pattern", f"is {type(pattern).__name__}, expected TopK or BlockLists: it has no lists")
    if pattern.mask != "none":
        raise ArgumentError("pattern", f"has mask={pattern.mask!r}, and {what} has whole blocks only: mask='none'")
    partial = is_listed(pattern.kv_num_blocks, pattern.kv_indices)
    if pattern.full_kv_indices is None or pattern.full_kv_num_blocks is None:
        return ascending(pattern.kv_indices, partial)
    full = is_listed(pattern.full_kv_num_blocks, pattern.full_kv_indices)
    both = torch.cat([pattern.kv_indices, pattern.full_kv_indices], -1)
    return ascending(both, torch.cat([partial, full], -1))
