"""Attention of packed sequences over lists of keys on real tensors: checks, the choice of kernels, and their calls."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from codegen.select.key_lists import KeyListsCall
from runtime.checks import check_dense, refuse_capture
from runtime.errors import ArgumentError
from runtime.kernel import load_kernel
from runtime.kernels.arguments import MAX_EXTENT, check_scale, check_sink
from runtime.kernels.attention import AttentionResult
from runtime.kernels.key_lists_forward import KeyListsForwardKernel
from runtime.kernels.paged_attention import Options, Window
from runtime.ops import paged_calls
from runtime.ops.attention_checks import check_no_overlap
from runtime.ops.attention_choice import DTYPES, arch_of
from runtime.ops.attention_extras import check_softcap
from runtime.ops.paged_calls import has_receipt
from runtime.ops.varlen_calls import (
    Bounds,
    check_bound_values,
    check_bounds,
    check_operands,
    check_out,
    without_tokens,
)
from runtime.prepare.key_lists import rising_bounds
from runtime.receipts.mode import KERNELS_KEPT, kept_by_mode

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

    Raises:
        ArgumentError: before anything is launched.
    """
    options = options_of(lists, scale=scale, softcap=softcap, lse=lse)
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
    call = KeyListsCall(
        arch_of(q.device),
        DTYPES[q.dtype],
        head_dim=q.shape[2],
        entry_keys=lists.keys,
        group=q.shape[1] // k.shape[1],
        queries=q.shape[0],
        keys=k.shape[0],
        entries=lists.indices.shape[2],
        options=softcap is not None or sink is not None,
    )
    kernel = _kernel(q.device.index, call.kernel()) if call.by_keys() else None
    if kernel is not None:
        return attend_by_keys(kernel, q, k, v, bounds=bounds, lists=lists, scale=scale, out=out)
    return attend_by_queries(q, k, v, bounds, lists, options=options, sink=sink, out=out)


@kept_by_mode(KERNELS_KEPT)
def _kernel(index: int, fields: tuple[tuple[str, Any], ...]) -> KeyListsForwardKernel | None:
    """Kernel of calls of a kind; None if it has no receipt."""
    if not has_receipt(fields):
        return None
    device = torch.device("cuda", index)
    refuse_capture("q", device)
    kernel = load_kernel(dict(fields), device=device)
    assert isinstance(kernel, KeyListsForwardKernel)
    return kernel


def attend_by_keys(
    kernel: KeyListsForwardKernel,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    bounds: Bounds,
    lists: Lists,
    scale: float | None = None,
    out: torch.Tensor | None = None,
) -> AttentionResult:
    """Compute checked calls by key blocks: each is loaded once for all queries that list it."""
    indices: dict[str, Any] = {**bounds._asdict(), "lists": lists.indices, "counts": lists.counts}
    return kernel(q, k, v, **indices, scale=scale, out=out)


def attend_by_queries(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bounds: Bounds,
    lists: Lists,
    *,
    options: Options,
    sink: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> AttentionResult:
    """Compute checked calls by the kernel of decoding over pages: a sequence is a request with its keys in one page."""
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


def options_of(lists: Lists, *, scale: float | None = None, softcap: float | None = None, lse: bool = False) -> Options:
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
