"""Two ranks, one of which has a fault at one step of some calls: an error, a delay, or its end.

A step is a moment at which a rank talks to the other one: a question to the store of the group, a collective, messages
that begin or are waited for. Each call has data of its own, so that a rank that is one call ahead computes what is
wrong. Kernels are by the definition; the backend is gloo.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import queue
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

PROJECT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(PROJECT / "tests" / "support"), str(PROJECT), str(Path(__file__).parent)]
import attention_oracle  # noqa: E402
import oracle_calls  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from runtime import CollectiveError  # noqa: E402
from runtime.distributed import (  # noqa: E402
    Layout,
    context,
    context_parallel_attention,
    head_parallel_attention,
    heads,
    plan_sends,
)
from runtime.distributed.agreement import state_of  # noqa: E402
from runtime.distributed.transfer import Transfer  # noqa: E402
from runtime.patterns import Causal, Dense, SlidingWindow, TopK, scored_of  # noqa: E402

RANKS, LENGTH, BLOCK = 2, 128, 32
AGREE, MOVE = 2.0, 4.0
"""Seconds that ranks wait for each other's word, and for data."""
DELAY = 0.3  # seconds that nobody minds
LIMIT = 2 * (AGREE + MOVE) + 2.0
"""Seconds of one call: a forward and a backward pass, and a machine that is busy."""
STORE = ("set", "get", "wait", "check", "compare_set", "delete_key")


class Fault(NamedTuple):
    """What happens, on which rank, at which of its steps; of KERNELS an error of the first one within a call."""

    kind: str
    rank: int
    step: int


KERNELS = ("attend", "attend_backward")


class Injected(Exception):
    """An error that no library has."""


class Steps:
    """Counts the steps of this rank, and has a fault at one of them."""

    def __init__(self, fault: Fault | None) -> None:
        self.fault, self.count = fault, 0

    def here(self) -> None:
        self.count += 1
        if self.fault is None or self.fault.kind in KERNELS or self.count != self.fault.step:
            return
        if self.fault.kind == "error":
            raise Injected("an injected error")
        if self.fault.kind == "kill":
            os._exit(9)
        time.sleep(DELAY if self.fault.kind == "delay" else AGREE + MOVE + 0.5)

    def before(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **options: Any) -> Any:
            self.here()
            return function(*arguments, **options)

        return counted

    def after(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Count what has been done: a fault comes when others may have heard of it already."""

        def counted(*arguments: Any, **options: Any) -> Any:
            found = function(*arguments, **options)
            self.here()
            return found

        return counted


class Store:
    """A store whose questions are steps."""

    def __init__(self, store: Any, steps: Steps) -> None:
        for name in STORE:
            function = getattr(store, name)
            setattr(self, name, steps.before(steps.after(function) if name == "set" else function))


@contextmanager
def counted(group: Any, steps: Steps) -> Iterator[None]:
    """Count what a group does."""
    state = state_of(group)
    kept = dist.batch_isend_irecv, dist.all_reduce, dist.all_gather, Transfer.wait, state.store
    state.store = Store(state.store, steps)
    dist.batch_isend_irecv = steps.before(steps.after(dist.batch_isend_irecv))
    dist.all_reduce, dist.all_gather = steps.before(dist.all_reduce), steps.before(dist.all_gather)
    Transfer.wait = steps.before(Transfer.wait)  # type: ignore[method-assign]
    try:
        yield
    finally:
        dist.batch_isend_irecv, dist.all_reduce, dist.all_gather, wait, state.store = kept
        Transfer.wait = wait  # type: ignore[method-assign]


@contextmanager
def broken(kernel: str) -> Iterator[None]:
    """Let the next call of a kernel of this rank have an error."""
    modules = context, heads
    before = [getattr(module, kernel) for module in modules]

    def fail(*_: Any, **__: Any) -> None:
        restore()
        raise Injected("an injected error of a kernel")

    def restore() -> None:
        for module, function in zip(modules, before, strict=True):
            setattr(module, kernel, function)

    for module in modules:
        setattr(module, kernel, fail)
    try:
        yield
    finally:
        restore()


def tensors_of(call: int) -> list[Any]:
    made = torch.Generator().manual_seed(call)
    return [torch.randn(1, 2, LENGTH, 8, generator=made).bfloat16() for _ in range(3)]


def near(rank: int) -> TopK:
    """Return lists of a rank's queries: the first block of each rank."""
    del rank
    blocks = torch.tensor([0, LENGTH // BLOCK // RANKS], dtype=torch.int32)
    return TopK(blocks.expand(1, 1, LENGTH // BLOCK // RANKS, 2).contiguous(), block=(BLOCK, BLOCK))


def attention(group: Any, call: int, pattern: Any, *, gradients: bool = False, by: Any = None, **options: Any) -> str:
    """Make a call on this rank, and return what is wrong with its results."""
    layout, rank = Layout.contiguous(RANKS), dist.get_rank(group)
    whole = tensors_of(call)
    q, k, v = (layout.shard(tensor, rank).requires_grad_(gradients) for tensor in whole)
    by = by or context_parallel_attention
    out = by(q, k, v, pattern, group, layout="contiguous", timeout=AGREE, **options)
    seen = Causal() if isinstance(pattern, Causal) else pattern
    if isinstance(pattern, TopK):
        every = pattern.kv_indices.repeat(1, 1, RANKS, 1)
        seen = TopK(every, block=(BLOCK, BLOCK))
    times = oracle_calls.seen_by(*whole[:2], seen.index_tensors(), scored_of(seen), None)
    right, lse = attention_oracle.attention(*whole, times)
    wrong = [] if close(out.detach(), layout.shard(right, rank)) else ["out"]
    if gradients:
        weights = tensors_of(1000 + call)[0].float()
        (out.float() * layout.shard(weights, rank)).sum().backward()
        grads = attention_oracle.gradients(*whole, right, lse, weights, times)
        pairs = (("dq", q), ("dk", k), ("dv", v))
        wrong += [name for name, leaf in pairs if not close(leaf.grad, layout.shard(grads[name], rank))]
    return " ".join(wrong)


def close(found: Any, right: Any) -> bool:
    return bool(torch.allclose(found.float(), right.float(), atol=5e-2, rtol=5e-2))


def by_plan(group: Any, call: int) -> str:
    layout, rank = Layout.contiguous(RANKS), dist.get_rank(group)
    q, k, _ = (layout.shard(tensor, rank) for tensor in tensors_of(call))
    plan = plan_sends(q, k, near(rank), group, most=1.1, timeout=AGREE)
    return attention(group, call, near(rank), send=plan)


CALLS: tuple[Callable[[Any, int], str], ...] = (
    lambda group, call: attention(group, call, Dense()),  # of a new kind
    lambda group, call: attention(group, call, Dense()),  # of a known one
    lambda group, call: attention(group, call, Causal(), gradients=True),
    lambda group, call: attention(group, call, SlidingWindow(5)),  # the first rank needs nothing of the other
    lambda group, call: attention(group, call, Dense(), validate=True),
    lambda group, call: attention(group, call, Dense(), by=head_parallel_attention, gradients=True),
    by_plan,
    lambda group, call: attention(group, call, Dense()),
)


def scenario(group: Any, spare: Any, fault: Fault | None, number: int) -> tuple[int, list[str]]:
    """Return the steps of this rank, and what each call was: "" for right, an error's name, or what is wrong."""
    rank = dist.get_rank(group)
    own = fault if fault is not None and fault.rank == rank else None
    steps = Steps(own)
    found: list[str] = []
    with counted(group, steps):
        for place, call in enumerate(CALLS):
            breaks = own is not None and own.kind in KERNELS and own.step == place
            with broken(own.kind) if own is not None and breaks else nullcontext():
                found.append(_outcome(call, group, 100 * number + place))
    if spare is not None:
        dist.barrier()
        found.append(_outcome(CALLS[0], spare, 100 * number + len(CALLS)))
    return steps.count, found


def kernel_wrongs(fault: Fault, told: list[Any]) -> list[str]:
    """Return what must not be after an error of a kernel: its call fails on all ranks by name, all others are right.

    Only calls that ranks agree on fail together: the first ones of a kind, and those with ``validate``.
    """
    found = []
    for rank, each in enumerate(told):
        if each is None:
            found.append(f"{fault}: rank {rank} has not ended")
            continue
        for place, outcome in enumerate(each[1]):
            right = "" if place != fault.step else "Injected: an injected error of a kernel"
            if right and rank != fault.rank:
                right = f"rank {fault.rank}: an injected error of a kernel"
            if outcome != right and not (right and rank != fault.rank and right in outcome and "LONG" not in outcome):
                found.append(f"{fault}: rank {rank}, call {place}: {outcome!r}, expected {right!r}")
    return found


def _outcome(call: Callable[[Any, int], str], group: Any, number: int) -> str:
    began = time.monotonic()
    try:
        wrong = call(group, number)
        told = f"WRONG {wrong}" if wrong else ""
    except (Injected, CollectiveError) as error:
        told = f"{type(error).__name__}: {error}"
    except Exception as error:
        told = f"BARE {type(error).__name__}: {error}"
    took = time.monotonic() - began
    return f"LONG {took:.1f} s: {told}" if took > LIMIT else told


def on_rank(rank: int, folder: str, faults: list[Fault | None], answers: Any) -> None:
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(len(faults) * (len(CALLS) + 2) * LIMIT, exit=True)
    store = dist.FileStore(f"{folder}/store", RANKS)
    dist.init_process_group("gloo", rank=rank, world_size=RANKS, store=store, timeout=timedelta(seconds=120))
    oracle_calls.install()
    for number, fault in enumerate(faults):
        killed = fault is not None and fault.kind == "kill"
        group, spare = (dist.new_group(list(range(RANKS)), timeout=timedelta(seconds=MOVE)) for _ in range(2))
        answers.put((rank, number, scenario(group, None if killed else spare, fault, number)))
        if killed:
            break
        dist.barrier()
    answers.put((rank, -1, None))
    answers.close()
    answers.join_thread()
    os._exit(0)


def run(faults: list[Fault | None]) -> list[list[Any]]:
    """Return, of each fault, what each rank had: its steps, and the outcomes of its calls; None of one that ended.

    A rank that is killed ends its process: such a fault is the last one.
    """
    context = multiprocessing.get_context("fork")
    answers: Any = context.Queue()
    found: list[list[Any]] = [[None] * RANKS for _ in faults]
    with tempfile.TemporaryDirectory() as folder:
        given = folder, faults, answers
        processes = [context.Process(target=on_rank, args=(rank, *given)) for rank in range(RANKS)]
        for process in processes:
            process.start()
        last = faults[-1]
        done, ends = 0, RANKS - (last is not None and last.kind == "kill")
        try:
            while done < ends:
                rank, number, told = answers.get(timeout=(len(CALLS) + 2) * LIMIT + 20)
                done += number < 0
                if number >= 0:
                    found[number][rank] = told
        except queue.Empty:
            pass
        finally:
            for process in processes:
                process.join(2)
                process.kill()
    return found


def wrongs(fault: Fault | None, told: list[Any]) -> list[str]:
    """Return what must not be: other data, long waits, bare errors, and calls that go wrong without a reason."""
    killed = fault is not None and fault.kind == "kill"
    found = []
    for rank, each in enumerate(told):
        if each is None:
            if not (killed and fault is not None and rank == fault.rank):
                found.append(f"{fault}: rank {rank} has not ended")
            continue
        outcomes = each[1]
        found += [
            f"{fault}: rank {rank}, call {place}: {text}"
            for place, text in enumerate(outcomes)
            if text.startswith(("WRONG", "LONG", "BARE"))
        ]
    if found or killed:
        return found
    calm = fault is None or fault.kind == "delay"
    whole = [each[1] for each in told]
    for rank, outcomes in enumerate(whole):
        if outcomes[-1]:
            found.append(f"{fault}: rank {rank}, another group: {outcomes[-1]}")
        stopped = any("has stopped" in text for every in whole for text in every)
        failed = [place for place, text in enumerate(outcomes[:-1]) if text]
        if calm and failed:
            found.append(f"{fault}: rank {rank}, calls {failed}: {outcomes}")
        most = 1 if fault is None or fault.kind != "late" else (AGREE + MOVE) / AGREE + 1  # whole calls late
        if not stopped and len(failed) > most:  # one call, and the next one is right
            found.append(f"{fault}: rank {rank}, calls {failed} without having stopped: {outcomes}")
    return found
