"""Calls of the CUDA driver, with their status as exceptions."""

from __future__ import annotations

from functools import cache
from typing import Any

from runtime.errors import DeviceError


@cache
def driver() -> Any:
    """The module cuda.bindings.driver."""
    from cuda.bindings import driver as bindings  # noqa: PLC0415 - needs libcuda

    return bindings


def call(function: Any, *arguments: Any) -> Any:
    """Call a driver function and return its results without the status.

    Raises:
        DeviceError: if the driver reports an error, with its name.
    """
    status, *results = function(*arguments)
    if int(status) != 0:
        raise DeviceError(f"{function.__name__} failed: {getattr(status, 'name', status)}")
    return results[0] if len(results) == 1 else results
