"""Cubins in the driver: one copy of each, unloaded after its last user is gone and its launches have finished."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from typing import Any
from weakref import WeakValueDictionary, finalize

from runtime.driver.api import call, driver
from runtime.driver.context import entered

Launched = set[tuple[int, int]]
"""(device number, handle) of streams on which a kernel of a library was launched."""


class Library:
    """A cubin or PTX loaded in the driver.

    Attributes:
        handle: the driver's handle.
        launched: streams on which its kernels were launched. All of them live as long as the process.
    """

    def __init__(self, code: bytes) -> None:
        self.handle = call(driver().cuLibraryLoadData, code, [], [], 0, [], [], 0)
        self.launched: Launched = set()
        # The garbage collector calls this at any time in any thread: it must not touch CUDA.
        self._retire: finalize[..., Library] | None = finalize(self, _retired.append, (self.handle, self.launched))
        self._retire.atexit = False

    def keep(self) -> None:
        """Keep it loaded until the process ends, for a CUDA graph or a stream of unknown lifetime."""
        if self._retire is not None:
            self._retire.detach()
            self._retire = None
            _kept.append(self)


_loaded: WeakValueDictionary[bytes, Library] = WeakValueDictionary()
_kept: list[Library] = []  # at most one copy of each cubin
_retired: deque[tuple[Any, Launched]] = deque()
_waiting: list[tuple[Any, list[Any]]] = []  # (library, events recorded after its launches)
_lock = threading.Lock()


def load(code: bytes, *settings: int) -> Library:
    """Get the library of a cubin, loading it if necessary. Unused libraries are unloaded.

    The device's primary context is current.

    Args:
        code: the cubin or the PTX.
        settings: function attributes of its kernels in the driver. Each combination has its own copy.

    Raises:
        DeviceError: if the driver refuses the code.
    """
    digest = sha256(code)
    digest.update(repr(settings).encode())
    key = digest.digest()
    with _lock, _relaxed():
        _unload_retired()
        found = _loaded.get(key)
        if found is None:
            found = _loaded[key] = Library(code)
        return found


def _unload_retired() -> None:
    """Unload the libraries without users whose launches have finished, without waiting for the GPU.

    An event is recorded after the launches of each library, and queried now and whenever a library is loaded.
    """
    for _ in range(len(_retired)):
        handle, launched = _retired.popleft()
        events = _events(launched)
        if events is None:
            _retired.append((handle, launched))
        else:
            _waiting.append((handle, events))
    _waiting[:] = [(handle, events) for handle, events in _waiting if not _unloaded(handle, events)]


def _events(launched: Launched) -> list[Any] | None:
    """Events recorded after all launches on these streams; None while one of the streams is being captured."""
    cuda, events = driver(), []
    for device, stream in launched:
        with entered(device):
            event = call(cuda.cuEventCreate, cuda.CUevent_flags.CU_EVENT_DISABLE_TIMING)
            events.append(event)
            # In a capture the event would become part of the graph. The second check detects a capture that began in
            # between.
            if _is_captured(stream) or call(cuda.cuEventRecord, event, stream) or _is_captured(stream):
                for each in events:
                    call(cuda.cuEventDestroy, each)
                return None
    return events


def _is_captured(stream: int) -> bool:
    """Whether a stream is in a CUDA graph capture, or is the default stream while a capture forbids its use."""
    cuda = driver()
    status, state = cuda.cuStreamIsCapturing(stream)
    return int(status) != 0 or state != cuda.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE


def _unloaded(handle: Any, events: list[Any]) -> bool:
    """Unload a library if all events have completed; return whether it was unloaded."""
    cuda = driver()
    if any(int(cuda.cuEventQuery(event)[0]) != 0 for event in events):
        return False
    for event in events:
        call(cuda.cuEventDestroy, event)
    call(cuda.cuLibraryUnload, handle)
    return True


@contextmanager
def _relaxed() -> Iterator[None]:
    """Allow calls that a capture in global mode would forbid, without breaking captures of other threads."""
    cuda = driver()
    mode = call(cuda.cuThreadExchangeStreamCaptureMode, cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED)
    try:
        yield
    finally:
        call(cuda.cuThreadExchangeStreamCaptureMode, mode)
