"""Calls of the kernel for decoding with the tensors of other attention: views, and launches.

K and V are a cache of one page for each request, and nothing is copied.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from typing import NamedTuple

import torch

from runtime.driver.allocate import allocator, contiguous
from runtime.driver.context import entered, is_elsewhere
from runtime.kernels.arguments import check_addresses
from runtime.kernels.attention import AttentionResult, layout_like
from runtime.kernels.attention_launch import AttentionLaunch, Outputs, extent
from runtime.kernels.paged_attention import CHUNK_BYTES, MOST_CHUNKS, TENSORS, Options, PagedAttentionKernel

MOST_OFFSET = 2**31
"""Chunks of 16 bytes that a stride, and all heads together, span less than: the kernel multiplies them in 32 bits."""
NAMES = {"k_cache": "k", "v_cache": "v"}
"""Arguments of calls by names of the kernel, where they differ."""
Strided = tuple[tuple[int, ...], tuple[int, ...]]
"""Sizes and strides of a view."""


class Fold(NamedTuple):
    """The kernel's views of the tensors of a call.

    Attributes:
        q: (tokens, heads, head_dim).
        cache: (requests, keys, kv_heads, head_dim), the same for K and V.
        out: as q.
        lse: sizes of the log-sum-exp as the kernel writes it.
        lse_order: its dimensions that are (batch, heads, q_len); () if it is that already.
    """

    q: Strided
    cache: Strided
    out: Strided
    lse: tuple[int, ...]
    lse_order: tuple[int, ...] = ()


def strides_of(sizes: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    """Strides with 0 for dimensions of one element, whose strides mean nothing."""
    return tuple(0 if size == 1 else stride for size, stride in zip(sizes, strides, strict=True))


def _merged(outer: tuple[int, int], inner: tuple[int, int]) -> int | None:
    """Stride of one dimension that stands for two, each (size, stride); None if there is none."""
    if outer[0] == 1:
        return inner[1]
    return outer[1] if inner[0] == 1 else inner[1] if outer[1] == inner[0] * inner[1] else None


def reaches(cache: Strided, element: int) -> bool:
    """Whether the kernel's offsets reach all of K and V, whose elements have so many bytes."""
    spans = [(size - 1) * (stride * element // CHUNK_BYTES) for size, stride in zip(*cache, strict=True)]
    steps = [stride * element // CHUNK_BYTES for stride in cache[1]]
    return sum(spans[:3]) < MOST_CHUNKS and max(steps) < MOST_OFFSET and spans[2] < MOST_OFFSET


def folds_of(q: Strided, k: Strided, out: Strided, *, sees_all: bool, sink: bool, lengths: int) -> Iterator[Fold]:
    """Views of a call, best first. They are right if the kernel's offsets reach them.

    Args:
        q: (batch, heads, q_len, head_dim).
        k: (batch, kv_heads, kv_len, head_dim).
        out: as q.
        sees_all: whether each query sees all keys.
        sink: whether the heads have sinks.
        lengths: lengths of batches that the call has: 0, 1 or as many as batches.
    """
    sizes = q[0]
    (batch, heads, q_len, d), (_, kv_heads, kv_len, _) = sizes, k[0]
    rows = [strides_of(*each) for each in (q, out)]
    of_batch, of_head, of_key, _ = strides_of(*k)

    def merged(outer: int, inner: int) -> list[int] | None:
        """Strides of q and ``out`` along two dimensions as one; None if one of both has none."""
        found = [_merged((sizes[outer], each[outer]), (sizes[inner], each[inner])) for each in rows]
        return [stride for stride in found if stride is not None] if None not in found else None

    of_heads, all_heads = merged(0, 1), _merged((batch, of_batch), (kv_heads, of_head))
    if lengths <= 1 and (batch == 1 or not sink) and of_heads is not None and all_heads is not None:
        # One request has the heads of all batches.
        views = [((q_len, batch * heads, d), (each[2], stride, 1)) for each, stride in zip(rows, of_heads, strict=True)]
        cache = (1, kv_len, batch * kv_heads, d), (0, of_key, all_heads, 1)
        yield Fold(views[0], cache, views[1], (batch, heads, q_len))
    if lengths not in (0, batch):
        return
    cache = (batch, kv_len, kv_heads, d), (of_batch, of_key, of_head, 1)
    tokens, many_heads = merged(0, 2), merged(1, 2)
    if tokens is not None:
        views = [((batch * q_len, heads, d), (stride, each[1], 1)) for each, stride in zip(rows, tokens, strict=True)]
        yield Fold(views[0], cache, views[1], (heads, batch, q_len), (1, 0, 2))
    if many_heads is not None and sees_all and not sink:
        # Each batch has one token, and a head for each of its queries.
        views = [((batch, heads * q_len, d), (each[0], head, 1)) for each, head in zip(rows, many_heads, strict=True)]
        yield Fold(views[0], cache, views[1], (heads, q_len, batch), (2, 0, 1))


def attend_folded(
    kernel: PagedAttentionKernel, fold: Fold, given: dict[str, torch.Tensor], options: Options
) -> tuple[AttentionLaunch, AttentionResult]:
    """Compute a call whose types and sizes are checked.

    Args:
        kernel: the kernel.
        fold: its views of the tensors.
        given: the tensors of the call by the kernel's names, in the order of later calls: q, K, V and ``out`` are last.
        options: the kernel's other arguments.

    Returns:
        The launch of calls with tensors like these, and the result.

    Raises:
        ArgumentError: for a tensor that does not begin at a multiple of 16 bytes, before anything is launched.
    """
    q = given["q"]
    check_addresses(
        {name: given[name].data_ptr() for name in ("q", "k_cache", "v_cache", "out") if name in given}, NAMES
    )
    with entered(q.device.index) if is_elsewhere(q) else nullcontext():
        launch = _bound(kernel, fold, given, options)
        result: AttentionResult | None = launch(tuple(given.values()))
    assert result is not None  # tensors are aligned, and ``out`` overlaps none
    return launch, result


def _bound(
    kernel: PagedAttentionKernel, fold: Fold, given: dict[str, torch.Tensor], options: Options
) -> AttentionLaunch:
    """The launch of calls with tensors like those given, whose types and sizes are checked.

    Args:
        kernel: the kernel.
        fold: its views.
        given: the tensors of the call by the kernel's names, in the order of later calls.
        options: the kernel's other arguments.
    """
    q, has_out = given["q"], "out" in given
    layout = layout_like(q, q.dtype)
    out = given["out"] if has_out else torch.empty_strided(*layout[:2], dtype=q.dtype, device=q.device)
    views = {name: given[name].as_strided(*fold.cache) for name in ("k_cache", "v_cache")}
    views |= {"q": q.as_strided(*fold.q), "out": out.as_strided(*fold.out)}
    signature = kernel._check({**dict.fromkeys(TENSORS), **given, **views}, options)
    absent = (name for name in (*TENSORS, "lse") if name not in given and name != "out")
    return AttentionLaunch(
        kernel._loaded,
        signature,
        Outputs(
            layout,
            (*contiguous(fold.lse), torch.float32) if options.return_lse else None,
            allocator(q.device),
            dict.fromkeys(absent, 0),
            signature.extra.memory,
        ),
        tuple(given),
        len(given) - (4 if has_out else 3),
        tuple(map(extent, given.values())) if has_out else (),
        partial(_ordered, fold.lse_order) if fold.lse_order and options.return_lse else AttentionResult,
        "out",
    )


def _ordered(order: tuple[int, ...], out: torch.Tensor, lse: torch.Tensor) -> AttentionResult:
    """The result, with a log-sum-exp (batch, heads, q_len) of one that has these dimensions in another order."""
    return AttentionResult(out, lse.permute(order).contiguous())
