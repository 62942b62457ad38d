"""CUDA contexts: a call runs in the primary context of its tensors' device, whatever context its thread has current.

A new thread has no current context. Other threads may have the context of another device or of another library. torch
calls the CUDA runtime, which works in all of them. Driver functions use the current context, so a call makes the
primary context current for its launches and torch's allocations, and restores the thread's context afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from runtime.driver.api import call, driver

# Primary context handle of each device, and cuCtxGetCurrent, which every call uses.
_primary: dict[int, tuple[int, Callable[[], Any]]] = {}


def primary_context(device: int) -> int:
    """Primary context of a device, retained at the first call for the rest of the process, as in torch."""
    if device not in _primary:
        cuda = driver()
        call(cuda.cuInit, 0)
        handle = call(cuda.cuDevicePrimaryCtxRetain, call(cuda.cuDeviceGet, device))
        _primary[device] = int(handle), cuda.cuCtxGetCurrent
    return _primary[device][0]


def is_elsewhere(tensor: Any) -> bool:
    """Whether a call on a tensor must enter its device's context because that is not current in this thread.

    False for anything but a tensor on a numbered device: the call's checks refuse it.
    """
    try:
        primary, current = _primary[tensor.device.index]
    except (AttributeError, KeyError):
        return _is_first(tensor)
    return int(current()[1] or 0) != primary  # None if the driver fails; entering the context then reports the error


def _is_first(tensor: Any) -> bool:
    """``is_elsewhere`` for the first tensor of a device."""
    device = getattr(getattr(tensor, "device", None), "index", None)
    if not isinstance(device, int):
        return False
    primary_context(device)
    return is_elsewhere(tensor)


@contextmanager
def entered(device: int) -> Iterator[None]:
    """Make a device's primary context current, and the device torch's current device, within the block."""
    cuda = driver()
    call(cuda.cuCtxPushCurrent, primary_context(device))
    try:
        with torch.cuda.device(device):
            yield
    finally:
        call(cuda.cuCtxPopCurrent)
