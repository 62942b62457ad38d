"""Attention of vLLM-Omni: a callable of its entry-point group ``vllm_omni.sparse_attn``, named ``block_sparse``."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch

from runtime.errors import ArgumentError
from runtime.integrations.choosers import Chooser, chooser_of
from runtime.integrations.chosen import attend, exact_pattern
from runtime.patterns import Pattern
from runtime.video import VideoWindow

GEOMETRY = ("latent_shape", "patch_size")
"""Parameters that vLLM-Omni fills in: (frames, rows, columns) of the latents, and of a patch."""


def attention(  # noqa: PLR0917 - the contract
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    params: Mapping[str, Any],
    is_causal: bool = False,
    softmax_scale: float | None = None,
) -> Any:
    """Compute attention by vLLM-Omni's contract for sparse plug-ins.

    Args:
        query: (batch, q_len, heads, head_dim), float16 or bfloat16, on a GPU.
        key, value: (batch, kv_len, kv_heads, head_dim).
        params: ``pattern`` says which keys are seen. It is an object of ``patterns``, or a mapping:
            ``{"kind": "video_window", "window": [3, 3, 3], "tile": [2, 8, 8]}``, which takes the grid of tokens from
            ``latent_shape`` and ``patch_size`` or its own ``grid``; ``{"kind": "topk", "topk": 32}`` and the patterns
            of numbers, as :func:`chooser_of` takes them; ``{"kind": "dense"}`` to compute all of
            it. ``attn_mask``: bool, as :func:`diffusers_attention` takes it; it goes with
            ``dense`` alone. ``return_lse``: whether to return the log-sum-exp too, for attention in rings.
        is_causal: whether query i sees the keys 0 to i; q_len is kv_len then.
        softmax_scale: of the logits, by default 1 / sqrt(head_dim).

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
    """Return the chooser of ``params``; None where all is to be computed.

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
    try:
        return _window(tuple(sorted(fields.items())))
    except TypeError as error:  # a field that is missing, or that there is none of
        raise ArgumentError("params['pattern']", f"has fields {sorted(fields)}: {error}") from None


MOST_WINDOWS = 16  # sizes of videos whose lists are kept


@lru_cache(maxsize=MOST_WINDOWS)
def _window(fields: tuple[tuple[str, Any], ...]) -> VideoWindow:
    """Return a window of a video's size, whose tiles and lists are made once."""
    return VideoWindow(**dict(fields))


def _grid(params: Mapping[str, Any]) -> tuple[int, ...]:
    """Return frames, rows and columns of tokens.

    Raises:
        ArgumentError: naming the parameter that is missing or does not divide.
    """
    latents, patch = (_row(name, params) for name in GEOMETRY)
    if any(size % part for size, part in zip(latents, patch, strict=True)):
        raise ArgumentError("params['latent_shape']", f"is {latents}, not a multiple of patch_size {patch}")
    return tuple(size // part for size, part in zip(latents, patch, strict=True))


def _row(name: str, params: Mapping[str, Any]) -> tuple[int, ...]:
    """Return three sizes that are the same for each sample, of (3,) or (samples, 3) numbers.

    A tensor on a GPU is waited for: a server that has them there gives the ``grid``.
    """
    value = params.get(name)
    if value is None:
        raise ArgumentError(f"params['{name}']", "is missing: 'video_window' wants it, or a 'grid' of its own")
    rows = torch.as_tensor(value).reshape(-1, 3).tolist() if torch.as_tensor(value).numel() % 3 == 0 else []
    if not rows or any(row != rows[0] for row in rows) or min(rows[0]) < 1:
        raise ArgumentError(f"params['{name}']", f"is {value!r}, expected (frames, rows, columns) of all samples")
    return tuple(int(size) for size in rows[0])
