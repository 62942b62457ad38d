"""Attention over K and V in pages: the public functions."""

from __future__ import annotations

from typing import Any, Literal

import torch

from runtime.checks import check_flag, check_word, present_device
from runtime.errors import ArgumentError
from runtime.kernels.attention import AttentionResult
from runtime.kernels.paged_attention import Options
from runtime.key_lists import KeyLists
from runtime.ops.attention_checks import refuse_transformed
from runtime.ops.attention_choice import DTYPES
from runtime.ops.attention_extras import check_numbers
from runtime.ops.modes import PLAIN, any_autocast, is_watched
from runtime.ops.paged_calls import PATTERNS, attend_paged, bytes_of_workspace, check_sizes, window_of
from runtime.ops.paged_operator import paged_operator
from runtime.patterns import Pattern

LAYOUTS = ("NHD", "HND")


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    pattern: Pattern | KeyLists,
    *,
    block_table: torch.Tensor | None = None,
    seq_lens: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    layout: Literal["NHD", "HND"] = "NHD",
    scale: float | None = None,
    softcap: float | None = None,
    sink: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    batch_invariant: bool = False,
    validate: bool = False,
) -> torch.Tensor | AttentionResult:
    """Compute attention of the latest queries of each request over a KV cache in pages: decoding and prefill.

    The last query of a request has the position of its last key. Tables, lengths and lists stay on the GPU: a call
    does not synchronize, and a captured CUDA graph serves other values of tensors with the same shapes. Thread blocks
    divide the keys of a request, and their parts are added in a fixed order: the same call always has the same bits.
    On Hopper, calls with 32 or more queries per request on average take the prefill kernel, with tiles of 128 queries.
    It does not serve lists, sinks, softcaps, pages of fewer than 16 tokens, ``batch_invariant``, and heads of 256 in
    float16. E4m3 caches have prefill kernels for heads of 64 and 128. Calls of at least 1024 queries with lists of
    blocks of 64 or 128 keys take a kernel by key blocks, which loads each block once for all queries that list it: with
    heads of 64 or 128, in groups of 4, 8 or 16, over 16-bit caches, if the kernel has a receipt. The shipped ones have
    heads of 128. There are no gradients. Under
    ``torch.autocast``, q is cast to the type of a float16 or bfloat16 cache, otherwise to that of autocast.

    Args:
        q: (tokens, heads, head_dim), float16 or bfloat16, on a GPU; head_dim is 64, 128, 192 or 256.
        k_cache: (pages, page_size, kv_heads, head_dim) with ``layout="NHD"``, (pages, kv_heads, page_size, head_dim)
            with ``"HND"``, in q's type or float8_e4m3fn. page_size is a power of two, and heads a multiple of kv_heads.
            The last dimension is contiguous, other strides are multiples of 16 bytes. Without ``block_table``, page i
            has all keys of request i.
        v_cache: as k_cache, with the same strides. Both may be views of one tensor.
        pattern: ``Dense``, ``Causal``, ``SlidingWindow`` or ``SinkWindow`` of ``patterns``, or ``KeyLists``: a list for
            each query. Keys and values outside of all windows have no effect, and pages there are not read.
        block_table: int32 (batch, pages of the longest request): the pages of each request, in order. Pages may be
            shared. Numbers outside of the cache hide their keys.
        seq_lens: int32 (batch,), contiguous: keys of each request, with those of the queries; FlashAttention's
            ``seqused_k``. By default all keys that a row of ``block_table`` has room for.
        cu_seqlens_q: int32 (batch + 1,), contiguous: first token of each request in q, then the end of the last one.
            By default all requests have tokens / batch queries.
        layout: order of the dimensions of a page.
        scale: softmax scale, from 1e-37 to 1e38; by default 1 / sqrt(head_dim).
        softcap: cap of the logits, from 0.001 to 1000.
        sink: float32 (heads,), a logit that joins the sum of each row of its head.
        k_scale: float32, for a float8_e4m3fn cache: K is k_cache * k_scale. (1,), (kv_heads,), or a factor for each
            token and KV head: the shape of k_cache without head_dim. By default 1. Products are in float16, for queries
            in bfloat16 too, whose values must not exceed 65504.
        v_scale: the same for V. Factors of tokens have the strides of k_scale.
        return_lse: whether to return the log-sum-exp too.
        out: (tokens, heads, head_dim), where to write the result; it overlaps no input.
        workspace: uint8 (bytes,), of ``paged_workspace``. By default a call allocates its memory, and in a CUDA graph
            clears a part. The kernel by key blocks allocates up to 1 GiB and three integers per entry in any case.
        batch_invariant: whether the keys of a request are divided by its own length alone. The result of a request then
            has the same bits whatever else is in the batch, and takes more time. Lists of more than 16,384 keys are
            divided by the width of ``indices``: pass the same width in every batch.
        validate: also check the values of tables, lengths and bounds. Synchronizes.

    Returns:
        The result (tokens, heads, head_dim) in q's type: 0 for a query that sees no key. With ``return_lse`` an
        ``AttentionResult`` (out, lse); lse is float32 (heads, tokens), natural logarithm, -inf without keys. Tokens of
        no request are not written.

    Raises:
        ArgumentError: naming the argument, its value and the allowed values, before anything is launched.
        DeviceError: for a device that no kernels are written for.
        ToolchainError, CompileError, CacheError, UnverifiedError: at the first call of a kind.
    """
    flags = {"return_lse": return_lse, "batch_invariant": batch_invariant, "validate": validate}
    for name, flag in flags.items():
        if flag is not True and flag is not False:
            check_flag(name, flag)
    check_word("layout", layout, LAYOUTS)
    check_numbers(scale, softcap)
    lists = counts = None
    entry_keys = 1
    if isinstance(pattern, KeyLists):
        lists, counts, entry_keys = pattern.indices, pattern.counts, pattern.keys
    elif not isinstance(pattern, Pattern) or pattern.kind not in PATTERNS:
        what = pattern.kind if isinstance(pattern, Pattern) else type(pattern).__name__
        raise ArgumentError("pattern", f"is {what}; allowed over pages: {', '.join(PATTERNS)}, or KeyLists")
    traced = torch.compiler.is_dynamo_compiling()
    if traced or any_autocast():
        q = _autocast(q, k_cache)
    tensors = (q, k_cache, v_cache, block_table, seq_lens, cu_seqlens_q, lists, counts, sink, k_scale, v_scale, out)
    options = Options(window_of(pattern), entry_keys, scale, softcap, batch_invariant, return_lse)
    attend = attend_paged if not traced and _is_direct((*tensors, workspace)) else paged_operator
    result = attend((*tensors, workspace), options, heads_first=layout == "HND", validate=validate)
    return result if return_lse else result.out


def paged_workspace(
    *,
    batch: int,
    tokens: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    batch_invariant: bool = False,
    device: torch.device | str | int = "cuda",
) -> torch.Tensor:
    """Allocate the workspace of calls of ``paged_attention``, cleared.

    One serves all calls that do not overlap in time, in any stream or CUDA graph, of at most these sizes.

    Args:
        batch: requests. If ``batch_invariant`` calls have lists, pass ``tokens``: each query has its own parts.
        tokens: queries of all requests.
        heads: query heads.
        kv_heads: heads of K and V.
        head_dim: elements per head.
        batch_invariant: whether such calls are among them. Otherwise only the device and head_dim matter.
        device: of the calls.

    Returns:
        uint8 (bytes,).

    Raises:
        ArgumentError: naming the argument.
        DeviceError: for a device that no kernels are written for.
        ToolchainError, CompileError, CacheError: at the first call of a kind.
    """
    sizes = {"batch": batch, "tokens": tokens, "heads": heads, "kv_heads": kv_heads}
    check_flag("batch_invariant", batch_invariant)
    check_sizes(head_dim, sizes)
    where = present_device("device", device)
    if where.type != "cuda":
        raise ArgumentError("device", f"is {where}, expected a CUDA device")
    if where.index is None:
        where = torch.device("cuda", torch.cuda.current_device())
    size = bytes_of_workspace(where, head_dim, sizes, batch_invariant=batch_invariant)
    return torch.zeros((size,), dtype=torch.uint8, device=where)


def _autocast(q: Any, k_cache: Any) -> Any:
    """Cast q for a cache if autocast is on. Caches are not cast: they are larger than what a call reads of them."""
    if (
        not torch.is_autocast_enabled("cuda")
        or not isinstance(q, torch.Tensor)
        or not isinstance(k_cache, torch.Tensor)
    ):
        return q
    if not q.is_cuda or not q.is_floating_point() or q.dtype == torch.float64:
        return q
    return q.to(k_cache.dtype if k_cache.dtype in DTYPES else torch.get_autocast_dtype("cuda"))


def _is_direct(tensors: tuple[Any, ...]) -> bool:
    """Whether a call needs no dispatcher: it has no mode, transform, tracer, subclass or gradient."""
    if is_watched() or not PLAIN.issuperset(map(type, tensors)):
        refuse_transformed(tensors, "q, k_cache and v_cache", "pass all requests as one batch")
        return any(t is not None and not hasattr(type(t), "__torch_function__") for t in tensors)
    return not (torch.is_grad_enabled() and True in [t is not None and t.requires_grad for t in tensors])
