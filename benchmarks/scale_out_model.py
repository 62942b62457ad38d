"""A model of attention over ranks: compute, bytes and how they overlap. Pure arithmetic; docs/scale-out.md uses it.

A call is a row of runs of heads. Their keys and values arrive one run after the other, over one link; a run is computed
when it has arrived and the one before it is done; a run is sent for when one of ``AHEAD`` earlier is done. Gradients of
a run go back over the same link when it is computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

AHEAD = 3  # as in runtime/distributed/exchange.py


class Machine(NamedTuple):
    """What a rank has; every number is measured, or assumed and said so.

    Attributes:
        flops: a second, of the kernel alone on its part of the work.
        link: bytes a second that a rank receives while it sends as many.
        latency: seconds of a message, however short.
        slowed: share of its speed that a kernel keeps while data moves (NCCL takes SMs, copies take bandwidth).
    """

    flops: float
    link: float
    latency: float = 0.0
    slowed: float = 1.0


class Run(NamedTuple):
    """Some heads.

    Attributes:
        flops: of a rank.
        received: bytes of keys and values.
        returned: bytes of gradients that go back.
    """

    flops: float
    received: float
    returned: float = 0.0


class Predicted(NamedTuple):
    """What a call takes.

    Attributes:
        seconds: of the whole call.
        alone: of its compute.
        moving: of what is sent, without compute.
    """

    seconds: float
    alone: float
    moving: float

    @property
    def efficiency(self) -> float:
        """Speed as a share of that without ranks."""
        return self.alone / self.seconds


def predict(machine: Machine, runs: Sequence[Run], own_flops: float = 0.0) -> Predicted:
    """Predict a call.

    Args:
        machine: of each rank.
        runs: in their order.
        own_flops: of steps over a rank's own keys, which need nothing of others.
    """
    sent = [run.received / machine.link + machine.latency * (run.received > 0) for run in runs]
    back = [run.returned / machine.link + machine.latency * (run.returned > 0) for run in runs]
    moving, alone = sum(sent) + sum(back), (own_flops + sum(run.flops for run in runs)) / machine.flops
    link = 0.0  # when it is free
    arrived: list[float] = []
    for seconds in sent[:AHEAD]:
        link += seconds
        arrived.append(link)
    done = own_flops / machine.flops
    for place, run in enumerate(runs):
        start = max(done, arrived[place])
        busy = max(0.0, link - start)  # data that is on its way while this run is computed
        took = run.flops / machine.flops
        slow = took / machine.slowed
        done = start + (slow if slow <= busy else took + busy * (1 - machine.slowed))
        if place + AHEAD < len(runs):
            link = max(link, done) + sent[place + AHEAD]
            arrived.append(link)
        if back[place]:
            link = max(link, done) + back[place]
    return Predicted(max(done, link if any(back) else done), alone, moving)


def runs_of(flops: float, received: float, heads: Sequence[int], returned: float = 0.0) -> list[Run]:
    """Divide a call between runs of so many heads.

    Args:
        flops: of all.
        received: bytes of all.
        heads: of k, in each run.
        returned: bytes of all that go back.
    """
    total = sum(heads)
    return [Run(flops * each / total, received * each / total, returned * each / total) for each in heads]
