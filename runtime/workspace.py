"""Device memory that kernels need beside their arguments, kept from launch to launch."""

from __future__ import annotations

import threading

import torch

SCHEDULER_COUNTERS = 2  # tiles handed out, thread blocks that ended
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
    """Return ``size`` bytes or more whose content nobody relies on before a launch or after it.

    As with counters, the launches of a stream share them, and a launch that is being captured gets its own.
    """
    if torch.cuda.is_current_stream_capturing():
        return torch.empty(size, dtype=torch.uint8, device=device)
    key = owner(device, stream)
    found = _scratch.get(key)
    if found is None or found.numel() < size:
        found = _scratch[key] = torch.empty(size, dtype=torch.uint8, device=device)
    return found
