"""Exchange of keys and values between ranks, some heads at a time, and of their gradients."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from runtime.distributed.copies import copy_wide, taken_blocks
from runtime.distributed.steps import Piece, Steps
from runtime.distributed.transfer import Lane, Message, Transfer

Pair = tuple[torch.Tensor, torch.Tensor]
"""K and V, or their gradients."""
MOVES, RETURNS = 0, 1  # lanes
AHEAD = 3
"""Runs of heads that are in flight or in use at once."""


class Sent(NamedTuple):
    """The blocks that a rank sends to each other rank.

    Attributes:
        block: keys per block.
        blocks: block indices by receiving rank, each int64 (batch or 1, heads or 1, cap).
    """

    block: int
    blocks: dict[int, torch.Tensor]


class Arrival(NamedTuple):
    """Buffers in flight.

    Attributes:
        buffers: buffers of the steps, in their order.
        transfer: transfer of the data from other ranks.
        copied: event after the copies of this rank's own data.
    """

    buffers: list[Pair]
    transfer: Transfer
    copied: torch.cuda.Event | None


class Exchange:
    """Exchange of the keys and values of one call.

    Args:
        group: the ranks.
        rank: this rank.
        steps: steps of all ranks.
        k, v: this rank's keys and values.
        sent: blocks to send by rank; None: the pieces that the other ranks' steps need.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        rank: int,
        steps: Sequence[Steps],
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        sent: Sent | None,
    ) -> None:
        self.group, self.rank, self.steps, self.sent = group, rank, steps, sent
        self.mine, self.k, self.v = steps[rank], k, v
        self.moves, self.returns = Lane(k.device, MOVES), Lane(k.device, RETURNS)
        self.is_needed = any(each.buffers for each in steps)

    def arrivals(self, runs: Sequence[slice], *, gives_back: bool) -> Iterator[tuple[slice, list[Pair]]]:
        """Yield runs of heads and their buffers as they arrive. The first transfers start at once.

        The caller enqueues all reads of the buffers before it takes the next run. With ``gives_back``, it then calls
        ``give_back`` with their gradients.
        """
        del gives_back  # NCCL keeps the order of a rank's calls
        return self._as_they_come(runs, [self._begin(run) for run in runs[:AHEAD]])

    def _as_they_come(self, runs: Sequence[slice], ahead: list[Arrival]) -> Iterator[tuple[slice, list[Pair]]]:
        try:
            for place, run in enumerate(runs):
                arrival = ahead.pop(0)
                arrival.transfer.wait()
                self.moves.join(arrival.copied)
                yield run, arrival.buffers
                del arrival  # its memory may be reused after the work enqueued meanwhile
                if place + AHEAD < len(runs):
                    ahead.append(self._begin(runs[place + AHEAD]))
        finally:  # also after an error, so that the memory can be reused
            self.moves.join()

    def _buffers(self, run: slice) -> list[Pair]:
        shape = (self.k.shape[0], run.stop - run.start)
        sizes = [self.mine.rows(number) for number in range(len(self.mine.buffers))]
        return [
            (self.k.new_empty((*shape, size, self.k.shape[3])), self.v.new_empty((*shape, size, self.v.shape[3])))
            for size in sizes
        ]

    def _begin(self, run: slice) -> Arrival:
        """Start to fill buffers, after the work enqueued on the current stream so far."""
        there = self._buffers(run)
        self.moves.follow()
        with self.moves.on():
            own = self.k[:, run], self.v[:, run]
            for source, pair in self._own(there):
                for tensor, target in zip(own, pair, strict=True):
                    copy_wide(target, tensor.narrow(2, source, target.shape[2]))
            copied = self.moves.mark()
            sends = [message for rank in self._others() for message in self._sends(rank, run, own)]
            what = f"keys and values of heads {run.start} to {run.stop - 1} of rank {self.rank}"
            return Arrival(there, Transfer(self.group, what, sends, self._of_others(there)), copied)

    def _others(self) -> list[int]:
        return [rank for rank in range(len(self.steps)) if rank != self.rank]

    def _of_others(self, buffers: Sequence[Pair]) -> Iterator[Message]:
        """Rows of buffers that other ranks send."""
        for pieces, pair in zip(self.mine.buffers, buffers, strict=True):
            for piece in pieces:
                for tensor in pair if piece.rank != self.rank else ():
                    yield from (Message(piece.rank, rows) for rows in rows_of(tensor, piece.target, piece.size))

    def _own(self, buffers: Sequence[Pair]) -> Iterator[tuple[int, Pair]]:
        """Rows of buffers that this rank owns, each with its first row in k and v."""
        for pieces, (k, v) in zip(self.mine.buffers, buffers, strict=True):
            for piece in pieces:
                if piece.rank == self.rank:
                    rows = piece.target, piece.size
                    yield piece.source, (k.narrow(2, *rows), v.narrow(2, *rows))

    def _for(self, rank: int) -> list[Piece]:
        """Pieces of this rank's rows that another rank needs, in that rank's order."""
        return [piece for pieces in self.steps[rank].buffers for piece in pieces if piece.rank == self.rank]

    def _sends(self, rank: int, run: slice, own: Sequence[torch.Tensor]) -> Iterator[Message]:
        for piece in self._for(rank):
            tensors: Sequence[torch.Tensor] = own
            if self.sent is not None:
                tensors = self._listed(rank, run, own)
            for tensor in tensors:
                yield from (Message(rank, rows.contiguous()) for rows in rows_of(tensor, piece.source, piece.size))

    def _blocks_for(self, rank: int, run: slice) -> torch.Tensor:
        """Indices of the blocks of some heads that are sent to a rank: (batch or 1, heads or 1, cap)."""
        assert self.sent is not None
        blocks = self.sent.blocks[rank]
        return blocks if blocks.shape[1] == 1 else blocks[:, run]

    def _listed(self, rank: int, run: slice, own: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Rows of this rank's keys and values, for some heads, that are sent to another rank."""
        assert self.sent is not None
        blocks, block = self._blocks_for(rank, run), self.sent.block
        return tuple(taken_blocks(tensor, blocks, block) for tensor in own)

    def give_back(self, run: slice, grads: Sequence[Pair], own: Sequence[tuple[int, Pair]], sums: Pair) -> None:
        """Send gradients to the ranks that own the keys, and sum the received gradients, in rank order, in float32.

        Args:
            run: heads of k.
            grads: gradients of the buffers.
            own: gradients of this rank's keys from its own steps: the first row, and the rows.
            sums: outputs: dk and dv of these heads.
        """
        self.returns.follow()
        with self.returns.on():
            back = {
                rank: [(piece.source, self._room(piece, sums)) for piece in self._for(rank)] for rank in self._others()
            }
            receives = [
                Message(rank, rows)
                for rank, parts in back.items()
                for _, pair in parts
                for tensor in pair
                for rows in rows_of(tensor, 0, tensor.shape[2])
            ]
            what = f"gradients of heads {run.start} to {run.stop - 1} of rank {self.rank}"
            Transfer(self.group, what, self._of_others(grads), receives).wait()
            back[self.rank] = [*own, *self._own(grads)]
            self._add_up(run, back, sums)
            self.returns.keep(*(tensor for pair in grads for tensor in pair))
            self.returns.keep(*(tensor for _, pair in own for tensor in pair))

    def _add_up(self, run: slice, back: dict[int, list[tuple[int, Pair]]], sums: Pair) -> None:
        """Write the sums over the parts of all ranks."""
        for which, total in enumerate(sums):
            parts = {rank: [(start, pair[which]) for start, pair in each] for rank, each in sorted(back.items())}
            if self.sent is None:
                add_up(total, [part for each in parts.values() for part in each])
            else:
                self._add_up_blocks(total, run, parts)

    def _room(self, piece: Piece, sums: Pair) -> Pair:
        dk, dv = (total.new_empty((*total.shape[:2], piece.size, total.shape[3])) for total in sums)
        return dk, dv

    def _add_up_blocks(self, total: torch.Tensor, run: slice, parts: dict[int, list[tuple[int, torch.Tensor]]]) -> None:
        """Sum the gradients of a rank's own keys, and of the blocks that it sent to others."""
        assert self.sent is not None
        found = torch.zeros(total.shape, dtype=torch.float32, device=total.device)
        for rank, each in parts.items():
            for start, part in each:
                if rank == self.rank:
                    found.narrow(2, start, part.shape[2]).add_(part)
                    continue
                blocks = found.unflatten(2, (-1, self.sent.block))
                index = self._blocks_for(rank, run)[..., None, None]
                index = index.expand(*found.shape[:2], -1, *blocks.shape[3:])
                more = part.unflatten(2, (-1, self.sent.block))
                blocks.scatter_(2, index, blocks.gather(2, index) + more)  # unique indices: a fixed order of sums
        total.copy_(found)

    def finish(self) -> None:
        """Make the current stream wait for all gradients."""
        self.returns.join()


def rows_of(tensor: torch.Tensor, first: int, size: int) -> Iterator[torch.Tensor]:
    """Rows of each batch and head; they are contiguous if the tensor's rows are."""
    for batch in tensor.narrow(2, first, size).unbind(0):
        yield from batch.unbind(0)


def add_up(total: torch.Tensor, parts: Sequence[tuple[int, torch.Tensor]]) -> None:
    """Write the sums of parts per row, in their order and in float32. A row in no part is 0.

    Args:
        total: (batch, heads, rows, head_dim).
        parts: the first row of each part, and its rows (batch, heads, some, head_dim).
    """
    ends = {0, total.shape[2], *(end for start, part in parts for end in (start, start + part.shape[2]))}
    cuts = sorted(ends)
    for first, last in itertools.pairwise(cuts):
        rows = total[:, :, first:last]
        over = [
            part[:, :, first - start : last - start]
            for start, part in parts
            if start <= first and last <= start + part.shape[2]
        ]
        if len(over) == 2:
            torch.add(*over, out=rows)  # torch adds two half-precision tensors in float32 and rounds once
        elif over:
            found = over[0].float() if len(over) > 1 else over[0]
            for part in over[1:]:
                found += part
            rows.copy_(found)
        else:
            rows.zero_()
