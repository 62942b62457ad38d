"""Device workspaces of kernels: persistent counters and temporary scratch memory."""

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

SCRATCH_ALIGNMENT = 128
"""Bytes; each scratch buffer begins at a multiple. Bulk copies need 16."""

_counters: dict[tuple[int, int], torch.Tensor] = {}  # by device and handle of persistent streams


def counters(device: torch.device, stream: int, number: int) -> torch.Tensor:
    """At least ``number`` int32 counters, all 0.

    Every kernel resets its counters to 0, and launches on one stream run in order, so each stream keeps one set. Two
    kinds of launches get their own set, cleared on their stream first: launches in a CUDA graph capture, because a
    graph may run concurrently with anything, and launches on a stream that may end before the process, because a later
    stream may get its handle. A launch that faults leaves its counters undefined, but the fault also ends the CUDA
    context.

    Args:
        device: device of the launch; its primary context is current.
        stream: handle of torch's current stream of the device.
        number: number of counters.
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
    """``size`` bytes of uninitialized memory of the current stream, which later calls on the stream may reuse."""
    return allocator(device)((size,), (1,), torch.uint8)


def _cleared(device: torch.device, stream: int, number: int) -> torch.Tensor:
    """New counters of the current stream, cleared on it without a torch operator, which dispatch modes would see."""
    made = allocator(device)((number,), (1,), torch.int32)
    call(driver().cuMemsetD32Async, made.data_ptr(), 0, number, stream)
    return made


def _kept(device: torch.device, stream: int, number: int) -> torch.Tensor:
    """New counters of the current stream that outlive the call.

    A separate thread allocates them: while torch.compile warms up for CUDA graphs, this thread allocates from the
    graphs' pool, where torch refuses memory that outlives the call.
    """
    current = torch.cuda.current_stream(device)

    def made() -> torch.Tensor:
        with entered(device.index), torch.cuda.stream(current):
            return _cleared(device, stream, number)

    with ThreadPoolExecutor(1) as apart:
        return apart.submit(made).result()


class Memory(NamedTuple):
    """Device workspaces of a signature's launches.

    Attributes:
        counters: total number of counters.
        scratch: total bytes of scratch memory.
        counter_places: (pointer parameter, byte offset) of each group of counters.
        scratch_places: (pointer parameter, byte offset) of each scratch buffer.
        unused: pointer parameters without memory, all 0.
    """

    counters: int
    scratch: int
    counter_places: tuple[tuple[str, int], ...]
    scratch_places: tuple[tuple[str, int], ...]
    unused: dict[str, int]

    @classmethod
    def of(cls, args: LaunchArgs) -> Memory:
        """Lay out the workspaces of a launch."""
        counters = sum(args.counters.values())
        aligned = {name: -(-size // SCRATCH_ALIGNMENT) * SCRATCH_ALIGNMENT for name, size in args.scratch.items()}
        scratch = sum(aligned.values())
        return cls(
            counters,
            scratch,
            _places(args.counters, COUNTER_BYTES) if counters else (),
            _places(aligned, 1) if scratch else (),
            dict.fromkeys((*(args.counters if not counters else ()), *(args.scratch if not scratch else ())), 0),
        )


NO_MEMORY = Memory(0, 0, (), (), {})


def _places(wanted: Mapping[str, int], unit: int) -> tuple[tuple[str, int], ...]:
    """Offset of each part of an allocation."""
    ends = accumulate(count * unit for count in wanted.values())
    return tuple(zip(wanted, (0, *ends), strict=False))


def reserve(device: torch.device, stream: int, memory: Memory, addresses: dict[str, int]) -> tuple[Any, Any]:
    """Add the workspace addresses of a launch by parameter; return the tensors that own the memory.

    The caller keeps the tensors until the launch is enqueued, because freed memory could be allocated again (in a
    capture immediately). Parameters without memory get the address 0.
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
