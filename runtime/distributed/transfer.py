"""Data transfers between ranks, and their streams.

``torch.distributed`` moves the data, with any backend. A rank receives messages in the order in which they were sent.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from runtime.errors import CollectiveError

HIGH_PRIORITY = -1  # copies that wait for an SM get it before the next attention kernel does


class Message(NamedTuple):
    """Rows to send to a rank, or to receive from one.

    Attributes:
        rank: the other rank in the group.
        rows: contiguous tensor.
    """

    rank: int
    rows: torch.Tensor


class Transfer:
    """Messages that start together; ``wait`` completes them.

    Args:
        group: the ranks.
        what: description for errors.
        sends: messages to others.
        receives: messages from others, written to ``rows``.
    """

    def __init__(
        self, group: dist.ProcessGroup, what: str, sends: Iterable[Message], receives: Iterable[Message]
    ) -> None:
        self.what = what
        pairs = [(dist.irecv, each) for each in receives] + [(dist.isend, each) for each in sends]
        self.messages = [message for _, message in pairs]  # kept alive until they have arrived
        operations = [dist.P2POp(how, each.rows, group=group, group_peer=each.rank) for how, each in pairs]
        try:
            self.works = dist.batch_isend_irecv(operations) if operations else []
        except RuntimeError as error:
            raise self._failed(self._ranks(), error) from None

    def wait(self) -> None:
        """Make the current stream wait until everything is received and sent; without a GPU, block.

        Raises:
            CollectiveError: naming the late or failed rank.
        """
        one_each = len(self.works) == len(self.messages)
        for place, work in enumerate(self.works):
            try:
                work.wait()
            except RuntimeError as error:
                ranks = (self.messages[place].rank,) if one_each else self._ranks()
                raise self._failed(ranks, error) from None

    def _ranks(self) -> tuple[int, ...]:
        return tuple(sorted({message.rank for message in self.messages}))

    def _failed(self, ranks: tuple[int, ...], error: Exception) -> CollectiveError:
        return CollectiveError(
            self.what, ranks, f"late or failed ({str(error).splitlines()[0] or type(error).__name__})"
        )


@lru_cache(maxsize=64)
def _stream(device: torch.device, number: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=HIGH_PRIORITY)


class Lane:
    """A side stream. Without a GPU there is none, and everything happens in order.

    Args:
        device: device of the tensors.
        number: index of the stream; lanes with the same index share it.
    """

    def __init__(self, device: torch.device, number: int) -> None:
        self.stream = _stream(device, number) if device.type == "cuda" else None

    def on(self) -> Any:
        """A context in which this stream is the current one."""
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def follow(self, event: torch.cuda.Event | None = None) -> None:
        """Make this stream wait for an event, or for the work enqueued on the current stream so far."""
        if self.stream is not None:
            if event is None:
                self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
            else:
                self.stream.wait_event(event)

    def mark(self) -> torch.cuda.Event | None:
        """An event after the work enqueued on this stream so far."""
        return None if self.stream is None else self.stream.record_event()

    def join(self, event: torch.cuda.Event | None = None) -> None:
        """Make the current stream wait for an event of this stream, or for the work enqueued on it so far."""
        if self.stream is not None:
            current = torch.cuda.current_stream(self.stream.device)
            if event is None:
                current.wait_stream(self.stream)
            else:
                current.wait_event(event)

    def keep(self, *tensors: torch.Tensor) -> None:
        """Keep memory of the current stream from being reused before this stream has finished with it."""
        if self.stream is not None:
            for tensor in tensors:
                tensor.record_stream(self.stream)


def here(device: torch.device) -> torch.cuda.Event | None:
    """An event after the work enqueued on the current stream so far."""
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None
