"""torch's call: ``torch.nn.functional.scaled_dot_product_attention``."""

from __future__ import annotations

from typing import Any

import torch

from runtime.checks import check_dense, check_flag
from runtime.compat.front import TORCH_NAMES, attend, check_dropout, check_gqa, refuse
from runtime.convert import from_key_mask, from_token_mask
from runtime.errors import ArgumentError
from runtime.patterns import Causal, Dense, Pattern

_NAMES = {**TORCH_NAMES, "pattern": "attn_mask"}
_AS_SCORE = (
    "a bias of the logits is a score here: block_sparse_attention(q, k, v, Dense(), "
    "score=Score('score + bias[batch, head, q_idx, kv_idx]', aux={'bias': bias}))"
)


def scaled_dot_product_attention(  # noqa: PLR0917 - torch's signature
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Compute torch's ``scaled_dot_product_attention``, with its arguments.

    A boolean ``attn_mask`` becomes lists of blocks in each call, with a bit for each pair of partial blocks; blocks
    that it hides are not computed. ``runtime.convert.from_token_mask`` makes them once. The backward pass computes
    gradients of query, key and value.

    Args:
        query: (..., heads, q_len, head_dim), float16 or bfloat16, of two dimensions or more.
        key: (..., kv_heads, kv_len, head_dim).
        value: as key; head_dim is that of key.
        attn_mask: bool, broadcastable to (..., heads, q_len, kv_len): True for the pairs that are visible. Other types
            are a bias of the logits and refused.
        dropout_p: 0.0.
        is_causal: whether query i sees the keys 0 to i, whatever the lengths. Not beside ``attn_mask``.
        scale: factor of the logits; by default 1 / sqrt(head_dim).
        enable_gqa: allow fewer kv_heads than heads; heads is then a multiple of kv_heads.

    Returns:
        The result, in query's type and shape, 0 for a query that sees no key.

    Raises:
        ArgumentError: naming an argument that has no counterpart, or is wrong.
        SpecError: for an option that no kernel has.
    """
    check_dropout(dropout_p)
    check_flag("is_causal", is_causal)
    check_dense("query", query)
    shape = query.shape
    query, key, value = (_of_four(name, t, shape) for name, t in (("query", query), ("key", key), ("value", value)))
    check_gqa(query, key, enable_gqa)
    pattern: Pattern = Dense()
    if is_causal:
        if attn_mask is not None:
            raise ArgumentError("attn_mask", "is given, and is_causal is True: pass one of them")
        # Both corners are one where the lengths agree, and kernels of bottom_right are the measured ones.
        pattern = Causal() if query.shape[2] == key.shape[2] else Causal(align="top_left")
    elif attn_mask is not None:
        pattern = _lists_of(attn_mask, shape, query, key)
    out, _ = attend(query, key, value, pattern, _NAMES, scale=scale, return_lse=True)
    return out.reshape(shape)


def _of_four(name: str, tensor: Any, shape: Any) -> torch.Tensor:
    """A tensor with dimensions in front that are those of query, as (batch, heads, length, head_dim).

    Args:
        name: of the argument.
        tensor: query, key or value.
        shape: of query.

    Raises:
        ArgumentError: naming the argument.
    """
    check_dense(name, tensor)
    if tensor.dim() < 2 or tensor.dim() != len(shape) or tensor.shape[:-3] != shape[:-3]:
        expected = "expected at least 2" if name == "query" else f"query has {tuple(shape)}"
        raise ArgumentError(name, f"has dimensions {tuple(tensor.shape)}, {expected}")
    whole: torch.Tensor = tensor.flatten(0, -4) if tensor.dim() > 4 else tensor[(None,) * (4 - tensor.dim())]
    return whole


def _lists_of(mask: Any, shape: Any, query: torch.Tensor, key: torch.Tensor) -> Pattern:
    """The lists of a boolean mask that broadcasts to (..., heads, q_len, kv_len).

    Raises:
        ArgumentError: naming ``attn_mask``.
    """
    check_dense("attn_mask", mask)
    if mask.dtype != torch.bool:
        hint = _AS_SCORE if mask.is_floating_point() else "masks are torch.bool"
        raise ArgumentError("attn_mask", f"is {mask.dtype}, expected torch.bool: {hint}")
    if mask.device != query.device:
        raise ArgumentError("attn_mask", f"is on {mask.device}, query is on {query.device}")
    if mask.requires_grad:
        refuse("attn_mask", mask, "a mask has no gradient")
    lengths = (query.shape[2], key.shape[2])
    full = (*shape[:-2], *lengths)
    fits = mask.dim() <= len(full) and all(
        size in (1, wanted) for size, wanted in zip(mask.shape[::-1], full[::-1], strict=False)
    )
    if not fits:
        expected = f"expected one that broadcasts to {tuple(full)}"
        raise ArgumentError("attn_mask", f"has shape {tuple(mask.shape)}, {expected}")
    mask = mask[(None,) * (max(len(full), 4) - mask.dim())]
    if mask.dim() > 4:
        shared = all(size == 1 for size in mask.shape[:-3])
        mask = mask.expand(*(mask.shape if shared else shape)[:-3], *mask.shape[-3:]).flatten(0, -4)
    if mask.shape[1:3] == (1, 1):
        return from_key_mask(mask[:, 0, 0].expand(-1, lengths[1]), q_len=lengths[0])
    return from_token_mask(mask.expand(*mask.shape[:2], *lengths))
