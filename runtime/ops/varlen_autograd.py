"""Gradients of the operators of packed sequences, and the operator that computes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import torch

from codegen.scored_pattern import scored_pattern
from runtime.errors import ArgumentError
from runtime.ops.attention_autograd import check_recordable, each_tensor, is_differentiated, refuse_tangents
from runtime.ops.operators import NAMESPACE, NO_SECOND, STRIDES, check_gradients_given, like, needs, nothing
from runtime.ops.packed_lists import check_lists
from runtime.ops.varlen_calls import Bounds, check_bounds, check_operands
from runtime.ops.varlen_gradients import attend_varlen_backward
from runtime.receipts.mode import entered, mode

_NAME = "varlen_attention_backward"
_SCHEMA = (
    f"{_NAME}(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, Tensor out, "
    "Tensor lse, Tensor? dlse, Tensor? sink, Tensor?[] lists, str spec_json, *, float? scale=None, "
    "float? softcap=None, bool deterministic=True, bool dq=True, bool dkdv=True, bool dsink=False) "
    "-> (Tensor, Tensor, Tensor, Tensor)"
)
_OPTIONS = ("scale", "softcap", "deterministic")
"""Options of a call that its backward pass has too."""
Found = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def _run(*arguments: Any, **options: Any) -> Found:
    """Compute the operator: gradients that are not requested have no elements."""
    dout, q, k, v, cu_seqlens_q, cu_seqlens_k, out, lse, dlse, sink, lists, text = arguments
    options |= {"dout": dout, "out": out, "lse": lse, "dlse": dlse, "sink": sink, "lists": tuple(lists)}
    found = attend_varlen_backward(q, k, v, Bounds(cu_seqlens_q, cu_seqlens_k), scored_pattern(text), **options)
    dq, dk, dv, dsink = (nothing(q) if gradient is None else gradient for gradient in found[:4])
    return dq, dk, dv, dsink


def _fake(*arguments: Any, dq: bool = True, dkdv: bool = True, dsink: bool = False, **_: Any) -> Found:
    """Tensors like the gradients, without values."""
    dout, q, k, v, cu_seqlens_q, cu_seqlens_k, out, lse, dlse, sink, lists, text = arguments
    check_operands(q, k, v, on_gpu=False)
    bounds = Bounds(cu_seqlens_q, cu_seqlens_k)
    check_bounds(q, bounds)
    check_lists(q, k, bounds, scored_pattern(text), lists)
    if dsink and sink is None:
        raise ArgumentError("sink", "is missing, and its gradient is wanted")
    for name, tensor in (("dout", dout), ("out", out)):
        if tensor.dtype != q.dtype:
            raise ArgumentError(name, f"is {tensor.dtype}, q is {q.dtype}: pass one type")
    for name, tensor in (("lse", lse), ("dlse", dlse)):
        if tensor is not None and tensor.dtype != torch.float32:
            raise ArgumentError(name, f"is {tensor.dtype}, expected torch.float32")
    first, second, third = (like(t) if needed else nothing(q) for needed, t in ((dq, q), (dkdv, k), (dkdv, v)))
    return first, second, third, sink.new_empty(sink.shape) if dsink else nothing(q)


def _refuse_second(ctx: Any, *gradients: Any) -> NoReturn:
    """Refuse a gradient of the gradients."""
    raise ArgumentError("varlen_attention", NO_SECOND)


def refuse_vmap(*_: Any) -> NoReturn:
    """Refuse mapped operands."""
    raise ArgumentError(
        "q, k and v", "one of them is mapped by torch.vmap: pass all sequences as one, with their bounds"
    )


_library = torch.library.Library(NAMESPACE, "FRAGMENT")
_library.define(_SCHEMA, tags=(torch.Tag.pt2_compliant_tag, STRIDES))
_library.impl(_NAME, _run, "CompositeExplicitAutograd")
torch.library.register_fake(f"{NAMESPACE}::{_NAME}", _fake, lib=_library)
torch.library.register_autograd(f"{NAMESPACE}::{_NAME}", _refuse_second, lib=_library)
torch.library.register_vmap(f"{NAMESPACE}::{_NAME}", refuse_vmap, lib=_library)


class _Forward(NamedTuple):
    """A call of the operator below autograd.

    Attributes:
        overload: the operator.
        keys: of the dispatcher, those that come after autograd's.
        text: the pattern.
        options: arguments by name.
    """

    overload: Any
    keys: Any
    text: str
    options: dict[str, Any]


class _Attention(torch.autograd.Function):  # type: ignore[misc, unused-ignore]
    """Attention of packed sequences with gradients of q, k, v and the sinks."""

    @staticmethod
    def forward(ctx: Any, call: _Forward, *tensors: Any) -> tuple[Any, Any]:
        """Compute the result, and the LSE, which the caller may not have requested."""
        q, k, v, sink, *others = tensors
        bounds, lists = others[:2], others[2:]
        options = {**call.options, "gradients": True}
        with torch._C._AutoDispatchBelowAutograd():
            out, lse = call.overload.redispatch(call.keys, q, k, v, *bounds, sink, lists, call.text, **options)
        ctx.save_for_backward(q, k, v, out, lse, sink, *others)
        ctx.text, ctx.mode = call.text, mode()
        ctx.options = {name: call.options[name] for name in _OPTIONS if name in call.options}
        if torch.are_deterministic_algorithms_enabled():  # of this call, whatever is set when its backward pass runs
            ctx.options["deterministic"] = True
        ctx.set_materialize_grads(False)
        if call.options.get("lse"):
            return out, lse
        unasked = nothing(q)
        ctx.mark_non_differentiable(unasked)
        return out, unasked

    @staticmethod
    def backward(ctx: Any, dout: Any, dlse: Any) -> tuple[Any, ...]:
        """Gradients of q, k, v and the sinks."""
        q, k, v, out, lse, sink, *others = ctx.saved_tensors
        bounds, lists = others[:2], others[2:]
        wanted = ctx.needs_input_grad[1:5]
        check_gradients_given(dout, dlse)
        found: Sequence[Any] = (None,) * 4
        if dout is not None or dlse is not None:
            dout = torch.zeros_like(out) if dout is None else dout
            compute = torch.ops.sparse_kernel_codegen.varlen_attention_backward
            with entered(ctx.mode):  # a thread of autograd has none of its own
                of_call = (q, k, v, *bounds, out, lse, dlse, sink, lists)
                found = compute(dout, *of_call, ctx.text, **ctx.options, **needs(wanted))
        kept = (gradient if needed else None for gradient, needed in zip(found, wanted, strict=True))
        return (None, *kept, *(None,) * len(others))


def with_gradients(overload: Any) -> Callable[..., Any]:
    """Autograd implementation of the operator that returns a new result.

    Raises:
        ArgumentError, SpecError: by what is returned, for what has no gradient.
    """

    def called(keys: Any, *arguments: Any, **options: Any) -> Any:
        refuse_tangents(overload, arguments)
        below = keys & torch._C._after_autograd_keyset
        q, k, v, cu_seqlens_q, cu_seqlens_k, sink, lists, text = arguments
        if is_differentiated(q, k, v, sink):
            check_recordable(overload, arguments)
            call = _Forward(overload, below, text, options)
            return _Attention.apply(call, q, k, v, sink, cu_seqlens_q, cu_seqlens_k, *lists)  # type: ignore[no-untyped-call, unused-ignore]
        with torch._C._AutoDispatchBelowAutograd():
            return overload.redispatch(below, *arguments, **options)

    return called


def without_gradients(overload: Any) -> Callable[..., Any]:
    """Autograd implementation of the operator that writes into ``out``: refuse tensors that require a gradient.

    Raises:
        ArgumentError: by what is returned.
    """

    def called(keys: Any, *arguments: Any, **options: Any) -> Any:
        refuse_tangents(overload, arguments)
        for name, tensor in each_tensor(overload, arguments):
            if is_differentiated(tensor):
                reason = f"is given, and {name} requires a gradient, which what is written has not"
                raise ArgumentError("out", f"{reason}; leave it out, or call it under torch.no_grad()")
        with torch._C._AutoDispatchBelowAutograd():
            return overload.redispatch(keys & torch._C._after_autograd_keyset, *arguments, **options)

    return called
