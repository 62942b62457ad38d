"""Keys and values in torch's symmetric memory, which all GPUs of a host can address. Copy engines of peers read them.

Copy engines use no SM, so a kernel that fills the GPU keeps its speed during the transfer; NCCL's kernels use some SMs.
The memory has room for all keys and values of the sequence. Neither kernels of this package nor multicast move data.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from runtime.distributed.agreement import (
    TIMEOUT,
    agree,
    check_timeout,
    fail_together,
    finish,
    meet,
    report,
    same,
    state_of,
    underway,
)
from runtime.distributed.arguments import group_from
from runtime.distributed.copies import copy_heads, copy_wide
from runtime.distributed.exchange import Exchange, Pair
from runtime.distributed.layout import Layout
from runtime.distributed.steps import OWN, Steps
from runtime.errors import ArgumentError
from runtime.ops.attention_checks import check_operands

_KEPT = 16  # tensors per group
SIGNAL_TIMEOUT = 600_000  # ms, NCCL's default: a rank may be compiling kernels
WRITTEN, READ, FREE, PUSHED = range(4)
"""Channels of barriers."""
KEYS, GRADIENTS = "keys", "gradients"
"""Names of memory. KEYS: (2, batch, kv_heads, kv_len, head_dim); a rank writes its own part, which all ranks read.
GRADIENTS: (ranks, 2, batch, kv_heads, rows per rank, head_dim); rank r writes the r-th part on the other ranks.
outbox.py serves ranks that need less than the whole sequence."""


class Symmetric:
    """A tensor on each rank that peers can address.

    Args:
        here: this rank's tensor.
        handle: handle of torch's symmetric memory.
    """

    def __init__(self, here: torch.Tensor, handle: Any) -> None:
        self.here, self.handle = here, handle
        # Older versions of torch allocate each tensor separately, and have no name for the allocation.
        self._remote = getattr(handle, "get_remote_tensor", None) or handle.get_buffer
        self._at: dict[int, torch.Tensor] = {}

    def barrier(self, channel: int) -> None:
        """Make the current stream wait for all ranks. A GPU that times out stops and names the rank."""
        self.handle.barrier(channel=channel, timeout_ms=SIGNAL_TIMEOUT)

    def at(self, rank: int) -> torch.Tensor:
        """The memory of a rank as a cached tensor: torch takes about 50 us to make one."""
        if rank not in self._at:
            self._at[rank] = self._remote(rank, tuple(self.here.shape), self.here.dtype)
        return self._at[rank]


def memory_of(group: dist.ProcessGroup, what: str, shape: tuple[int, ...], like: torch.Tensor) -> Symmetric:
    """A group's memory of a name. All ranks allocate it together in the first call.

    Args:
        group: the ranks.
        what: KEYS, GRADIENTS or another name.
        shape: shape of the tensor.
        like: a tensor with the dtype and device.

    Raises:
        ArgumentError: if symmetric memory is not available: without GPUs, or between hosts.
    """
    from torch.distributed import _symmetric_memory as memory  # noqa: PLC0415 - few calls need it

    kept = state_of(group).memory
    if (key := (what, shape, like.dtype, like.device)) in kept:
        kept_already: Symmetric = kept[key]
        return kept_already
    if len(kept) == _KEPT:
        _settle(group, like.device)  # pending GPU work may read the memory that is released
        kept.pop(next(iter(kept)))
    about, error = f"symmetric memory for {what}", None
    try:
        here = memory.empty(*shape, dtype=like.dtype, device=like.device)
        # torch clears the memory and its barrier signals after the pending work of the default stream. The signal of a
        # faster rank would be cleared too, and both ranks would wait forever.
        _settle(group, like.device)
    except (RuntimeError, NotImplementedError) as refusal:
        error = _refused(refusal)
    fail_together(group, about, error, TIMEOUT)  # no rank waits in the next line for a rank without memory
    try:
        made = Symmetric(here, memory.rendezvous(here, group.group_name))
    except (RuntimeError, NotImplementedError) as refusal:
        error = _refused(refusal)
    fail_together(group, about, error, TIMEOUT)
    kept[key] = made
    return made


def _refused(error: Exception) -> ArgumentError:
    """Error for unavailable symmetric memory, with torch's reason."""
    told = str(error).splitlines()[0] if str(error) else type(error).__name__
    return ArgumentError("symmetric", f"is True, but torch has no symmetric memory here: {told}")


def _settle(group: dist.ProcessGroup, device: torch.device) -> None:
    """Wait for the default stream and the current stream.

    Raises:
        CollectiveError: if a late rank makes them time out.
    """
    if device.type != "cuda":
        return
    others = tuple(rank for rank in range(group.size()) if rank != group.rank())
    for stream in {torch.cuda.current_stream(device), torch.cuda.default_stream(device)}:
        with torch.cuda.stream(stream):
            finish("making symmetric memory", device, others, TIMEOUT)


def keys_of(group: dist.ProcessGroup, k: torch.Tensor) -> Symmetric:
    """The memory for keys and values of the whole sequence; k is the rank's part.

    Raises:
        ArgumentError: if symmetric memory is not available.
    """
    batch, heads, rows, head_dim = k.shape
    return memory_of(group, KEYS, (2, batch, heads, rows * group.size(), head_dim), k)


def shared_keys(k: torch.Tensor, mesh_or_group: Any, *, timeout: float = TIMEOUT) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tensors like k, for keys and values, that ``symmetric=True`` uses without a copy.

    The tensors are views of memory that all calls with this shape share: write keys and values into them, call
    attention, then write the next ones. They are for inference; a call with gradients refuses them. All ranks call this
    function.

    Args:
        k: this rank's keys in the contiguous layout, (batch, kv_heads, kv_len, head_dim); their values are not read.
        mesh_or_group: as in the calls.
        timeout: seconds that ranks wait for each other.

    Returns:
        (k, v), each (batch, kv_heads, kv_len, head_dim), not contiguous.

    Raises:
        ArgumentError: if symmetric memory is not available.
        CollectiveError: for a rank that is late or has failed.
    """
    group = group_from(mesh_or_group)
    try:
        check_timeout(timeout)
        check_operands(k, k, k)
    except Exception as error:
        report(group, error)
        raise
    same(agree(group, "shared_keys", {"function": "shared_keys", "k": f"{tuple(k.shape)} {k.dtype}"}, timeout))
    with underway(group, "shared_keys"):
        meet(group, k.device)
        own_k, own_v = keys_of(group, k).here.narrow(3, group.rank() * k.shape[2], k.shape[2])
    return own_k, own_v


def fits(every: Sequence[Steps]) -> bool:
    """Whether the buffers of all ranks are the first keys of the sequence, in their order."""
    return all(
        len(steps.buffers) <= 1 and all(step.buffer == OWN or (step.keys,) == step.spans for step in steps.steps)
        for steps in every
    )


class SymmetricExchange(Exchange):
    """Exchange that reads keys and values directly from peers, and writes gradients directly to their owners.

    Args:
        whole: the memory for keys.
        layout: assignment of keys to ranks.
        exchange: the arguments of ``Exchange``, by name.
    """

    def __init__(self, whole: Symmetric, layout: Layout, **exchange: Any) -> None:
        super().__init__(**exchange)
        self.whole, self.layout = whole, layout

    def arrivals(self, runs: Sequence[slice], *, gives_back: bool) -> Iterator[tuple[slice, list[Pair]]]:
        """Yield runs of heads and their buffers as they arrive. All transfers start at once.

        A barrier is a kernel that occupies an SM while it waits, and delays an attention thread block on that SM until
        the other rank arrives. So the computation starts after the first barrier and ends before the last one. Barriers
        of several streams must not wait for each other crosswise either, because thread blocks of gradients do: if
        gradients are given back, their last barrier also signals that all ranks have read everything.
        """
        buffers = [self.room(run) for run in runs]
        self.moves.follow()
        with self.moves.on():
            self.fill()
            self.whole.barrier(WRITTEN)
            written = self.moves.mark()
            events = []
            for run, there in zip(runs, buffers, strict=True):
                self.read(run, there)
                events.append(self.moves.mark())
        self.moves.join(written)
        return self._arrived(runs, buffers, events, gives_back=gives_back)

    def _arrived(
        self, runs: Sequence[slice], buffers: list[list[Pair]], events: Sequence[Any], *, gives_back: bool
    ) -> Iterator[tuple[slice, list[Pair]]]:
        try:
            for run, event in zip(runs, events, strict=True):
                self.moves.join(event)
                yield run, buffers.pop(0)
        finally:  # also after an error, so that the memory can be reused
            self.moves.join()
        if not gives_back:
            self.whole.barrier(READ)  # all ranks may write again

    def room(self, run: slice) -> list[Pair]:
        """Uninitialized buffers of heads."""
        k, v = self.whole.here[:, :, run, : self.mine.rows(0)] if self.mine.buffers else self.whole.here[:, :, run]
        return [(k, v)]

    def fill(self) -> None:
        """Write this rank's keys and values, unless they are already in the memory."""
        for source, target in zip((self.k, self.v), self.whole.here, strict=True):
            first = 0
            for span in self.layout.spans(self.rank, self.whole.here.shape[3]):
                rows, there = source.narrow(2, first, span.size), target.narrow(2, span.start, span.size)
                if (rows.data_ptr(), rows.stride()) != (there.data_ptr(), there.stride()):
                    copy_wide(there, rows)
                first += span.size

    def read(self, run: slice, buffers: Sequence[Pair]) -> None:
        """Copy the data that this rank needs; each rank starts with a different peer."""
        del buffers  # views of this memory
        ranks = len(self.steps)
        pieces = [piece for pieces in self.mine.buffers for piece in pieces if piece.rank != self.rank]
        for piece in sorted(pieces, key=lambda piece: (piece.rank - self.rank) % ranks):
            for source, target in zip(self.whole.at(piece.rank), self.whole.here, strict=True):
                rows = slice(piece.target, piece.target + piece.size)
                copy_heads(target[:, run, rows], source[:, run, rows])

    def give_back(self, run: slice, grads: Sequence[Pair], own: Sequence[tuple[int, Pair]], sums: Pair) -> None:
        """Send gradients to the ranks that own the keys, and sum the received gradients, in rank order, in float32.

        Args:
            run: heads of k.
            grads: gradients of the buffers.
            own: gradients of this rank's keys from its own steps: the first row, and the rows.
            sums: outputs: dk and dv of these heads.
        """
        inbox = self.inbox()
        self.returns.follow()
        with self.returns.on():
            if run.start == 0:
                inbox.barrier(FREE)  # all ranks have summed the gradients of an earlier call
            self.push(inbox, run, grads)
            inbox.barrier(PUSHED)
            self.collect(inbox, run, [*own, *self._own(grads)], sums)
            self.returns.keep(*(tensor for pair in grads for tensor in pair))
            self.returns.keep(*(tensor for _, pair in own for tensor in pair))

    def inbox(self) -> Symmetric:
        """The memory into which other ranks write gradients of this rank's keys."""
        return memory_of(self.group, GRADIENTS, (len(self.steps), 2, *self.k.shape), self.k)

    def push(self, inbox: Symmetric, run: slice, grads: Sequence[Pair]) -> None:
        """Write gradients of other ranks' keys into those ranks' memory."""
        for pieces, pair in zip(self.mine.buffers, grads, strict=True):
            for piece in pieces:
                if piece.rank != self.rank:
                    for target, source in zip(inbox.at(piece.rank)[self.rank], pair, strict=True):
                        there = target[:, run].narrow(2, piece.source, piece.size)
                        copy_heads(there, source.narrow(2, piece.target, piece.size))

    def collect(self, inbox: Symmetric, run: slice, own: list[tuple[int, Pair]], sums: Pair) -> None:
        """Sum the gradients that other ranks have written, and this rank's own."""
        back: dict[int, list[tuple[int, Pair]]] = {self.rank: own}
        for rank in self._others():
            k, v = inbox.here[rank, :, :, run]
            back[rank] = [
                (piece.source, (k.narrow(2, piece.source, piece.size), v.narrow(2, piece.source, piece.size)))
                for piece in self._for(rank)
            ]
        self._add_up(run, back, sums)


def check_not_kept(k: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Refuse keys in memory that later calls overwrite, if a backward pass would read them.

    Raises:
        ArgumentError: if k is in that memory.
    """
    for (what, *_), kept in state_of(group).memory.items():
        first = kept.here.data_ptr()
        if what == KEYS and first <= k.data_ptr() < first + kept.here.nbytes:
            reason = "is from shared_keys, which later calls overwrite, but gradients are needed: pass a copy"
            raise ArgumentError("k", reason)
