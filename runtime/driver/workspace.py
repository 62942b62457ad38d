"""Device memory that kernels need beside their arguments, kept from launch to launch."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from codegen.problem import COUNTER_BYTES, LaunchArgs

PER_THREAD_STREAM = 2  # cudaStreamPerThread: one handle, which is a stream of its own in each thread

_counters: dict[tuple[int, int, int], torch.Tensor] = {}
_scratch: dict[tuple[int, int, int], torch.Tensor] = {}


def owner(device: torch.device, stream: int) -> tuple[int, int, int]:
    """Return what a stream is known by: its device, its handle and, where the handle does not say all, the thread."""
    return device.index, stream, threading.get_ident() if stream == PER_THREAD_STREAM else 0


def counters(device: torch.device, stream: int, number: int) -> torch.Tensor:
    """Return ``number`` counters, all 0.

    A kernel leaves them at 0, and launches on one stream follow each other, so each stream needs one set. A CUDA graph
    may run beside anything: a launch that is being captured gets its own, cleared by the graph. A launch that a fault
    cuts short leaves them as they are; the fault ends the CUDA context, so that nothing is launched on them again.
    """
    if torch.cuda.is_current_stream_capturing():
        return torch.zeros(number, dtype=torch.int32, device=device)
    key = owner(device, stream)
    found = _counters.get(key)
    if found is None or found.numel() < number:
        found = _counters[key] = _kept(device, stream, torch.zeros, number, torch.int32)
    return found


def scratch(device: torch.device, stream: int, size: int) -> torch.Tensor:
    """Return at least ``size`` bytes of uninitialised scratch memory, which the next launch on the stream reuses.

    A launch that is being captured gets its own.
    """
    if torch.cuda.is_current_stream_capturing():
        return torch.empty(size, dtype=torch.uint8, device=device)
    key = owner(device, stream)
    found = _scratch.get(key)
    if found is None or found.numel() < size:
        found = _scratch[key] = _kept(device, stream, torch.empty, size, torch.uint8)
    return found


def _kept(
    device: torch.device, stream: int, make: Callable[..., torch.Tensor], number: int, dtype: torch.dtype
) -> torch.Tensor:
    """Return a new tensor of a stream that outlives the call.

    It is made in a thread of its own: where torch.compile warms up for CUDA graphs, what this thread allocates is of
    the graphs' pool, and torch refuses what stays in it. A stream of each thread would be another one there.
    """

    def made() -> torch.Tensor:
        with torch.cuda.device(device), torch.cuda.stream(torch.cuda.ExternalStream(stream, device)):
            return make(number, dtype=dtype, device=device)

    if device.type != "cuda" or stream == PER_THREAD_STREAM:
        return make(number, dtype=dtype, device=device)
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
        kept = scratch(device, stream, memory.scratch)
        first = kept.data_ptr()
        for name, offset in memory.scratch_places:
            addresses[name] = first + offset
    return counted, kept
