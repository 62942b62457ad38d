"""Attention by its definition, in plain torch: for tests, and for machines without a GPU."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, overload

import torch

from runtime.checks import check_dense, check_flag
from runtime.convert import from_block_mask, to_token_mask
from runtime.errors import ArgumentError
from runtime.expressions.evaluate import evaluate
from runtime.kernels.attention import AttentionResult
from runtime.ops.attention_checks import RANK
from runtime.ops.attention_extras import check_numbers
from runtime.ops.attention_hints import refuse_pattern
from runtime.patterns import Pattern, Score, score_for, scored_of

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


@overload
def reference_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    pattern: Pattern | BlockMask,
    *,
    scale: float | None = ...,
    softcap: float | None = ...,
    score: Score | str | Callable[..., Any] | None = ...,
    sink: torch.Tensor | None = ...,
    kv_lengths: torch.Tensor | None = ...,
    return_lse: Literal[False] = ...,
) -> torch.Tensor: ...


@overload
def reference_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    pattern: Pattern | BlockMask,
    *,
    scale: float | None = ...,
    softcap: float | None = ...,
    score: Score | str | Callable[..., Any] | None = ...,
    sink: torch.Tensor | None = ...,
    kv_lengths: torch.Tensor | None = ...,
    return_lse: Literal[True],
) -> AttentionResult: ...


def reference_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    pattern: Pattern | BlockMask,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    score: Score | str | Callable[..., Any] | None = None,
    sink: torch.Tensor | None = None,
    kv_lengths: torch.Tensor | None = None,
    return_lse: bool = False,
) -> torch.Tensor | AttentionResult:
    """Compute what ``block_sparse_attention`` does by the definition, in torch, on any device.

    It computes in float32, of float64 tensors in float64, and holds all logits, 4 or 8 bytes for each query, key and
    head. autograd differentiates it. ``torch.compile`` runs a part of it outside of the graph, so that
    ``fullgraph=True`` fails.

    Args:
        q: (batch, heads, q_len, head_dim), of any floating-point type.
        k: (batch, kv_heads, kv_len, head_dim); heads is a multiple of kv_heads.
        v: (batch, kv_heads, kv_len, any head_dim).
        pattern: an object of ``runtime.patterns`` that lists no block twice, or a FlexAttention ``BlockMask``.
        scale: softmax scale; by default 1 / sqrt(head_dim).
        softcap: cap of the logits: softcap * tanh(scale * q k^T / softcap). Not beside ``score``.
        score: what becomes of the logits, scale * q k^T, before the softmax: a ``runtime.patterns.Score``, a text or a
            function.
        sink: (heads,), a logit that joins the sum of each row of its head, as a key without a value would.
        kv_lengths: int32 (batch or 1,), keys of each batch that exist.
        return_lse: whether to return the log-sum-exp too.

    Returns:
        The result, in q's type: 0 for a query that sees no key. With ``return_lse`` an ``AttentionResult`` (out, lse);
        lse is float32 or float64 (batch, heads, q_len), -inf without keys and sink.

    Raises:
        ArgumentError: naming the argument, its value and the allowed values.
    """
    check_flag("return_lse", return_lse)
    check_numbers(scale, softcap)
    if softcap is not None and score is not None:
        raise ArgumentError("softcap", "is given beside a score: write it in the score, 30 * tanh(score / 30)")
    _check_operands(q, k, v)
    if sink is not None:
        _check_vector("sink", sink, {(q.shape[1],)}, is_float=True)
    if kv_lengths is not None:
        _check_vector("kv_lengths", kv_lengths, {(1,), (q.shape[0],)}, is_float=False)
    (batch, heads, q_len, head_dim), kv_len = q.shape, k.shape[2]
    if not isinstance(pattern, Pattern):
        pattern = _converted(pattern, q_len, kv_len)
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    group = heads // k.shape[1]
    keys, values = (x.to(dtype).repeat_interleave(group, 1) for x in (k, v))
    logits = q.to(dtype) @ keys.mT * (1 / math.sqrt(head_dim) if scale is None else scale)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if score is not None:
        logits = _scored(score if isinstance(score, Score) else score_for(score, q, k), pattern, logits)
    seen = to_token_mask(pattern, q_len=q_len, kv_len=kv_len, batch=batch, heads=heads).to(q.device)
    if kv_lengths is not None:
        seen = seen & (torch.arange(kv_len, device=q.device) < kv_lengths.to(q.device).reshape(-1, 1, 1, 1))
    logits = logits.masked_fill(~seen, -math.inf)
    if sink is not None:
        column = sink.to(dtype=dtype, device=q.device).reshape(1, -1, 1, 1).expand(batch, heads, q_len, 1)
        logits = torch.cat([logits, column], -1)
    # A row without keys: softmax of zeros, times 0, so that no gradient is NaN.
    any_key = (logits != -math.inf).any(-1, keepdim=True)
    logits = torch.where(any_key, logits, 0.0)
    weights = logits.softmax(-1)[..., :kv_len] * any_key
    out = (weights @ values).to(q.dtype)
    if not return_lse:
        return out
    return AttentionResult(out, torch.where(any_key[..., 0], logits.logsumexp(-1), -math.inf))


def _check_operands(q: Any, k: Any, v: Any) -> None:
    """Check q, k and v against each other."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        check_dense(name, tensor)
        if tensor.dim() != RANK or not tensor.is_floating_point():
            what = f"{tensor.dtype} {tuple(tensor.shape)}"
            raise ArgumentError(name, f"is {what}, expected floating-point (batch, heads, length, head_dim)")
        if tensor.dtype != q.dtype or tensor.device != q.device:
            raise ArgumentError(name, f"is {tensor.dtype} on {tensor.device}, q is {q.dtype} on {q.device}")
    if k.shape[0] != q.shape[0] or k.shape[3] != q.shape[3] or q.shape[1] % max(k.shape[1], 1):
        raise ArgumentError("k", f"has shape {tuple(k.shape)}, which does not go with q's, {tuple(q.shape)}")
    if v.shape[:3] != k.shape[:3]:
        raise ArgumentError("v", f"has shape {tuple(v.shape)}, k has {tuple(k.shape)}")


def _check_vector(name: str, tensor: Any, shapes: set[tuple[int, ...]], *, is_float: bool) -> None:
    """Check a tensor with a value for each head or batch."""
    check_dense(name, tensor)
    is_right = tensor.is_floating_point() if is_float else tensor.dtype in (torch.int32, torch.int64)
    if not is_right or tuple(tensor.shape) not in shapes:
        kind, expected = "floating-point" if is_float else "int32", " or ".join(map(str, sorted(shapes)))
        raise ArgumentError(name, f"is {tensor.dtype} {tuple(tensor.shape)}, expected {kind} {expected}")


def _converted(pattern: Any, q_len: int, kv_len: int) -> Pattern:
    """The pattern of a BlockMask.

    Raises:
        ArgumentError: naming ``pattern``, for any other object.
    """
    from torch.nn.attention.flex_attention import BlockMask  # noqa: PLC0415 - takes long, and few calls need it

    if not isinstance(pattern, BlockMask):
        refuse_pattern(pattern)
    return from_block_mask(pattern, q_len=q_len, kv_len=kv_len)


def _scored(score: Score, pattern: Pattern, logits: torch.Tensor) -> torch.Tensor:
    """What a score makes of the logits, in their type."""
    found = scored_of(pattern, score).score
    assert found is not None
    values: dict[str, Any] = {"score": logits, "q_len": logits.shape[2], "kv_len": logits.shape[3]}
    for axis, name in enumerate(("batch", "head", "q_idx", "kv_idx")):
        numbers = torch.arange(logits.shape[axis], device=logits.device)
        values[name] = numbers.view([-1 if place == axis else 1 for place in range(RANK)])
    return evaluate(found.expression, values, dict(score.aux or {})).to(logits.dtype).expand(logits.shape)
