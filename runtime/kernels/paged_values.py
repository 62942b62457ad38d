"""Checks of the values of tables, lengths and bounds of a call over pages, which wait for the GPU."""

from __future__ import annotations

from typing import Any

import torch

from runtime.errors import ArgumentError


def check_paged_values(tensors: dict[str, Any], left: int, sink: int) -> None:
    """Check that bounds rise, that requests have no more keys than pages, and that the cache has these pages.

    Args:
        tensors: the checked tensors of a call, by the kernel's names.
        left: keys that a query sees before its own position; the cache need not have pages outside of all windows.
        sink: keys at the beginning that later queries see too.

    Raises:
        ArgumentError: for the first value that is wrong.
    """
    bounds, lengths, table = (tensors[name] for name in ("cu_seqlens_q", "seq_lens", "block_table"))
    tokens = tensors["q"].shape[0]
    pages, page_size = tensors["k_cache"].shape[:2]
    if bounds is not None:
        values = bounds.tolist()
        for place, (one, other) in enumerate(zip([0, *values], [*values, tokens], strict=True)):
            if one > other:
                where = f"entry {place}" if place < len(values) else f"the {tokens} tokens, after entry {place - 1}"
                rising = f"expected rising bounds, 0 to {tokens}"
                raise ArgumentError("cu_seqlens_q", f"falls from {one} to {other} at {where}; {rising}")
    most = page_size if table is None else table.shape[1] * page_size
    if lengths is not None:
        for request, length in enumerate(lengths.tolist()):
            if not 0 <= length <= most:
                room = f"{most}, the keys that its pages have room for"
                raise ArgumentError("seq_lens", f"has {length} for request {request}, expected 0 to {room}")
    if table is None:
        return
    batch = table.shape[0]
    ends = torch.full((batch,), most, device=table.device) if lengths is None else lengths.long()
    queries = tokens // batch if bounds is None else bounds.diff()
    first_keys = ends - queries - left  # of windows
    begins = torch.arange(table.shape[1], device=table.device) * page_size
    used = (begins + page_size > first_keys[:, None]) | (begins < sink)
    used &= begins < ends[:, None]
    wrong = (used & ((table < 0) | (table >= pages))).nonzero().tolist()
    if wrong:
        request, place = wrong[0]
        page = int(table[request, place])
        raise ArgumentError("block_table", f"has page {page} at [{request}, {place}], expected 0 to {pages - 1}")
