"""Timing of benchmarks, in two modes.

A *single call* is timed after a pause: the GPU is cool and its clocks are high, as for a kernel that runs occasionally.
Calls *back to back* run for at least a quarter of a second: the GPU is at its power limit, as in training or in serving
under load. See docs/notebook/measuring.md.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

Call = Callable[[], Any]
SLEEP_CYCLES = 1_000_000  # about half a millisecond, longer than most calls take to enqueue
LONGEST_SLEEP = 20_000_000  # limit, because a call that synchronizes cannot be hidden behind the sleep
CYCLES_PER_SECOND = 2e9  # at least the clock of any supported GPU
BLOCK_SECONDS = 0.25  # long enough for power and clock to reflect the call
SETTLING_SHARE = 0.2  # share of a block for which the call runs untimed before it, so that clocks settle
ROUNDS = 3
FEWEST_CALLS = 3  # minimum number of calls per block


def single_calls(calls: dict[str, Call], repeats: int = 15, warm_up: int = 4) -> dict[str, float]:
    """Median milliseconds of each call, alone after a pause.

    Calls take turns, so that clock drift affects all of them.
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
            # The host runs ahead during the sleep, so the events enclose only GPU time.
            torch.cuda._sleep(min(max(SLEEP_CYCLES, sleeps.get(name, 0)), LONGEST_SLEEP))
            start.record()
            call()
            stop.record()
            stop.synchronize()
            times[name].append(start.elapsed_time(stop))
    return {name: median(values) for name, values in times.items()}


def back_to_back(calls: dict[str, Call], seconds: float = BLOCK_SECONDS, rounds: int = ROUNDS) -> dict[str, float]:
    """Milliseconds of each call, back to back in blocks: the median over the rounds.

    Args:
        calls: calls; their blocks take turns.
        seconds: minimum duration of a block. Before it, the call runs untimed for SETTLING_SHARE of that.
        rounds: blocks per call.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()  # exclude one-time compilation and allocation
    for _ in range(rounds):
        for name, call in calls.items():
            first = block_milliseconds(call, 0.0)
            settled = block_milliseconds(call, SETTLING_SHARE * seconds, first)
            times[name].append(block_milliseconds(call, seconds, settled))
    return {name: median(values) for name, values in times.items()}


def block_milliseconds(call: Call, seconds: float, expected: float = math.inf) -> float:
    """Mean milliseconds of calls back to back, which together take at least ``seconds``.

    Args:
        call: the call to time.
        seconds: minimum duration of the block.
        expected: estimated milliseconds of a call, which gives the number of calls. If they end too soon, more follow.
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
    """A function that replays calls captured in a CUDA graph, without host time per call."""
    calls[0]()  # exclude one-time compilation and allocation
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    replay: Call = graph.replay
    return replay


def calls_of_block(seconds: float, milliseconds: float) -> int:
    """Number of calls that fill a block, from milliseconds per call and seconds per block."""
    return max(FEWEST_CALLS, math.ceil(1e3 * seconds / milliseconds))


def median(values: list[float]) -> float:
    """Median of the values; for an even number, the upper of the two middle values."""
    return sorted(values)[len(values) // 2]
