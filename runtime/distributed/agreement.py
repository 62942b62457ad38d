"""Agreement of ranks before they move data, through the store of their group. Errors name the rank that is late."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from time import monotonic, sleep
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from codegen.wording import one_line, shown
from runtime.errors import ArgumentError, CollectiveError

TIMEOUT = 300.0
"""Default timeout in seconds. It is long because a rank may be compiling kernels."""
MOST_AGREED = 256
"""Number of call kinds that a group remembers. Ranks agree again on a forgotten kind."""
_FAILED, _VERDICT, _STOPPED = "failed", "verdict", "stopped"
_PAUSE = 1e-3  # seconds
_LOOK = 0.5  # seconds between checks of a waiting rank for ranks that have given up
_LONGEST_REASON = 400  # characters of an error in a report to other ranks
_KEYS = "sparse_kernel_codegen"
_BACKWARD = f"{_KEYS}/backward."
_LONGEST = 1e6  # seconds, the largest timeout


@dataclass
class State:
    """The state of a group in this process.

    Ranks agree in rounds. The name of a round counts the calls that all ranks continued with (agreed on, or of a known
    kind) and the failed attempts since then (refused by this rank, or failed on all ranks). So a caught error of one
    rank counts as one call for all ranks that agree, and as none for ranks that did not have to. Each round has one
    verdict, which is written once and holds for all ranks: a late rank reads that it is late.

    Attributes:
        store: the group's store.
        calls: number of calls that all ranks continued with.
        backward_passes: number of backward passes, which have separate rounds: a rank may refuse calls between a call
            and its backward pass.
        attempts: number of rounds since the last such call.
        agreed: call kinds that ranks have agreed on, oldest first; the same on all ranks.
        memory: symmetric memory, keyed by its purpose.
        written: keys of this rank that others may still read.
        moving: the call that is moving data; "" for none.
        stopped: the reason why this rank has left the group; "" if it has not.
    """

    store: Any
    calls: int = 0
    backward_passes: int = 0
    attempts: int = 0
    agreed: dict[tuple[Any, ...], None] = field(default_factory=dict)
    memory: dict[tuple[Any, ...], Any] = field(default_factory=dict)
    written: list[str] = field(default_factory=list)
    moving: str = ""
    stopped: str = ""

    @property
    def round(self) -> str:
        """The prefix of the keys of the next round."""
        return f"{_KEYS}/{self.calls}.{self.attempts}"

    def next_backward(self) -> str:
        """Count a backward pass, and return the prefix of the keys of its round."""
        self.backward_passes += 1
        return f"{_BACKWARD}{self.backward_passes}"

    def remember(self, kind: tuple[Any, ...]) -> None:
        """Remember a call kind that all ranks have just agreed on."""
        self.agreed[kind] = None
        if len(self.agreed) > MOST_AGREED:
            self.agreed.pop(next(iter(self.agreed)))

    def go_on(self) -> None:
        """Count a call that all ranks continue with."""
        self.calls += 1
        self.attempts = 0


_states: WeakKeyDictionary[dist.ProcessGroup, State] = WeakKeyDictionary()


def group_of(name: str) -> dist.ProcessGroup:
    """The group of a name.

    Raises:
        ArgumentError: if there is none.
    """
    try:
        resolve: Any = torch._C._distributed_c10d._resolve_process_group
        found: dist.ProcessGroup = resolve(name)
        return found
    except (RuntimeError, ValueError, KeyError):
        raise ArgumentError("mesh_or_group", f"was the group {name}, which does not exist (any more)") from None


def state_of(group: dist.ProcessGroup) -> State:
    """The state of a group; it is dropped with the group.

    Raises:
        ArgumentError: for a group that was destroyed.
    """
    there: Any = distributed_c10d._world.pg_map
    found = _states.get(group) if group in there else None
    if found is None:
        for gone in [each for each in _states if each not in there]:
            del _states[gone]
        if group not in there:
            raise ArgumentError("mesh_or_group", f"was the group {group.group_name}, which does not exist (any more)")
        found = _states[group] = State(there[group][1])
    return found


def check_timeout(timeout: Any) -> None:
    """Check a timeout.

    Raises:
        ArgumentError: unless it is a number of seconds.
    """
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout <= _LONGEST:
        raise ArgumentError("timeout", f"is {shown(timeout)}, expected seconds, up to {_LONGEST:g}")


def report(group: dist.ProcessGroup, error: Exception) -> None:
    """Report to the other ranks, which may be waiting for agreement, that this rank has refused a call."""
    state = state_of(group)
    if not state.stopped:
        with suppress(RuntimeError):  # an error of the store: raise this rank's own error instead
            _write(state, f"{state.round}/{group.rank()}", {_FAILED: _text_of(error)})
        state.attempts += 1


def agree(
    group: dist.ProcessGroup, what: str, facts: Mapping[str, Any], timeout: float = TIMEOUT, *, key: str = ""
) -> list[Any]:
    """Exchange facts with all ranks.

    Args:
        group: the ranks.
        what: name of the call, for messages.
        facts: plain data; ``same`` compares the facts that must be equal.
        timeout: seconds after which a rank is late.
        key: key of a round other than the next round of calls.

    Returns:
        The facts of each rank.

    Raises:
        CollectiveError: naming the late or failed ranks, on every participating rank.
    """
    check_not_stopped(group, what)
    state, own = state_of(group), group.rank()
    in_turn, key, collective = not key, key or state.round, f"agreement on {what}"
    try:
        _write(state, f"{key}/{own}", facts)
        state.written.append(f"{key}/{_VERDICT}")
        verdict = _decided(state, key, _failure(state, key, group.size(), timeout))
        facts_of_all = [] if verdict else [json.loads(state.store.get(f"{key}/{rank}")) for rank in range(group.size())]
        if not verdict:
            _forget(state, key)
    except BaseException as error:
        _withdraw(group, key, what, error)
        state.attempts += in_turn
        if isinstance(error, RuntimeError | ValueError):  # raised by the store
            others = tuple(rank for rank in range(group.size()) if rank != own)
            raise CollectiveError(collective, others, f"the store of the group failed ({_text_of(error)})") from None
        raise
    state.attempts += in_turn
    if verdict:
        ranks, reason = verdict
        raise CollectiveError(collective, tuple(ranks), reason)
    return facts_of_all


def _write(state: State, key: str, word: Mapping[str, Any]) -> None:
    state.written.append(key)
    state.store.set(key, json.dumps(word))


def _failure(state: State, key: str, ranks: int, timeout: float) -> tuple[list[int], str] | None:
    """Wait for the messages of all ranks.

    Returns:
        Failed or late ranks and the reason; None if all messages or a verdict have arrived.
    """
    store, deadline = state.store, monotonic() + timeout
    missing = list(range(ranks))
    while True:
        left = deadline - monotonic()
        with suppress(RuntimeError):  # not there yet; the next query reports a failed store
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
            return missing, f"no message within {timeout:g} s"


def _decided(state: State, key: str, failure: Any) -> Any:
    """The verdict of a round, the same on all ranks: the first one written."""
    return json.loads(state.store.compare_set(f"{key}/{_VERDICT}", "", json.dumps(failure)))


def _withdraw(group: dist.ProcessGroup, key: str, what: str, error: BaseException) -> None:
    """End a round that this rank cannot finish. If others have already continued, this rank stops."""
    state = state_of(group)
    try:
        verdict = _decided(state, key, ([group.rank()], _text_of(error)))
    except (RuntimeError, ValueError):
        verdict = None
    if verdict is None:
        stop(group, what, error)


def _forget(state: State, key: str) -> None:
    """Delete this rank's keys of the rounds (of calls or backward passes) before one that all ranks have reached."""
    of_calls = not key.startswith(_BACKWARD)
    old = [each for each in state.written if not each.startswith(f"{key}/") and of_calls != each.startswith(_BACKWARD)]
    for each in old:
        state.store.delete_key(each)
    state.written = [each for each in state.written if each not in old]


def _text_of(error: BaseException) -> str:
    """The text of an error, on one line."""
    return one_line(str(error), _LONGEST_REASON) or type(error).__name__


@contextmanager
def underway(group: dist.ProcessGroup, what: str) -> Iterator[None]:
    """Stop this rank if a call does not finish: data from other ranks would be mistaken for data of the next call."""
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


def fail_together(
    group: dist.ProcessGroup, what: str, error: Exception | None, timeout: float, *, key: str = ""
) -> None:
    """Agree, within a call, that no rank has an error. If one has, all ranks leave the call and may make another.

    Args:
        group: the ranks.
        what: the call, for messages.
        error: this rank's error, or None.
        timeout: seconds after which a rank is late.
        key: as in ``agree``.

    Raises:
        Exception: the error of this rank.
        CollectiveError: if another rank has an error, is late or has stopped.
    """
    state = state_of(group)
    word = {} if error is None else {_FAILED: _text_of(error)}
    try:
        agree(group, what, word, timeout, key=key)
    except BaseException as other:
        if not state.stopped:
            state.moving = ""  # all data of this call have arrived, and no rank sends more
        if error is None or not isinstance(other, CollectiveError):
            raise
        raise error from None


@contextmanager
def known_if_done(group: dist.ProcessGroup, kind: tuple[Any, ...]) -> Iterator[None]:
    """Remember a call kind once a call of it is done. After an error, ranks agree again on the next call."""
    state = state_of(group)
    try:
        yield
    except BaseException:
        state.agreed.pop(kind, None)
        raise
    if kind not in state.agreed:
        state.remember(kind)


class Attempt:
    """The computations of one rank within a call. The call's data movement continues even if a computation fails.

    If ranks fail together, an error is kept until all data have arrived, further computations are skipped, and all
    ranks leave the call. Otherwise an error is raised at once, which stops this rank (``underway``).

    Args:
        group: the ranks.
        what: the call, for messages.
        timeout: seconds after which a rank is late.
        together: whether ranks fail together; the same on all ranks.
        key: as in ``agree``.
    """

    def __init__(self, group: dist.ProcessGroup, what: str, timeout: float, *, together: bool, key: str = "") -> None:
        self.group, self.what, self.timeout, self.together, self.key = group, what, timeout, together, key
        self._error: Exception | None = None

    def run(self, compute: Callable[[], None]) -> None:
        """Run a computation, unless an earlier one failed."""
        if self._error is not None:
            return
        try:
            compute()
        except Exception as error:
            if not self.together:
                raise
            self._error = error

    def settle(self) -> None:
        """Leave the call on all ranks if a computation of one rank failed.

        Raises:
            Exception: the error of this rank.
            CollectiveError: if another rank has an error, is late or has stopped.
        """
        error, self._error = self._error, None
        if self.together:
            fail_together(self.group, self.what, error, self.timeout, key=self.key)


def stop(group: dist.ProcessGroup, what: str, error: BaseException) -> None:
    """Leave a group, and report it to the ranks that wait for this one."""
    state = state_of(group)
    state.stopped = f"stopped within {what} ({_text_of(error)})"
    with suppress(RuntimeError, ValueError):
        state.store.set(f"{_KEYS}/{_STOPPED}/{group.rank()}", state.stopped)


def check_not_stopped(group: dist.ProcessGroup, what: str) -> None:
    """Refuse a call in a group that this rank has left.

    Raises:
        CollectiveError: naming this rank and the unfinished call.
    """
    if reason := state_of(group).stopped:
        raise CollectiveError(what, (group.rank(),), f"has {reason}: make another group")


def same(facts_of_all: list[dict[str, Any]]) -> None:
    """Refuse facts that differ between ranks.

    Raises:
        ArgumentError: naming the first differing fact and two ranks that differ; the same on all ranks.
    """
    for name, first in facts_of_all[0].items():
        for rank, facts in enumerate(facts_of_all):
            if facts.get(name) != first:
                raise ArgumentError(name, f"is {first} on rank 0 and {facts.get(name)} on rank {rank}: pass the same")


def finish(what: str, device: torch.device, others: tuple[int, ...], timeout: float) -> None:
    """Wait for the work of the current stream, at most ``timeout`` seconds.

    Raises:
        CollectiveError: if it is not done by then.
    """
    if device.type != "cuda":
        return
    done, deadline = torch.cuda.current_stream(device).record_event(), monotonic() + timeout
    while not done.query():
        if monotonic() > deadline:
            raise CollectiveError(what, others, f"one of them is late or failed: not done within {timeout:g} s")
        sleep(_PAUSE)


def meet(group: dist.ProcessGroup, device: torch.device) -> None:
    """Run a first collective in which all ranks take part, which NCCL requires."""
    met = torch.zeros(1, dtype=torch.float32, device=device)
    with as_collective(group, "the first collective of a call"):
        dist.all_reduce(met, group=group)


@contextmanager
def as_collective(group: dist.ProcessGroup, what: str) -> Iterator[None]:
    """Convert torch's error of a late or failed collective to an error that names ranks.

    Raises:
        CollectiveError: naming the other ranks.
    """
    try:
        yield
    except RuntimeError as error:
        others = tuple(rank for rank in range(group.size()) if rank != group.rank())
        raise CollectiveError(what, others, f"one of them is late or failed ({_text_of(error)})") from None
