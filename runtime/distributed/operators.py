"""torch operators of distributed attention, for ``torch.compile`` and autograd.

For the backward pass, ``context_parallel_attention`` saves its inputs, its result and its log-sum-exp; keys and values
of other ranks are sent again. ``head_parallel_attention`` also saves q, k, v and the results of its heads over the
whole sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

from runtime.distributed import context, heads
from runtime.distributed.agreement import check_not_stopped, group_of, known_if_done, state_of, underway
from runtime.distributed.inputs import Inputs, finished, prepare
from runtime.distributed.plan import plan_of
from runtime.errors import ArgumentError
from runtime.ops.attention_extras import NUMBER_SCHEMA, TENSOR_SCHEMA, TENSORS, Extras
from runtime.ops.operators import NAMESPACE, NO_SECOND, STRIDES, like, nothing
from runtime.receipts.mode import entered, mode

CONTEXT, HEADS = "context_parallel_attention", "head_parallel_attention"
_INPUTS = f"Tensor q, Tensor k, Tensor v, Tensor?[] tensors, {TENSOR_SCHEMA}, str plan"
_OPTIONS = f"*, {NUMBER_SCHEMA}, bool deterministic=True"
_FORWARD = f"({_INPUTS}, {_OPTIONS}, bool validate=False, bool gradients=False)"
_BACKWARD = f"(Tensor dout, Tensor? dlse, Tensor[] saved, {_INPUTS}, {_OPTIONS}, bool dsink=False)"
Two = tuple[torch.Tensor, torch.Tensor]
Four = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def _inputs(arguments: Sequence[Any], options: dict[str, Any]) -> Inputs:
    q, k, v, tensors, *optional, _plan = arguments
    return Inputs(q, k, v, tuple(tensors), Extras.of(optional, options))


def _context(
    *arguments: Any, validate: bool = False, gradients: bool = False, deterministic: bool = True, **options: Any
) -> Two:
    """Compute context_parallel_attention."""
    plan, inputs = plan_of(arguments[-1]), _inputs(arguments, options)
    kind, agreed = prepare(CONTEXT, plan, inputs, gradients=gradients, validate=validate, deterministic=deterministic)
    with underway(group_of(plan.group), CONTEXT), known_if_done(group_of(plan.group), kind):
        found = context.forward(plan, inputs, validate=validate, together=agreed)
        if validate:
            finished(CONTEXT, plan, inputs)
    return found


def _heads(
    *arguments: Any, validate: bool = False, gradients: bool = False, deterministic: bool = True, **options: Any
) -> tuple[torch.Tensor, ...]:
    """Compute head_parallel_attention, and the tensors that its backward pass needs."""
    plan, inputs = plan_of(arguments[-1]), _inputs(arguments, options)
    kind, agreed = prepare(HEADS, plan, inputs, gradients=gradients, validate=validate, deterministic=deterministic)
    with underway(group_of(plan.group), HEADS), known_if_done(group_of(plan.group), kind):
        out, lse, saved = heads.forward(plan, inputs, gradients=gradients, together=agreed)
        if validate:
            finished(HEADS, plan, inputs)
    return out, lse, *saved


def _backward_of(name: str, compute: Callable[..., Any]) -> Callable[..., Four]:
    """The backward operator of ``name``. The gradient of sinks is empty unless ``dsink`` is set."""

    def run(*arguments: Any, dsink: bool = False, deterministic: bool = True, **options: Any) -> Four:
        dout, dlse, saved, *given = arguments
        plan, inputs = plan_of(given[-1]), _inputs(given, options)
        group, what = group_of(plan.group), f"the gradients of {name}"
        check_not_stopped(group, what)
        kind = (what, plan, inputs.kind())
        passed: dict[str, Any] = {"dlse": dlse, "deterministic": deterministic, "dsink": dsink}
        state = state_of(group)
        key = state.next_backward()
        passed["first"] = "" if kind in state.agreed else key
        with underway(group, what), known_if_done(group, kind):
            dq, dk, dv, of_sink = compute(plan, inputs, tuple(saved), dout, **passed)
        return dq, dk, dv, nothing(dq) if of_sink is None else of_sink

    return run


def _fake_context(q: Any, *_: Any, **__: Any) -> Two:
    return like(q), q.new_empty(q.shape[:3], dtype=torch.float32)


def _fake_heads(*arguments: Any, **_: Any) -> tuple[torch.Tensor, ...]:
    q, k, v, *_rest, text = arguments
    ranks = plan_of(text).layout.ranks

    def whole(tensor: torch.Tensor) -> torch.Tensor:
        batch, count, rows = tensor.shape[:3]
        return tensor.new_empty((batch, count // ranks, rows * ranks, *tensor.shape[3:]))

    out, lse = q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=torch.float32)
    return out, lse, whole(q), whole(k), whole(v), whole(out), whole(lse)


def _fake_backward_of(new: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., Four]:
    def fake(*arguments: Any, dsink: bool = False, **_: Any) -> Four:
        q, k, v, _tensors, sink, *_rest = arguments[3:]
        return new(q), new(k), new(v), sink.new_empty(sink.shape) if dsink else nothing(q)

    return fake


def _refuse(*_: Any) -> NoReturn:
    raise ArgumentError("distributed attention", NO_SECOND)


def _setup(ctx: Any, inputs: Any, keyword_only_inputs: dict[str, Any], output: Any) -> None:
    """Save the inputs of the backward pass."""
    q, k, v, tensors, *optional, plan = inputs
    saved = output if len(output) == 2 else output[2:]
    ctx.count = len(saved)
    ctx.save_for_backward(q, k, v, *optional, *saved, *tensors)
    ctx.plan, ctx.mode = plan, mode()
    ctx.options = {name: keyword_only_inputs.get(name) for name in (*Extras._fields[TENSORS:], "deterministic")}
    ctx.set_materialize_grads(False)


def _gradients_of(name: str) -> Callable[..., tuple[Any, ...]]:
    """The backward pass of an operator."""

    def backward(ctx: Any, dout: Any, dlse: Any, *_: Any) -> tuple[Any, ...]:
        q, k, v, *others = ctx.saved_tensors
        optional, others = others[:TENSORS], others[TENSORS:]
        saved, tensors = others[: ctx.count], others[ctx.count :]
        of_sink = Extras(*optional).sink is not None and bool(ctx.needs_input_grad[4])
        dout = torch.zeros_like(q) if dout is None else dout  # the other ranks take part anyway
        inputs = q, k, v, tensors, *optional, ctx.plan
        compute = getattr(torch.ops.sparse_kernel_codegen, f"{name}_backward")
        with entered(ctx.mode):  # autograd's threads do not inherit it
            dq, dk, dv, dsink = compute(dout, dlse, saved, *inputs, **ctx.options, dsink=of_sink)
        return dq, dk, dv, [None] * len(tensors), dsink if of_sink else None, *(None,) * TENSORS

    return backward


_library = torch.library.Library(NAMESPACE, "FRAGMENT")


def _define(name: str, schema: str, implementation: Any, fake: Any) -> None:
    _library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag, STRIDES))
    _library.impl(name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_library)


def _contiguous(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.new_empty(tensor.shape)


for _name, _results, _compute, _without_values, _module, _new in (
    (CONTEXT, 2, _context, _fake_context, context, like),
    (HEADS, 7, _heads, _fake_heads, heads, _contiguous),
):
    _define(_name, f"{_FORWARD} -> ({', '.join(['Tensor'] * _results)})", _compute, _without_values)
    _four = f"{_BACKWARD} -> (Tensor, Tensor, Tensor, Tensor)"
    _define(f"{_name}_backward", _four, _backward_of(_name, _module.backward), _fake_backward_of(_new))
    torch.library.register_autograd(f"{NAMESPACE}::{_name}", _gradients_of(_name), setup_context=_setup, lib=_library)
    torch.library.register_autograd(f"{NAMESPACE}::{_name}_backward", _refuse, lib=_library)
