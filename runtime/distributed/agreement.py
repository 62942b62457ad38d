"""What ranks say to each other before they move data: by the store of their group, so that a late rank has a name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from time import monotonic, sleep
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from codegen.errors import CodegenError
from runtime.errors import ArgumentError, CollectiveError

TIMEOUT = 300.0
"""Seconds that ranks wait for each other, by default: one of them may be compiling kernels."""
_FAILED = "failed"
_PAUSE = 1e-3  # seconds
_KEYS = "sparse_kernel_codegen"
_KEPT_ROUNDS = 8


@dataclass
class State:
    """What this process knows of a group.

    Attributes:
        store: of the group. One of another group of that name is another one.
        rounds: agreements that were made or begun.
        agreed: calls that were agreed on.
        memory: symmetric memory, by what it is for.
    """

    store: Any
    rounds: int = 0
    agreed: set[tuple[Any, ...]] = field(default_factory=set)
    memory: dict[tuple[Any, ...], Any] = field(default_factory=dict)


_states: dict[str, State] = {}


def group_of(name: str) -> dist.ProcessGroup:
    """Return the group of a name.

    Raises:
        ArgumentError: if there is none.
    """
    try:
        resolve: Any = torch._C._distributed_c10d._resolve_process_group
        found: dist.ProcessGroup = resolve(name)
        return found
    except (RuntimeError, ValueError, KeyError):
        raise ArgumentError("mesh_or_group", f"was the group {name}, which there is not (any more)") from None


def state_of(group: dist.ProcessGroup) -> State:
    """Return what is known of a group."""
    _, store = distributed_c10d._world.pg_map[group]
    found = _states.get(group.group_name)
    if found is None or found.store is not store:
        found = _states[group.group_name] = State(store)
    return found


def _next(group: dist.ProcessGroup) -> tuple[Any, str]:
    """Return the store of a group, and how the keys of its next agreement begin."""
    state = state_of(group)
    store, number = state.store, state.rounds
    state.rounds += 1
    if number >= _KEPT_ROUNDS:  # who has come to this round has read all of those
        store.delete_key(f"{_KEYS}/{number - _KEPT_ROUNDS}/{dist.get_rank(group)}")
    return store, f"{_KEYS}/{number}"


def report(group: dist.ProcessGroup, error: CodegenError) -> None:
    """Tell the other ranks, which may be about to agree with this one, that it has failed."""
    store, key = _next(group)
    store.set(f"{key}/{dist.get_rank(group)}", json.dumps({_FAILED: str(error)}))


def agree(group: dist.ProcessGroup, what: str, facts: Mapping[str, Any], timeout: float = TIMEOUT) -> list[Any]:
    """Tell all ranks something, and return what each of them told.

    Args:
        group: the ranks.
        what: what it is about, in a word, for messages.
        facts: plain data; what must be the same is compared by ``same``.
        timeout: seconds until a rank is late.

    Raises:
        CollectiveError: naming the ranks that are late or have failed, on every rank that asks.
    """
    store, key = _next(group)
    store.set(f"{key}/{dist.get_rank(group)}", json.dumps(facts))
    ranks = range(dist.get_world_size(group))
    deadline = monotonic() + timeout
    late = tuple(rank for rank in ranks if not _arrived(store, f"{key}/{rank}", deadline))
    collective = f"agreement on {what}"
    if late:
        reason = f"no word within {timeout:g} s"
        store.set(f"{key}/{_FAILED}", json.dumps([late, reason]))
        raise CollectiveError(collective, late, reason)
    told = [json.loads(store.get(f"{key}/{rank}")) for rank in ranks]
    for rank, each in enumerate(told):
        if _FAILED in each:
            raise CollectiveError(collective, (rank,), each[_FAILED])
    if store.check([f"{key}/{_FAILED}"]):  # this rank was late itself, and others have given up
        late_ranks, reason = json.loads(store.get(f"{key}/{_FAILED}"))
        raise CollectiveError(collective, tuple(late_ranks), reason)
    return told


def _arrived(store: Any, key: str, deadline: float) -> bool:
    """Return whether a key is there before the deadline."""
    try:
        store.wait([key], timedelta(seconds=max(deadline - monotonic(), 0.001)))
    except (RuntimeError, dist.DistStoreError):
        return bool(store.check([key]))
    return True


def same(told: list[dict[str, Any]]) -> None:
    """Refuse what ranks are not agreed on.

    Raises:
        ArgumentError: naming the first fact that differs and two ranks with it; the same on all ranks.
    """
    for name, first in told[0].items():
        for rank, facts in enumerate(told):
            if facts.get(name) != first:
                raise ArgumentError(name, f"is {first} on rank 0 and {facts.get(name)} on rank {rank}: pass the same")


def finish(what: str, device: torch.device, others: tuple[int, ...], timeout: float) -> None:
    """Wait for what the GPU has to do, and no longer than that.

    Raises:
        CollectiveError: where it is not done by then.
    """
    if device.type != "cuda":
        return
    done, deadline = torch.cuda.current_stream(device).record_event(), monotonic() + timeout
    while not done.query():
        if monotonic() > deadline:
            raise CollectiveError(what, others, f"one of them is late or failed: not done within {timeout:g} s")
        sleep(_PAUSE)


def meet(group: dist.ProcessGroup, device: torch.device) -> None:
    """Make the ranks' first collective one that all take part in, as NCCL wants it."""
    met = torch.zeros(1, device=device)
    dist.all_reduce(met, group=group)
