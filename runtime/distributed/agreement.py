"""What ranks say to each other before they move data: by the store of their group, so that a late rank has a name."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from time import monotonic, sleep
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from codegen.errors import CodegenError
from codegen.wording import one_line, shown
from runtime.errors import ArgumentError, CollectiveError

TIMEOUT = 300.0
"""Seconds that ranks wait for each other, by default: one of them may be compiling kernels."""
MOST_AGREED = 256
"""Kinds of calls that a group remembers; the oldest is agreed on anew."""
_FAILED, _VERDICT, _STOPPED = "failed", "verdict", "stopped"
_PAUSE = 1e-3  # seconds
_LOOK = 0.5  # seconds, after which a rank that waits looks whether others have given up
_LONGEST_REASON = 400  # characters of an error that others are told
_KEYS = "sparse_kernel_codegen"
_LONGEST = 1e6  # seconds that may be waited for


@dataclass
class State:
    """What this process knows of a group.

    Ranks agree in rounds. A round is named by the calls that all ranks have gone on with, agreed on or of a known kind,
    and by those that came to nothing since: refused by this rank, or failed on all. So an error of one rank that is
    caught is one call to all that agree, and none to those that did not have to. Of each round there is one verdict,
    which is written once and holds for all: who comes late is told that it was.

    Attributes:
        store: of the group.
        calls: calls that all ranks go on with.
        attempts: rounds since the last one of them.
        agreed: kinds of calls that were agreed on, the oldest first: the same on all ranks.
        memory: symmetric memory, by what it is for.
        written: keys of this rank that others may still read.
        moving: the call whose data are on their way; "" for none.
        stopped: why this rank takes no part any more; "" while it does.
    """

    store: Any
    calls: int = 0
    attempts: int = 0
    agreed: dict[tuple[Any, ...], None] = field(default_factory=dict)
    memory: dict[tuple[Any, ...], Any] = field(default_factory=dict)
    written: list[str] = field(default_factory=list)
    moving: str = ""
    stopped: str = ""

    @property
    def round(self) -> str:
        """How the keys of the next round begin."""
        return f"{_KEYS}/{self.calls}.{self.attempts}"

    def remember(self, kind: tuple[Any, ...]) -> None:
        """Keep a kind of calls that all ranks have agreed on just now."""
        self.agreed[kind] = None
        if len(self.agreed) > MOST_AGREED:
            self.agreed.pop(next(iter(self.agreed)))

    def go_on(self) -> None:
        """Count a call that all ranks go on with."""
        self.calls += 1
        self.attempts = 0


_states: WeakKeyDictionary[dist.ProcessGroup, State] = WeakKeyDictionary()


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
    """Return what is known of a group; it goes with the group.

    Raises:
        ArgumentError: for a group that was destroyed.
    """
    there: Any = distributed_c10d._world.pg_map
    found = _states.get(group) if group in there else None
    if found is None:
        for gone in [each for each in _states if each not in there]:
            del _states[gone]
        if group not in there:
            raise ArgumentError("mesh_or_group", f"was the group {group.group_name}, which there is not (any more)")
        found = _states[group] = State(there[group][1])
    return found


def check_timeout(timeout: Any) -> None:
    """Check how long ranks wait for each other.

    Raises:
        ArgumentError: unless it is a number of seconds.
    """
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout <= _LONGEST:
        raise ArgumentError("timeout", f"is {shown(timeout)}, expected seconds, up to {_LONGEST:g}")


def report(group: dist.ProcessGroup, error: Exception) -> None:
    """Tell the other ranks, which may be about to agree with this one, that it has refused a call."""
    state = state_of(group)
    if not state.stopped:
        with suppress(RuntimeError):  # of the store: the error of this rank is the one to raise
            _write(state, f"{state.round}/{group.rank()}", {_FAILED: _told(error)})
        state.attempts += 1


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
    check_not_stopped(group, what)
    state, own = state_of(group), group.rank()
    key, collective = state.round, f"agreement on {what}"
    try:
        _write(state, f"{key}/{own}", facts)
        state.written.append(f"{key}/{_VERDICT}")
        verdict = _decided(state, key, _failure(state, key, group.size(), timeout))
        told = [] if verdict else [json.loads(state.store.get(f"{key}/{rank}")) for rank in range(group.size())]
        if not verdict:
            _forget(state, key)
    except BaseException as error:
        _withdraw(group, key, what, error)
        if isinstance(error, RuntimeError | ValueError):  # of the store
            others = tuple(rank for rank in range(group.size()) if rank != own)
            raise CollectiveError(collective, others, f"the store of the group failed ({_told(error)})") from None
        raise
    state.attempts += 1
    if verdict:
        ranks, reason = verdict
        raise CollectiveError(collective, tuple(ranks), reason)
    return told


def _write(state: State, key: str, word: Mapping[str, Any]) -> None:
    state.written.append(key)
    state.store.set(key, json.dumps(word))


def _failure(state: State, key: str, ranks: int, timeout: float) -> tuple[list[int], str] | None:
    """Wait for the words of all ranks, and return which of them have none to agree on, and why.

    None: all have, or there is a verdict already.
    """
    store, deadline = state.store, monotonic() + timeout
    missing = list(range(ranks))
    while True:
        left = deadline - monotonic()
        with suppress(RuntimeError):  # not yet; of a store that has failed the next question says so
            store.wait([f"{key}/{rank}" for rank in missing], timedelta(seconds=max(min(left, _LOOK), _PAUSE)))
        here = [rank for rank in missing if store.check([f"{key}/{rank}"])]
        for rank in here:
            word = json.loads(store.get(f"{key}/{rank}"))
            if _FAILED in word:
                return [rank], word[_FAILED]
        missing = [rank for rank in missing if rank not in here]
        if not missing or store.check([f"{key}/{_VERDICT}"]):
            return None
        for rank in missing:
            if store.check([f"{_KEYS}/{_STOPPED}/{rank}"]):
                return [rank], store.get(f"{_KEYS}/{_STOPPED}/{rank}").decode()
        if left <= 0:
            return missing, f"no word within {timeout:g} s"


def _decided(state: State, key: str, failure: Any) -> Any:
    """Return the verdict of a round, the same on all ranks: that of the first one to have any."""
    return json.loads(state.store.compare_set(f"{key}/{_VERDICT}", "", json.dumps(failure)))


def _withdraw(group: dist.ProcessGroup, key: str, what: str, error: BaseException) -> None:
    """End a round that this rank cannot finish; where others have gone on already, it stops."""
    state = state_of(group)
    try:
        verdict = _decided(state, key, ([group.rank()], _told(error)))
    except (RuntimeError, ValueError):
        verdict = None
    state.attempts += 1
    if verdict is None:
        stop(group, what, error)


def _forget(state: State, key: str) -> None:
    """Delete this rank's keys of rounds before one that all ranks have come to."""
    for old in (each for each in state.written if not each.startswith(f"{key}/")):
        state.store.delete_key(old)
    state.written = [each for each in state.written if each.startswith(f"{key}/")]


def _told(error: BaseException) -> str:
    """Return an error in a line."""
    return one_line(str(error), _LONGEST_REASON) or type(error).__name__


@contextmanager
def underway(group: dist.ProcessGroup, what: str) -> Iterator[None]:
    """Stop this rank where a call is not finished: what others send would be taken for data of the next one."""
    state = state_of(group)
    state.moving = what
    try:
        yield
    except BaseException as error:
        if state.moving:
            stop(group, what, error)
        raise
    finally:
        state.moving = ""


def fail_together(group: dist.ProcessGroup, what: str, error: CodegenError | None, timeout: float) -> None:
    """Agree, within a call, that no rank has an error; where one has, all leave the call, and may make another one.

    Raises:
        CodegenError: that of this rank.
        CollectiveError: for a rank that has one, is late or has stopped.
    """
    state = state_of(group)
    word = {} if error is None else {_FAILED: _told(error)}
    try:
        agree(group, what, word, timeout)
    except BaseException as other:
        if not state.stopped:
            state.moving = ""  # what has been sent in this call has arrived, and nobody sends more
        if error is None or not isinstance(other, CollectiveError):
            raise
        raise error from None


def stop(group: dist.ProcessGroup, what: str, error: BaseException) -> None:
    """Take no part any more in what a group does, and say so to those that wait for this rank."""
    state = state_of(group)
    state.stopped = f"stopped within {what} ({_told(error)})"
    with suppress(RuntimeError, ValueError):
        state.store.set(f"{_KEYS}/{_STOPPED}/{group.rank()}", state.stopped)


def check_not_stopped(group: dist.ProcessGroup, what: str) -> None:
    """Refuse calls over ranks some of whom may be in the middle of another call.

    Raises:
        CollectiveError: naming this rank, and what it has not finished.
    """
    if reason := state_of(group).stopped:
        raise CollectiveError(what, (group.rank(),), f"has {reason}: make another group")


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
    with as_collective(group, "the first collective of a call"):
        dist.all_reduce(met, group=group)


@contextmanager
def as_collective(group: dist.ProcessGroup, what: str) -> Iterator[None]:
    """Word what torch says of a collective that is late or has failed.

    Raises:
        CollectiveError: naming the other ranks.
    """
    try:
        yield
    except RuntimeError as error:
        others = tuple(rank for rank in range(group.size()) if rank != group.rank())
        raise CollectiveError(what, others, f"one of them is late or failed ({_told(error)})") from None
