"""Keys and values in memory that all GPUs of a host address, as torch has it: peers read them by copy engines.

Copy engines take no SM, so a kernel that fills the chip goes on at its own speed while data moves. NCCL's kernels take
some, and what waits for those takes longer. There is room for all keys and values of the sequence. No kernel of ours is
about, and no multicast.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from runtime.distributed.agreement import TIMEOUT, agree, meet, same, state_of
from runtime.distributed.arguments import group_from
from runtime.distributed.exchange import Exchange, Pair, rows_of
from runtime.distributed.layout import Layout, Span
from runtime.distributed.steps import OWN, Steps
from runtime.errors import ArgumentError

_KEPT = 4  # shapes; each has a buffer for all keys and values
_WRITTEN, _READ = 0, 1  # channels of barriers


class Whole(NamedTuple):
    """Keys and values of a whole sequence on each rank, of which a rank writes its own part.

    Attributes:
        here: (2, batch, kv_heads, kv_len, head_dim) on this rank.
        handle: of torch's symmetric memory.
    """

    here: torch.Tensor
    handle: Any

    def at(self, rank: int) -> torch.Tensor:
        """Return what is on a rank."""
        # Older versions of torch have one allocation for each tensor, and no other name for it.
        remote = getattr(self.handle, "get_remote_tensor", self.handle.get_buffer)
        found: torch.Tensor = remote(rank, tuple(self.here.shape), self.here.dtype)
        return found


def whole_of(group: dist.ProcessGroup, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Whole:
    """Return the memory that a group has for keys and values of a shape; all ranks ask at the same time, once.

    Raises:
        ArgumentError: where there is no such memory: without GPUs, and between hosts.
    """
    from torch.distributed import _symmetric_memory as memory  # noqa: PLC0415 - few calls need it

    kept = state_of(group).memory
    if (key := (shape, dtype, device)) in kept:
        whole: Whole = kept[key]
        return whole
    if len(kept) == _KEPT:
        kept.pop(next(iter(kept)))
    try:
        here = memory.empty(2, *shape, dtype=dtype, device=device)
        kept[key] = whole = Whole(here, memory.rendezvous(here, group.group_name))
        return whole
    except (RuntimeError, NotImplementedError) as error:
        told = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ArgumentError("symmetric", f"is True, and torch has no symmetric memory here: {told}") from None


def shared_keys(k: torch.Tensor, mesh_or_group: Any, *, timeout: float = TIMEOUT) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tensors like k, for keys and values, where ``symmetric=True`` needs no copy of them.

    They are views of the memory that all calls with this shape share: write keys and values into them, call, and then
    write the next ones. They are for inference: a call with gradients refuses them. All ranks call it.

    Args:
        k: (batch, kv_heads, kv_len, head_dim) of this rank, of a contiguous layout; its values are not read.
        mesh_or_group: as in the calls.
        timeout: seconds that ranks wait for each other.

    Returns:
        (k, v), each (batch, kv_heads, kv_len, head_dim), not contiguous.

    Raises:
        ArgumentError: where there is no symmetric memory.
        CollectiveError: for a rank that is late or has failed.
    """
    group = group_from(mesh_or_group)
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    same(agree(group, "shared_keys", {"k": f"{tuple(k.shape)} {k.dtype}"}, timeout))
    meet(group, k.device)
    batch, heads, rows, head_dim = k.shape
    whole = whole_of(group, (batch, heads, rows * ranks, head_dim), k.dtype, k.device).here
    own = whole[:, :, :, rank * rows : (rank + 1) * rows]
    return own[0], own[1]


def fits(every: Sequence[Steps]) -> bool:
    """Return whether the buffers of all ranks are the first keys of the sequence, in their order."""
    return all(
        len(steps.buffers) <= 1 and all(step.buffer == OWN or (step.keys,) == step.spans for step in steps.steps)
        for steps in every
    )


class SymmetricExchange(Exchange):
    """Reads keys and values of others where they lie; gradients go back as in any exchange.

    Args:
        whole: the memory.
        layout: who has what.
        exchange: the arguments of ``Exchange``, by name.
    """

    def __init__(self, whole: Whole, layout: Layout, **exchange: Any) -> None:
        super().__init__(**exchange)
        self.whole = whole
        self.spans: tuple[Span, ...] = layout.spans(self.rank, whole.here.shape[3])

    def arrivals(self, runs: Sequence[slice]) -> Iterator[tuple[slice, list[Pair]]]:
        """Yield runs of heads and their buffers, as they have arrived; all are begun at once."""
        self.moves.follow()
        with self.moves.on():
            self.fill()
            self.whole.handle.barrier(channel=_WRITTEN)
            events = []
            for run in runs:
                self.read(run)
                events.append(self.moves.mark())
            self.whole.handle.barrier(channel=_READ)  # the call ends behind it: then anybody may write again
        return self._arrived(runs, events)

    def _arrived(self, runs: Sequence[slice], events: Sequence[Any]) -> Iterator[tuple[slice, list[Pair]]]:
        for run, event in zip(runs, events, strict=True):
            self.moves.join(event)
            k, v = self.whole.here[:, :, run, : self.mine.rows(0)] if self.mine.buffers else self.whole.here[:, :, run]
            yield run, [(k, v)]
        self.moves.join()

    def fill(self) -> None:
        """Write this rank's keys and values, if they are not there already."""
        for source, target in zip((self.k, self.v), self.whole.here, strict=True):
            first = 0
            for span in self.spans:
                rows, there = source.narrow(2, first, span.size), target.narrow(2, span.start, span.size)
                if (rows.data_ptr(), rows.stride()) != (there.data_ptr(), there.stride()):
                    there.copy_(rows)
                first += span.size

    def read(self, run: slice) -> None:
        """Copy what this rank needs of others, each from a peer of its own at first."""
        ranks = len(self.steps)
        pieces = [piece for pieces in self.mine.buffers for piece in pieces if piece.rank != self.rank]
        for piece in sorted(pieces, key=lambda piece: (piece.rank - self.rank) % ranks):
            for source, target in zip(self.whole.at(piece.rank), self.whole.here, strict=True):
                rows = (rows_of(tensor[:, run], piece.target, piece.size) for tensor in (source, target))
                for theirs, ours in zip(*rows, strict=True):
                    ours.copy_(theirs)  # contiguous: a copy engine does it


def check_not_kept(k: torch.Tensor, whole: Whole) -> None:
    """Refuse keys whose memory later calls write to, where a backward pass would read them.

    Raises:
        ArgumentError: if k is in that memory.
    """
    first = whole.here.data_ptr()
    if first <= k.data_ptr() < first + whole.here.nbytes:
        raise ArgumentError("k", "is of shared_keys, which later calls write to, and gradients are wanted: pass a copy")
