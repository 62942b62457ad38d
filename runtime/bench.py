"""What benchmarks share: the clock, both ways of timing, and the data sets of attention.

A *single call* is timed after a pause: the chip is cool and clocks high, as for a kernel that runs now and then. Calls
*back to back* fill at least a quarter of a second: the chip is at its power limit, as in training or in serving under
load. docs/measuring.md says more.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
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


def calls_of_block(seconds: float, milliseconds: float) -> int:
    """Return how many calls of that length fill a block."""
    return max(FEWEST_CALLS, math.ceil(1e3 * seconds / milliseconds))


def median(values: list[float]) -> float:
    """Return the middle one of the values; of an even number the upper one of the two in the middle."""
    return sorted(values)[len(values) // 2]


# Standard deviations of a row's logits in 16 heads, spread as in a trained text encoder.
HEAD_STDS = (0.6, 0.9, 1.0, 1.1, 1.2, 1.3, 1.3, 1.4, 1.6, 2.0, 2.5, 2.9, 3.3, 3.7, 5.0, 19.7)
KEY_NORM_SIGMA = 0.8
SINK_QUERY, SINK_KEY = 6.0, 22.0  # lengths along u: the first key's logit is larger by their product / sqrt(d)
ROTARY_NOISE, ROTARY_MEAN, ROTARY_KEY, ROTARY_BASE = 1.4, 0.7, 30.0, 1e4
RISING_QUERY, RISE, RISE_KEYS, LONGEST_KEY = 8.0, 5.0, 128, 500.0

Inputs = tuple[torch.Tensor, torch.Tensor]  # q and k


@dataclass(frozen=True)
class DataSet:
    """Values of q and k for attention; v is normal in all of them.

    Attributes:
        why: what of real data it stands for, in a line.
        change: takes q and k of standard normal numbers (float32) and a unit vector of each K/V head, as
            (batch, kv_heads, 1, head_dim); returns q and k. Random numbers are of the generator that it gets.
    """

    why: str
    change: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Generator | None], Inputs]


def _scaled(std: float) -> DataSet:
    def change(q: torch.Tensor, k: torch.Tensor, u: torch.Tensor, generator: torch.Generator | None) -> Inputs:
        return q * math.sqrt(std), k * math.sqrt(std)

    return DataSet(f"logits of standard deviation {std:g}", change)


def _key_norms(q: torch.Tensor, k: torch.Tensor, u: torch.Tensor, generator: torch.Generator | None) -> Inputs:
    norms = torch.randn((*k.shape[:3], 1), generator=generator, device=k.device)
    return q, k * (KEY_NORM_SIGMA * norms).exp()


def head_stds(heads: int) -> list[float]:
    """Return the logits' standard deviation of each query head.

    HEAD_STDS repeat for more heads than these; fewer get some of them, evenly spread, with the largest.
    """
    known = len(HEAD_STDS)
    if heads < known:
        return [HEAD_STDS[math.ceil((head + 1) * known / heads) - 1] for head in range(heads)]
    return [HEAD_STDS[head % known] for head in range(heads)]


def _heads(q: torch.Tensor, k: torch.Tensor, u: torch.Tensor, generator: torch.Generator | None) -> Inputs:
    # All of it in q: the query heads of one K/V head differ.
    return q * torch.tensor(head_stds(q.shape[1]), device=q.device)[:, None, None], k


def of_query_heads(u: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Return for each query head what its K/V head has."""
    return u.repeat_interleave(q.shape[1] // u.shape[1], 1)


def _sink(q: torch.Tensor, k: torch.Tensor, u: torch.Tensor, generator: torch.Generator | None) -> Inputs:
    k = k.clone()
    k[:, :, :1] += SINK_KEY * u
    return q + SINK_QUERY * of_query_heads(u, q), k


def rotated(x: torch.Tensor) -> torch.Tensor:
    """Return x (..., positions, head_dim) after a rotary embedding: dimension i turns with dimension i + head_dim/2."""
    positions, half = x.shape[-2], x.shape[-1] // 2
    rates = ROTARY_BASE ** -(torch.arange(half, dtype=torch.float64, device=x.device) / half)
    angles = torch.arange(positions, dtype=torch.float64, device=x.device)[:, None] * rates
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def _rotary(q: torch.Tensor, k: torch.Tensor, u: torch.Tensor, generator: torch.Generator | None) -> Inputs:
    mean = ROTARY_MEAN * math.sqrt(q.shape[3]) * u
    own = of_query_heads(u, q)
    q = rotated(ROTARY_NOISE * q + of_query_heads(mean, q)) + SINK_QUERY * own
    k = rotated(ROTARY_NOISE * k + mean)
    k[:, :, :1] = ROTARY_KEY * u
    return q, k


def _rising(q: torch.Tensor, k: torch.Tensor, u: torch.Tensor, generator: torch.Generator | None) -> Inputs:
    step = RISE / RISING_QUERY * math.sqrt(k.shape[3])  # of a key's length, from block to block
    lengths = (torch.arange(k.shape[2], device=k.device) / RISE_KEYS * step).clamp(max=LONGEST_KEY)
    return q + RISING_QUERY * of_query_heads(u, q), k + lengths[:, None] * u


def _falling(q: torch.Tensor, k: torch.Tensor, u: torch.Tensor, generator: torch.Generator | None) -> Inputs:
    q, k = _rising(q, k.flip(2), u, generator)
    return q, k.flip(2)


DATA: dict[str, DataSet] = {
    **{f"std{std}": _scaled(std) for std in (1, 2, 4, 9)},
    "key_norms": DataSet("keys of very different length: log-normal, sigma 0.8", _key_norms),
    "heads": DataSet("heads of very different logits, as in a trained text encoder", _heads),
    "sink": DataSet("an attention sink: the first key has much of every row's weight", _sink),
    "rotary": DataSet("rotary embedding of q and k with a mean, and a sink: logits wave with the distance", _rotary),
    "rising": DataSet("logits that rise by 5 from 128 keys to the next: each block has a new maximum", _rising),
    "falling": DataSet("rising, keys in reverse: the same for kernels that take the last keys first", _falling),
}


def make_data(
    name: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, generator: torch.Generator | None = None
) -> None:
    """Fill q, k and v with a data set; the numbers are made in float32 and rounded to the tensors' type.

    Args:
        name: of DATA.
        q: (batch, heads, length, head_dim); overwritten.
        k: (batch, kv_heads, length, head_dim), with kv_heads a divisor of heads; overwritten.
        v: as k.
        generator: of the random numbers, on the tensors' device; torch's own by default.

    Raises:
        ValueError: if there is no such data set.
    """
    if name not in DATA:
        raise ValueError(f"name is {name!r}; allowed: {', '.join(DATA)}")

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=q.device)

    u = normal(*k.shape[:2], 1, k.shape[3])
    u /= u.norm(dim=-1, keepdim=True)
    v.copy_(normal(*v.shape))
    for tensor, values in zip((q, k), DATA[name].change(normal(*q.shape), normal(*k.shape), u, generator), strict=True):
        tensor.copy_(values)
