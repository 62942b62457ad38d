"""A model of attention over ranks: compute, bytes and how they overlap, for docs/notebook/scale-out.md. No GPU.

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
        slowed: share of its speed that a kernel keeps while data moves: 1 with copy engines; with NCCL, which takes
            SMs, 0 where each thread block of a kernel has its share of the work and waits for its SM.
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
        slow = took / machine.slowed if machine.slowed else float("inf")
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


HEADS, DIM, BYTES = 16, 128, 2
NODE = 8  # GPUs that NVLink joins
NVLINK, NETWORK = 245e9, 50e9
"""Bytes a second into a GPU: measured between two H100s, both ways at once; of a 400 Gb/s adapter each, assumed."""
SPEEDS = {"topk32, random lists": 681e12, "window 2K": 566e12, "causal": 621e12, "dense": 675e12}
"""FLOPS of one H100 alone: the first is of this row (fp16), others are of shorter sequences (results.md)."""
LENGTHS = (1 << 16, 1 << 20, 1 << 24)
COLUMNS = ((2, 1.0), (2, 0.0), (8, 1.0), (64, 1.0))
"""GPUs, and what a kernel keeps of its speed while data moves."""


def keys_of(kind: str, length: int) -> float:
    """Mean number of visible keys per query."""
    keys = {"topk32, random lists": 4096, "window 2K": 2048, "causal": length / 2, "dense": length}
    return float(keys[kind])


def scaled(kind: str, length: int, ranks: int, slowed: float = 1.0) -> Predicted:
    """Predict a forward pass where everything that a pattern needs comes from other ranks at the speed of a link."""
    flops = 4 * HEADS * DIM * length / ranks * keys_of(kind, length)
    of_key = 2 * HEADS * DIM * BYTES
    link = NVLINK if ranks <= NODE else NETWORK
    if kind == "window 2K":
        edge = min(1.0, 2048 * ranks / length)
        runs = [Run(flops * edge, 2048 * of_key)]
        return predict(Machine(SPEEDS[kind], link, slowed=slowed), runs, flops * (1 - edge))
    received = length * of_key * (ranks - 1) / ranks
    return predict(Machine(SPEEDS[kind], link, slowed=slowed), runs_of(flops, received, (1, 1, 2, 3, 4, 5)))


def main() -> None:
    """Print the table of docs/notebook/scale-out.md."""
    heads = (f"{ranks} GPUs{'' if slowed else ', no overlap'}" for ranks, slowed in COLUMNS)
    print("| " + " | ".join(("workload", "length", *heads)) + " |")
    print("| --- | ---: |" + " ---: |" * len(COLUMNS))
    for kind in SPEEDS:
        for length in LENGTHS:
            cells = (f"{scaled(kind, length, ranks, slowed).efficiency:.2f}" for ranks, slowed in COLUMNS)
            print(f"| {kind} | {length:,} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
