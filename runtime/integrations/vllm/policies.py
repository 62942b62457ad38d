"""Choice of the keys that layers see, by a setting of vLLM."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from codegen.wording import shown
from runtime.errors import ArgumentError
from runtime.key_lists import KeyLists
from runtime.patterns import Pattern, SinkWindow, SlidingWindow

SETTING = "block_sparse"
"""Key of vLLM's ``additional_config``."""
WINDOWS: dict[Any, type[SlidingWindow] | type[SinkWindow]] = {
    "sliding_window": SlidingWindow,
    "sink_window": SinkWindow,
}


class LayerCall(NamedTuple):
    """A call of a layer, for a policy.

    Attributes:
        layer: name of the layer, such as ``model.layers.3.self_attn.attn``.
        query: (tokens, heads, head_dim).
        k_cache: (pages, kv_heads, page_size, head_dim), with the keys of the queries.
        v_cache: as k_cache.
        block_table: int32 (batch, pages of the longest request).
        seq_lens: int32 (batch,), keys of each request.
        cu_seqlens_q: int32 (batch + 1,), first token of each request, then the end of the last one.
        max_query_len: queries of a request at most.
    """

    layer: str
    query: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    cu_seqlens_q: torch.Tensor
    max_query_len: int


Policy = Callable[[LayerCall], Pattern | KeyLists | None]
"""A function that returns the keys of a call: a pattern of ``paged_attention``, or None for all keys.

It must not synchronize. A CUDA graph captures its operations, and its choice by ``max_query_len``.
"""


def policy_of(fields: Any) -> Policy | None:
    """Return the policy that the setting of vLLM describes.

    Args:
        fields: ``additional_config["block_sparse"]``: the kind and the parameters of a window, such as ``{"kind":
            "sink_window", "sink": 4, "left": 4095}``, or ``{"policy": "package.module:function"}``. None for none.

    Raises:
        ArgumentError: naming the field.
    """
    if fields is None:
        return None
    if not isinstance(fields, Mapping):
        raise ArgumentError(SETTING, f"is {type(fields).__name__}, expected a mapping with 'policy' or 'kind'")
    if "policy" in fields:
        if len(fields) > 1:
            raise ArgumentError(SETTING, f"has fields {sorted(fields)}, expected 'policy' alone")
        return _function(fields["policy"])
    numbers = dict(fields)
    kind = numbers.pop("kind", None)
    if not isinstance(kind, str) or kind not in WINDOWS:
        raise ArgumentError(f"{SETTING}.kind", f"is {shown(kind)}, expected {' or '.join(WINDOWS)}")
    try:
        pattern: Any = WINDOWS[kind](**numbers)
    except TypeError as error:  # a missing or unknown field
        raise ArgumentError(SETTING, f"has fields {sorted(numbers)} of kind {kind!r}: {error}") from None
    if pattern.right:
        raise ArgumentError(f"{SETTING}.right", f"is {pattern.right}, expected 0: layers are causal")
    return lambda call: pattern


def _function(path: Any) -> Policy:
    """The function of a path.

    Raises:
        ArgumentError: if there is none.
    """
    module, _, name = path.partition(":") if isinstance(path, str) else ("", "", "")
    if not module or not name:
        raise ArgumentError(f"{SETTING}.policy", f"is {shown(path)}, expected 'package.module:function'")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ArgumentError(f"{SETTING}.policy", f"is {shown(path)}, which cannot be imported: {error}") from None
    if not callable(found):
        raise ArgumentError(f"{SETTING}.policy", f"is {shown(path)}, which is {type(found).__name__}, not a function")
    policy: Policy = found
    return policy
