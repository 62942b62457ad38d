"""FlashAttention's calls: ``flash_attn_func`` and its packed forms, in the layout (batch, length, heads, head_dim)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeAlias, overload

import torch

from codegen.patterns.base import MOST_KEYS
from codegen.wording import shown
from runtime.checks import check_dense, check_flag
from runtime.compat.front import attend, check_dropout, refuse
from runtime.errors import ArgumentError
from runtime.kernels.arguments import check_number
from runtime.kernels.attention import AttentionResult
from runtime.ops.varlen import varlen_attention
from runtime.patterns import Causal, Dense, Pattern, Score, SlidingWindow

_NAMES = {"scale": "softmax_scale", "score": "alibi_slopes"}
_DISTANCE = "abs(q_idx + kv_len - q_len - kv_idx)"
Result: TypeAlias = torch.Tensor | tuple[torch.Tensor, torch.Tensor, None]


@overload
def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = ...,
    softmax_scale: float | None = ...,
    causal: bool = ...,
    window_size: tuple[int | None, int | None] = ...,
    softcap: float = ...,
    alibi_slopes: torch.Tensor | None = ...,
    deterministic: bool = ...,
    return_attn_probs: Literal[False] = ...,
) -> torch.Tensor: ...


@overload
def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = ...,
    softmax_scale: float | None = ...,
    causal: bool = ...,
    window_size: tuple[int | None, int | None] = ...,
    softcap: float = ...,
    alibi_slopes: torch.Tensor | None = ...,
    deterministic: bool = ...,
    *,
    return_attn_probs: Literal[True],
) -> tuple[torch.Tensor, torch.Tensor, None]: ...


def flash_attn_func(  # noqa: PLR0917 - FlashAttention's signature
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """Compute FlashAttention's attention, with the arguments of ``flash_attn_func`` (FlashAttention 2).

    Positions are aligned at the end: query i has the position of key i + kv_len - q_len, for ``causal``,
    ``window_size`` and ``alibi_slopes``. The backward pass computes gradients of q, k and v.

    Args:
        q: (batch, q_len, heads, head_dim), float16 or bfloat16.
        k: (batch, kv_len, kv_heads, head_dim); heads is a multiple of kv_heads.
        v: as k.
        dropout_p: 0.0.
        softmax_scale: factor of the logits; by default 1 / sqrt(head_dim).
        causal: whether keys after a query's position are hidden; it sets ``window_size[1]`` to 0.
        window_size: keys before and after a query's position that it sees; -1 or None for all of them.
        softcap: the logits become softcap * tanh(logits / softcap); 0.0 for none.
        alibi_slopes: float32 (heads,) or (batch, heads). The logits get -slope * distance of key and query.
        deterministic: whether gradients have the same bits in every call.
        return_attn_probs: whether to return the log-sum-exp too. Not with ``alibi_slopes``: FlashAttention's then
            differs from the log-sum-exp of the logits where ``causal`` is set.

    Returns:
        The result, in q's type: (batch, q_len, heads, head_dim), 0 for a query that sees no key. With
        ``return_attn_probs`` the triple (out, lse, None): lse is float32 (batch, heads, q_len), the natural logarithm,
        -inf for a query that sees no key. FlashAttention has an empty tensor instead of None, and may have inf there.

    Raises:
        ArgumentError: naming an argument that has no counterpart, or is wrong.
        SpecError: for an option that no kernel has.
    """
    check_dropout(dropout_p)
    for name, flag in (("causal", causal), ("deterministic", deterministic), ("return_attn_probs", return_attn_probs)):
        check_flag(name, flag)
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        check_dense(name, tensor)
        if tensor.dim() != 4:
            expected = "expected (batch, length, heads, head_dim)"
            raise ArgumentError(name, f"has {tensor.dim()} dimensions {tuple(tensor.shape)}, {expected}")
    cap = check_number("softcap", softcap)
    if cap < 0:
        refuse("softcap", softcap, "expected 0.0 for none, or a positive number")
    options: dict[str, Any] = {"softcap": cap if cap > 0 else None}
    if alibi_slopes is not None:
        if return_attn_probs:
            refuse("return_attn_probs", True, "not with alibi_slopes; block_sparse_attention has return_lse")
        _check_slopes(alibi_slopes, q)
        options = {"score": _alibi(alibi_slopes, cap)}
    pattern = _window(causal, window_size, k.shape[1])
    q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    out, lse = attend(q, k, v, pattern, _NAMES, scale=softmax_scale, deterministic=deterministic, **options)
    out = out.transpose(1, 2)
    if not return_attn_probs:
        return out
    assert lse is not None
    return out, lse, None


@overload
def flash_attn_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    dropout_p: float = ...,
    softmax_scale: float | None = ...,
    causal: bool = ...,
    window_size: tuple[int | None, int | None] = ...,
    softcap: float = ...,
    alibi_slopes: torch.Tensor | None = ...,
    deterministic: bool = ...,
    return_attn_probs: Literal[False] = ...,
) -> torch.Tensor: ...


@overload
def flash_attn_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    dropout_p: float = ...,
    softmax_scale: float | None = ...,
    causal: bool = ...,
    window_size: tuple[int | None, int | None] = ...,
    softcap: float = ...,
    alibi_slopes: torch.Tensor | None = ...,
    deterministic: bool = ...,
    *,
    return_attn_probs: Literal[True],
) -> tuple[torch.Tensor, torch.Tensor, None]: ...


def flash_attn_kvpacked_func(  # noqa: PLR0917 - FlashAttention's signature
    q: torch.Tensor,
    kv: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """Compute ``flash_attn_func`` of k and v in one tensor.

    Args:
        q: (batch, q_len, heads, head_dim).
        kv: (batch, kv_len, 2, kv_heads, head_dim).
        dropout_p, softmax_scale, causal, window_size: as there.
        softcap, alibi_slopes, deterministic, return_attn_probs: as there.

    Returns:
        As ``flash_attn_func``.

    Raises:
        ArgumentError, SpecError: as ``flash_attn_func``.
    """
    k, v = _unpacked("kv", kv, 2)
    options = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    call: Callable[..., Result] = flash_attn_func
    return call(q, k, v, *options)


@overload
def flash_attn_qkvpacked_func(
    qkv: torch.Tensor,
    dropout_p: float = ...,
    softmax_scale: float | None = ...,
    causal: bool = ...,
    window_size: tuple[int | None, int | None] = ...,
    softcap: float = ...,
    alibi_slopes: torch.Tensor | None = ...,
    deterministic: bool = ...,
    return_attn_probs: Literal[False] = ...,
) -> torch.Tensor: ...


@overload
def flash_attn_qkvpacked_func(
    qkv: torch.Tensor,
    dropout_p: float = ...,
    softmax_scale: float | None = ...,
    causal: bool = ...,
    window_size: tuple[int | None, int | None] = ...,
    softcap: float = ...,
    alibi_slopes: torch.Tensor | None = ...,
    deterministic: bool = ...,
    *,
    return_attn_probs: Literal[True],
) -> tuple[torch.Tensor, torch.Tensor, None]: ...


def flash_attn_qkvpacked_func(  # noqa: PLR0917 - FlashAttention's signature
    qkv: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """Compute ``flash_attn_func`` of q, k and v in one tensor.

    Args:
        qkv: (batch, length, 3, heads, head_dim).
        dropout_p, softmax_scale, causal, window_size: as there.
        softcap, alibi_slopes, deterministic, return_attn_probs: as there.

    Returns:
        As ``flash_attn_func``.

    Raises:
        ArgumentError, SpecError: as ``flash_attn_func``.
    """
    q, k, v = _unpacked("qkv", qkv, 3)
    options = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    call: Callable[..., Result] = flash_attn_func
    return call(q, k, v, *options)


def flash_attn_varlen_func(  # noqa: PLR0917 - FlashAttention's signature
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
) -> Result:
    """Compute FlashAttention's attention of packed sequences, with the arguments of ``flash_attn_varlen_func``.

    It is ``varlen_attention``, with gradients of q, k and v.

    Args:
        q: (total_q, heads, head_dim), float16 or bfloat16.
        k: (total_k, kv_heads, head_dim); heads is a multiple of kv_heads.
        v: as k.
        cu_seqlens_q: int32 (batch + 1,), bounds of the sequences in q.
        cu_seqlens_k: int32 (batch + 1,), bounds of the sequences in k and v.
        max_seqlen_q, max_seqlen_k: not needed, and not read.
        dropout_p, softmax_scale, causal, window_size, softcap: as of ``flash_attn_func``.
        alibi_slopes: None, not (heads,): there are no slopes.
        deterministic: as of ``varlen_attention``.
        return_attn_probs: whether to return the log-sum-exp too.
        block_table: None, not (batch, blocks): there is no paged cache.

    Returns:
        The result (total_q, heads, head_dim) in q's type. With ``return_attn_probs`` the triple (out, lse, None), where
        lse is float32 (heads, total_q).

    Raises:
        ArgumentError: naming an argument that has no counterpart, or is wrong.
    """
    del max_seqlen_q, max_seqlen_k
    check_dropout(dropout_p)
    flags = (("causal", causal), ("deterministic", deterministic), ("return_attn_probs", return_attn_probs))
    for name, flag in flags:
        check_flag(name, flag)
    for name, given in (("alibi_slopes", alibi_slopes), ("block_table", block_table)):
        if given is not None:
            refuse(name, type(given).__name__, "kernels of packed sequences have no counterpart: leave it out")
    cap = check_number("softcap", softcap)
    if cap < 0:
        refuse("softcap", softcap, "expected 0.0 for none, or a positive number")
    check_dense("k", k)
    pattern = _window(causal, window_size, k.shape[0])
    bounds = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    softcaps = {"softcap": cap} if cap > 0 else {}
    options: dict[str, Any] = {**bounds, "scale": softmax_scale, **softcaps, "return_lse": return_attn_probs}
    options["deterministic"] = deterministic
    found = varlen_attention(q, k, v, pattern, **options)
    if not isinstance(found, AttentionResult):
        return found
    assert found.lse is not None
    return found.out, found.lse, None


def _unpacked(name: str, packed: Any, parts: int) -> tuple[torch.Tensor, ...]:
    """The tensors in one, (batch, length, parts, heads, head_dim), as views."""
    check_dense(name, packed)
    if packed.dim() != 5 or packed.shape[2] != parts:
        shape = tuple(packed.shape)
        raise ArgumentError(name, f"has shape {shape}, expected (batch, length, {parts}, heads, head_dim)")
    return tuple(packed.unbind(2))


def _window(causal: bool, window_size: Any, kv_len: int) -> Pattern:
    """The pattern of ``causal`` and ``window_size``.

    Raises:
        ArgumentError: naming ``window_size``.
    """
    if not isinstance(window_size, tuple | list) or len(window_size) != 2:
        raise ArgumentError("window_size", f"is {shown(window_size)}, expected (left, right)")
    sides = [-1 if side is None else side for side in window_size]
    if not all(type(side) is int and side >= -1 for side in sides):
        expected = "expected (left, right) of whole numbers, -1 for every key of a side"
        raise ArgumentError("window_size", f"is {shown(tuple(window_size))}, {expected}")
    left, right = sides[0], 0 if causal else sides[1]
    if left < 0 and right <= 0:
        return Dense() if right < 0 else Causal()
    if kv_len > MOST_KEYS:
        refuse("window_size", tuple(window_size), f"windows are for {MOST_KEYS} keys at most, and k has {kv_len}")
    return SlidingWindow(*(min(side, MOST_KEYS) if side >= 0 else MOST_KEYS for side in (left, right)))


def _check_slopes(slopes: Any, q: torch.Tensor) -> None:
    """Check ALiBi slopes against q, (batch, q_len, heads, head_dim).

    Raises:
        ArgumentError: naming ``alibi_slopes``.
    """
    check_dense("alibi_slopes", slopes)
    if slopes.dtype != torch.float32:
        raise ArgumentError("alibi_slopes", f"is {slopes.dtype}, expected torch.float32")
    batch, heads = q.shape[0], q.shape[2]
    if tuple(slopes.shape) not in ((heads,), (batch, heads)):
        raise ArgumentError(
            "alibi_slopes", f"has shape {tuple(slopes.shape)}, expected ({heads},) or ({batch}, {heads})"
        )


def _alibi(slopes: torch.Tensor, softcap: float) -> Score:
    """The score of ALiBi, behind a softcap if that is not 0."""
    logit = f"{softcap!r} * tanh(score / {softcap!r})" if softcap > 0 else "score"
    index = "head" if slopes.dim() == 1 else "batch, head"
    return Score(f"{logit} - slopes[{index}] * {_DISTANCE}", aux={"slopes": slopes})
