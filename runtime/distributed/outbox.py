"""Rows that other ranks need, in memory that they can address: for windows, and for lists with packed blocks.

A rank's outbox holds, packed by receiver, the rows that each other rank needs. Receivers copy them into their own
buffers. Gradients return the same way: the receivers write them into an inbox of the same layout.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from runtime.distributed.copies import copy_heads, copy_wide
from runtime.distributed.exchange import Pair
from runtime.distributed.layout import Layout
from runtime.distributed.steps import Piece, Steps
from runtime.distributed.symmetric import Symmetric, SymmetricExchange, memory_of

ROWS, GRADIENTS_OF_ROWS = "rows", "gradients of rows"
"""Purposes of the memory, both (2, batch, kv_heads, rows, head_dim)."""


def places(steps: Sequence[Steps], sender: int) -> list[tuple[int, Piece, int]]:
    """Contents of an outbox: (receiver, piece of its buffers, first row of the piece)."""
    found, first = [], 0
    for receiver, each in enumerate(steps):
        for piece in (piece for pieces in each.buffers for piece in pieces):
            if piece.rank == sender != receiver:
                found.append((receiver, piece, first))
                first += piece.size
    return found


def outbox_of(group: dist.ProcessGroup, steps: Sequence[Steps], k: torch.Tensor, what: str = ROWS) -> Symmetric:
    """The memory for rows of keys and values, or for their gradients; it has the same size on all ranks.

    Raises:
        ArgumentError: if symmetric memory is not available.
    """
    each = [sum(piece.size for _, piece, _ in places(steps, sender)) for sender in range(len(steps))]
    return memory_of(group, what, (2, *k.shape[:2], max(each), k.shape[3]), k)


class OutboxExchange(SymmetricExchange):
    """Exchange that reads rows from the outboxes of other ranks, and writes their gradients into the inboxes.

    Args:
        outbox: memory for rows.
        layout: assignment of keys to ranks.
        exchange: the arguments of ``Exchange``, by name.
    """

    def __init__(self, outbox: Symmetric, layout: Layout, **exchange: Any) -> None:
        super().__init__(outbox, layout, **exchange)
        self.outboxes = [places(self.steps, sender) for sender in range(len(self.steps))]

    def room(self, run: slice) -> list[Pair]:
        """Uninitialized buffers of heads."""
        return self._buffers(run)

    def fill(self) -> None:
        """Write the rows that other ranks need."""
        every = slice(0, self.k.shape[1])
        for receiver, piece, first in self.outboxes[self.rank]:
            for source, target in zip(self._taken(receiver, every), self.whole.here, strict=True):
                copy_wide(target.narrow(2, first, piece.size), source.narrow(2, piece.source, piece.size))

    def _taken(self, receiver: int, run: slice) -> tuple[torch.Tensor, ...]:
        """Keys and values, or the blocks of them that are sent to a rank."""
        own = self.k[:, run], self.v[:, run]
        return own if self.sent is None else self._listed(receiver, run, own)

    def read(self, run: slice, buffers: Sequence[Pair]) -> None:
        """Copy the needed rows, of other ranks and of this one, into buffers."""
        for source, pair in self._own(buffers):
            for tensor, target in zip((self.k, self.v), pair, strict=True):
                copy_wide(target, tensor[:, run].narrow(2, source, target.shape[2]))
        for piece, first, pair in self._mine(buffers):
            for source, target in zip(self.whole.at(piece.rank), pair, strict=True):
                copy_heads(target.narrow(2, piece.target, piece.size), source[:, run].narrow(2, first, piece.size))

    def _mine(self, buffers: Sequence[Pair]) -> Iterator[tuple[Piece, int, Pair]]:
        """This rank's pieces in the boxes of others, the first row there, and the buffer of each."""
        first = {
            sender: iter([first for receiver, _, first in box if receiver == self.rank])
            for sender, box in enumerate(self.outboxes)
        }
        for pieces, pair in zip(self.mine.buffers, buffers, strict=True):
            for piece in pieces:
                if piece.rank != self.rank:
                    yield piece, next(first[piece.rank]), pair

    def inbox(self) -> Symmetric:
        """The memory into which other ranks write gradients of this rank's rows."""
        return outbox_of(self.group, self.steps, self.k, GRADIENTS_OF_ROWS)

    def push(self, inbox: Symmetric, run: slice, grads: Sequence[Pair]) -> None:
        """Write gradients of other ranks' rows into those ranks' memory."""
        for piece, first, pair in self._mine(grads):
            for target, source in zip(inbox.at(piece.rank), pair, strict=True):
                there = target[:, run].narrow(2, first, piece.size)
                copy_heads(there, source.narrow(2, piece.target, piece.size))

    def collect(self, inbox: Symmetric, run: slice, own: list[tuple[int, Pair]], sums: Pair) -> None:
        """Sum the gradients that other ranks have written, and this rank's own."""
        back: dict[int, list[tuple[int, Pair]]] = {self.rank: own}
        k, v = inbox.here[:, :, run]
        for receiver, piece, first in self.outboxes[self.rank]:
            rows = first, piece.size
            back.setdefault(receiver, []).append((piece.source, (k.narrow(2, *rows), v.narrow(2, *rows))))
        self._add_up(run, back, sums)
