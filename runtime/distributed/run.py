"""One rank's part of a distributed call: its steps, index tensors and exchange."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from codegen.scored_pattern import ScoredPattern
from runtime.distributed.agreement import fail_together, group_of
from runtime.distributed.exchange import Exchange, Pair, Sent
from runtime.distributed.inputs import Inputs
from runtime.distributed.lists import blocks_of, chosen, key_block, names_of, relabeled, wanted_blocks
from runtime.distributed.masks import has_positions, masked
from runtime.distributed.outbox import OutboxExchange, outbox_of
from runtime.distributed.plan import Plan
from runtime.distributed.steps import OWN, Step, Steps
from runtime.distributed.symmetric import SymmetricExchange, fits, keys_of
from runtime.distributed.transfer import Message, Transfer
from runtime.errors import ArgumentError
from runtime.ops.attention_choice import LIST_RANK
from runtime.ops.attention_extras import Extras
from runtime.ops.block_sizes import Tensors
from runtime.patterns import split_tensors


class Call(NamedTuple):
    """One call of a kernel: its step and its queries, keys and values."""

    step: Step
    queries: torch.Tensor
    kv: Pair


class Run:
    """One rank's part of a distributed call.

    Args:
        plan: plan of the call.
        inputs: arguments of the call.
        validate: check the caps of a plan on the host.
        gives_back: whether gradients are sent back to the owners of the keys.
    """

    def __init__(self, plan: Plan, inputs: Inputs, *, validate: bool = False, gives_back: bool = False) -> None:
        self.plan, self.inputs = plan, inputs
        self.group = group_of(plan.group)
        self.rank = dist.get_rank(self.group)
        q, k = inputs.q, inputs.k
        every = [plan.steps(rank, q.shape[2], k.shape[2]) for rank in range(plan.layout.ranks)]
        self.mine: Steps = every[self.rank]
        self.gives_back = gives_back
        self.runs = plan.runs(tuple(q.shape), k.shape[1], gives_back=gives_back)
        self.scored, self.tensors, sent = self._localized(validate)
        given: dict[str, Any] = {
            "group": self.group,
            "rank": self.rank,
            "steps": every,
            "k": k,
            "v": inputs.v,
            "sent": sent,
        }
        self.exchange: Exchange
        if not plan.symmetric or not any(each.buffers for each in every):
            self.exchange = Exchange(**given)
        elif sent is None and fits(every):
            self.exchange = SymmetricExchange(keys_of(self.group, k), plan.layout, **given)
        else:
            self.exchange = OutboxExchange(outbox_of(self.group, every, k), plan.layout, **given)

    def _localized(self, validate: bool) -> tuple[ScoredPattern, Tensors, Sent | None]:
        """The pattern of lists over the keys of a step, its tensors, and the blocks that are sent."""
        plan, inputs, scored = self.plan, self.inputs, self.plan.scored
        tensors, sent = inputs.tensors, None
        kv_len, q_len = (t.shape[2] * plan.layout.ranks for t in (inputs.k, inputs.q))
        device = inputs.q.device
        kv_at = None
        if (caps := plan.caps_of(inputs.k.shape[2])) is not None:
            sent, tensors, kv_at = self._listed(caps, kv_len, validate)
        if has_positions(scored):
            kv_at = torch.arange(kv_len, dtype=torch.int32, device=device) if kv_at is None else kv_at
            q_at = plan.layout.positions(self.rank, q_len, device).to(torch.int32)
            scored, tensors = masked(scored, tensors, (q_len, kv_len), q_at, kv_at)
        return scored, tensors, sent

    def _listed(self, caps: Sequence[Sequence[int]], kv_len: int, validate: bool) -> tuple[Sent, Tensors, torch.Tensor]:
        """Exchange needed blocks. Returns the blocks to send, the lists over received blocks, and their names."""
        plan, inputs, rank = self.plan, self.inputs, self.rank
        layout, block, device = plan.layout, key_block(plan.scored), inputs.k.device
        lists, aux = split_tensors(plan.scored, inputs.tensors)
        together = has_positions(plan.scored)
        wanted = wanted_blocks(plan.scored, lists, inputs.k.shape[1], kv_len // block, together=together)
        asked, answers = {}, {}
        for other in range(layout.ranks):
            if other != rank and caps[other][rank]:
                theirs = blocks_of(layout, other, kv_len, block, device)
                asked[other] = wanted[..., theirs].to(torch.uint8).contiguous()
            if other != rank and caps[rank][other]:
                shape = (*wanted.shape[:2], inputs.k.shape[2] // block)
                answers[other] = torch.empty(shape, dtype=torch.uint8, device=device)
        what = f"needed blocks of rank {rank}"
        sends, receives = ([Message(other, rows) for other, rows in each.items()] for each in (asked, answers))
        Transfer(self.group, what, sends, receives).wait()
        names = names_of(wanted, layout, rank, kv_len, block=block, caps=caps)
        self._check_room(names.missing, validate)
        blocks = {other: chosen(told, caps[rank][other]) for other, told in answers.items()}
        tensors = (*relabeled(plan.scored, lists, names.table), *aux.values())
        return Sent(block, blocks), tensors, _positions(names.table, block, self.mine, inputs.k.shape[2])

    def _check_room(self, missing: torch.Tensor, validate: bool) -> None:
        """Refuse lists that need more blocks than the plan has room for."""
        reason = "has too little room for the lists: call plan_sends(...) again, or leave it out"
        if not validate and missing.is_cuda:
            torch._assert_async(~missing, f"send: {reason}")
            return
        error = ArgumentError("send", reason) if bool(missing) else None
        fail_together(self.group, "room for listed blocks", error, self.plan.timeout)

    def heads_of_q(self, run: slice) -> slice:
        """The query heads of some heads of k."""
        group = self.inputs.q.shape[1] // self.inputs.k.shape[1]
        return slice(run.start * group, run.stop * group)

    def lists(self, step: Step, run: slice) -> tuple[ScoredPattern, Tensors]:
        """The pattern of a step, and its index tensors for some heads of k."""
        if step.scored != self.plan.scored:  # patterns with tensors keep their pattern
            return step.scored, ()
        kv_heads = self.inputs.k.shape[1]
        if not self.tensors or run == slice(0, kv_heads):
            return self.scored, self.tensors
        indices, aux = split_tensors(self.scored, self.tensors)
        return self.scored, (*(of_heads(tensor, run, kv_heads) for tensor in indices), *aux.values())

    def extras(self, step: Step) -> Extras:
        """Optional tensors and numbers of a step, without sinks, which join a row once."""
        return self.inputs.extras._replace(sink=None, kv_lengths=self._lengths(step))

    def _lengths(self, step: Step) -> torch.Tensor | None:
        """Number of valid keys of a step, if the call has lengths or the pattern has a prefix."""
        limits = [] if self.inputs.extras.kv_lengths is None else [self.inputs.extras.kv_lengths]
        if step.prefix:
            prefix = self.inputs.tensors[0]
            assert prefix is not None
            limits.append(prefix)
        if not limits:
            return None
        least = limits[0] if len(limits) == 1 else torch.minimum(*limits)
        found = torch.zeros_like(least)
        for span in step.spans:
            found = found + (least - span.start).clamp(0, span.size)
        return found.contiguous()

    def calls(self, kv: Sequence[Pair], run: slice, *, own: bool) -> Iterator[Call]:
        """Calls over the rank's own keys, or over buffers."""
        q = self.inputs.q[:, self.heads_of_q(run)]
        for step in self.mine.steps:
            if (step.buffer == OWN) == own:
                k, v = kv[0 if own else step.buffer]
                keys = k[:, :, step.keys.start : step.keys.stop], v[:, :, step.keys.start : step.keys.stop]
                yield Call(step, q[:, :, step.rows.start : step.rows.stop], keys)

    def everything(self) -> Iterator[tuple[bool, slice, list[Pair]]]:
        """The operands of all calls: the rank's own keys, then the buffers of heads as they arrive."""
        inputs = self.inputs
        every = slice(0, inputs.k.shape[1])
        needed = self.exchange.is_needed
        coming = self.exchange.arrivals(self.runs, gives_back=self.gives_back) if needed else iter(())
        yield True, every, [(inputs.k, inputs.v)]
        for run, buffers in coming:
            yield False, run, buffers


def _positions(table: torch.Tensor, block: int, steps: Steps, kv_len: int) -> torch.Tensor:
    """Positions of a buffer's keys in the whole sequence: int32 (keys,), from a table that all heads share."""
    rows = steps.rows(0) if steps.buffers else kv_len
    place = table[0, 0, :-1].long()
    first = torch.zeros(rows // block + 1, dtype=torch.int32, device=table.device)
    numbers = torch.arange(len(place), dtype=torch.int32, device=table.device)
    first.scatter_(0, torch.where(place >= 0, place, rows // block), numbers * block)
    return (first[:-1, None] + torch.arange(block, dtype=torch.int32, device=table.device)).flatten()


def of_heads(tensor: torch.Tensor | None, run: slice, kv_heads: int) -> torch.Tensor | None:
    """The part of an index tensor for some heads of k."""
    if tensor is None or tensor.dim() < LIST_RANK or tensor.shape[1] == 1:
        return tensor
    each = tensor.shape[1] // kv_heads
    return tensor[:, run.start * each : run.stop * each]
