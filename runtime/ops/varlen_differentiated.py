"""Attention of packed sequences that autograd records without torch's dispatcher.

Results, errors and what a call keeps are those of the operator (``runtime.ops.varlen_autograd``), which the backward
pass uses where something watches it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from codegen.scored_pattern import ScoredPattern
from runtime.kernels.arguments import Signatures
from runtime.kernels.attention import AttentionResult
from runtime.ops.modes import PLAIN, is_watched
from runtime.ops.operators import check_gradients_given, needs
from runtime.ops.packed_lists import Lists, check_lists
from runtime.ops.varlen_calls import Bounds, attend_varlen, check_call
from runtime.ops.varlen_gradients import attend_varlen_backward, check_gradients
from runtime.receipts.mode import entered, mode

_permitted = Signatures()
"""Kinds of calls whose gradients can be computed."""


class _Call(NamedTuple):
    """A call, less its tensors.

    Attributes:
        scored: the pattern.
        scale, softcap, deterministic: of the call.
        lse: whether the caller requested the log-sum-exp.
        validate: whether the values of the bounds are checked.
        mode: that of ``runtime.receipts.mode``.
    """

    scored: ScoredPattern
    scale: float | None
    softcap: float | None
    deterministic: bool
    lse: bool
    validate: bool
    mode: bool | None


class _Attention(torch.autograd.Function):  # type: ignore[misc, unused-ignore]
    """Attention of packed sequences with gradients of q, k, v and the sinks."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *tensors: Any) -> Any:
        """Compute the result and the log-sum-exp, which the backward pass reads."""
        q, k, v, sink, *others = tensors
        bounds, lists = others[:2], tuple(others[2:])
        options: dict[str, Any] = {"scale": call.scale, "softcap": call.softcap, "sink": sink}
        options |= {"validate": call.validate, "lists": lists}
        out, lse = attend_varlen(q, k, v, Bounds(*bounds), call.scored, **options, lse=True)
        ctx.save_for_backward(q, k, v, out, lse, sink, *others)
        ctx.call = call
        ctx.set_materialize_grads(False)
        return (out, lse) if call.lse else out

    @staticmethod
    def backward(ctx: Any, dout: Any, dlse: Any = None) -> tuple[Any, ...]:
        """Gradients of q, k, v and the sinks."""
        call: _Call = ctx.call
        q, k, v, out, lse, sink, *others = ctx.saved_tensors
        bounds, lists = others[:2], tuple(others[2:])
        wanted = ctx.needs_input_grad[1:5]
        check_gradients_given(dout, dlse)
        found: Sequence[Any] = (None,) * 4
        if dout is not None or dlse is not None:
            dout = torch.zeros_like(out) if dout is None else dout
            options: dict[str, Any] = {"scale": call.scale, "softcap": call.softcap, **needs(wanted)}
            options["deterministic"] = call.deterministic
            watched = torch.is_grad_enabled() or is_watched() or not {type(dout), type(dlse)} <= PLAIN
            with entered(call.mode):  # a thread of autograd has no mode of its own
                if watched:
                    compute = torch.ops.sparse_kernel_codegen.varlen_attention_backward
                    of_call = (q, k, v, *bounds, out, lse, dlse, sink, lists)
                    found = compute(dout, *of_call, call.scored.text, **options)
                else:
                    options |= {"dout": dout, "out": out, "lse": lse, "dlse": dlse, "sink": sink, "lists": lists}
                    found = attend_varlen_backward(q, k, v, Bounds(*bounds), call.scored, **options)[:4]
        kept = (gradient if needed else None for gradient, needed in zip(found, wanted, strict=True))
        return (None, *kept, *(None,) * len(others))


def attend_varlen_with_gradients(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bounds: Bounds,
    scored: ScoredPattern,
    *,
    deterministic: bool,
    scale: float | None,
    softcap: float | None,
    sink: torch.Tensor | None,
    lse: bool,
    validate: bool,
    lists: Lists = (),
) -> AttentionResult:
    """Compute attention of packed sequences, and record it for autograd.

    Args:
        q, k, v, bounds, scored: as of ``attend_varlen``.
        deterministic: whether gradients have the same bits in every call.
        scale, softcap, sink, lse, validate, lists: as of ``attend_varlen``.

    Raises:
        ArgumentError, SpecError: as ``attend_varlen``, and for what has no gradient.
    """
    deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
    key: Any = None
    try:
        key = (scored.text, q.shape[2], q.dtype, q.device, softcap, sink is not None, deterministic, mode())
        permitted = _permitted.last[0] == key or _permitted.find(key)
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
        key, permitted = None, False
    if not permitted:
        with torch.no_grad():
            softcap = check_call(q, k, v, bounds, scale=scale, softcap=softcap, sink=sink)
            check_lists(q, k, bounds, scored, lists)
        check_gradients(q, scored, softcap=softcap, deterministic=deterministic)
        _permitted.keep(key, True)
    call = _Call(scored, scale, softcap, deterministic, lse, validate, mode())
    found = _Attention.apply(call, q, k, v, sink, *bounds, *lists)  # type: ignore[no-untyped-call, unused-ignore]
    return AttentionResult(*found) if lse else AttentionResult(found, None)
