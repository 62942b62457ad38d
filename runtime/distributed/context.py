"""Attention over ranks that share a sequence: both passes, on real tensors.

Keys and values are gathered for some heads at a time, so that each row is one softmax by one kernel call, while those
of the next heads are on their way. Steps over a rank's own keys come first, and need nothing of others. Where a pattern
divides the keys of a row between two calls, their results are merged by their log-sum-exp in float32.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from runtime.distributed.exchange import Pair, add_up
from runtime.distributed.inputs import Inputs
from runtime.distributed.layout import Span
from runtime.distributed.plan import Plan
from runtime.distributed.run import Run
from runtime.distributed.steps import Steps
from runtime.ops.attention_calls import attend
from runtime.ops.attention_gradients import attend_backward
from runtime.ops.merge import merge_attention
from runtime.ops.operators import like


def forward(plan: Plan, inputs: Inputs, *, validate: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the result and the log-sum-exp of a rank's queries.

    Raises:
        ArgumentError: for what no kernel computes.
        CollectiveError: for a rank that is late or has failed.
    """
    run = Run(plan, inputs, validate=validate)
    q, sink = inputs.q, inputs.sink
    out, lse = like(q), q.new_empty(q.shape[:3], dtype=torch.float32)
    for rows in unseen(run.mine, q.shape[2]):
        out[:, :, rows.start : rows.stop] = 0
        lse[:, :, rows.start : rows.stop] = -torch.inf if sink is None else sink[:, None]
    for own, heads, kv in run.everything():
        of_q = run.heads_of_q(heads)
        for step, queries, (k, v) in run.calls(kv, heads, own=own):
            scored, tensors = run.lists(step, heads)
            of_rows = slice(step.rows.start, step.rows.stop)
            there, lse_there = out[:, of_q, of_rows], lse[:, of_q, of_rows]
            options = {**inputs.options, "kv_lengths": run.lengths(step), "lse": True}
            if step.merges:
                found = attend(queries, k, v, tensors, scored, **options)
                assert found.lse is not None
                found = merge_attention(there, lse_there, found.out, found.lse)
                there.copy_(found.out)
            else:
                of_sink = None if sink is None else sink[of_q]
                found = attend(queries, k, v, tensors, scored, sink=of_sink, out=there, **options)
            assert found.lse is not None
            lse_there.copy_(found.lse)
    return out, lse


def unseen(steps: Steps, q_len: int) -> Iterator[Span]:
    """Yield the queries that no step has: they see no key."""
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
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return the gradients of a rank's q, k, v and sinks; that of the sinks is of its own queries.

    Raises:
        ArgumentError, SpecError: for what has no gradient.
        CollectiveError: for a rank that is late or has failed.
    """
    run = Run(plan, inputs, gives_back=True)
    out, lse = saved
    dq, dk, dv = (like(tensor) for tensor in (inputs.q, inputs.k, inputs.v))
    for rows in unseen(run.mine, dq.shape[2]):
        dq[:, :, rows.start : rows.stop] = 0
    of_own: list[tuple[int, Pair]] = []
    try:
        for own, heads, kv in run.everything():
            of_q = run.heads_of_q(heads)
            made: dict[int, list[tuple[int, Pair]]] = {number: [] for number in range(len(run.mine.buffers))}
            for step, queries, (k, v) in run.calls(kv, heads, own=own):
                scored, tensors = run.lists(step, heads)
                of_rows = slice(step.rows.start, step.rows.stop)
                passed: dict[str, Any] = {
                    "out": out[:, of_q, of_rows],
                    "dout": dout[:, of_q, of_rows],
                    "lse": lse[:, of_q, of_rows].contiguous(),
                    "dlse": None if dlse is None else dlse[:, of_q, of_rows].contiguous(),
                    "kv_lengths": run.lengths(step),
                    "deterministic": deterministic,
                }
                found = attend_backward(queries, k, v, tensors, scored, **passed, **inputs.options)
                assert found.dq is not None and found.dk is not None and found.dv is not None
                there = dq[:, of_q, of_rows]
                there.copy_(there.float() + found.dq if step.merges else found.dq)
                (of_own if own else made[step.buffer]).append((step.keys.start, (found.dk, found.dv)))
            if not own:
                grads = [_whole(pairs, kv[number]) for number, pairs in made.items()]
                mine = [(start, (k[:, heads], v[:, heads])) for start, (k, v) in of_own]
                run.exchange.give_back(heads, grads, mine, (dk[:, heads], dv[:, heads]))
    finally:  # also where the call ends with an error: its memory may be used again
        run.exchange.finish()
    if not run.exchange.is_needed:
        for which, total in enumerate((dk, dv)):
            add_up(total, [(start, pair[which]) for start, pair in of_own])
    return dq, dk, dv, of_sinks(inputs.sink, out, lse, dout, dlse) if dsink else None


def _whole(made: Sequence[tuple[int, Pair]], buffer: Pair) -> Pair:
    """Return the gradients of a buffer: the sum of those of its steps, in their order."""
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
    """Return the gradient of the sinks: minus the sum over rows of exp(sink - lse) (dO O - dlse)."""
    delta = (dout.float() * out.float()).sum(-1)
    if dlse is not None:
        delta = delta - dlse
    found: torch.Tensor = -((sink[:, None] - lse).exp() * delta).sum((0, 2))
    return found
