"""Device memory that kernels need beside their arguments: counters that are kept, scratch memory that is not."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from codegen.problem import COUNTER_BYTES, LaunchArgs
from runtime.driver.allocate import allocator
from runtime.driver.api import call, driver
from runtime.driver.context import entered
from runtime.driver.streams import is_lasting

_counters: dict[tuple[int, int], torch.Tensor] = {}  # by device and handle, of streams that last


def counters(device: torch.device, stream: int, number: int) -> torch.Tensor:
    """At least ``number`` counters, all 0, as int32.

    A kernel leaves them at 0, and launches on one stream follow each other, so each stream keeps one set. A launch has
    a set of its own, cleared on its stream before it, in two cases: in a CUDA graph capture, as a graph may run beside
    anything, and on a stream that may end before the process does, as the next stream may have its handle. A launch
    that a fault cuts short leaves counters as they are; the fault ends the CUDA context, so that nothing is launched on
    them again.

    Args:
        device: of the launch; its primary context is current.
        stream: handle of torch's current stream of the device.
        number: of counters.
    """
    if torch.cuda.is_current_stream_capturing():
        return _cleared(device, stream, number)
    found = _counters.get((device.index, stream))
    if found is None or found.numel() < number:
        if not is_lasting(device, stream):
            return _cleared(device, stream, number)
        found = _counters[device.index, stream] = _kept(device, stream, number)
    return found


def scratch(device: torch.device, size: int) -> torch.Tensor:
    """``size`` bytes of uninitialized memory of the current stream, which torch may give to the next call on it."""
    return allocator(device)((size,), (1,), torch.uint8)


def _cleared(device: torch.device, stream: int, number: int) -> torch.Tensor:
    """New counters of the current stream, cleared on it. No operator of torch runs: none of its modes sees them."""
    made = allocator(device)((number,), (1,), torch.int32)
    call(driver().cuMemsetD32Async, made.data_ptr(), 0, number, stream)
    return made


def _kept(device: torch.device, stream: int, number: int) -> torch.Tensor:
    """New counters of the current stream that outlive the call.

    They are made in a thread of its own: where torch.compile warms up for CUDA graphs, memory that this thread
    allocates is of the graphs' pool, and torch refuses what stays in it.
    """
    current = torch.cuda.current_stream(device)

    def made() -> torch.Tensor:
        with entered(device.index), torch.cuda.stream(current):
            return _cleared(device, stream, number)

    with ThreadPoolExecutor(1) as apart:
        return apart.submit(made).result()


class Memory(NamedTuple):
    """The device memory that the launches of a signature need beside their arguments.

    Attributes:
        counters: how many, in all.
        scratch: bytes, in all.
        counter_places: (pointer parameter, bytes before its first counter) of each.
        scratch_places: (pointer parameter, bytes before its own) of each.
        unused: pointer parameters of a kind of which nothing is wanted, all 0.
    """

    counters: int
    scratch: int
    counter_places: tuple[tuple[str, int], ...]
    scratch_places: tuple[tuple[str, int], ...]
    unused: dict[str, int]

    @classmethod
    def of(cls, args: LaunchArgs) -> Memory:
        """Lay out what a launch asks for."""
        counters, scratch = sum(args.counters.values()), sum(args.scratch.values())
        return cls(
            counters,
            scratch,
            _places(args.counters, COUNTER_BYTES) if counters else (),
            _places(args.scratch, 1) if scratch else (),
            dict.fromkeys((*(args.counters if not counters else ()), *(args.scratch if not scratch else ())), 0),
        )


NO_MEMORY = Memory(0, 0, (), (), {})


def _places(wanted: Mapping[str, int], unit: int) -> tuple[tuple[str, int], ...]:
    """Return where each part of an allocation begins."""
    ends = accumulate(count * unit for count in wanted.values())
    return tuple(zip(wanted, (0, *ends), strict=False))


def reserve(device: torch.device, stream: int, memory: Memory, addresses: dict[str, int]) -> tuple[Any, Any]:
    """Add the addresses of a launch's counters and of its scratch memory by parameter; return the tensors they are in.

    These must be held until the launch is enqueued: freed memory could be allocated again, in a capture at once.
    Where nothing is wanted of a kind, its addresses are 0.
    """
    counted = kept = None
    if memory.unused:
        addresses |= memory.unused
    if memory.counters:
        counted = counters(device, stream, memory.counters)
        first = counted.data_ptr()
        for name, offset in memory.counter_places:
            addresses[name] = first + offset
    if memory.scratch:
        kept = scratch(device, memory.scratch)
        first = kept.data_ptr()
        for name, offset in memory.scratch_places:
            addresses[name] = first + offset
    return counted, kept
