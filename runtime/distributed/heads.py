"""Forward and backward pass of head parallelism: each rank computes some of the heads over the whole sequence."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch
import torch.distributed as dist

from runtime.distributed.agreement import Attempt, group_of
from runtime.distributed.context import of_sinks
from runtime.distributed.exchange import AHEAD
from runtime.distributed.inputs import Inputs
from runtime.distributed.plan import Plan
from runtime.distributed.run import of_heads
from runtime.distributed.shuffle import Parted, Shuffle, SymmetricShuffle, with_whole_rows
from runtime.ops.attention_calls import attend
from runtime.ops.attention_gradients import attend_backward
from runtime.ops.block_sizes import Tensors
from runtime.patterns import split_tensors

Saved = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""q, k, v, result and log-sum-exp of this rank's heads over the whole sequence."""


class HeadRun:
    """One call on one rank.

    Args:
        plan: plan of the call.
        inputs: arguments of the call.
    """

    def __init__(self, plan: Plan, inputs: Inputs) -> None:
        self.plan, self.inputs = plan, inputs
        group = group_of(plan.group)
        self.ranks, self.rank = plan.layout.ranks, dist.get_rank(group)
        self.kv_heads = inputs.k.shape[1] // self.ranks
        self.group = inputs.q.shape[1] // inputs.k.shape[1]
        kind = SymmetricShuffle if plan.symmetric else Shuffle
        self.shuffle = kind(group, plan.layout, self.kv_heads, inputs.q.device)
        batch, heads, q_len, head_dim = inputs.q.shape
        shape = batch, heads // self.ranks, q_len * self.ranks, head_dim
        self.runs = plan.runs(shape, self.kv_heads, by_heads=True)

    def whole(self, local: torch.Tensor, *, result: bool = False) -> torch.Tensor:
        """A tensor for this rank's heads over the whole sequence; a result is sent back."""
        batch, heads, rows = local.shape[:3]
        shape = batch, heads // self.ranks, rows * self.ranks, *local.shape[3:]
        return self.shuffle.room(shape, local) if result else local.new_empty(shape)

    def arrivals(self, tensors: Sequence[Parted]) -> Iterator[tuple[slice, slice]]:
        """Yield heads of k and of q that have arrived, while the following ones are in flight."""
        tensors = [each._replace(local=with_whole_rows(each.local)) for each in tensors]
        ahead = [self.shuffle.gather(run, tensors) for run in self.runs[:AHEAD]]
        for place, run in enumerate(self.runs):
            transfer, copied = ahead.pop(0)
            transfer.wait()
            self.shuffle.moves.join(copied)
            yield run, slice(run.start * self.group, run.stop * self.group)
            if place + AHEAD < len(self.runs):
                ahead.append(self.shuffle.gather(self.runs[place + AHEAD], tensors))

    def lists(self, run: slice) -> Tensors:
        """Index tensors of some heads of k."""
        indices, aux = split_tensors(self.plan.scored, self.inputs.tensors)
        return (*(of_heads(tensor, run, self.kv_heads) for tensor in indices), *aux.values())

    def sink(self) -> torch.Tensor | None:
        """Sinks of this rank's heads."""
        sink = self.inputs.extras.sink
        return None if sink is None else sink[self.own()]

    def own(self) -> slice:
        """This rank's heads of q among all heads."""
        each = self.kv_heads * self.group
        return slice(self.rank * each, (self.rank + 1) * each)


def forward(
    plan: Plan, inputs: Inputs, *, gradients: bool, together: bool = False
) -> tuple[torch.Tensor, torch.Tensor, Saved]:
    """Compute the result and the log-sum-exp of a rank's queries, and the tensors saved for the backward pass.

    Args:
        plan: plan of the call.
        inputs: arguments of the call.
        gradients: save tensors for a backward pass.
        together: if the kernels of one rank fail, raise an error on all ranks.

    Raises:
        ArgumentError: if no kernel supports the call.
        CollectiveError: for a rank that is late or has failed.
    """
    run = HeadRun(plan, inputs)
    q, k, v = (run.whole(tensor) for tensor in (inputs.q, inputs.k, inputs.v))
    out = inputs.q.new_empty(inputs.q.shape)
    lse = out.new_empty(out.shape[:3], dtype=torch.float32)
    whole_out, whole_lse, sink = run.whole(out, result=True), run.whole(lse, result=True), run.sink()
    given = Parted(inputs.q, q, run.group), Parted(inputs.k, k, 1), Parted(inputs.v, v, 1)
    attempt = Attempt(run.shuffle.group, "head_parallel_attention", plan.timeout, together=together)

    def compute(heads: slice, of_q: slice) -> None:
        found = attend(
            q[:, of_q],
            k[:, heads],
            v[:, heads],
            run.lists(heads),
            plan.scored,
            extras=inputs.extras._replace(sink=None if sink is None else sink[of_q]),
            lse=True,
            out=whole_out[:, of_q],
        )
        assert found.lse is not None
        whole_lse[:, of_q] = found.lse

    try:
        for heads, of_q in run.arrivals(given):
            attempt.run(partial(compute, heads, of_q))
            run.shuffle.give_back(heads, (Parted(out, whole_out, run.group), Parted(lse, whole_lse, run.group)))
    finally:  # also after an error, so that the memory can be reused
        run.shuffle.finish()
    attempt.settle()
    if plan.symmetric:  # later calls write to that memory
        keep = torch.clone if gradients else torch.empty_like
        whole_out, whole_lse = keep(whole_out), keep(whole_lse)
    return out, lse, (q, k, v, whole_out, whole_lse)


def backward(
    plan: Plan,
    inputs: Inputs,
    saved: Saved,
    dout: torch.Tensor,
    *,
    dlse: torch.Tensor | None,
    deterministic: bool,
    dsink: bool,
    first: str = "",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Compute the gradients of a rank's q, k, v and sinks; the sinks' gradient is 0 for other ranks' heads.

    ``first`` names the round of the first backward pass of its kind: if the kernels of one rank fail, all ranks raise
    an error.

    Raises:
        ArgumentError, SpecError: if the call has no gradient.
        CollectiveError: for a rank that is late or has failed.
    """
    run = HeadRun(plan, inputs)
    q, k, v, out, lse = saved
    dq, dk, dv = (tensor.new_empty(tensor.shape) for tensor in (inputs.q, inputs.k, inputs.v))
    of_q, of_k, of_v = (run.whole(tensor, result=True) for tensor in (dq, dk, dv))
    whole_dout = torch.empty_like(out)
    given = [Parted(dout, whole_dout, run.group)]
    whole_dlse = None
    if dlse is not None:
        whole_dlse = torch.empty_like(lse)
        given.append(Parted(dlse, whole_dlse, run.group))
    about = "the gradients of head_parallel_attention"
    attempt = Attempt(run.shuffle.group, about, plan.timeout, together=bool(first), key=first)

    def compute(heads: slice, queries: slice) -> None:
        found = attend_backward(
            q[:, queries],
            k[:, heads],
            v[:, heads],
            run.lists(heads),
            plan.scored,
            extras=inputs.extras._replace(sink=None),
            out=out[:, queries],
            dout=whole_dout[:, queries],
            lse=lse[:, queries].contiguous(),
            dlse=None if whole_dlse is None else whole_dlse[:, queries].contiguous(),
            deterministic=deterministic,
        )
        for target, which, part in ((of_q, queries, found.dq), (of_k, heads, found.dk), (of_v, heads, found.dv)):
            assert part is not None
            target[:, which] = part

    try:
        for heads, queries in run.arrivals(given):
            attempt.run(partial(compute, heads, queries))
            run.shuffle.give_back(heads, (Parted(dq, of_q, run.group), Parted(dk, of_k, 1), Parted(dv, of_v, 1)))
    finally:  # also after an error, so that the memory can be reused
        run.shuffle.finish()
    attempt.settle()
    if not dsink:
        return dq, dk, dv, None
    assert inputs.extras.sink is not None
    of_sink = torch.zeros_like(inputs.extras.sink)
    of_sink[run.own()] = of_sinks(run.sink(), out, lse, whole_dout, whole_dlse)
    return dq, dk, dv, of_sink
