"""Kernels by the definition in place of ours, where calls over ranks make their local ones."""

from __future__ import annotations

from typing import Any

import attention_oracle
import oracle_kernel
import torch

from codegen.patterns import PATTERNS
from codegen.scored_pattern import ScoredPattern
from runtime.distributed import context, heads, inputs
from runtime.kernels import arguments
from runtime.kernels.attention import AttentionResult
from runtime.ops import attention_checks
from runtime.ops.attention_extras import Extras
from runtime.ops.attention_gradients import Gradients
from runtime.patterns import split_tensors


def seen_by(q: Any, k: Any, tensors: Any, scored: ScoredPattern, kv_lengths: Any) -> torch.Tensor:
    """Return how often each query sees each key; the pattern is one that a spec may have."""
    PATTERNS[scored.pattern.kind].model_validate(scored.pattern_fields)
    lists, aux = split_tensors(scored, tuple(tensors))
    return attention_oracle.times_seen(scored.text, lists, (*q.shape[:3], k.shape[2]), kv_lengths, aux)


def attend(
    q: Any,
    k: Any,
    v: Any,
    tensors: Any,
    scored: ScoredPattern,
    *,
    extras: Extras,
    lse: bool,
    out: Any = None,
) -> AttentionResult:
    """Stand for ``attend``, in the types of kernels."""
    assert lse and not (torch.is_grad_enabled() and q.requires_grad)
    seen = seen_by(q, k, tensors, scored, extras.kv_lengths)
    found, sums = attention_oracle.attention(q, k, v, seen, sink=extras.sink, **extras.numbers())
    out = torch.empty_like(q) if out is None else out
    return AttentionResult(out.copy_(found), sums)


def attend_backward(
    q: Any,
    k: Any,
    v: Any,
    tensors: Any,
    scored: ScoredPattern,
    *,
    extras: Extras,
    deterministic: bool,
    **passed: Any,
) -> Gradients:
    """Stand for ``attend_backward``, in the types of kernels."""
    out, lse, dout = (passed.pop(name) for name in ("out", "lse", "dout"))
    seen = seen_by(q, k, tensors, scored, extras.kv_lengths)
    found = attention_oracle.gradients(q, k, v, out, lse, dout, seen, **extras.numbers(), **passed)
    return Gradients(*(found[name].to(q.dtype) for name in ("dq", "dk", "dv")), None, ())


def install() -> None:
    """Put them there, for tensors on a CPU."""
    attention_checks.check_tensor = arguments.check_tensor = oracle_kernel._check_tensor
    for module in (context, heads):
        module.attend, module.attend_backward = attend, attend_backward  # type: ignore[assignment, attr-defined]
    inputs.chosen_for = lambda *_, **__: None  # type: ignore[assignment]
