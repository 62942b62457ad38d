"""All-to-all by heads: from a part of the sequence with all heads to some heads with all of the sequence, and back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from runtime.distributed.exchange import MOVES, RETURNS, rows_of, with_whole_rows
from runtime.distributed.layout import Layout
from runtime.distributed.transfer import Lane, Message, Transfer


class Parted(NamedTuple):
    """A tensor in both ways.

    Attributes:
        local: (batch, heads, rows of a rank, ...), all heads.
        whole: (batch, heads / ranks, rows, ...), this rank's heads.
        group: its heads for one of k.
    """

    local: torch.Tensor
    whole: torch.Tensor
    group: int


class Shuffle:
    """Moves heads of one call.

    Args:
        group: the ranks.
        layout: who has which part of the sequence.
        kv_heads: heads of k that a rank computes.
        device: of the tensors.
    """

    def __init__(self, group: dist.ProcessGroup, layout: Layout, kv_heads: int, device: torch.device) -> None:
        self.group, self.layout, self.kv_heads = group, layout, kv_heads
        self.rank = dist.get_rank(group)
        self.moves, self.returns = Lane(device, MOVES), Lane(device, RETURNS)

    def gather(self, run: slice, tensors: Sequence[Parted]) -> tuple[Transfer, torch.cuda.Event | None]:
        """Begin to fill some heads of ``whole``, behind what the current stream has to do until here.

        Returns:
            What comes from others, and an event behind what this rank has itself.
        """
        self.moves.follow()
        with self.moves.on():
            tensors = [each._replace(local=with_whole_rows(each.local)) for each in tensors]
            for local, whole in self._both(self.rank, run, tensors):
                whole.copy_(local)
            copied = self.moves.mark()
            others = [rank for rank in range(self.layout.ranks) if rank != self.rank]
            sends = [Message(rank, row) for rank in others for row in self._of_others(rank, run, tensors)]
            receives = [Message(rank, row) for rank in others for row in self._of_mine(rank, run, tensors)]
            what = f"heads {run.start} to {run.stop - 1} of each rank, to rank {self.rank}"
            return Transfer(self.group, what, sends, receives), copied

    def give_back(self, run: slice, tensors: Sequence[Parted]) -> None:
        """Send some heads of ``whole`` to those whose part of the sequence they are; ``local`` is written."""
        self.returns.follow()
        with self.returns.on():
            others = [rank for rank in range(self.layout.ranks) if rank != self.rank]
            sends = [Message(rank, row) for rank in others for row in self._of_mine(rank, run, tensors)]
            receives = [Message(rank, row) for rank in others for row in self._of_others(rank, run, tensors)]
            what = f"results of heads {run.start} to {run.stop - 1} of rank {self.rank}"
            transfer = Transfer(self.group, what, sends, receives)
            for local, whole in self._both(self.rank, run, tensors):
                local.copy_(whole)
            transfer.wait()
            self.returns.keep(*(each.whole for each in tensors))

    def finish(self) -> None:
        """Make the current stream wait for all that is on its way."""
        self.moves.join()
        self.returns.join()

    def _both(self, rank: int, run: slice, tensors: Sequence[Parted]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield where a rank's rows of this rank's heads are here, if this rank has both."""
        for each in tensors:
            heads = self._heads(self.rank, run, each.group)
            own = slice(run.start * each.group, run.stop * each.group)
            for first, start, size in self._rows(rank, each.whole.shape[2]):
                yield each.local[:, heads].narrow(2, first, size), each.whole[:, own].narrow(2, start, size)

    def _of_others(self, rank: int, run: slice, tensors: Sequence[Parted]) -> Iterator[torch.Tensor]:
        """Yield this rank's rows of another one's heads."""
        for each in tensors:
            heads = each.local[:, self._heads(rank, run, each.group)]
            for first, _, size in self._rows(self.rank, each.whole.shape[2]):
                yield from rows_of(heads, first, size)

    def _of_mine(self, rank: int, run: slice, tensors: Sequence[Parted]) -> Iterator[torch.Tensor]:
        """Yield another rank's rows of this rank's heads."""
        for each in tensors:
            heads = each.whole[:, run.start * each.group : run.stop * each.group]
            for _, start, size in self._rows(rank, each.whole.shape[2]):
                yield from rows_of(heads, start, size)

    def _heads(self, rank: int, run: slice, group: int) -> slice:
        """Return heads that a rank computes, among all."""
        first = rank * self.kv_heads
        return slice((first + run.start) * group, (first + run.stop) * group)

    def _rows(self, rank: int, length: int) -> Iterator[tuple[int, int, int]]:
        """Yield a rank's rows: the first among its own, the first in the sequence, and how many."""
        first = 0
        for span in self.layout.spans(rank, length):
            yield first, span.start, span.size
            first += span.size
