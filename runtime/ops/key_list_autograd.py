"""Gradients of the operators of attention over lists of keys, and the operator that computes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import torch

from runtime.errors import ArgumentError
from runtime.ops.attention_autograd import check_recordable, is_differentiated, refuse_tangents
from runtime.ops.key_list_calls import Lists, check_list_call
from runtime.ops.key_list_gradients import attend_key_lists_backward
from runtime.ops.operators import NAMESPACE, NO_SECOND, STRIDES, check_gradients_given, nothing
from runtime.ops.varlen_autograd import refuse_vmap
from runtime.ops.varlen_calls import Bounds
from runtime.receipts.mode import entered, mode

_NAME = "key_list_attention_backward"
_SCHEMA = (
    f"{_NAME}(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, Tensor lists, "
    "Tensor? counts, Tensor out, Tensor lse, Tensor? dlse, *, int entry_keys, float? scale=None) "
    "-> (Tensor, Tensor, Tensor)"
)
_OPTIONS = ("entry_keys", "scale")
"""Options of a call that its backward pass has too."""
Found = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _run(*arguments: Any, entry_keys: int, **options: Any) -> Found:
    """Compute the operator."""
    dout, q, k, v, cu_seqlens_q, cu_seqlens_k, lists, counts, out, lse, dlse = arguments
    listed, bounds = Lists(lists, counts, entry_keys), Bounds(cu_seqlens_q, cu_seqlens_k)
    rows = {"dout": dout, "out": out, "lse": lse, "dlse": dlse}
    return tuple(attend_key_lists_backward(q, k, v, bounds, listed, **rows, **options))  # type: ignore[return-value, unused-ignore]


def _fake(*arguments: Any, entry_keys: int, **_: Any) -> Found:
    """Tensors like the gradients, without values."""
    dout, q, k, v, cu_seqlens_q, cu_seqlens_k, lists, counts, out, lse, dlse = arguments
    listed, bounds = Lists(lists, counts, entry_keys), Bounds(cu_seqlens_q, cu_seqlens_k)
    check_list_call(q, k, v, bounds, listed, sink=None, on_gpu=False)
    for name, tensor in (("dout", dout), ("out", out)):
        if tensor.dtype != q.dtype:
            raise ArgumentError(name, f"is {tensor.dtype}, q is {q.dtype}: pass one type")
    for name, tensor in (("lse", lse), ("dlse", dlse)):
        if tensor is not None and tensor.dtype != torch.float32:
            raise ArgumentError(name, f"is {tensor.dtype}, expected torch.float32")
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _refuse_second(ctx: Any, *gradients: Any) -> NoReturn:
    """Refuse a gradient of the gradients."""
    raise ArgumentError("varlen_attention", NO_SECOND)


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
        options: arguments by name.
    """

    overload: Any
    keys: Any
    options: dict[str, Any]


class _Attention(torch.autograd.Function):  # type: ignore[misc, unused-ignore]
    """Attention over lists of keys with gradients of q, k and v."""

    @staticmethod
    def forward(ctx: Any, call: _Forward, *tensors: Any) -> tuple[Any, Any]:
        """Compute the result, and the LSE, which the caller may not have requested."""
        options = {**call.options, "gradients": True}
        with torch._C._AutoDispatchBelowAutograd():
            out, lse = call.overload.redispatch(call.keys, *tensors, **options)
        ctx.save_for_backward(*tensors[:-1], out, lse)
        ctx.mode = mode()
        ctx.options = {name: call.options[name] for name in _OPTIONS if name in call.options}
        ctx.set_materialize_grads(False)
        if call.options.get("lse"):
            return out, lse
        unasked = nothing(out)
        ctx.mark_non_differentiable(unasked)
        return out, unasked

    @staticmethod
    def backward(ctx: Any, dout: Any, dlse: Any) -> tuple[Any, ...]:
        """Gradients of q, k and v."""
        *inputs, out, lse = ctx.saved_tensors
        wanted = ctx.needs_input_grad[1:]
        check_gradients_given(dout, dlse)
        found: tuple[Any, ...] = (None,) * 3
        if dout is not None or dlse is not None:
            dout = torch.zeros_like(out) if dout is None else dout
            compute = torch.ops.sparse_kernel_codegen.key_list_attention_backward
            with entered(ctx.mode):  # a thread of autograd has none of its own
                found = compute(dout, *inputs, out, lse, dlse, **ctx.options)
        kept = (gradient if needed else None for gradient, needed in zip(found, wanted, strict=False))
        return (None, *kept, *(None,) * (len(wanted) - len(found)))


def with_gradients(overload: Any) -> Callable[..., Any]:
    """Autograd implementation of the operator that returns a new result.

    Raises:
        ArgumentError: by what is returned, for what has no gradient.
    """

    def called(keys: Any, *arguments: Any, **options: Any) -> Any:
        refuse_tangents(overload, arguments)
        below = keys & torch._C._after_autograd_keyset
        if is_differentiated(*arguments):
            check_recordable(overload, arguments)
            return _Attention.apply(_Forward(overload, below, options), *arguments)  # type: ignore[no-untyped-call, unused-ignore]
        with torch._C._AutoDispatchBelowAutograd():
            return overload.redispatch(below, *arguments, **options)

    return called
