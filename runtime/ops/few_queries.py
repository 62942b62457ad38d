"""Attention of a few queries by the kernel for decoding, whose thread blocks divide the keys of a request.

K and V are a cache of one page for each request, and all tensors are views: nothing is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import NamedTuple

import torch

from codegen.patterns import PatternBase
from codegen.scored_pattern import ScoredPattern
from codegen.select.few_queries import FewQueriesCall, may_decode
from codegen.select.paged import decode_fields
from runtime.driver.allocate import allocator, contiguous
from runtime.driver.context import entered, is_elsewhere
from runtime.kernels.arguments import check_addresses
from runtime.kernels.attention import AttentionResult, layout_like
from runtime.kernels.attention_launch import AttentionLaunch, Outputs, extent
from runtime.kernels.paged_attention import (
    CHUNK_BYTES,
    MOST_CHUNKS,
    TENSORS,
    UNBOUNDED,
    Options,
    PagedAttentionKernel,
    Window,
)
from runtime.log import logger
from runtime.ops.attention_checks import RANK, check_operands, check_out, check_values, read_tensors
from runtime.ops.attention_choice import DTYPES
from runtime.ops.attention_extras import Extras
from runtime.ops.attention_launches import Place, launches
from runtime.ops.paged_calls import HEAD_DIMS, decode_kernel, has_receipt

MOST_OFFSET = 2**31
"""Chunks of 16 bytes that a stride, and all heads together, span less than: the kernel multiplies them in 32 bits."""
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


def _reaches(cache: Strided, element: int) -> bool:
    """Whether the kernel's offsets reach all of K and V, whose elements have so many bytes."""
    spans = [(size - 1) * (stride * element // CHUNK_BYTES) for size, stride in zip(*cache, strict=True)]
    steps = [stride * element // CHUNK_BYTES for stride in cache[1]]
    return sum(spans[:3]) < MOST_CHUNKS and max(steps) < MOST_OFFSET and spans[2] < MOST_OFFSET


def _folds(q: Strided, k: Strided, out: Strided, *, sees_all: bool, sink: bool, lengths: int) -> Iterator[Fold]:
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


def decoding_of(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scored: ScoredPattern,
    *,
    extras: Extras,
    arch: str,
    out: torch.Tensor | None = None,
) -> tuple[Fold | None, str]:
    """The kernel's views of a call that takes the kernel for decoding, or the reason why another computes it.

    Args:
        q, k, v, out: the tensors, whose types and sizes are checked.
        scored: the pattern and the score.
        extras: the other tensors and numbers.
        arch: architecture of the GPU.
    """
    lengths = 0 if extras.kv_lengths is None else int(extras.kv_lengths.shape[0])
    sizes = q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2]
    call = FewQueriesCall(arch, *sizes, scored.pattern, scored.score is not None, lengths > 0)
    reason = call.tiles_reason()
    dtype, head_dim = DTYPES[q.dtype], q.shape[3]
    if reason:
        return None, reason
    fields = decode_fields(arch, dtype, "same", head_dim)
    if head_dim not in HEAD_DIMS["same"] or not has_receipt(tuple(fields.items())):
        return None, f"no kernel for decoding with heads of {head_dim} elements in {dtype} has a receipt for {arch}"
    of_k, of_v = (strides_of(tuple(each.shape), each.stride()) for each in (k, v))
    if of_k != of_v:
        return None, f"K has strides {k.stride()}, V has {v.stride()}"
    if lengths > 1 and extras.kv_lengths is not None and extras.kv_lengths.stride(0) != 1:
        return None, "kv_lengths are not contiguous"
    written = layout_like(q, q.dtype)[:2] if out is None else (tuple(out.shape), out.stride())
    views = (tuple(q.shape), q.stride()), (tuple(k.shape), k.stride()), written
    folds = _folds(*views, sees_all=call.sees_all, sink=extras.sink is not None, lengths=lengths)
    found = next((fold for fold in folds if _reaches(fold.cache, k.element_size())), None)
    return found, "" if found else "no views of its tensors are (tokens, heads, head_dim)"


def attend_few(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scored: ScoredPattern,
    *,
    extras: Extras,
    lse: bool,
    out: torch.Tensor | None,
    validate: bool,
    place: Place | None,
    arch_of: Callable[[torch.device], str],
) -> AttentionResult | None:
    """Check and compute a call without index tensors, if it takes the kernel for decoding.

    Args:
        q, k, v, scored, extras, lse, out, validate: as of ``attend``.
        place: where the launch is kept for later calls, or None.
        arch_of: architecture of a device.

    Returns:
        The result; None, and nothing is launched, for calls that another kernel computes.

    Raises:
        ArgumentError, DeviceError: before anything is launched.
        ToolchainError, CompileError, CacheError: at the first call of a kind.
    """
    try:
        if scored.score is not None or len(q.shape) != RANK:
            return None
        if not may_decode(scored.pattern, q.shape[1], k.shape[1], q.shape[2], k.shape[2]):
            return None
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
        return None  # an argument is of another type, which the checks of other kernels name
    check_operands(q, k, v)
    extras.check_tensors(q)
    if out is not None:
        check_out(out, q, read_tensors(q, k, v, (), {}, extras=extras))
    fold, _ = decoding_of(q, k, v, scored, extras=extras, arch=arch_of(q.device), out=out)
    if fold is None:
        return None
    if validate:
        check_values(scored, (), (q.shape[2], k.shape[2]), extras)
    read = {"sink": extras.sink, "seq_lens": extras.kv_lengths, "q": q, "k_cache": k, "v_cache": v, "out": out}
    given = {name: tensor for name, tensor in read.items() if tensor is not None}
    with entered(q.device.index) if is_elsewhere(q) else nullcontext():
        kernel = decode_kernel(q.device.index, DTYPES[q.dtype], "same", q.shape[3])
        window = _window_of(scored.pattern, is_last=q.shape[2] == 1)
        options = Options(window, 1, extras.scale, extras.softcap, batch_invariant=False, return_lse=lse)
        launch = _bound(kernel, fold, given, options)
        found = launch(tuple(given.values()))
        if found is None:
            names = {"k_cache": "k", "v_cache": "v"}
            check_addresses(
                {name: given[name].data_ptr() for name in ("q", "k_cache", "v_cache", "out") if name in given}, names
            )
        assert found is not None
    logger().debug("%s: thread blocks divide the keys of few queries", kernel.compiled.named.stem)
    if place is not None:
        launches.keep(*place, launch)
    result: AttentionResult = found
    return result


def _window_of(pattern: PatternBase, *, is_last: bool) -> Window:
    """Keys that a query sees.

    Args:
        pattern: one of those that the kernel has.
        is_last: whether the only query of each batch has the position of the last key: then causal attention is dense,
            also with lengths of batches, which would move the diagonal.
    """
    if pattern.kind == "dense" or (pattern.kind == "causal" and is_last):
        return Window(UNBOUNDED, UNBOUNDED)
    if pattern.kind == "causal":
        return Window()
    left, right, sink = (getattr(pattern, name, 0) for name in ("left", "right", "sink"))
    return Window(left, right, sink)


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
    signature = kernel.bound({**dict.fromkeys(TENSORS), **given, **views}, options)
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
