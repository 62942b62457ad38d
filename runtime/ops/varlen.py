"""Attention of packed sequences: the public function."""

from __future__ import annotations

from typing import Any

import torch

from codegen.patterns import PATTERNS
from codegen.scored_pattern import scored_pattern
from runtime.checks import check_flag
from runtime.errors import ArgumentError
from runtime.kernels.attention import AttentionResult
from runtime.key_lists import KeyLists
from runtime.ops.attention_checks import refuse_transformed
from runtime.ops.key_list_operator import key_list_operator
from runtime.ops.modes import PLAIN, any_autocast, autocast, is_watched
from runtime.ops.packed_lists import packed_pattern
from runtime.ops.varlen_calls import Bounds, attend_varlen
from runtime.ops.varlen_differentiated import attend_varlen_with_gradients
from runtime.ops.varlen_operator import varlen_operator
from runtime.patterns import Pattern, TopK

PACKED = (*(name for name, pattern in PATTERNS.items() if pattern.packs_sequences), TopK.kind)


def varlen_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    pattern: Pattern | KeyLists,
    *,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sink: torch.Tensor | None = None,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
    validate: bool = False,
    deterministic: bool = True,
) -> torch.Tensor | AttentionResult:
    """Compute attention within each of several sequences that are packed into one tensor.

    Query i of sequence s sees those keys of sequence s that the pattern shows it. Positions are counted within the
    sequence; if it has more keys than queries, the last query is aligned with the last key. The layout, and the names
    of the arguments, are those of FlashAttention's ``flash_attn_varlen_func``; the longest lengths are not needed. The
    bounds stay on the GPU: a call does not synchronize, and a captured CUDA graph serves other bounds of as many
    sequences.

    q, k, v and the sinks have gradients, and so has the log-sum-exp. Gradients of tokens in no sequence are zeros.

    Args:
        q: (tokens, heads, head_dim), float16 or bfloat16, on a GPU; head_dim is a multiple of 8 up to 256. The last
            dimension is contiguous, other strides are multiples of 8 elements.
        k: (key tokens, kv_heads, head_dim); heads is a multiple of kv_heads.
        v: as k. NaN and infinity in a sequence, or in tokens of no sequence, do not reach results or gradients of
            another one. With ``KeyLists``, v must be finite, and for gradients q, k and the output gradient too.
        pattern: ``Dense``, ``Causal``, ``SlidingWindow`` or ``SinkWindow`` of ``runtime.patterns``. Or ``BlockLists``
            with ``mask`` none or causal, or ``TopK``, on Hopper: blocks have 64 or 128 queries and keys and are counted
            within each sequence, and ``convert.packed_list_rows`` has the rows of the lists. Or ``KeyLists``: of
            the keys up to its own position, each query sees those of its list. Entries count from the first key of a
            sequence. head_dim is then 64, 128, 192 or 256; gradients have heads of 64 or 128 in groups of 4, 8 or 16,
            entries of 16, 32, 64 or 128 keys, no softcap and no sinks, and need a kernel with a receipt.
        cu_seqlens_q: int32 (sequences + 1,), contiguous: where each sequence begins in q, and where the last one ends.
            Rising; sequences may be empty. Tokens before the first sequence and behind the last one are not written.
        cu_seqlens_k: the same of k and v; by default ``cu_seqlens_q``.
        scale: softmax scale, from 1e-37 to 1e38; by default 1 / sqrt(head_dim).
        softcap: cap of the logits, from 0.001 to 1000. Each value is a kernel.
        sink: float32 (heads,), a logit that joins the sum of each row of its head.
        return_lse: whether to return the log-sum-exp too.
        out: (tokens, heads, head_dim), where to write the result; it overlaps no input. Not with gradients.
        validate: also check the values of the bounds and of block lists. Synchronizes.
        deterministic: gradients have the same bits in every call. If False, they may be summed in any order if that is
            faster. ``torch.use_deterministic_algorithms(True)`` has precedence.

    Returns:
        The result (tokens, heads, head_dim) in q's type: 0 for a query that sees no key. With ``return_lse`` an
        ``AttentionResult`` (out, lse); lse is float32 (heads, tokens), natural logarithm, -inf without keys.

    Raises:
        ArgumentError: naming the argument, its value and the allowed values, before anything is launched.
        DeviceError: for a device that no kernels are written for.
        ToolchainError, CompileError, CacheError, UnverifiedError: at the first call of a kind.
    """
    for name, flag in (("return_lse", return_lse), ("validate", validate), ("deterministic", deterministic)):
        check_flag(name, flag)
    if not isinstance(pattern, KeyLists) and (not isinstance(pattern, Pattern) or pattern.kind not in PACKED):
        what = pattern.kind if isinstance(pattern, Pattern) else type(pattern).__name__
        raise ArgumentError("pattern", f"is {what}; allowed for packed sequences: {', '.join(PACKED)}, or KeyLists")
    bounds = Bounds(cu_seqlens_q, cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k)
    traced = torch.compiler.is_dynamo_compiling()
    if traced or any_autocast():
        q, k, v = autocast(q, k, v)
    options: dict[str, Any] = {"scale": scale, "softcap": softcap, "sink": sink, "lse": return_lse}
    options["validate"] = validate
    if isinstance(pattern, KeyLists):
        listed = key_list_operator(q, k, v, bounds, pattern, **options, deterministic=deterministic, out=out)
        return listed if return_lse else listed.out
    text, lists = packed_pattern(pattern)
    tensors = (q, k, v, *bounds, sink, out, *lists)
    plain = not traced and _is_plain(tensors)
    result: Any
    if plain and not _is_differentiated(tensors):
        result = attend_varlen(q, k, v, bounds, scored_pattern(text), **options, lists=lists, out=out)
    elif plain and out is None and not any(t is not None and t.is_inference() for t in tensors):
        options["deterministic"] = deterministic
        result = attend_varlen_with_gradients(q, k, v, bounds, scored_pattern(text), **options, lists=lists)
    else:
        options["deterministic"] = deterministic
        result = varlen_operator(q, k, v, bounds, text, **options, lists=lists, out=out)
    attended: AttentionResult = result
    return attended if return_lse else attended.out


def _is_plain(tensors: tuple[Any, ...]) -> bool:
    """Whether a call needs no dispatcher: it has no mode, transform, tracer or subclass.

    Raises:
        ArgumentError: for a tensor under ``torch.vmap``, and for a DTensor.
    """
    if is_watched() or not PLAIN.issuperset(map(type, tensors)):
        refuse_transformed(tensors, "q, k and v", "pass all sequences as one, with their bounds")
        return any(t is not None and not hasattr(type(t), "__torch_function__") for t in tensors)
    return True


def _is_differentiated(tensors: tuple[Any, ...]) -> bool:
    """Whether autograd records a call."""
    return torch.is_grad_enabled() and any(getattr(t, "requires_grad", False) for t in tensors)
