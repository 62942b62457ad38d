"""CUDA contexts: a call runs in the primary context of its tensors' device, torch's, whatever its thread has current.

A thread may have no context, as one that has run nothing yet; that of another device; or one that another library put
there. torch's calls of CUDA's runtime go on in all of them. The driver's functions use the current context, so a call
makes the right one current, allocations of torch included, and leaves the thread's as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from runtime.driver.api import call, driver

# Of each device the handle of its primary context, and cuCtxGetCurrent, which every call asks.
_primary: dict[int, tuple[int, Callable[[], Any]]] = {}


def primary_context(device: int) -> int:
    """Primary context of a device, retained at the first call and then kept, as torch does."""
    if device not in _primary:
        cuda = driver()
        call(cuda.cuInit, 0)
        handle = call(cuda.cuDevicePrimaryCtxRetain, call(cuda.cuDeviceGet, device))
        _primary[device] = int(handle), cuda.cuCtxGetCurrent
    return _primary[device][0]


def is_elsewhere(tensor: Any) -> bool:
    """Whether a call on a tensor must enter a context: that of its device is not current in this thread.

    What is no tensor of a device with a number enters none: the checks of the call refuse it.
    """
    try:
        primary, current = _primary[tensor.device.index]
    except (AttributeError, KeyError):
        return _is_first(tensor)
    return int(current()[1] or 0) != primary  # None where the driver fails, which entering tells


def _is_first(tensor: Any) -> bool:
    """Do as ``is_elsewhere`` for the first tensor of a device."""
    device = getattr(getattr(tensor, "device", None), "index", None)
    if not isinstance(device, int):
        return False
    primary_context(device)
    return is_elsewhere(tensor)


@contextmanager
def entered(device: int) -> Iterator[None]:
    """Make a device's primary context current, and the device torch's current one, until the block ends."""
    cuda = driver()
    call(cuda.cuCtxPushCurrent, primary_context(device))
    try:
        with torch.cuda.device(device):
            yield
    finally:
        call(cuda.cuCtxPopCurrent)
