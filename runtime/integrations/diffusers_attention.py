"""Attention of diffusers: ``model.set_attention_backend("block_sparse")``."""

from __future__ import annotations

import re
from typing import Any

import torch

from runtime.errors import ArgumentError, ToolchainError
from runtime.integrations.choosers import Chooser
from runtime.integrations.chosen import attend, exact_pattern
from runtime.integrations.packages import optional

DISPATCH = "diffusers.models.attention_dispatch"
_ours: set[str] = set()


def register_diffusers(name: str = "block_sparse", *, pattern_for: Chooser | None = None) -> None:
    """Add a backend to diffusers' attention dispatcher, which computes with this package's kernels.

    ``model.set_attention_backend(name)`` then takes it for a model, ``attention_backend(name)`` for a block of code.
    Without ``pattern_for`` each call is what the model asks for, exactly. Models have weights in float16 or bfloat16,
    and run under ``torch.no_grad()`` on a GPU.

    diffusers has no list of backends that others may join: the name is put into its enumeration of names.

    Args:
        name: of the backend; registering it again replaces it, in models that have it already too: with another
            ``pattern_for`` before a video of another size.
        pattern_for: ``pattern_for(module, q, k, exact)`` returns the pattern of a call in place of the model's own one,
            ``exact``, or (tiles, pattern) of a video: ``video.VideoWindow``,
            :class:`TopKSelection`, or any function. module is None; q is (batch, heads, q_len,
            head_dim), k (batch, kv_heads, kv_len, head_dim). A call with a mask takes no other pattern.

    Raises:
        ToolchainError: if diffusers is not installed, naming the extra, or is a version that works otherwise.
        ArgumentError: naming the argument.
    """
    dispatch = optional(DISPATCH, "diffusers")
    if not isinstance(name, str) or not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise ArgumentError("name", f"is {name!r}, expected a lower-case identifier")
    if pattern_for is not None and not callable(pattern_for):
        raise ArgumentError("pattern_for", f"is {type(pattern_for).__name__}, expected a function or None")
    names = dispatch.AttentionBackendName
    if name not in _ours and name in {member.value for member in names}:
        raise ArgumentError("name", f"is {name!r}, a backend of diffusers' own")

    def block_sparse(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        *,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        return_lse: bool = False,
        _parallel_config: Any = None,
    ) -> Any:
        """Compute a call: see :func:`diffusers_attention`; the dispatcher passes what has one of these names."""
        if query.shape[2] != key.shape[2] and not enable_gqa:
            reason = f"is False, with {query.shape[2]} query heads and {key.shape[2]} of the keys"
            raise ArgumentError("enable_gqa", reason)
        if _parallel_config is not None:
            raise ArgumentError("_parallel_config", "is given: no call here is split over a context")
        return diffusers_attention(
            query,
            key,
            value,
            attn_mask=attn_mask,
            dropout_p=dropout_p,
            is_causal=is_causal,
            scale=scale,
            return_lse=return_lse,
            pattern_for=pattern_for,
        )

    dispatch._AttentionBackendRegistry.register(_member(names, name))(block_sparse)
    _ours.add(name)


def diffusers_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    return_lse: bool = False,
    pattern_for: Chooser | None = None,
) -> Any:
    """Compute attention in diffusers' layout.

    Args:
        query: (batch, q_len, heads, head_dim), float16 or bfloat16.
        key, value: (batch, kv_len, kv_heads, head_dim).
        attn_mask: None, or bool (batch, kv_len), (batch or 1, 1, 1, kv_len), (q_len, kv_len) or (batch or 1, heads or
            1, q_len, kv_len).
        dropout_p: 0.
        is_causal: whether query i sees the keys 0 to i; q_len is kv_len then.
        scale: of the logits, by default 1 / sqrt(head_dim).
        return_lse: whether to return the log-sum-exp too.
        pattern_for: as :func:`register_diffusers` has it.

    Returns:
        (batch, q_len, heads, head_dim); with ``return_lse`` also float32 (batch, q_len, heads), natural logarithms.

    Raises:
        ArgumentError: naming the argument, before anything is launched.
    """
    if dropout_p:
        raise ArgumentError("dropout_p", f"is {dropout_p}, expected 0: there is no dropout")
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    exact = exact_pattern(attn_mask, q, k, is_causal)
    result = attend(q, k, v, exact, pattern_for, scale=scale, return_lse=return_lse)
    if return_lse:
        return result.out.transpose(1, 2), result.lse.transpose(1, 2)
    return result.transpose(1, 2)


def _member(names: Any, name: str) -> Any:
    """Member of diffusers' enumeration with that name, created if missing.

    Raises:
        ToolchainError: if the enumeration is not one of strings.
    """
    if name in names._value2member_map_:
        return names(name)
    if not issubclass(names, str):
        raise ToolchainError("the installed diffusers has backends that are no strings: pip install 'diffusers<0.43'")
    member = str.__new__(names, name)
    member._name_, member._value_ = name.upper(), name
    names._member_map_[member._name_] = member
    names._value2member_map_[name] = member
    return member
