"""Attention over ranks that share a sequence: both passes, on real tensors.

Keys and values are gathered for some heads at a time, so that each row is one softmax by one kernel call, while those
of the next heads are on their way. Steps over a rank's own keys come first, and need nothing of others. Where a pattern
divides the keys of a row between two calls, their results are merged by their log-sum-exp in float32.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from codegen.errors import CodegenError
from runtime.distributed.agreement import agree, finish, group_of, meet, report, same
from runtime.distributed.exchange import Exchange, Pair, Sent, add_up
from runtime.distributed.layout import Span
from runtime.distributed.lists import blocks_of, chosen, key_block, names_of, relabelled, wanted_blocks
from runtime.distributed.masks import has_positions, masked
from runtime.distributed.plan import Plan
from runtime.distributed.steps import OWN, Step, Steps
from runtime.distributed.symmetric import SymmetricExchange, Whole, check_not_kept, fits, whole_of
from runtime.distributed.transfer import Message, Transfer
from runtime.errors import ArgumentError
from runtime.ops.attention_calls import attend
from runtime.ops.attention_checks import check_values
from runtime.ops.attention_choice import LIST_RANK
from runtime.ops.attention_gradients import attend_backward, chosen_for
from runtime.ops.aux_tensors import apart
from runtime.ops.block_sizes import Tensors
from runtime.ops.merge import merge_attention
from runtime.ops.operators import like

_agreed: set[tuple[Any, ...]] = set()


@dataclass(frozen=True)
class Inputs:
    """What a call is given.

    Attributes:
        q, k, v: of this rank.
        tensors: of the pattern.
        sink, kv_lengths: of the call.
        options: ``scale`` and ``softcap``.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    tensors: Tensors
    sink: torch.Tensor | None
    kv_lengths: torch.Tensor | None
    options: dict[str, Any]

    def kind(self) -> tuple[Any, ...]:
        """Return what tells calls apart that have to be agreed on."""
        every = self.q, self.k, self.v, self.sink, self.kv_lengths
        shapes = tuple(None if t is None else (t.shape, t.dtype) for t in every)
        lists = tuple(None if t is None else (t.shape[:2], t.dtype) for t in self.tensors)
        return (self.q.device, shapes, lists, *self.options.values())

    def facts(self) -> dict[str, Any]:
        """Return what must be the same on all ranks, in plain data."""
        named: dict[str, Any] = {
            "q": self.q,
            "k": self.k,
            "v": self.v,
            "sink": self.sink,
            "kv_lengths": self.kv_lengths,
        }
        told = {name: None if t is None else f"{tuple(t.shape)} {t.dtype}" for name, t in named.items()}
        for place, t in enumerate(self.tensors):  # lists of ranks may be of other widths
            told[f"tensor {place} of the pattern"] = None if t is None else f"{tuple(t.shape[:2])} ... {t.dtype}"
        return {**told, **self.options}


def symmetric_memory(plan: Plan, k: torch.Tensor) -> Whole:
    """Return the memory for all keys and values of a call."""
    batch, heads, rows, head_dim = k.shape
    return whole_of(plan.group, (batch, heads, rows * plan.layout.ranks, head_dim), k.dtype, k.device)


def prepare(
    what: str, plan: Plan, inputs: Inputs, *, gradients: bool, validate: bool, deterministic: bool = True
) -> None:
    """Agree with the other ranks on a call: the first one of a kind, and each one that is validated.

    Args:
        what: the function that is called.
        plan: of the call.
        inputs: its arguments.
        gradients: whether they are wanted.
        validate: whether to check the values of lists and lengths.
        deterministic: of the call.

    Raises:
        ArgumentError: for what a rank has otherwise than others, and for what no rank can compute.
        CollectiveError: for a rank that is late, or has failed.
    """
    key = (what, plan, inputs.kind(), gradients)
    if key in _agreed and not validate:
        return
    group = group_of(plan.group)
    try:
        if gradients:
            options: dict[str, Any] = {"softcap": inputs.options["softcap"], "deterministic": deterministic}
            chosen_for(inputs.q, plan.spec_json, kv_lengths=inputs.kv_lengths is not None, **options)
        if validate:
            _check_values(what, plan, inputs)
    except CodegenError as error:
        report(group, error)
        raise
    facts = {**plan.facts(), **inputs.facts(), "gradients": gradients}
    same(agree(group, what, facts, plan.timeout))
    if key not in _agreed:
        meet(group, inputs.q.device)
        if plan.symmetric and gradients:
            check_not_kept(inputs.k, symmetric_memory(plan, inputs.k))
        _agreed.add(key)


def finished(what: str, plan: Plan, inputs: Inputs) -> None:
    """Wait until a call is done.

    Raises:
        CollectiveError: naming the other ranks, where it is not within the plan's time.
    """
    rank = dist.get_rank(group_of(plan.group))
    others = tuple(other for other in range(plan.layout.ranks) if other != rank)
    finish(what, inputs.q.device, others, plan.timeout)


def _check_values(what: str, plan: Plan, inputs: Inputs) -> None:
    """Check the values of lists, lengths and sinks against the whole sequence (synchronises)."""
    if not isinstance(json.loads(plan.spec_json).get("block"), dict):
        return
    q_len, kv_len = inputs.q.shape[2], inputs.k.shape[2] * plan.layout.ranks
    q_len = q_len if what == "context_parallel_attention" else q_len * plan.layout.ranks
    lists, _ = apart(plan.spec_json, inputs.tensors)
    check_values(plan.spec_json, lists, (q_len, kv_len), inputs.sink, inputs.kv_lengths)


class Run:
    """One call on one rank: its steps, its index tensors, and what it exchanges.

    Args:
        plan: of the call.
        inputs: its arguments.
        validate: whether the caps of a plan are checked on the host.
    """

    def __init__(self, plan: Plan, inputs: Inputs, *, validate: bool = False) -> None:
        self.plan, self.inputs = plan, inputs
        self.group = group_of(plan.group)
        self.rank = dist.get_rank(self.group)
        q, k = inputs.q, inputs.k
        every = [plan.steps(rank, q.shape[2], k.shape[2]) for rank in range(plan.layout.ranks)]
        self.mine: Steps = every[self.rank]
        self.runs = plan.runs(tuple(q.shape), k.shape[1])
        self.spec_json, self.tensors, sent = self._localised(validate)
        given: dict[str, Any] = {
            "group": self.group,
            "rank": self.rank,
            "steps": every,
            "k": k,
            "v": inputs.v,
            "sent": sent,
        }
        if plan.symmetric and sent is None and fits(every):
            whole = symmetric_memory(plan, k)
            self.exchange: Exchange = SymmetricExchange(whole, plan.layout, **given)
        else:
            self.exchange = Exchange(**given)

    def _localised(self, validate: bool) -> tuple[str, Tensors, Sent | None]:
        """Return the pattern of lists over the keys of a step, its tensors, and which blocks are sent."""
        plan, inputs, spec_json = self.plan, self.inputs, self.plan.spec_json
        tensors, sent = inputs.tensors, None
        kv_len, q_len = (t.shape[2] * plan.layout.ranks for t in (inputs.k, inputs.q))
        device = inputs.q.device
        kv_at = torch.arange(kv_len, dtype=torch.int32, device=device)
        if plan.caps is not None:
            sent, tensors, kv_at = self._listed(plan.caps, kv_len, validate)
        if has_positions(spec_json):
            q_at = plan.layout.positions(self.rank, q_len, device).to(torch.int32)
            spec_json, tensors = masked(spec_json, tensors, (q_len, kv_len), q_at, kv_at)
        return spec_json, tensors, sent

    def _listed(self, caps: Sequence[Sequence[int]], kv_len: int, validate: bool) -> tuple[Sent, Tensors, torch.Tensor]:
        """Tell each rank what is wanted of it; return what this one sends, lists of what it gets, and where that is."""
        plan, inputs, rank = self.plan, self.inputs, self.rank
        layout, block, device = plan.layout, key_block(plan.spec_json), inputs.k.device
        lists, aux = apart(plan.spec_json, inputs.tensors)
        together = has_positions(plan.spec_json)
        wanted = wanted_blocks(plan.spec_json, lists, inputs.k.shape[1], kv_len // block, together=together)
        asked, answers = {}, {}
        for other in range(layout.ranks):
            if other != rank and caps[other][rank]:
                theirs = blocks_of(layout, other, kv_len, block, device)
                asked[other] = wanted[..., theirs].to(torch.uint8).contiguous()
            if other != rank and caps[rank][other]:
                shape = (*wanted.shape[:2], inputs.k.shape[2] // block)
                answers[other] = torch.empty(shape, dtype=torch.uint8, device=device)
        what = f"wanted blocks of rank {rank}"
        sends, receives = ([Message(other, rows) for other, rows in each.items()] for each in (asked, answers))
        Transfer(self.group, what, sends, receives).wait()
        names = names_of(wanted, layout, rank, kv_len, block=block, caps=caps)
        self._check_room(names.missing, validate)
        blocks = {other: chosen(told, caps[rank][other]) for other, told in answers.items()}
        tensors = (*relabelled(plan.spec_json, lists, names.table), *aux.values())
        return Sent(block, blocks), tensors, _positions(names.table, block, self.mine, inputs.k.shape[2])

    def _check_room(self, missing: torch.Tensor, validate: bool) -> None:
        """Refuse lists that want more than the plan has room for."""
        reason = "has less room than the lists want: plan_sends(...) again, or leave it out"
        if not validate and missing.is_cuda:
            torch._assert_async(~missing, f"send: {reason}")
            return
        if bool(missing):
            error = ArgumentError("send", reason)
            if validate:
                report(self.group, error)
            raise error
        if validate:
            agree(self.group, "room for listed blocks", {}, self.plan.timeout)

    def heads_of_q(self, run: slice) -> slice:
        """Return the query heads of some heads of k."""
        group = self.inputs.q.shape[1] // self.inputs.k.shape[1]
        return slice(run.start * group, run.stop * group)

    def lists(self, step: Step, run: slice) -> tuple[str, Tensors]:
        """Return the pattern of a step, and its index tensors for some heads of k."""
        if step.spec_json != self.plan.spec_json:  # what has tensors keeps its pattern
            return step.spec_json, ()
        kv_heads = self.inputs.k.shape[1]
        if not self.tensors or run == slice(0, kv_heads):
            return self.spec_json, self.tensors
        indices, aux = apart(self.spec_json, self.tensors)
        return self.spec_json, (*(of_heads(tensor, run, kv_heads) for tensor in indices), *aux.values())

    def lengths(self, step: Step) -> torch.Tensor | None:
        """Return how many of a step's keys there are, where a call has lengths or the pattern a prefix."""
        limits = [] if self.inputs.kv_lengths is None else [self.inputs.kv_lengths]
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

    def calls(self, kv: Sequence[Pair], run: slice, *, own: bool) -> Iterator[tuple[Step, torch.Tensor, Pair]]:
        """Yield the steps over the rank's own keys, or those over buffers, with their queries, keys and values."""
        q = self.inputs.q[:, self.heads_of_q(run)]
        for step in self.mine.steps:
            if (step.buffer == OWN) == own:
                k, v = kv[0 if own else step.buffer]
                keys = k[:, :, step.keys.start : step.keys.stop], v[:, :, step.keys.start : step.keys.stop]
                yield step, q[:, :, step.rows.start : step.rows.stop], keys

    def everything(self) -> Iterator[tuple[bool, slice, list[Pair]]]:
        """Yield what there are calls over: the rank's own keys, then the buffers of heads that arrive."""
        inputs = self.inputs
        every = slice(0, inputs.k.shape[1])
        coming = self.exchange.arrivals(self.runs) if self.exchange.is_needed else iter(())
        yield True, every, [(inputs.k, inputs.v)]
        for run, buffers in coming:
            yield False, run, buffers


def _positions(table: torch.Tensor, block: int, steps: Steps, kv_len: int) -> torch.Tensor:
    """Return where each key of a buffer is in the whole sequence: int32 (keys,), of tables that all heads share."""
    rows = steps.rows(0) if steps.buffers else kv_len
    place = table[0, 0, :-1].long()
    first = torch.zeros(rows // block + 1, dtype=torch.int32, device=table.device)
    numbers = torch.arange(len(place), dtype=torch.int32, device=table.device)
    first.scatter_(0, torch.where(place >= 0, place, rows // block), numbers * block)
    return (first[:-1, None] + torch.arange(block, dtype=torch.int32, device=table.device)).flatten()


def of_heads(tensor: torch.Tensor | None, run: slice, kv_heads: int) -> torch.Tensor | None:
    """Return the index tensors of some heads of k."""
    if tensor is None or tensor.dim() < LIST_RANK or tensor.shape[1] == 1:
        return tensor
    each = tensor.shape[1] // kv_heads
    return tensor[:, run.start * each : run.stop * each]


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
            spec_json, tensors = run.lists(step, heads)
            of_rows = slice(step.rows.start, step.rows.stop)
            there, lse_there = out[:, of_q, of_rows], lse[:, of_q, of_rows]
            options = {**inputs.options, "kv_lengths": run.lengths(step), "lse": True}
            if step.merges:
                found = attend(queries, k, v, tensors, spec_json, **options)
                assert found.lse is not None
                found = merge_attention(there, lse_there, found.out, found.lse)
                there.copy_(found.out)
            else:
                of_sink = None if sink is None else sink[of_q]
                found = attend(queries, k, v, tensors, spec_json, sink=of_sink, out=there, **options)
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
    run = Run(plan, inputs)
    out, lse = saved
    dq, dk, dv = (like(tensor) for tensor in (inputs.q, inputs.k, inputs.v))
    for rows in unseen(run.mine, dq.shape[2]):
        dq[:, :, rows.start : rows.stop] = 0
    of_own: list[tuple[int, Pair]] = []
    for own, heads, kv in run.everything():
        of_q = run.heads_of_q(heads)
        made: dict[int, list[tuple[int, Pair]]] = {number: [] for number in range(len(run.mine.buffers))}
        for step, queries, (k, v) in run.calls(kv, heads, own=own):
            spec_json, tensors = run.lists(step, heads)
            of_rows = slice(step.rows.start, step.rows.stop)
            passed: dict[str, Any] = {
                "out": out[:, of_q, of_rows],
                "dout": dout[:, of_q, of_rows],
                "lse": lse[:, of_q, of_rows].contiguous(),
                "dlse": None if dlse is None else dlse[:, of_q, of_rows].contiguous(),
                "kv_lengths": run.lengths(step),
                "deterministic": deterministic,
            }
            found = attend_backward(queries, k, v, tensors, spec_json, **passed, **inputs.options)
            assert found.dq is not None and found.dk is not None and found.dv is not None
            there = dq[:, of_q, of_rows]
            there.copy_(there.float() + found.dq if step.merges else found.dq)
            (of_own if own else made[step.buffer]).append((step.keys.start, (found.dk, found.dv)))
        if not own:
            grads = [_whole(pairs, kv[number]) for number, pairs in made.items()]
            mine = [(start, (k[:, heads], v[:, heads])) for start, (k, v) in of_own]
            run.exchange.give_back(heads, grads, mine, (dk[:, heads], dv[:, heads]))
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
