"""Code shared by diffusers, vLLM-Omni and SGLang: a call's own mask, windows of videos, and the chosen pattern."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch

from runtime.convert import from_key_mask, from_token_mask
from runtime.errors import ArgumentError
from runtime.integrations.choosers import Chooser
from runtime.ops.attention import block_sparse_attention
from runtime.patterns import Causal, Dense, Pattern
from runtime.video import VideoTiles, VideoWindow, tiled_attention

MOST_WINDOWS = 16
"""Number of video sizes whose lists are cached."""


def window_of(fields: Mapping[str, Any], name: str) -> VideoWindow:
    """The window for a video size, with cached tiles and lists.

    Args:
        fields: those of :class:`VideoWindow`; lists stand for tuples.
        name: name of the fields in messages.

    Raises:
        ArgumentError: for a missing or unknown field.
    """
    settled = {key: tuple(value) if isinstance(value, list) else value for key, value in fields.items()}
    try:
        return _window(tuple(sorted(settled.items())))
    except TypeError as error:  # a missing, unknown or unhashable field
        raise ArgumentError(name, f"has fields {sorted(settled)}: {error}") from None


@lru_cache(maxsize=MOST_WINDOWS)
def _window(fields: tuple[tuple[str, Any], ...]) -> VideoWindow:
    """The window with these fields."""
    return VideoWindow(**dict(fields))


def exact_pattern(attn_mask: Any, q: torch.Tensor, k: torch.Tensor, is_causal: bool) -> Pattern:
    """The pattern of a call's own mask, without synchronizing.

    Args:
        attn_mask: None, or bool: (batch, kv_len) or (batch or 1, 1, 1, kv_len) of the keys, (q_len, kv_len) or (batch
            or 1, heads or 1, q_len, kv_len) of all pairs. An ambiguous 2-d mask is read as (batch, kv_len).
        q: (batch, heads, q_len, head_dim).
        k: (batch, kv_heads, kv_len, head_dim).
        is_causal: query i sees the keys 0 to i.

    Raises:
        ArgumentError: naming the argument.
    """
    batch, _, q_len, _ = q.shape
    kv_len = k.shape[2]
    if is_causal:
        if attn_mask is not None:
            raise ArgumentError("attn_mask", "is given with is_causal=True: put both into one mask")
        if q_len != kv_len:
            reason = f"is True with {q_len} queries and {kv_len} keys: their alignment is ambiguous"
            raise ArgumentError("is_causal", reason)
        return Causal()
    if attn_mask is None:
        return Dense()
    allowed = "bool (batch, kv_len), (batch or 1, 1, 1, kv_len), (q_len, kv_len) or (batch or 1, heads or 1, q_len,"
    if not isinstance(attn_mask, torch.Tensor) or attn_mask.dtype != torch.bool:
        what = attn_mask.dtype if isinstance(attn_mask, torch.Tensor) else type(attn_mask).__name__
        raise ArgumentError("attn_mask", f"is {what}, expected {allowed} kv_len): additive masks are not supported")
    shape = tuple(attn_mask.shape)
    if shape in ((batch, kv_len), (batch, 1, 1, kv_len), (1, 1, 1, kv_len)):
        return from_key_mask(attn_mask.reshape(-1, kv_len), q_len=q_len)
    if len(shape) not in (2, 4) or shape[-2:] != (q_len, kv_len):
        reason = f"is {shape}, but q_len is {q_len} and kv_len {kv_len}; expected {allowed} kv_len)"
        raise ArgumentError("attn_mask", reason)
    return from_token_mask(attn_mask)


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    exact: Pattern,
    pattern_for: Chooser | None,
    *,
    scale: float | None,
    return_lse: bool = False,
) -> Any:
    """Compute attention with the chosen pattern.

    Args:
        q: (batch, heads, q_len, head_dim).
        k, v: (batch, kv_heads, kv_len, head_dim).
        exact: the pattern of the call's own mask.
        pattern_for: a chooser, which may also return (tiles, pattern) for a video; None for ``exact``.
        scale: softmax scale.
        return_lse: also return the log-sum-exp.

    Returns:
        As ``block_sparse_attention``.

    Raises:
        ArgumentError: naming the argument.
    """
    chosen = exact if pattern_for is None else pattern_for(None, q, k, exact)
    if chosen is not exact and not isinstance(exact, Dense | Causal):
        raise ArgumentError("attn_mask", "is given, but pattern_for chose another pattern: they cannot be combined")
    options: dict[str, Any] = {"scale": scale, "return_lse": return_lse}
    if isinstance(chosen, tuple):
        if len(chosen) != 2 or not isinstance(chosen[0], VideoTiles):
            raise ArgumentError("pattern_for", f"returned {chosen!r}, expected a pattern or (tiles, pattern)")
        return tiled_attention(q, k, v, *chosen, **options)
    return block_sparse_attention(q, k, v, chosen, **options)
