"""Attention of a few queries by the kernel for decoding, whose thread blocks divide the keys of a request."""

from __future__ import annotations

from collections.abc import Callable

import torch

from codegen.patterns import PatternBase
from codegen.scored_pattern import ScoredPattern
from codegen.select.few_queries import FewQueriesCall, may_decode
from codegen.select.paged import decode_fields
from runtime.kernels.attention import AttentionResult, layout_like
from runtime.kernels.few_queries import Fold, attend_folded, folds_of, reaches, strides_of
from runtime.kernels.paged_attention import UNBOUNDED, Options, Window
from runtime.log import logger
from runtime.ops.attention_checks import RANK, check_operands, check_out, check_values, read_tensors
from runtime.ops.attention_choice import DTYPES
from runtime.ops.attention_extras import Extras
from runtime.ops.attention_launches import Place, launches
from runtime.ops.paged_calls import HEAD_DIMS, decode_kernel, has_receipt


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
    folds = folds_of(*views, sees_all=call.sees_all, sink=extras.sink is not None, lengths=lengths)
    found = next((fold for fold in folds if reaches(fold.cache, k.element_size())), None)
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
    kernel = decode_kernel(q.device.index, DTYPES[q.dtype], "same", q.shape[3])
    window = _window_of(scored.pattern, q.shape[2])
    options = Options(window, 1, extras.scale, extras.softcap, batch_invariant=False, return_lse=lse)
    launch, result = attend_folded(kernel, fold, given, options)
    logger().debug("%s: thread blocks divide the keys of few queries", kernel.compiled.named.stem)
    if place is not None:
        launches.keep(*place, launch)
    return result


def _window_of(pattern: PatternBase, q_len: int) -> Window:
    """Keys that a query sees. If all see all keys, lengths of batches move no diagonal."""
    band = pattern.band
    assert band is not None
    if band.sees_all(q_len):
        return Window(UNBOUNDED, UNBOUNDED)
    left, right = (UNBOUNDED if keys is None else keys for keys in (band.left, band.right))
    return Window(left, right, band.sink)
