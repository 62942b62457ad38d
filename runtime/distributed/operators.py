"""torch's operators of attention over ranks: what ``torch.compile`` and autograd see.

Between the passes a call keeps what it is given, its result and its log-sum-exp; keys and values of other ranks are
sent again for the gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch

from runtime.distributed.context import Inputs, backward, forward, prepare
from runtime.distributed.plan import plan_of
from runtime.errors import ArgumentError
from runtime.ops.operators import NAMESPACE, STRIDES, like, nothing

_NAME = "context_parallel_attention"
_INPUTS = "Tensor q, Tensor k, Tensor v, Tensor?[] tensors, Tensor? sink, Tensor? kv_lengths, str plan"
_OPTIONS = "*, float? scale=None, float? softcap=None, bool deterministic=True"
_SCHEMAS = (
    f"{_NAME}({_INPUTS}, {_OPTIONS}, bool validate=False, bool gradients=False) -> (Tensor, Tensor)",
    f"{_NAME}_backward(Tensor dout, Tensor? dlse, Tensor out, Tensor lse, {_INPUTS}, {_OPTIONS}, "
    "bool dsink=False) -> (Tensor, Tensor, Tensor, Tensor)",
)
Two = tuple[torch.Tensor, torch.Tensor]
Four = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def _inputs(arguments: Sequence[Any], options: dict[str, Any]) -> Inputs:
    q, k, v, tensors, sink, kv_lengths, _plan = arguments
    numbers = {name: options.get(name) for name in ("scale", "softcap")}
    return Inputs(q, k, v, tuple(tensors), sink, kv_lengths, numbers)


def _run(*arguments: Any, validate: bool = False, gradients: bool = False, **options: Any) -> Two:
    """Compute the operator."""
    plan, inputs = plan_of(arguments[-1]), _inputs(arguments, options)
    deterministic = options.get("deterministic", True)
    prepare(plan, inputs, gradients=gradients, validate=validate, deterministic=deterministic)
    return forward(plan, inputs, validate=validate)


def _run_backward(*arguments: Any, dsink: bool = False, **options: Any) -> Four:
    """Compute the gradients; those of sinks that are not asked for have no elements."""
    dout, dlse, out, lse, *inputs = arguments
    given = _inputs(inputs, options)
    passed = {"dlse": dlse, "deterministic": options.get("deterministic", True), "dsink": dsink}
    *found, of_sink = backward(plan_of(inputs[-1]), given, out, lse, dout, **passed)
    dq, dk, dv = found
    return dq, dk, dv, nothing(dq) if of_sink is None else of_sink


def _fake(q: Any, *_: Any, **__: Any) -> Two:
    return like(q), q.new_empty(q.shape[:3], dtype=torch.float32)


def _fake_backward(*arguments: Any, dsink: bool = False, **_: Any) -> Four:
    q, k, v, _tensors, sink, *_rest = arguments[4:]
    return like(q), like(k), like(v), sink.new_empty(sink.shape) if dsink else nothing(q)


def _refuse(*_: Any) -> NoReturn:
    reason = "has no gradient of its gradient"
    raise ArgumentError(_NAME, reason)


def _setup(ctx: Any, inputs: Any, keyword_only_inputs: dict[str, Any], output: Any) -> None:
    """Keep what the backward pass needs."""
    q, k, v, tensors, sink, kv_lengths, plan = inputs
    ctx.save_for_backward(q, k, v, sink, kv_lengths, *output, *tensors)
    ctx.plan = plan
    ctx.options = {name: keyword_only_inputs.get(name) for name in ("scale", "softcap", "deterministic")}
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dout: Any, dlse: Any) -> tuple[Any, ...]:
    """Return the gradients of q, k, v and the sinks."""
    q, k, v, sink, kv_lengths, out, lse, *tensors = ctx.saved_tensors
    needs = ctx.needs_input_grad
    of_sink = sink is not None and bool(needs[4])
    dout = torch.zeros_like(out) if dout is None else dout  # other ranks take part all the same
    inputs = q, k, v, tensors, sink, kv_lengths, ctx.plan
    compute = torch.ops.sparse_kernel_codegen.context_parallel_attention_backward
    dq, dk, dv, dsink = compute(dout, dlse, out, lse, *inputs, **ctx.options, dsink=of_sink)
    return dq, dk, dv, [None] * len(tensors), dsink if of_sink else None, None, None


_library = torch.library.Library(NAMESPACE, "FRAGMENT")
for _schema, _implementation, _without_values in zip(
    _SCHEMAS, (_run, _run_backward), (_fake, _fake_backward), strict=True
):
    _which = _schema.partition("(")[0]
    _library.define(_schema, tags=(torch.Tag.pt2_compliant_tag, STRIDES))
    _library.impl(_which, _implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{_which}", _without_values, lib=_library)  # type: ignore[arg-type]
torch.library.register_autograd(f"{NAMESPACE}::{_NAME}", _backward, setup_context=_setup, lib=_library)
torch.library.register_autograd(f"{NAMESPACE}::{_NAME}_backward", _refuse, lib=_library)
