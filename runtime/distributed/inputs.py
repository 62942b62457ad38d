"""Inputs of a distributed call, and the agreement of ranks on them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from runtime.distributed.agreement import (
    agree,
    check_not_stopped,
    finish,
    group_of,
    meet,
    report,
    same,
    state_of,
    underway,
)
from runtime.distributed.plan import Plan
from runtime.distributed.symmetric import check_not_kept
from runtime.ops.attention_checks import check_values
from runtime.ops.attention_extras import TENSORS, Extras
from runtime.ops.attention_gradients import chosen_for
from runtime.ops.block_sizes import Tensors
from runtime.patterns import split_tensors

Kind = tuple[Any, ...]
"""Kind of a call. Ranks agree once per kind."""


@dataclass(frozen=True)
class Inputs:
    """Inputs of a call.

    Attributes:
        q, k, v: this rank's tensors.
        tensors: tensors of the pattern.
        extras: the optional tensors and numbers of the call.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    tensors: Tensors
    extras: Extras

    def kind(self) -> Kind:
        """The kind of the call, for which ranks agree once."""
        every = self.q, self.k, self.v, *self.extras[:TENSORS]
        shapes = tuple(None if t is None else (t.shape, t.dtype) for t in every)
        lists = tuple(None if t is None else (t.shape[:2], t.dtype) for t in self.tensors)
        return (self.q.device, shapes, lists, *self.extras[TENSORS:])

    def facts(self) -> dict[str, Any]:
        """Facts that must be the same on all ranks, as plain data."""
        named: dict[str, Any] = {"q": self.q, "k": self.k, "v": self.v, **self.extras.tensors()}
        told = {name: None if t is None else f"{tuple(t.shape)} {t.dtype}" for name, t in named.items()}
        for place, t in enumerate(self.tensors):  # widths of lists may differ between ranks
            told[f"tensor {place} of the pattern"] = None if t is None else f"{tuple(t.shape[:2])} ... {t.dtype}"
        return {**told, **self.extras.numbers()}


def prepare(
    what: str, plan: Plan, inputs: Inputs, *, gradients: bool, validate: bool, deterministic: bool = True
) -> tuple[Kind, bool]:
    """Agree with the other ranks on a call: the first call of a kind, and each validated call.

    Args:
        what: name of the called function.
        plan: plan of the call.
        inputs: arguments of the call.
        gradients: whether gradients will be computed.
        validate: check the values of lists and lengths.
        deterministic: argument of the call.

    Returns:
        The kind of the call, and whether ranks have just agreed on it.

    Raises:
        ArgumentError: for arguments that differ between ranks, and for an unsupported call.
        CollectiveError: for a rank that is late, or has failed.
    """
    group = group_of(plan.group)
    check_not_stopped(group, what)
    state = state_of(group)
    kind = (what, plan, inputs.kind(), gradients)
    is_known = kind in state.agreed
    try:
        if plan.symmetric and gradients:
            check_not_kept(inputs.k, group)
        if gradients and (validate or not is_known):
            chosen_for(inputs.q, plan.scored, inputs.extras.features(), deterministic=deterministic)
        if validate:
            _check_values(what, plan, inputs)
    except Exception as error:
        report(group, error)
        raise
    agreed = validate or not is_known
    if agreed:
        about = f"{what} with validate=True" if is_known else what
        facts = {**plan.facts(), **inputs.facts(), "gradients": gradients, "validate": validate}
        same(agree(group, about, {"function": what, **facts}, plan.timeout))
    if not is_known:
        with underway(group, what):
            meet(group, inputs.q.device)
        state.remember(kind)
    state.go_on()
    return kind, agreed


def finished(what: str, plan: Plan, inputs: Inputs) -> None:
    """Wait until a call is done.

    Raises:
        CollectiveError: naming the other ranks, if the plan's timeout expires.
    """
    rank = dist.get_rank(group_of(plan.group))
    others = tuple(other for other in range(plan.layout.ranks) if other != rank)
    finish(what, inputs.q.device, others, plan.timeout)


def _check_values(what: str, plan: Plan, inputs: Inputs) -> None:
    """Check the values of lists, lengths and sinks against the whole sequence (synchronizes)."""
    q_len, kv_len = inputs.q.shape[2], inputs.k.shape[2] * plan.layout.ranks
    q_len = q_len if what == "context_parallel_attention" else q_len * plan.layout.ranks
    lists = () if plan.scored.block is None else split_tensors(plan.scored, inputs.tensors)[0]
    check_values(plan.scored, lists, (q_len, kv_len), inputs.extras)
