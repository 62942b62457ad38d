"""Attention for Hugging Face transformers, for models built with ``attn_implementation="block_sparse"``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from runtime.convert import from_token_mask
from runtime.errors import ArgumentError
from runtime.integrations.choosers import Chooser, chooser_of
from runtime.integrations.packages import optional
from runtime.integrations.transformers_context import (
    ContextMasks,
    ContextParallel,
    attend_parts,
    exact_pattern,
)
from runtime.integrations.transformers_masks import AttentionMask, MaskInterface
from runtime.integrations.transformers_packed import PackedCall
from runtime.ops.attention import block_sparse_attention
from runtime.patterns import Causal, Dense, Pattern, SlidingWindow

FUNCTIONS = "transformers.modeling_utils"
CONFIG_FIELD = "block_sparse"
"""Field of a model's configuration: plain data for :func:`chooser_of`."""
NO_NAMES = ("eager", "sdpa", "flash", "flex", "paged")
"""Transformers treats implementations whose names contain one of these as its own."""
REFUSED = ("position_bias", "head_mask", "output_attentions")
"""Unsupported arguments that would change the result."""


def register_transformers(
    name: str = "block_sparse",
    *,
    pattern_for: Chooser | None = None,
    decode: str | None = None,
    context_parallel: ContextParallel | None = None,
) -> None:
    """Register ``attn_implementation=name`` in transformers, which uses this package's kernels.

    Each call follows the model's mask: full, causal, sliding window, padding or packed sequences; see
    ``runtime.integrations.transformers_masks.MaskInterface``. Grouped K/V heads are not repeated. A model's softcaps
    and sink logits are applied. Weights must be float16 or bfloat16, on a GPU. Calls have gradients. Queries are
    aligned with the end of the keys (``bottom_right``), as chunked prefill and decoding with a cache require. A step
    with a single query uses a kernel whose query tile has 64 or more rows.

    Calls with ``cu_seq_lens_q`` and ``cu_seq_lens_k``, of a collator that packs documents, are computed by
    ``varlen_attention`` within each document.

    Args:
        name: name of the implementation. Registering it again replaces it, also in models that already use it.
        pattern_for: ``pattern_for(module, q, k, exact)`` returns the pattern of a call instead of the model's own one,
            ``exact``: :class:`TopKSelection`, or any function (q is (batch, heads, q_len, head_dim), k (batch,
            kv_heads, kv_len, head_dim)). Key lengths apply in addition. If the mask can only be expressed as lists
            (padding on the left, packed sequences), it must return ``exact``. Default: the chooser that
            ``model.config.block_sparse`` describes (see :func:`chooser_of`), or ``exact`` without such a field.
        decode: another implementation, such as ``"sdpa"``, for calls with a single query, with the model's own mask.
            Default: this implementation.
        context_parallel: ranks that each have a part of every sequence. Calls are computed by
            ``context_parallel_attention`` over the whole sequence, whose mask must be full, causal or a sliding window.
            ``pattern_for`` must return a pattern without tensors. Default: each process has whole sequences.

    Raises:
        ToolchainError: if transformers is not installed, naming the extra.
        ArgumentError: naming the argument.
    """
    functions, interface = optional(FUNCTIONS, "transformers"), MaskInterface.of_package()
    registered = functions.ALL_ATTENTION_FUNCTIONS
    if not isinstance(name, str) or not re.fullmatch(r"[a-z][a-z0-9_]*", name) or any(no in name for no in NO_NAMES):
        allowed = f"a lower-case identifier that contains none of {', '.join(NO_NAMES)}"
        raise ArgumentError("name", f"is {name!r}, expected {allowed}")
    if name in registered and not isinstance(registered[name], TransformersAttention):
        raise ArgumentError("name", f"is {name!r}, which is already registered by another package")
    if decode is not None and (decode not in registered or isinstance(registered[decode], TransformersAttention)):
        names = ", ".join(sorted(each for each in registered if "|" not in each and each != name))
        raise ArgumentError("decode", f"is {decode!r}, expected one of {names}")
    if pattern_for is not None and not callable(pattern_for):
        raise ArgumentError("pattern_for", f"is {type(pattern_for).__name__}, expected a function or None")
    if context_parallel is not None:
        if not isinstance(context_parallel, ContextParallel):
            what = f"is {type(context_parallel).__name__}, expected a ContextParallel or None"
            raise ArgumentError("context_parallel", what)
        if decode is not None:
            raise ArgumentError("decode", f"is {decode!r}, expected None with context_parallel, which has no caches")
        interface = ContextMasks(interface.masks, context_parallel.mesh_or_group.size())
    delegate = None if decode is None else _Delegate(decode, functions.ALL_ATTENTION_FUNCTIONS, interface.masks)
    functions.AttentionInterface.register(name, TransformersAttention(pattern_for, delegate, context_parallel))
    interface.masks.AttentionMaskInterface.register(name, interface)


@dataclass(frozen=True)
class _Delegate:
    """Another implementation, chosen by the user."""

    name: str
    functions: Mapping[str, Any]
    masks: Any

    def __call__(self, module: Any, tensors: tuple[torch.Tensor, ...], mask: Any, options: dict[str, Any]) -> Any:
        """Its result, with our mask or its own."""
        if isinstance(mask, AttentionMask):
            mask = mask.of_implementation(self.name, self.masks)
        given = {key: value for key, value in options.items() if value is not None}
        return self.functions[self.name](module, *tensors, mask, **given)[0]


@dataclass(frozen=True)
class TransformersAttention:
    """An attention function for transformers.

    Attributes:
        pattern_for: as for :func:`register_transformers`.
        decode: implementation of calls with a single query; None for this one.
        context_parallel: as for :func:`register_transformers`.
    """

    pattern_for: Chooser | None = None
    decode: _Delegate | None = None
    context_parallel: ContextParallel | None = None

    def __call__(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any,
        *,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: torch.Tensor | None = None,
        **others: Any,
    ) -> tuple[torch.Tensor, None]:
        """Compute the attention of a layer.

        Args:
            module: the layer's attention.
            query: (batch, heads, q_len, head_dim), float16 or bfloat16.
            key, value: (batch, kv_heads, kv_len, head_dim).
            attention_mask: an ``AttentionMask``, bool (batch or 1, heads or 1, q_len, kv_len), or None.
            dropout: 0.
            scaling: softmax scale. Default: 1 / sqrt(head_dim).
            is_causal: used without a mask. Default: ``module.is_causal``.
            sliding_window: used without a mask: number of keys that a causal query sees, including its own.
            softcap: cap of the logits.
            s_aux: (heads,), sink logits.
            others: other arguments that transformers passes. With ``cu_seq_lens_q`` and ``cu_seq_lens_k`` the batch is
                one row of sequences, which are independent of each other.

        Returns:
            (batch, q_len, heads, head_dim), and None for the attention weights, which kernels do not return.

        Raises:
            ArgumentError: naming the argument, before anything is launched.
        """
        packed = None if self.context_parallel is not None else PackedCall.of(query, key, value, others)
        if self.decode is not None and query.shape[2] == 1 and packed is None:
            options: dict[str, Any] = {
                "dropout": dropout,
                "scaling": scaling,
                "is_causal": is_causal,
                "sliding_window": sliding_window,
                "softcap": softcap,
                "s_aux": s_aux,
                **others,
            }
            return self.decode(module, (query, key, value), attention_mask, options), None
        _check_unsupported({"dropout": dropout, **{each: others.get(each) for each in REFUSED}})
        if is_causal is None:
            is_causal = bool(getattr(module, "is_causal", True))
        options = {"scale": scaling, "softcap": softcap, "sink": None if s_aux is None else s_aux.float()}
        if self.context_parallel is not None:
            exact = exact_pattern(attention_mask, is_causal, sliding_window)
            chosen = self._chosen(module, query, key, exact)
            return attend_parts(self.context_parallel, query, key, value, chosen, others=others, **options), None
        if packed is not None:
            exact = packed.exact(attention_mask, is_causal, sliding_window)
            chosen = self._chosen(module, query, key, exact)
            if packed.is_batch and sliding_window is not None and chosen is not exact:
                reason = f"is {sliding_window}, and the cache has no other keys, so pattern_for must return exact"
                raise ArgumentError("sliding_window", reason)
            return packed.attend(query, key, value, chosen, **options), None
        exact, lengths, is_listed = _pattern(attention_mask, query, key, is_causal, sliding_window)
        pattern = self._chosen(module, query, key, exact)
        if is_listed and pattern is not exact:
            reason = "needs lists (padding on the left or with holes, packed sequences, a custom mask)"
            raise ArgumentError("attention_mask", f"{reason}, so pattern_for must return exact; pad on the right")
        out = block_sparse_attention(
            query,
            key,
            value,
            pattern,
            **options,
            kv_lengths=lengths,
        )
        return out.transpose(1, 2).contiguous(), None

    def _chosen(self, module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, exact: Pattern) -> Any:
        """The pattern of a call."""
        if self.pattern_for is not None:
            return self.pattern_for(module, query, key, exact)
        fields = getattr(getattr(module, "config", None), CONFIG_FIELD, None)
        if fields is None:
            return exact
        if not isinstance(fields, Mapping):
            raise ArgumentError(f"config.{CONFIG_FIELD}", f"is {type(fields).__name__}, expected a dictionary")
        return chooser_of(fields, f"config.{CONFIG_FIELD}")(module, query, key, exact)


def _check_unsupported(given: dict[str, Any]) -> None:
    """Refuse unsupported arguments that would change the result.

    Raises:
        ArgumentError: for the first of them.
    """
    for argument, passed in given.items():
        if passed is not None and passed is not False and not (argument == "dropout" and passed == 0.0):
            shown = type(passed).__name__ if isinstance(passed, torch.Tensor) else repr(passed)
            raise ArgumentError(argument, f"is {shown}, which is not supported: leave it out, or use sdpa")


def _pattern(
    mask: Any, query: torch.Tensor, key: torch.Tensor, is_causal: bool, window: int | None
) -> tuple[Pattern, torch.Tensor | None, bool]:
    """The pattern of a call, its key lengths, and whether lists hold the whole mask."""
    q_len, kv_len = query.shape[2], key.shape[2]
    if isinstance(mask, AttentionMask):
        if (mask.q_len, mask.kv_len) != (q_len, kv_len):
            those = f"{mask.q_len} queries and {mask.kv_len} keys"
            raise ArgumentError("attention_mask", f"has {those}, the call has {q_len} and {kv_len}")
        return mask.pattern, mask.kv_lengths, mask.is_listed
    if mask is not None:
        if not isinstance(mask, torch.Tensor) or mask.dtype != torch.bool or mask.dim() != 4:
            what = f"{mask.dtype} {tuple(mask.shape)}" if isinstance(mask, torch.Tensor) else type(mask).__name__
            allowed = "bool (batch or 1, heads or 1, q_len, kv_len): additive masks are not supported"
            raise ArgumentError("attention_mask", f"is {what}, expected {allowed}")
        if mask.shape[2:] != (q_len, kv_len):
            raise ArgumentError(
                "attention_mask", f"is {tuple(mask.shape)}, the call has q_len {q_len}, kv_len {kv_len}"
            )
        return from_token_mask(mask), None, True
    if not is_causal:
        if window is not None:
            reason = f"is {window} without a mask and without causal attention: the visible keys are ambiguous"
            raise ArgumentError("sliding_window", reason)
        return Dense(), None, False
    if q_len not in (1, kv_len):
        reason = f"is missing, with {q_len} causal queries and {kv_len} keys: their alignment is ambiguous"
        raise ArgumentError("attention_mask", reason)
    return (Causal() if window is None or window >= kv_len else SlidingWindow(window - 1)), None, False
