"""Device memory that kernels need beside their arguments, kept from launch to launch."""

from __future__ import annotations

import threading

import torch

from codegen.problem import LaunchArgs

COUNTER_BYTES = 4
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
        found = _counters[key] = torch.zeros(number, dtype=torch.int32, device=device)
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
        found = _scratch[key] = torch.empty(size, dtype=torch.uint8, device=device)
    return found


def reserve(device: torch.device, stream: int, args: LaunchArgs) -> tuple[dict[str, int], list[torch.Tensor]]:
    """Return the addresses of a launch's counters and of its scratch memory by parameter, and the tensors they are in.

    These must be held until the launch is enqueued: freed memory could be allocated again, in a capture at once.
    Where nothing is wanted of a kind, its addresses are 0.
    """
    addresses: dict[str, int] = {}
    held: list[torch.Tensor] = []
    if not args.counters and not args.scratch:
        return addresses, held
    for wanted, unit, allocate in ((args.counters, COUNTER_BYTES, counters), (args.scratch, 1, scratch)):
        number, place = sum(wanted.values()), 0
        if number:
            held.append(allocate(device, stream, number))
            place = held[-1].data_ptr()
        for name, count in wanted.items():
            addresses[name] = place
            place += count * unit
    return addresses, held
