"""Attention for vLLM-Omni: the callable ``block_sparse`` of its entry-point group ``vllm_omni.sparse_attn``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from runtime.errors import ArgumentError
from runtime.integrations.choosers import Chooser, chooser_of
from runtime.integrations.chosen import attend, exact_pattern, window_of
from runtime.patterns import Pattern

GEOMETRY = ("latent_shape", "patch_size")
"""Parameters that vLLM-Omni sets: (frames, rows, columns) of the latents and of a patch."""


def attention(  # noqa: PLR0917 - the contract
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    params: Mapping[str, Any],
    is_causal: bool = False,
    softmax_scale: float | None = None,
) -> Any:
    """Compute attention, following vLLM-Omni's contract for sparse plug-ins.

    Args:
        query: (batch, q_len, heads, head_dim), float16 or bfloat16, on a GPU.
        key, value: (batch, kv_len, kv_heads, head_dim).
        params: ``pattern`` is the pattern, an object of ``patterns`` or a mapping:
            ``{"kind": "video_window", "window": [3, 3, 3], "tile": [2, 8, 8]}``, which takes the grid of tokens from
            ``latent_shape`` and ``patch_size`` or its own ``grid``; ``{"kind": "topk", "topk": 32}`` and the patterns
            without tensors, as for :func:`chooser_of`; or ``{"kind": "dense"}`` for full attention. ``attn_mask``:
            bool, as for :func:`diffusers_attention`, allowed only with ``dense``. ``return_lse``: also return the
            log-sum-exp, for ring attention.
        is_causal: query i sees the keys 0 to i; requires q_len = kv_len.
        softmax_scale: softmax scale. Default: 1 / sqrt(head_dim).

    Returns:
        (batch, q_len, heads, head_dim); with ``return_lse`` also float32 (batch, heads, q_len), natural logarithms.

    Raises:
        ArgumentError: naming the argument, before anything is launched.
    """
    chooser = _chooser(params)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    exact = exact_pattern(params.get("attn_mask"), q, k, is_causal)
    return_lse = bool(params.get("return_lse", False))
    result = attend(q, k, v, exact, chooser, scale=softmax_scale, return_lse=return_lse)
    return (result.out.transpose(1, 2), result.lse) if return_lse else result.transpose(1, 2)


attention.capabilities = {"supports_attention_mask": True}  # type: ignore[attr-defined]


def _chooser(params: Mapping[str, Any]) -> Chooser | None:
    """The chooser of ``params``; None for full attention.

    Raises:
        ArgumentError: naming the parameter.
    """
    pattern = params.get("pattern")
    if isinstance(pattern, Pattern):
        return lambda module, q, k, exact: pattern
    if not isinstance(pattern, Mapping):
        kinds = "'topk', 'video_window', 'sliding_window', 'sink_window', 'strided', 'causal' or 'dense'"
        what = "is missing" if pattern is None else f"is {type(pattern).__name__}"
        raise ArgumentError("params['pattern']", f"{what}, expected a pattern or a mapping with a kind: {kinds}")
    if pattern.get("kind") == "dense":
        return None
    if pattern.get("kind") != "video_window":
        return chooser_of(pattern, "params['pattern']")
    fields = {key: tuple(value) if isinstance(value, list) else value for key, value in pattern.items()}
    del fields["kind"]
    if "grid" not in fields:
        fields["grid"] = _grid(params)
    return window_of(fields, "params['pattern']")


def _grid(params: Mapping[str, Any]) -> tuple[int, ...]:
    """Frames, rows and columns of tokens.

    Raises:
        ArgumentError: naming the parameter that is missing, or not a multiple of the patch size.
    """
    latents, patch = (_row(name, params) for name in GEOMETRY)
    if any(size % part for size, part in zip(latents, patch, strict=True)):
        raise ArgumentError("params['latent_shape']", f"is {latents}, not a multiple of patch_size {patch}")
    return tuple(size // part for size, part in zip(latents, patch, strict=True))


def _row(name: str, params: Mapping[str, Any]) -> tuple[int, ...]:
    """Three sizes, the same for each sample, from (3,) or (samples, 3) numbers.

    Reading a tensor on a GPU synchronizes; pass ``grid`` to avoid it.
    """
    value = params.get(name)
    if value is None:
        raise ArgumentError(f"params['{name}']", "is missing: 'video_window' needs it, or its own 'grid'")
    rows = torch.as_tensor(value).reshape(-1, 3).tolist() if torch.as_tensor(value).numel() % 3 == 0 else []
    if not rows or any(row != rows[0] for row in rows) or min(rows[0]) < 1:
        raise ArgumentError(f"params['{name}']", f"is {value!r}, expected (frames, rows, columns) for all samples")
    return tuple(int(size) for size in rows[0])
