"""The process that uses CUDA: driver state does not survive a fork."""

from __future__ import annotations

import os

from runtime.errors import DeviceError

FORKED = (
    "this process was forked after the first use of CUDA, which no fork outlives: start it with "
    "multiprocessing.get_context('spawn') (torch: multiprocessing_context='spawn'), or fork before that use"
)
_user: int | None = None


def claim(*, torch_forked: bool = False) -> None:
    """Record that this process uses CUDA.

    Args:
        torch_forked: whether torch reports a fork after its first use of CUDA.

    Raises:
        DeviceError: if the process was forked after the first use of CUDA.
    """
    global _user  # noqa: PLW0603 - one per process
    if torch_forked or was_forked():
        raise DeviceError(FORKED)
    _user = os.getpid()


def was_forked() -> bool:
    """Whether this process was forked after the first use of CUDA."""
    return _user is not None and _user != os.getpid()
