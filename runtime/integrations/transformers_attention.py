"""Attention of Hugging Face transformers: models built with ``attn_implementation="block_sparse"``."""

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
from runtime.integrations.transformers_masks import AttentionMask, MaskInterface
from runtime.ops.attention import block_sparse_attention
from runtime.patterns import Causal, Dense, Pattern, SlidingWindow

FUNCTIONS = "transformers.modeling_utils"
CONFIG_FIELD = "block_sparse"
"""Of a model's configuration: plain data that :func:`chooser_of` takes."""
NO_NAMES = ("eager", "sdpa", "flash", "flex", "paged")
"""Transformers takes implementations whose names have one of these inside for its own."""
REFUSED = ("position_bias", "head_mask", "output_attentions", "cu_seq_lens_q", "cu_seq_lens_k")
"""Arguments that change the result, and that nothing here computes."""


def register_transformers(
    name: str = "block_sparse", *, pattern_for: Chooser | None = None, decode: str | None = None
) -> None:
    """Make ``attn_implementation=name`` of transformers' models compute with this package's kernels.

    Each call is what the model's mask says: full, causal, sliding windows, padding, packed sequences; see
    ``runtime.integrations.transformers_masks.MaskInterface``. Grouped K/V heads are not repeated. Softcaps and sink
    logits of a model are kept. Models have weights in float16 or bfloat16 and run under ``torch.no_grad()``, on a GPU.
    Queries stand at the end of the keys (``bottom_right``), so prompts in parts and steps of decoding with a cache are
    right; a step with a single query takes a kernel whose tile is made for 64 or more.

    Args:
        name: of the implementation; registering it again replaces it, in models that have it already too.
        pattern_for: ``pattern_for(module, q, k, exact)`` returns the pattern of a call in place of the model's own one,
            ``exact``: :class:`TopKSelection`, or any function (q is (batch, heads, q_len,
            head_dim), k (batch, kv_heads, kv_len, head_dim)). Lengths of the keys hold on top of it. Where the mask is
            only to be had as lists (padding on the left, packed sequences) it must return ``exact``. By default, what
            ``model.config.block_sparse`` describes, as :func:`chooser_of` takes it, and ``exact``
            where there is no such field.
        decode: another implementation, such as ``"sdpa"``, that computes calls with a single query, by the model's own
            mask. By default this one does.

    Raises:
        ToolchainError: if transformers is not installed, naming the extra.
        ArgumentError: naming the argument.
    """
    functions, interface = optional(FUNCTIONS, "transformers"), MaskInterface.of_package()
    registered = functions.ALL_ATTENTION_FUNCTIONS
    if not isinstance(name, str) or not re.fullmatch(r"[a-z][a-z0-9_]*", name) or any(no in name for no in NO_NAMES):
        allowed = f"a lower-case identifier without any of {', '.join(NO_NAMES)} inside"
        raise ArgumentError("name", f"is {name!r}, expected {allowed}")
    if name in registered and not isinstance(registered[name], TransformersAttention):
        raise ArgumentError("name", f"is {name!r}, which someone else has registered")
    if decode is not None and (decode not in registered or isinstance(registered[decode], TransformersAttention)):
        names = ", ".join(sorted(each for each in registered if "|" not in each and each != name))
        raise ArgumentError("decode", f"is {decode!r}, expected one of {names}")
    if pattern_for is not None and not callable(pattern_for):
        raise ArgumentError("pattern_for", f"is {type(pattern_for).__name__}, expected a function or None")
    delegate = None if decode is None else _Delegate(decode, functions.ALL_ATTENTION_FUNCTIONS, interface.masks)
    functions.AttentionInterface.register(name, TransformersAttention(pattern_for, delegate))
    interface.masks.AttentionMaskInterface.register(name, interface)


@dataclass(frozen=True)
class _Delegate:
    """Another implementation, which the user has named."""

    name: str
    functions: Mapping[str, Any]
    masks: Any

    def __call__(self, module: Any, tensors: tuple[torch.Tensor, ...], mask: Any, options: dict[str, Any]) -> Any:
        """Return its result, of a mask that is ours or its own."""
        if isinstance(mask, AttentionMask):
            mask = mask.of_implementation(self.name, self.masks)
        given = {key: value for key, value in options.items() if value is not None}
        return self.functions[self.name](module, *tensors, mask, **given)[0]


@dataclass(frozen=True)
class TransformersAttention:
    """An attention function of transformers.

    Attributes:
        pattern_for: as :func:`register_transformers` has it.
        decode: computes calls with a single query; None if this function does.
    """

    pattern_for: Chooser | None = None
    decode: _Delegate | None = None

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
            scaling: of the logits, by default 1 / sqrt(head_dim).
            is_causal: where there is no mask; by default ``module.is_causal``.
            sliding_window: keys that a causal query sees, its own among them, where there is no mask.
            softcap: of the logits.
            s_aux: (heads,), sink logits.
            others: what else transformers passes on.

        Returns:
            (batch, q_len, heads, head_dim), and None for the weights, which no kernel writes out.

        Raises:
            ArgumentError: naming the argument, before anything is launched.
        """
        if self.decode is not None and query.shape[2] == 1:
            options = {
                "dropout": dropout,
                "scaling": scaling,
                "is_causal": is_causal,
                "sliding_window": sliding_window,
                "softcap": softcap,
                "s_aux": s_aux,
                **others,
            }
            return self.decode(module, (query, key, value), attention_mask, options), None
        for argument, passed in {"dropout": dropout, **{each: others.get(each) for each in REFUSED}}.items():
            if passed is not None and passed is not False and not (argument == "dropout" and passed == 0.0):
                shown = type(passed).__name__ if isinstance(passed, torch.Tensor) else repr(passed)
                raise ArgumentError(argument, f"is {shown}, which no kernel here computes: leave it out, or use sdpa")
        if is_causal is None:
            is_causal = bool(getattr(module, "is_causal", True))
        exact, lengths, is_listed = _pattern(attention_mask, query, key, is_causal, sliding_window)
        pattern = self._chosen(module, query, key, exact)
        if is_listed and pattern is not exact:
            reason = "is not of numbers (padding on the left or with holes, packed sequences, a mask of your own)"
            raise ArgumentError("attention_mask", f"{reason}, so pattern_for must return exact; pad on the right")
        out = block_sparse_attention(
            query,
            key,
            value,
            pattern,
            scale=scaling,
            softcap=softcap,
            sink=None if s_aux is None else s_aux.float(),
            kv_lengths=lengths,
        )
        return out.transpose(1, 2).contiguous(), None

    def _chosen(self, module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, exact: Pattern) -> Any:
        """Return the pattern of a call."""
        if self.pattern_for is not None:
            return self.pattern_for(module, query, key, exact)
        fields = getattr(getattr(module, "config", None), CONFIG_FIELD, None)
        if fields is None:
            return exact
        if not isinstance(fields, Mapping):
            raise ArgumentError(f"config.{CONFIG_FIELD}", f"is {type(fields).__name__}, expected a dictionary")
        return chooser_of(fields, f"config.{CONFIG_FIELD}")(module, query, key, exact)


def _pattern(
    mask: Any, query: torch.Tensor, key: torch.Tensor, is_causal: bool, window: int | None
) -> tuple[Pattern, torch.Tensor | None, bool]:
    """Return the pattern of a call, the lengths of its keys, and whether all of its mask is in lists."""
    q_len, kv_len = query.shape[2], key.shape[2]
    if isinstance(mask, AttentionMask):
        if (mask.q_len, mask.kv_len) != (q_len, kv_len):
            those = f"{mask.q_len} queries and {mask.kv_len} keys"
            raise ArgumentError("attention_mask", f"is of {those}, the call has {q_len} and {kv_len}")
        return mask.pattern, mask.kv_lengths, mask.is_listed
    if mask is not None:
        if not isinstance(mask, torch.Tensor) or mask.dtype != torch.bool or mask.dim() != 4:
            what = f"{mask.dtype} {tuple(mask.shape)}" if isinstance(mask, torch.Tensor) else type(mask).__name__
            allowed = "bool (batch or 1, heads or 1, q_len, kv_len): no kernel adds a bias"
            raise ArgumentError("attention_mask", f"is {what}, expected {allowed}")
        if mask.shape[2:] != (q_len, kv_len):
            raise ArgumentError(
                "attention_mask", f"is {tuple(mask.shape)}, the call has q_len {q_len}, kv_len {kv_len}"
            )
        return from_token_mask(mask), None, True
    if not is_causal:
        if window is not None:
            reason = f"is {window} without a mask and without causal attention: which keys it means is not told"
            raise ArgumentError("sliding_window", reason)
        return Dense(), None, False
    if q_len not in (1, kv_len):
        reason = f"is missing, with {q_len} causal queries of {kv_len} keys: where they stand is not told"
        raise ArgumentError("attention_mask", reason)
    return (Causal() if window is None or window >= kv_len else SlidingWindow(window - 1)), None, False
