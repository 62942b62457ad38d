"""All-to-all between a part of the sequence with all heads and some heads with the whole sequence, and back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from runtime.distributed.copies import copy_heads, copy_wide
from runtime.distributed.exchange import MOVES, RETURNS, rows_of
from runtime.distributed.layout import Layout
from runtime.distributed.symmetric import FREE, PUSHED, WRITTEN, Symmetric, memory_of
from runtime.distributed.transfer import Lane, Message, Transfer


class Parted(NamedTuple):
    """A tensor in both distributions.

    Attributes:
        local: (batch, heads, rows of a rank, ...), all heads.
        whole: (batch, heads / ranks, rows, ...), this rank's heads.
        group: heads of the tensor per head of k.
    """

    local: torch.Tensor
    whole: torch.Tensor
    group: int


class Shuffle:
    """All-to-all of the heads of one call.

    Args:
        group: the ranks.
        layout: assignment of the sequence to ranks.
        kv_heads: heads of k that a rank computes.
        device: device of the tensors.
    """

    def __init__(self, group: dist.ProcessGroup, layout: Layout, kv_heads: int, device: torch.device) -> None:
        self.group, self.layout, self.kv_heads = group, layout, kv_heads
        self.rank = dist.get_rank(group)
        self.moves, self.returns = Lane(device, MOVES), Lane(device, RETURNS)

    def room(self, shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
        """A new tensor for results of this rank's heads. ``give_back`` takes these tensors in the same order."""
        return like.new_empty(shape)

    def gather(self, run: slice, tensors: Sequence[Parted]) -> tuple[Transfer, torch.cuda.Event | None]:
        """Start to fill some heads of ``whole``, after the work enqueued on the current stream so far.

        Args:
            run: heads of k, in ascending order over calls.
            tensors: tensors to fill, the same in each run; rows of ``local`` are contiguous.

        Returns:
            The transfer from other ranks, and an event after the copies of this rank's own data.
        """
        self.moves.follow()
        with self.moves.on():
            for local, whole in self._both(self.rank, run, tensors):
                copy_wide(whole, local)
            copied = self.moves.mark()
            others = self._others()
            sends = [Message(rank, row) for rank in others for row in self._of_others(rank, run, tensors)]
            receives = [Message(rank, row) for rank in others for row in self._of_mine(rank, run, tensors)]
            what = f"heads {run.start} to {run.stop - 1} of each rank, to rank {self.rank}"
            return Transfer(self.group, what, sends, receives), copied

    def give_back(self, run: slice, tensors: Sequence[Parted]) -> None:
        """Send some heads of ``whole`` to the ranks that own the rows, and write ``local``."""
        self.returns.follow()
        with self.returns.on():
            others = self._others()
            sends = [Message(rank, row) for rank in others for row in self._of_mine(rank, run, tensors)]
            receives = [Message(rank, row) for rank in others for row in self._of_others(rank, run, tensors)]
            what = f"results of heads {run.start} to {run.stop - 1} of rank {self.rank}"
            transfer = Transfer(self.group, what, sends, receives)
            for local, whole in self._both(self.rank, run, tensors):
                copy_wide(local, whole)
            transfer.wait()
            self.returns.keep(*(each.whole for each in tensors))

    def _others(self) -> list[int]:
        """The other ranks, starting after this one, so that each rank starts with a different peer."""
        ranks = self.layout.ranks
        return [(self.rank + step) % ranks for step in range(1, ranks)]

    def finish(self) -> None:
        """Make the current stream wait for all transfers."""
        self.moves.join()
        self.returns.join()

    def _both(self, rank: int, run: slice, tensors: Sequence[Parted]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Views of a rank's rows of this rank's heads in ``local`` and in ``whole``."""
        for each in tensors:
            heads = self._heads(self.rank, run, each.group)
            own = slice(run.start * each.group, run.stop * each.group)
            for first, start, size in self._rows(rank, each.whole.shape[2]):
                yield each.local[:, heads].narrow(2, first, size), each.whole[:, own].narrow(2, start, size)

    def _of_others(self, rank: int, run: slice, tensors: Sequence[Parted]) -> Iterator[torch.Tensor]:
        """This rank's rows of another rank's heads."""
        for each in tensors:
            heads = each.local[:, self._heads(rank, run, each.group)]
            for first, _, size in self._rows(self.rank, each.whole.shape[2]):
                yield from rows_of(heads, first, size)

    def _of_mine(self, rank: int, run: slice, tensors: Sequence[Parted]) -> Iterator[torch.Tensor]:
        """Another rank's rows of this rank's heads."""
        for each in tensors:
            heads = each.whole[:, run.start * each.group : run.stop * each.group]
            for _, start, size in self._rows(rank, each.whole.shape[2]):
                yield from rows_of(heads, start, size)

    def _heads(self, rank: int, run: slice, group: int) -> slice:
        """The heads that a rank computes, among all heads."""
        first = rank * self.kv_heads
        return slice((first + run.start) * group, (first + run.stop) * group)

    def _rows(self, rank: int, length: int) -> Iterator[tuple[int, int, int]]:
        """A rank's rows: the first among its own, the first in the sequence, and their number."""
        first = 0
        for span in self.layout.spans(rank, length):
            yield first, span.start, span.size
            first += span.size


class SymmetricShuffle(Shuffle):
    """All-to-all by copy engines, which read the heads directly from symmetric memory of the peers."""

    def __init__(self, group: dist.ProcessGroup, layout: Layout, kv_heads: int, device: torch.device) -> None:
        super().__init__(group, layout, kv_heads, device)
        self.staged: list[Symmetric] = []
        self.rooms: list[Symmetric] = []

    def room(self, shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
        """Memory for results that peers read; later calls overwrite it."""
        self.rooms.append(memory_of(self.group, f"results {len(self.rooms)}", shape, like))
        return self.rooms[-1].here

    def gather(self, run: slice, tensors: Sequence[Parted]) -> tuple[Transfer, torch.cuda.Event | None]:
        """Start to fill some heads of ``whole``; with the first ones, publish all of ``local`` to peers."""
        self.moves.follow()
        with self.moves.on():
            if run.start == 0:
                self.show(tensors)
                self.staged[0].barrier(WRITTEN)
            self.read(run, tensors)  # PUSHED: once all ranks have computed the last heads, all have read everything
            return Transfer(self.group, "", (), ()), self.moves.mark()

    def show(self, tensors: Sequence[Parted]) -> None:
        """Copy ``local`` to the memory that peers read."""
        self.staged = [
            memory_of(self.group, f"heads {number}", tuple(each.local.shape), each.local)
            for number, each in enumerate(tensors)
        ]
        for each, staged in zip(tensors, self.staged, strict=True):
            staged.here.copy_(each.local)

    def read(self, run: slice, tensors: Sequence[Parted]) -> None:
        """Copy all ranks' rows of this rank's heads."""
        for local, whole in self._both(self.rank, run, tensors):
            copy_wide(whole, local)
        for rank in self._others():
            for each, staged in zip(tensors, self.staged, strict=True):
                theirs = staged.at(rank)[:, self._heads(self.rank, run, each.group)]
                mine = each.whole[:, run.start * each.group : run.stop * each.group]
                for first, start, size in self._rows(rank, each.whole.shape[2]):
                    copy_heads(mine.narrow(2, start, size), theirs.narrow(2, first, size))

    def give_back(self, run: slice, tensors: Sequence[Parted]) -> None:
        """Wait until all ranks have computed some heads, and copy this rank's rows of them to ``local``."""
        self.returns.follow()
        with self.returns.on():
            self.rooms[0].barrier(PUSHED)
            self.fetch(run, tensors)
            if run.stop == self.kv_heads:
                self.rooms[0].barrier(FREE)

    def fetch(self, run: slice, tensors: Sequence[Parted]) -> None:
        """Copy this rank's rows of all ranks' heads."""
        for local, whole in self._both(self.rank, run, tensors):
            copy_wide(local, whole)
        for rank in self._others():
            for each, room in zip(tensors, self.rooms, strict=True):
                theirs = room.at(rank)[:, run.start * each.group : run.stop * each.group]
                mine = each.local[:, self._heads(rank, run, each.group)]
                for first, start, size in self._rows(self.rank, each.whole.shape[2]):
                    copy_heads(mine.narrow(2, first, size), theirs.narrow(2, start, size))


def with_whole_rows(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy if the rows of one batch and head are not contiguous."""
    is_whole = tensor[0, 0].is_contiguous()
    return tensor if is_whole else tensor.contiguous()
