"""Attention backend for diffusers: ``model.set_attention_backend("block_sparse")``."""

from __future__ import annotations

import re
from typing import Any

import torch

from runtime.errors import ArgumentError, ToolchainError
from runtime.integrations.choosers import Chooser
from runtime.integrations.chosen import attend, exact_pattern
from runtime.integrations.enumerations import add_member
from runtime.integrations.packages import optional

DISPATCH = "diffusers.models.attention_dispatch"
_ours: set[str] = set()


def register_diffusers(name: str = "block_sparse", *, pattern_for: Chooser | None = None) -> None:
    """Add a backend that uses this package's kernels to diffusers' attention dispatcher.

    ``model.set_attention_backend(name)`` then selects it for a model, ``attention_backend(name)`` for a block of code.
    Without ``pattern_for``, each call computes exactly the model's own attention. Weights must be float16 or bfloat16,
    and the model must run under ``torch.no_grad()`` on a GPU.

    diffusers has no registration API for backends, so this function adds the name to its enumeration of backend names.

    Args:
        name: name of the backend. Registering it again replaces it, also in models that already use it: for example
            with a new ``pattern_for`` before a video of another size.
        pattern_for: ``pattern_for(module, q, k, exact)`` returns the pattern of a call instead of the model's own one,
            ``exact``, or (tiles, pattern) for a video: ``video.VideoWindow``, :class:`TopKSelection`, or any function.
            module is None; q is (batch, heads, q_len, head_dim), k (batch, kv_heads, kv_len, head_dim). For a call with
            a mask, it must return ``exact``.

    Raises:
        ToolchainError: if diffusers is not installed, naming the extra, or if its version is incompatible.
        ArgumentError: naming the argument.
    """
    dispatch = optional(DISPATCH, "diffusers")
    if not isinstance(name, str) or not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise ArgumentError("name", f"is {name!r}, expected a lower-case identifier")
    if pattern_for is not None and not callable(pattern_for):
        raise ArgumentError("pattern_for", f"is {type(pattern_for).__name__}, expected a function or None")
    names = dispatch.AttentionBackendName
    if name not in _ours and name in {member.value for member in names}:
        raise ArgumentError("name", f"is {name!r}, which is one of diffusers' own backends")

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
        """Compute a call: see :func:`diffusers_attention`. The dispatcher passes arguments by these names."""
        if query.shape[2] != key.shape[2] and not enable_gqa:
            reason = f"is False, but there are {query.shape[2]} query heads and {key.shape[2]} key heads"
            raise ArgumentError("enable_gqa", reason)
        if _parallel_config is not None:
            raise ArgumentError("_parallel_config", "is given: context parallelism is not supported")
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
        is_causal: query i sees the keys 0 to i; requires q_len = kv_len.
        scale: softmax scale. Default: 1 / sqrt(head_dim).
        return_lse: also return the log-sum-exp.
        pattern_for: as for :func:`register_diffusers`.

    Returns:
        (batch, q_len, heads, head_dim); with ``return_lse`` also float32 (batch, q_len, heads), natural logarithms.

    Raises:
        ArgumentError: naming the argument, before anything is launched.
    """
    if dropout_p:
        raise ArgumentError("dropout_p", f"is {dropout_p}, expected 0: dropout is not supported")
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    exact = exact_pattern(attn_mask, q, k, is_causal)
    result = attend(q, k, v, exact, pattern_for, scale=scale, return_lse=return_lse)
    if return_lse:
        return result.out.transpose(1, 2), result.lse.transpose(1, 2)
    return result.transpose(1, 2)


def _member(names: Any, name: str) -> Any:
    """Member of diffusers' enumeration with that name, created if missing.

    Raises:
        ToolchainError: if the enumeration's members are not strings.
    """
    if name in names._value2member_map_:
        return names(name)
    if not issubclass(names, str):
        raise ToolchainError("the installed diffusers has no string backend names: pip install 'diffusers<0.43'")
    return add_member(names, str.__new__(names, name), name.upper(), name)
