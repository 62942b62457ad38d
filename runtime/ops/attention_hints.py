"""Messages for arguments of ``block_sparse_attention`` in the words of other libraries."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from codegen.wording import alternatives, shown
from runtime.errors import ArgumentError
from runtime.patterns import Pattern

_FLASH = "sparse_kernel_codegen.compat.flash_attn_func takes it"
_SDPA = "sparse_kernel_codegen.compat.scaled_dot_product_attention takes it"
_FLEX = "sparse_kernel_codegen.compat.flex_attention takes it"
_OTHERS: Mapping[str, str] = {
    "causal": f"the pattern is Causal(): block_sparse_attention(q, k, v, Causal()); {_FLASH}",
    "is_causal": f"the pattern is Causal(align='top_left'), or Causal() for q_len == kv_len; {_SDPA}",
    "window_size": f"the pattern is SlidingWindow(left, right); {_FLASH}",
    "sliding_window": "the pattern is SlidingWindow(left, right)",
    "block_mask": f"the pattern is the mask: block_sparse_attention(q, k, v, block_mask); {_FLEX}",
    "mask_mod": "the pattern is create_block_mask(mask_mod, B, H, Q_LEN, KV_LEN)",
    "attn_mask": f"the pattern is runtime.convert.from_token_mask(attn_mask); {_SDPA}",
    "attention_mask": "the pattern is runtime.convert.from_token_mask(mask)",
    "mask": "the pattern is runtime.convert.from_token_mask(mask)",
    "softmax_scale": f"write scale=; {_FLASH}",
    "sm_scale": "write scale=",
    "score_mod": f"write score=; {_FLEX}",
    "alibi_slopes": f"write score=Score('score + slope[head] * (kv_idx - q_idx)', aux={{'slope': slopes}}); {_FLASH}",
    "logits_soft_cap": "write softcap=",
    "soft_cap": "write softcap=",
    "learnable_sink": "write sink=",
    "sinks": "write sink=",
    "s_aux": "write sink=",
    "cache_seqlens": "write kv_lengths=",
    "seqused_k": "write kv_lengths=",
    "return_attn_probs": f"write return_lse=True; {_FLASH}",
    "return_aux": f"write return_lse=True; {_FLEX}",
    "return_softmax_lse": "write return_lse=True",
    "enable_gqa": "leave it out: the numbers of heads of q and k say it",
    "dropout_p": "leave it out: kernels have no dropout of attention weights",
    "kernel_options": "leave it out: kernels have no options of Triton",
}


def refuse_keywords(unknown: Mapping[str, Any], known: Iterable[str]) -> None:
    """Refuse keyword arguments that ``block_sparse_attention`` does not have.

    Args:
        unknown: the keywords and their values.
        known: the keywords that it has.

    Raises:
        ArgumentError: always, for the first one.
    """
    name, value = next(iter(unknown.items()))
    what = f"a {type(value).__name__}" if isinstance(value, torch.Tensor) or callable(value) else shown(value)
    hint = _OTHERS.get(name) or alternatives(name, known)
    raise ArgumentError(name, f"is {what}, and block_sparse_attention has no such argument: {hint}")


def refuse_pattern(pattern: Any) -> None:
    """Refuse an object that is no pattern.

    Raises:
        ArgumentError: always, naming ``pattern``, with the pattern that was meant if that is known.
    """
    expected = "expected an object of sparse_kernel_codegen.patterns or a FlexAttention BlockMask"
    if pattern is None:
        raise ArgumentError("pattern", f"is missing, {expected}, such as Causal()")
    if isinstance(pattern, str):
        classes = {each.kind: each.__name__ for each in Pattern.__subclasses__()}
        word = pattern.lower().replace("-", "_").replace(" ", "_")
        found = classes.get({"full": "dense", "window": "sliding_window", "local": "sliding_window"}.get(word, word))
        hint = f": write {found}({_EXAMPLES.get(found, '...')})" if found else ""
        raise ArgumentError("pattern", f"is {shown(pattern)}, {expected}{hint}")
    if isinstance(pattern, type) and issubclass(pattern, Pattern):
        name = pattern.__name__
        raise ArgumentError("pattern", f"is the class {name}: write {name}({_EXAMPLES.get(name, '...')})")
    if isinstance(pattern, torch.Tensor):
        hint = "runtime.convert.from_token_mask(mask) makes a pattern of a boolean mask"
        raise ArgumentError("pattern", f"is {type(pattern).__name__}, {expected}: {hint}")
    if callable(pattern):
        hint = "create_block_mask(mask_mod, B, H, Q_LEN, KV_LEN) makes a pattern of a mask_mod"
        raise ArgumentError("pattern", f"is {type(pattern).__name__}, {expected}: {hint}")
    raise ArgumentError("pattern", f"is {type(pattern).__name__}, {expected}")


_EXAMPLES = {"Dense": "", "Causal": "", "SlidingWindow": "left, right", "SinkWindow": "sink, left"}
"""Arguments of patterns, by class."""
