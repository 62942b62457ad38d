"""Calls over lists of key blocks whose lists, counts, bounds, tables and lengths hold anything, and the proper ones.

What is promised: a kernel reads and writes nothing outside its tensors, and ends. An entry out of range is absent, a
count is the nearest that a list has entries for, a bound the nearest token and not below the one before, a length the
nearest that the pages have room for, and a page that the cache does not have hides its keys.
"""

from __future__ import annotations

from typing import Any

import torch
from paged_garbage import anything

from codegen.spec import KeyListsBackwardSpec, KeyListsForwardSpec, Spec
from runtime.prepare.key_lists import rising_bounds


def is_of_key_lists(spec: Spec) -> bool:
    """Whether a spec's kernels take lists of key blocks."""
    return isinstance(spec, KeyListsForwardSpec | KeyListsBackwardSpec)


def spoiled(
    spec: KeyListsForwardSpec | KeyListsBackwardSpec, positional: list[Any], named: dict[str, Any], seed: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Named arguments with garbage in the place of indices, and those that a kernel must take them for.

    Args:
        spec: of the kernel.
        positional: q, k and v of a proper call.
        named: its other arguments.
        seed: of what is drawn, on the CPU. Bounds and lengths of every second call are left as they are.
    """
    draw = torch.Generator().manual_seed(seed)
    q, k, _ = positional
    paged, tokens = "block_table" in named, q.shape[0]
    keys = named["block_table"].shape[1] * k.shape[1] if paged else k.shape[0]
    blocks, (*of_counts, entries) = -(-keys // spec.entry_keys), named["lists"].shape
    found: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    def put(name: str, shape: Any, most: int, valid: float) -> None:
        drawn = anything(tuple(shape), most, draw, valid)
        if name in ("lists", "block_table"):
            right = torch.where((drawn >= 0) & (drawn < most), drawn, -1)
        else:
            right = drawn.clamp(0, most - 1) if name in ("counts", "seq_lens") else rising_bounds(drawn, most - 1)
        found[name] = drawn, right

    put("lists", named["lists"].shape, blocks, 0.6)
    put("counts", of_counts, entries + 1, 0.6)
    if paged:
        put("block_table", named["block_table"].shape, k.shape[0], 0.7)
    if seed % 2:
        put("cu_seqlens_q", named["cu_seqlens_q"].shape, tokens + 1, 0.5)
        if paged:
            put("seq_lens", named["seq_lens"].shape, keys + 1, 0.6)
        else:
            put("cu_seqlens_k", named["cu_seqlens_k"].shape, keys + 1, 0.5)
    given, proper = ({**named, **{name: both[i].to(q.device) for name, both in found.items()}} for i in (0, 1))
    return given, proper


def check(kernel: Any, positional: list[Any], named: dict[str, Any], seed: int) -> None:
    """Call a kernel with garbage and without; the results must have the same bits.

    Args:
        kernel: a kernel object.
        positional: q, k and v of a proper call.
        named: its other arguments.
        seed: of the garbage.
    """
    calls = spoiled(kernel.spec, positional, named, seed)
    if isinstance(kernel.spec, KeyListsBackwardSpec):
        results = [tuple(kernel(*positional, **each)) for each in calls]
    else:
        q, bounds = positional[0], calls[1]["cu_seqlens_q"]
        inside = slice(int(bounds[0]), int(bounds[-1]))
        results = []
        for each in calls:
            around = torch.full((q.shape[0] + 8, *q.shape[1:]), float("nan"), dtype=q.dtype, device=q.device)
            found = kernel(*positional, **each, out=around[4:-4])
            results.append((around, found.lse[:, inside]))
        assert results[0][0][:4].isnan().all() and results[0][0][-4:].isnan().all()
    for with_garbage, without in zip(*results, strict=True):
        torch.testing.assert_close(with_garbage, without, rtol=0, atol=0, equal_nan=True)
