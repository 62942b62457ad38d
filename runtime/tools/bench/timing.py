"""The clock of benchmarks, and both ways of timing.

A *single call* is timed after a pause: the chip is cool and clocks high, as for a kernel that runs now and then. Calls
*back to back* fill at least a quarter of a second: the chip is at its power limit, as in training or in serving under
load. docs/notebook/measuring.md says more.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

Call = Callable[[], Any]
SLEEP_CYCLES = 1_000_000  # about half a millisecond, longer than most calls take to enqueue
LONGEST_SLEEP = 20_000_000  # a call that waits for the GPU is not slept over
CYCLES_PER_SECOND = 2e9  # no less than the clock of any GPU here
BLOCK_SECONDS = 0.25  # power and clock of a block are then its own
SETTLING_SHARE = 0.2  # of a block: as long runs the call before it, untimed, so that clocks settle
ROUNDS = 3
FEWEST_CALLS = 3  # of a block, however long a call takes


def single_calls(calls: dict[str, Call], repeats: int = 15, warm_up: int = 4) -> dict[str, float]:
    """Return the median milliseconds of each call, alone after a pause.

    Calls take turns, so that a drift of the clock meets all of them.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    sleeps: dict[str, int] = {}
    for name, call in calls.items():
        for _ in range(warm_up):
            began = time.perf_counter()
            call()
            sleeps[name] = int(2 * (time.perf_counter() - began) * CYCLES_PER_SECOND)
    for _ in range(repeats):
        for name, call in calls.items():
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            # The host runs ahead meanwhile: only the GPU's time is between the events.
            torch.cuda._sleep(min(max(SLEEP_CYCLES, sleeps.get(name, 0)), LONGEST_SLEEP))
            start.record()
            call()
            stop.record()
            stop.synchronize()
            times[name].append(start.elapsed_time(stop))
    return {name: median(values) for name, values in times.items()}


def back_to_back(calls: dict[str, Call], seconds: float = BLOCK_SECONDS, rounds: int = ROUNDS) -> dict[str, float]:
    """Return the milliseconds of each call in blocks of one after the other: the median of the rounds.

    Args:
        calls: each has a block of its own, and they take turns.
        seconds: what a block takes at least. Before it the call runs for SETTLING_SHARE of that, untimed.
        rounds: blocks of each call.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()  # what is compiled or allocated once is no part of a block
    for _ in range(rounds):
        for name, call in calls.items():
            first = block_milliseconds(call, 0.0)
            settled = block_milliseconds(call, SETTLING_SHARE * seconds, first)
            times[name].append(block_milliseconds(call, seconds, settled))
    return {name: median(values) for name, values in times.items()}


def block_milliseconds(call: Call, seconds: float, expected: float = math.inf) -> float:
    """Return the mean milliseconds of calls back to back, which together take ``seconds`` or longer.

    Args:
        call: what is timed.
        seconds: the least length of the block.
        expected: milliseconds of a call, from which the number of calls follows. If they end too soon, more follow.
    """
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    done, elapsed, more = 0, 0.0, calls_of_block(seconds, expected)
    start.record()
    while more:
        for _ in range(more):
            call()
        done += more
        stop.record()
        stop.synchronize()
        elapsed = start.elapsed_time(stop)
        missing = seconds - elapsed / 1e3
        more = calls_of_block(missing, elapsed / done) if missing > 0 else 0
    return elapsed / done


def captured(calls: Sequence[Call]) -> Call:
    """Capture calls in a CUDA graph, and return a function that replays it: the host takes no time for each call."""
    calls[0]()  # what is compiled or allocated once is no part of the graph
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    replay: Call = graph.replay
    return replay


def calls_of_block(seconds: float, milliseconds: float) -> int:
    """The number of calls of some milliseconds that fill a block of some seconds."""
    return max(FEWEST_CALLS, math.ceil(1e3 * seconds / milliseconds))


def median(values: list[float]) -> float:
    """Return the middle one of the values; of an even number the upper one of the two in the middle."""
    return sorted(values)[len(values) // 2]
