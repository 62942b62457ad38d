"""Gradients of the attention operators, and the operator that computes them.

Between the passes a call keeps q, k, v, the result, its log-sum-exp, the pattern's tensors and, where it has them, the
sinks and the lengths of batches; nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch.autograd import forward_ad

from codegen.scored_pattern import ScoredPattern, scored_pattern
from runtime.errors import ArgumentError
from runtime.kernels.arguments import NO_TANGENT, has_tangent
from runtime.ops.attention_checks import check_types
from runtime.ops.attention_extras import NUMBER_SCHEMA, TENSOR_SCHEMA, TENSORS, Extras
from runtime.ops.attention_gradients import attend_backward, learned_aux
from runtime.ops.operators import NAMESPACE, NO_SECOND, STRIDES, check_gradients_given, like, needs, nothing
from runtime.patterns import split_tensors
from runtime.receipts.mode import entered, mode

_NAME = "block_sparse_attention_backward"
_SCHEMA = (
    f"{_NAME}(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? dlse, Tensor?[] tensors, "
    f"{TENSOR_SCHEMA}, str spec_json, *, {NUMBER_SCHEMA}, "
    "bool deterministic=True, bool dq=True, bool dkdv=True, bool dsink=False, str[]? daux=None) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor[])"
)
_OPTIONS = (*Extras._fields[TENSORS:], "deterministic")
"""Options of a call that its backward pass has too."""
Found = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, list[torch.Tensor]]


def _run(*arguments: Any, **options: Any) -> Found:
    """Compute the operator: gradients that are not requested have no elements."""
    dout, q, k, v, out, lse, dlse, tensors, *optional, text = arguments
    extras = Extras.of(optional, options)
    options |= {"dout": dout, "out": out, "lse": lse, "dlse": dlse}
    found = attend_backward(q, k, v, tuple(tensors), scored_pattern(text), extras=extras, **options)
    dq, dk, dv, dsink = (nothing(q) if gradient is None else gradient for gradient in found[:4])
    return dq, dk, dv, dsink, list(found.daux)


def _fake(
    *arguments: Any,
    dq: bool = True,
    dkdv: bool = True,
    dsink: bool = False,
    daux: Sequence[str] | None = None,
    **_: Any,
) -> Found:
    """Tensors like the gradients, without values."""
    dout, q, k, v, out, lse, dlse, tensors, *optional, text = arguments
    scored, extras = scored_pattern(text), Extras(*optional)
    check_types(q, k, v, tensors, scored, extras=extras)
    sink: Any = extras.sink
    if dsink and sink is None:
        raise ArgumentError("sink", "is missing, and its gradient is wanted")
    for name, tensor in (("dout", dout), ("out", out)):
        if tensor.dtype != q.dtype:
            raise ArgumentError(name, f"is {tensor.dtype}, q is {q.dtype}: pass one type")
    for name, tensor in (("lse", lse), ("dlse", dlse)):
        if tensor is not None and tensor.dtype != torch.float32:
            raise ArgumentError(name, f"is {tensor.dtype}, expected torch.float32")
    wanted = (dq, q), (dkdv, k), (dkdv, v)
    first, second, third = (like(tensor) if needed else nothing(q) for needed, tensor in wanted)
    aux = split_tensors(scored, tensors)[1]
    of_aux = [aux[name].new_empty(aux[name].shape) for name in daux or ()]
    return first, second, third, sink.new_empty(sink.shape) if dsink else nothing(q), of_aux


def _refuse_second(ctx: Any, *gradients: Any) -> NoReturn:
    """Refuse a gradient of the gradients."""
    raise ArgumentError("block_sparse_attention", NO_SECOND)


def _refuse_vmap(*_: Any) -> NoReturn:
    reason = "is mapped by torch.vmap: pass the batch as a dimension, (batch, heads, length, head_dim)"
    raise ArgumentError("dout, q, k and v", f"one of them {reason}")


_library = torch.library.Library(NAMESPACE, "FRAGMENT")
_library.define(_SCHEMA, tags=(torch.Tag.pt2_compliant_tag, STRIDES))
_library.impl(_NAME, _run, "CompositeExplicitAutograd")
torch.library.register_fake(f"{NAMESPACE}::{_NAME}", _fake, lib=_library)
torch.library.register_autograd(f"{NAMESPACE}::{_NAME}", _refuse_second, lib=_library)
torch.library.register_vmap(f"{NAMESPACE}::{_NAME}", _refuse_vmap, lib=_library)


class _Forward(NamedTuple):
    """A call of the operator below autograd.

    Attributes:
        overload: the operator.
        keys: of the dispatcher, those that come after autograd's.
        others: its arguments after the optional tensors.
        options: those by name.
    """

    overload: Any
    keys: Any
    others: tuple[Any, ...]
    options: dict[str, Any]


class _Attention(torch.autograd.Function):  # type: ignore[misc, unused-ignore]
    """Attention with gradients of q, k, v, the sinks and floating-point tensors of the score."""

    @staticmethod
    def forward(ctx: Any, call: _Forward, q: Any, k: Any, v: Any, *others: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the result, and the LSE, which the caller may not have requested."""
        options = {**call.options, "gradients": True}
        with torch._C._AutoDispatchBelowAutograd():
            inputs = q, k, v, list(others[TENSORS:]), *others[:TENSORS], *call.others
            out, lse = call.overload.redispatch(call.keys, *inputs, **options)
        ctx.save_for_backward(q, k, v, out, lse, *others)
        ctx.text, ctx.mode = call.others[-1], mode()
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
        """Gradients of q, k, v, the sinks and tensors of the score."""
        q, k, v, out, lse, *others = ctx.saved_tensors
        tensors = others[TENSORS:]
        wanted = ctx.needs_input_grad[1:5]
        named = _named(scored_pattern(ctx.text), ctx.needs_input_grad[4 + TENSORS :])
        found: Sequence[Any] = (None,) * 4
        of_named: Sequence[Any] = ()
        check_gradients_given(dout, dlse)
        if dout is not None or dlse is not None:
            dout = torch.zeros_like(out) if dout is None else dout
            compute = torch.ops.sparse_kernel_codegen.block_sparse_attention_backward
            inputs = dout, q, k, v, out, lse, dlse, tensors, *others[:TENSORS], ctx.text
            with entered(ctx.mode):  # a thread of autograd has none of its own
                *found, of_named = compute(*inputs, **ctx.options, **needs(wanted), daux=list(named))
        kept = [gradient if needed else None for gradient, needed in zip(found, wanted, strict=True)]
        of_tensors: list[Any] = [None] * len(tensors)
        for place, gradient in zip(named.values(), of_named, strict=False):  # none, where there is no gradient at all
            of_tensors[place] = gradient
        return (None, *kept, *(None,) * (TENSORS - 1), *of_tensors)


def _named(scored: ScoredPattern, needs: Sequence[bool]) -> dict[str, int]:
    """Places of the score's tensors that need a gradient, among a call's tensors, by name."""
    names = scored.aux_names
    places = zip(names, range(len(needs) - len(names), len(needs)), strict=True)
    return {name: place for name, place in places if needs[place] and name in scored.score_names}


def is_differentiated(*tensors: Any) -> bool:
    """Whether gradients are enabled, and one of the tensors requires one."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def each_tensor(overload: Any, arguments: Sequence[Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors among the arguments of an operator, each with the name of its argument."""
    for each, value in zip(overload._schema.arguments, arguments, strict=False):
        for tensor in value if isinstance(value, list | tuple) else (value,):
            if isinstance(tensor, torch.Tensor):
                yield "pattern" if each.name == "tensors" else each.name, tensor


def refuse_tangents(overload: Any, arguments: Sequence[Any]) -> None:
    """Refuse what forward-mode differentiation follows: below autograd it would be dropped without a word."""
    if forward_ad._current_level < 0:
        return
    for name, tensor in each_tensor(overload, arguments):
        if has_tangent(tensor):
            raise ArgumentError(name, NO_TANGENT)


def check_recordable(overload: Any, arguments: Sequence[Any]) -> None:
    """Refuse what autograd cannot record for a backward pass.

    Raises:
        ArgumentError: within a transform of torch.func, or for a tensor of inference mode.
    """
    if torch._C._are_functorch_transforms_active():
        reason = "is differentiated by a transform of torch.func, which sees no gradient of this operator"
        raise ArgumentError("q, k and v", f"one of them {reason}: call torch.autograd.grad, or backward")
    for name, tensor in each_tensor(overload, arguments):
        if tensor.is_inference():
            reason = "was made under torch.inference_mode(), and autograd cannot keep it"
            raise ArgumentError(name, f"{reason} for the backward pass: pass a clone made outside of it")


def with_gradients(overload: Any) -> Callable[..., Any]:
    """Autograd implementation of the operator that returns a new result.

    Raises:
        ArgumentError, SpecError: by what is returned, for what has no gradient.
    """

    def called(keys: Any, *arguments: Any, **options: Any) -> Any:
        refuse_tangents(overload, arguments)
        below = keys & torch._C._after_autograd_keyset
        q, k, v, tensors, *others = arguments
        optional, others = others[:TENSORS], others[TENSORS:]
        learned = learned_aux(scored_pattern(others[-1]), tensors) if torch.is_grad_enabled() else ()
        if learned or is_differentiated(q, k, v, Extras(*optional).sink):
            check_recordable(overload, arguments)
            call = _Forward(overload, below, tuple(others), {**options, "aux_gradients": list(learned)})
            return _Attention.apply(call, q, k, v, *optional, *tensors)  # type: ignore[no-untyped-call, unused-ignore]
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
        named = {each.name: value for each, value in zip(overload._schema.arguments, arguments, strict=False)}
        learned = learned_aux(scored_pattern(arguments[-1]), named["tensors"]) if torch.is_grad_enabled() else ()
        differentiated = (
            name for name, value in named.items() if isinstance(value, torch.Tensor) and is_differentiated(value)
        )
        for name in (*differentiated, *learned):
            reason = f"is given, and {name} requires a gradient, which what is written has not"
            raise ArgumentError("out", f"{reason}; leave it out, or call it under torch.no_grad()")
        with torch._C._AutoDispatchBelowAutograd():
            return overload.redispatch(keys & torch._C._after_autograd_keyset, *arguments, **options)

    return called


def never_with_gradients(
    overload: Any, why: str = "FP8 has no backward: use bf16, or torch.no_grad()"
) -> Callable[..., Any]:
    """Autograd implementation of an operator without a backward: refuse tensors that require a gradient.

    Raises:
        ArgumentError: by what is returned.
    """

    def called(keys: Any, *arguments: Any, **options: Any) -> Any:
        refuse_tangents(overload, arguments)
        for name, tensor in each_tensor(overload, arguments):
            if is_differentiated(tensor):
                raise ArgumentError(name, f"requires a gradient, and {why}")
        with torch._C._AutoDispatchBelowAutograd():
            return overload.redispatch(keys & torch._C._after_autograd_keyset, *arguments, **options)

    return called
