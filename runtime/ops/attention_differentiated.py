"""Attention that autograd records without torch's dispatcher: calls that no mode, tracer or subclass watches.

Results, errors and what a call keeps are those of the operator (``runtime.ops.attention_autograd``), which the backward
pass uses where something watches it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch

from codegen.scored_pattern import ScoredPattern
from runtime.kernels.arguments import Signatures
from runtime.kernels.attention import AttentionResult
from runtime.ops.attention_calls import attend
from runtime.ops.attention_checks import check_operands
from runtime.ops.attention_extras import TENSORS, Extras
from runtime.ops.attention_gradients import attend_backward, chosen_for
from runtime.ops.block_sizes import Tensors
from runtime.ops.modes import PLAIN, is_watched
from runtime.ops.operators import check_gradients_given, needs
from runtime.receipts.mode import entered, mode

_SAME = nullcontext()
_permitted = Signatures()
"""Kinds of calls whose gradients can be computed."""


class _Call(NamedTuple):
    """A call, less its tensors.

    Attributes:
        scored: the pattern and the score.
        numbers: those of the call's extras.
        deterministic: of the call.
        lse: whether the caller requested the log-sum-exp.
        forward: options of the forward pass alone.
        mode: that of ``runtime.receipts.mode``.
    """

    scored: ScoredPattern
    numbers: tuple[Any, ...]
    deterministic: bool
    lse: bool
    forward: dict[str, Any]
    mode: bool | None


class _Attention(torch.autograd.Function):  # type: ignore[misc, unused-ignore]
    """Attention with gradients of q, k, v and the sinks."""

    @staticmethod
    def forward(ctx: Any, call: _Call, q: Any, k: Any, v: Any, *others: Any) -> Any:
        """Compute the result and the log-sum-exp, which the backward pass reads."""
        extras, options = Extras(*others[:TENSORS], *call.numbers), {**call.forward, "lse": True, "for_gradients": True}
        out, lse = attend(q, k, v, others[TENSORS:], call.scored, extras=extras, **options)
        ctx.save_for_backward(q, k, v, out, lse, *others)
        ctx.call = call
        ctx.set_materialize_grads(False)
        return (out, lse) if call.lse else out

    @staticmethod
    def backward(ctx: Any, dout: Any, dlse: Any = None) -> tuple[Any, ...]:
        """Gradients of q, k, v and the sinks."""
        call: _Call = ctx.call
        q, k, v, out, lse, *others = ctx.saved_tensors
        optional, tensors = others[:TENSORS], others[TENSORS:]
        wanted = ctx.needs_input_grad[1:5]
        check_gradients_given(dout, dlse)
        found: Sequence[Any] = (None,) * 4
        if dout is not None or dlse is not None:
            dout = torch.zeros_like(out) if dout is None else dout
            options: dict[str, Any] = {"deterministic": call.deterministic, **needs(wanted)}
            watched = torch.is_grad_enabled() or is_watched() or not {type(dout), type(dlse)} <= PLAIN
            extras = Extras(*optional, *call.numbers)
            with _SAME if mode() == call.mode else entered(call.mode):  # a thread of autograd has no mode of its own
                if watched:
                    inputs = dout, q, k, v, out, lse, dlse, tensors, *optional, call.scored.text
                    compute = torch.ops.sparse_kernel_codegen.block_sparse_attention_backward
                    found = compute(*inputs, **extras.numbers(), **options)[:4]
                else:
                    options |= {"dout": dout, "out": out, "lse": lse, "dlse": dlse}
                    found = attend_backward(q, k, v, tuple(tensors), call.scored, extras=extras, **options)[:4]
        kept = (gradient if needed else None for gradient, needed in zip(found, wanted, strict=True))
        return (None, *kept, *(None,) * (len(others) - 1))


def attend_with_gradients(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tensors: Tensors,
    scored: ScoredPattern,
    *,
    extras: Extras,
    deterministic: bool,
    lse: bool,
    out: None,
    **forward: Any,
) -> AttentionResult:
    """Compute attention, and record it for autograd.

    Args:
        q, k, v, tensors, scored: as of ``attend``.
        deterministic: whether gradients have the same bits in every call.
        extras, lse: as of ``attend``.
        out: None: what is written has no gradient.
        forward: other options of ``attend``.

    Raises:
        ArgumentError, SpecError: as ``attend``, and for what has no gradient.
    """
    del out
    deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
    verified = mode()
    key: Any = None
    try:
        key = (scored.text, q.shape[3], q.dtype, q.device, extras.kind(), deterministic, verified)
        permitted = _permitted.last[0] == key or _permitted.find(key)
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
        key, permitted = None, False
    if not permitted:
        check_operands(q, k, v)
        extras.check(q)
        chosen_for(q, scored, extras.features(), deterministic=deterministic)
        _permitted.keep(key, True)
    call = _Call(scored, extras[TENSORS:], deterministic, lse, forward, verified)
    found = _Attention.apply(call, q, k, v, *extras[:TENSORS], *tensors)  # type: ignore[no-untyped-call, unused-ignore]
    return AttentionResult(*found) if lse else AttentionResult(found, None)
