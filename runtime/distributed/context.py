"""Forward and backward pass of context parallelism, on real tensors.

Keys and values are gathered for some heads at a time, so that one kernel call computes the whole softmax of a row,
while the keys and values of the next heads are being sent. Steps over a rank's own keys come first, because they need
no data of other ranks. If a pattern splits the keys of a row between two calls, their results are merged by log-sum-exp
in float32.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from runtime.distributed.agreement import Attempt
from runtime.distributed.exchange import Pair, add_up
from runtime.distributed.inputs import Inputs
from runtime.distributed.layout import Span
from runtime.distributed.plan import Plan
from runtime.distributed.run import Call, Run
from runtime.distributed.steps import Steps
from runtime.ops.attention_calls import attend
from runtime.ops.attention_gradients import attend_backward
from runtime.ops.merge import merge_attention
from runtime.ops.operators import like


def forward(
    plan: Plan, inputs: Inputs, *, validate: bool = False, together: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the result and the log-sum-exp of a rank's queries.

    Args:
        plan: plan of the call.
        inputs: arguments of the call.
        validate: check the caps of a plan on the host.
        together: if the kernels of one rank fail, raise an error on all ranks.

    Raises:
        ArgumentError: if no kernel supports the call.
        CollectiveError: for a rank that is late or has failed.
    """
    run = Run(plan, inputs, validate=validate)
    attempt = Attempt(run.group, "context_parallel_attention", plan.timeout, together=together)
    q, sink = inputs.q, inputs.extras.sink
    out, lse = like(q), q.new_empty(q.shape[:3], dtype=torch.float32)
    for span in unseen(run.mine, q.shape[2]):
        out[:, :, slice(*span)] = 0
        lse[:, :, slice(*span)] = -torch.inf if sink is None else sink[:, None]
    for own, heads, kv in run.everything():
        of_q = run.heads_of_q(heads)
        of_sink = None if sink is None else sink[of_q]
        for call in run.calls(kv, heads, own=own):
            rows = slice(*call.step.rows)
            there = out[:, of_q, rows], lse[:, of_q, rows]
            attempt.run(partial(_attend, run, call, heads, there, of_sink))
    attempt.settle()
    return out, lse


def _attend(run: Run, call: Call, heads: slice, there: Pair, sink: torch.Tensor | None) -> None:
    """Write the result and the log-sum-exp of a step, or merge them with existing ones."""
    step, queries, kv = call
    scored, tensors = run.lists(step, heads)
    extras, (out, lse) = run.extras(step), there
    if step.merges:
        found = attend(queries, *kv, tensors, scored, extras=extras, lse=True)
        assert found.lse is not None
        found = merge_attention(out, lse, found.out, found.lse)
        out.copy_(found.out)
    else:
        found = attend(queries, *kv, tensors, scored, extras=extras._replace(sink=sink), out=out, lse=True)
    assert found.lse is not None
    lse.copy_(found.lse)


def unseen(steps: Steps, q_len: int) -> Iterator[Span]:
    """Spans of queries without a step, which see no key."""
    ends = sorted({0, q_len, *(end for step in steps.steps for end in step.rows)})
    for first, last in itertools.pairwise(ends):
        if not any(step.rows.start <= first < step.rows.stop for step in steps.steps):
            yield Span(first, last)


def backward(
    plan: Plan,
    inputs: Inputs,
    saved: tuple[torch.Tensor, torch.Tensor],
    dout: torch.Tensor,
    *,
    dlse: torch.Tensor | None,
    deterministic: bool,
    dsink: bool,
    first: str = "",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Compute the gradients of a rank's q, k, v and sinks; the sinks' gradient is summed over its own queries.

    ``first`` names the round of the first backward pass of its kind: if the kernels of one rank fail, all ranks raise
    an error.

    Raises:
        ArgumentError, SpecError: if the call has no gradient.
        CollectiveError: for a rank that is late or has failed.
    """
    run = Run(plan, inputs, gives_back=True)
    about = "the gradients of context_parallel_attention"
    together = bool(first) and run.exchange.is_needed  # else no rank waits for another one
    attempt = Attempt(run.group, about, plan.timeout, together=together, key=first)
    rows_of = _Rows(*saved, dout, dlse)
    dq, dk, dv = (like(tensor) for tensor in (inputs.q, inputs.k, inputs.v))
    for span in unseen(run.mine, dq.shape[2]):
        dq[:, :, slice(*span)] = 0
    of_own: list[tuple[int, Pair]] = []
    try:
        for own, heads, kv in run.everything():
            of_q = run.heads_of_q(heads)
            made: dict[int, list[tuple[int, Pair]]] = {number: [] for number in range(len(run.mine.buffers))}
            for call in run.calls(kv, heads, own=own):
                rows = slice(*call.step.rows)
                passed = {**rows_of(of_q, rows), "deterministic": deterministic}
                into = dq[:, of_q, rows], of_own if own else made[call.step.buffer]
                attempt.run(partial(_attend_backward, run, call, heads, into, passed))
            if not own:
                grads = [_whole(pairs, kv[number]) for number, pairs in made.items()]
                mine = [(start, (k[:, heads], v[:, heads])) for start, (k, v) in of_own]
                run.exchange.give_back(heads, grads, mine, (dk[:, heads], dv[:, heads]))
    finally:  # also after an error, so that the memory can be reused
        run.exchange.finish()
    attempt.settle()
    if not run.exchange.is_needed:
        for which, total in enumerate((dk, dv)):
            add_up(total, [(start, pair[which]) for start, pair in of_own])
    return dq, dk, dv, of_sinks(inputs.extras.sink, *saved, dout, dlse) if dsink else None


class _Rows(NamedTuple):
    """Rows of the tensors saved by the forward pass, and of the incoming gradients."""

    out: torch.Tensor
    lse: torch.Tensor
    dout: torch.Tensor
    dlse: torch.Tensor | None

    def __call__(self, heads: slice, rows: slice) -> dict[str, Any]:
        """Rows of some heads of q, as keyword arguments of a kernel."""
        return {
            "out": self.out[:, heads, rows],
            "dout": self.dout[:, heads, rows],
            "lse": self.lse[:, heads, rows].contiguous(),
            "dlse": None if self.dlse is None else self.dlse[:, heads, rows].contiguous(),
        }


def _attend_backward(
    run: Run, call: Call, heads: slice, into: tuple[torch.Tensor, list[tuple[int, Pair]]], passed: dict[str, Any]
) -> None:
    """Add a step's gradients to ``into``: those of its queries, and of its keys and values with their first row."""
    step, queries, kv = call
    dq, made = into
    scored, tensors = run.lists(step, heads)
    found = attend_backward(queries, *kv, tensors, scored, extras=run.extras(step), **passed)
    assert found.dq is not None and found.dk is not None and found.dv is not None
    dq.copy_(dq.float() + found.dq if step.merges else found.dq)
    made.append((step.keys.start, (found.dk, found.dv)))


def _whole(made: Sequence[tuple[int, Pair]], buffer: Pair) -> Pair:
    """Gradients of a buffer: the sum over its steps, in their order."""
    found = []
    for which, tensor in enumerate(buffer):
        parts = [(start, pair[which]) for start, pair in made]
        widest = max(parts, key=lambda part: part[1].shape[2]) if parts else None
        if widest is not None and widest[1].shape[2] == tensor.shape[2] and len(parts) <= 2:
            total = widest[1].contiguous()
            for start, part in parts:
                if part is not widest[1]:
                    total.narrow(2, start, part.shape[2]).add_(part)  # of two: in float32, rounded once
        else:
            total = tensor.new_empty(tensor.shape)
            add_up(total, parts)
        found.append(total)
    return found[0], found[1]


def of_sinks(sink: Any, out: Any, lse: Any, dout: Any, dlse: Any) -> torch.Tensor:
    """Gradient of the sinks: minus the sum over rows of exp(sink - lse) (dO O - dlse)."""
    delta = (dout.float() * out.float()).sum(-1)
    if dlse is not None:
        delta = delta - dlse
    found: torch.Tensor = -((sink[:, None] - lse).exp() * delta).sum((0, 2))
    return found
