"""Calls of the CUDA driver: its functions, their status, and a context for each thread."""

from __future__ import annotations

import threading
from typing import Any

from runtime.errors import DeviceError

_thread = threading.local()


def driver() -> Any:
    """Return cuda.bindings.driver."""
    from cuda.bindings import driver as bindings  # noqa: PLC0415 - needs libcuda

    return bindings


def call(function: Any, *arguments: Any) -> Any:
    """Call a driver function and return its results without the status.

    Raises:
        DeviceError: with the driver's name of the error.
    """
    status, *results = function(*arguments)
    if int(status) != 0:
        raise DeviceError(f"{function.__name__} failed: {getattr(status, 'name', status)}")
    return results[0] if len(results) == 1 else results


def make_context_current(device: int) -> None:
    """Give the calling thread a CUDA context if it has none, as in a thread of autograd's that nothing has run on yet.

    torch counts on CUDA's runtime for that, whose functions do it by themselves; the driver's fail instead.
    """
    if getattr(_thread, "has_context", False):
        return
    cuda = driver()
    if int(call(cuda.cuCtxGetCurrent)) == 0:
        handle = call(cuda.cuDeviceGet, device)
        call(cuda.cuCtxSetCurrent, call(cuda.cuDevicePrimaryCtxRetain, handle))
    _thread.has_context = True
