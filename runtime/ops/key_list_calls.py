"""Attention of packed sequences over lists of keys on real tensors: checks, and the call of a kernel."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from runtime.checks import check_dense
from runtime.errors import ArgumentError
from runtime.kernels.arguments import MAX_EXTENT, check_scale, check_sink
from runtime.kernels.attention import AttentionResult
from runtime.kernels.paged_attention import Options, Window
from runtime.ops import paged_calls
from runtime.ops.attention_checks import check_no_overlap
from runtime.ops.attention_choice import DTYPES
from runtime.ops.attention_extras import check_softcap
from runtime.ops.varlen_calls import (
    Bounds,
    check_bound_values,
    check_bounds,
    check_operands,
    check_out,
    without_tokens,
)
from runtime.prepare.key_lists import rising_bounds

HEAD_DIMS = paged_calls.HEAD_DIMS["same"]
"""Head sizes of the kernels."""


class Lists(NamedTuple):
    """The tensors of ``KeyLists``, and the keys of an entry.

    Attributes:
        indices: int32 (kv_heads or 1, tokens, entries).
        counts: int32 (kv_heads or 1, tokens), or None.
        keys: keys of an entry.
    """

    indices: torch.Tensor
    counts: torch.Tensor | None
    keys: int


def attend_key_lists(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bounds: Bounds,
    lists: Lists,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    sink: torch.Tensor | None = None,
    lse: bool = False,
    out: torch.Tensor | None = None,
    validate: bool = False,
) -> AttentionResult:
    """Compute attention of packed sequences in which each query has a list of keys.

    The kernel is the one of decoding over pages. Each sequence is a request whose keys lie in one page.

    Raises:
        ArgumentError: before anything is launched.
    """
    options = _options(lists, scale=scale, softcap=softcap, lse=lse)
    check_list_call(q, k, v, bounds, lists, sink=sink)
    if out is not None:
        check_out(q, out)
        named = {"q": q, "k": k, "v": v, **bounds._asdict(), "pattern.indices": lists.indices}
        check_no_overlap(out, {**named, "pattern.counts": lists.counts, "sink": sink})
    if validate:
        check_bound_values("cu_seqlens_q", bounds.cu_seqlens_q, q.shape[0])
        check_bound_values("cu_seqlens_k", bounds.cu_seqlens_k, k.shape[0])
    if q.shape[0] == 0 or k.shape[0] == 0:
        return without_tokens(q, sink, out, lse=lse)
    paged_calls.check_place(q)
    kernel = paged_calls._kernel(q.device.index, DTYPES[q.dtype], "same", q.shape[2])
    if k.stride() != v.stride():
        k, v = k.contiguous(), v.contiguous()
    first_keys, lengths = key_places(bounds.cu_seqlens_k, k.shape[0])
    given = (q, k, v, first_keys, lengths, bounds.cu_seqlens_q, lists.indices, lists.counts, sink, None, None, out)
    return kernel.attend((*given, None), options)


def key_places(cu_seqlens_k: torch.Tensor, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """First key of each sequence and number of its keys, int32, within the tensor whatever the bounds are."""
    inside = rising_bounds(cu_seqlens_k, tokens)
    return inside[:-1], inside[1:] - inside[:-1]


def _options(lists: Lists, *, scale: float | None, softcap: float | None, lse: bool) -> Options:
    """What a call has besides its tensors."""
    if scale is not None:
        check_scale(scale)
    capped = None if softcap is None else check_softcap(softcap)
    return Options(Window(), lists.keys, scale, capped, batch_invariant=False, return_lse=lse)


def check_list_call(q: Any, k: Any, v: Any, bounds: Bounds, lists: Lists, *, sink: Any, on_gpu: bool = True) -> None:
    """Check the tensors of a call against each other.

    Raises:
        ArgumentError: for the first thing that is wrong.
    """
    check_operands(q, k, v, on_gpu=on_gpu)
    if q.shape[2] not in HEAD_DIMS:
        allowed = ", ".join(map(str, HEAD_DIMS))
        raise ArgumentError("q", f"has head_dim {q.shape[2]}, expected {allowed} with KeyLists")
    check_bounds(q, bounds)
    _check_lists(q, k, lists)
    if sink is not None:
        check_sink(sink, q.shape[1], q.device)


def _check_lists(q: torch.Tensor, k: torch.Tensor, lists: Lists) -> None:
    """Check the lists against q and k."""
    heads, tokens = k.shape[1], q.shape[0]
    for name, tensor in (("pattern.indices", lists.indices), ("pattern.counts", lists.counts)):
        if tensor is None:
            continue
        check_dense(name, tensor)
        if tensor.device != q.device:
            raise ArgumentError(name, f"is on {tensor.device}, q is on {q.device}: pass it there")
        if tensor.shape[0] not in (1, heads) or tensor.shape[1] != tokens:
            expected = f"expected {heads} KV heads, or 1 for all, and the {tokens} tokens of q"
            raise ArgumentError(name, f"has shape {tuple(tensor.shape)}, {expected}")
    entries, most = lists.indices.shape[2], MAX_EXTENT // lists.keys
    if not 1 <= entries <= most:
        raise ArgumentError("pattern.indices", f"has {entries} entries per list, expected 1 to {most}")
    if entries > 1 and lists.indices.stride(2) != 1:
        stride = lists.indices.stride(2)
        raise ArgumentError("pattern.indices", f"has stride {stride} between entries, which must be contiguous")
