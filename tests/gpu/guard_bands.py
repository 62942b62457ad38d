"""Guard bands around every tensor of a process: an allocator for torch that looks at them (``--guard-bands``).

Inputs, results, copies, what ``prepare`` worked out, counters and scratch memory: all that torch allocates lies between
bands of bytes 0xFF, and is filled with them (NaN in floating point, -1 in integers). ``faults`` tells which were
changed. Memory that was freed stays as it is until then, so that a late write is seen too.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

BAND = 1 << 14  # bytes
FILL = 0xFF
MOST_HELD = 2 << 30  # bytes that were freed and are not yet looked at
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED: memory may be allocated while a stream is being captured
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING

_Allocate = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)
_Free = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)


class GuardBands:
    """The allocator. One for a process, installed before torch initializes CUDA. For the first GPU alone."""

    def __init__(self) -> None:
        import torch

        self._cuda: Any = ctypes.CDLL("libcuda.so.1")
        self._stream, self._context = ctypes.c_void_p(), ctypes.c_void_p()
        self._call("cuInit", 0)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), 0)
        self._call("cuCtxSetCurrent", self._context)
        self._call("cuStreamCreate", ctypes.byref(self._stream), _NON_BLOCKING)
        self._lock = threading.RLock()  # a call of the driver lets other threads go on
        self._live: dict[int, int] = {}  # address of what torch was given -> its bytes
        self._captured: set[int] = set()  # what a CUDA graph was given: a replay uses it, though torch has freed it
        self._freed: list[tuple[int, int]] = []
        self._faults: list[str] = []
        self._callbacks = _Allocate(self._allocate), _Free(self._free)  # torch keeps their addresses alone
        addresses = [ctypes.cast(callback, ctypes.c_void_p).value for callback in self._callbacks]
        torch._C._cuda_changeCurrentAllocator(torch._C._cuda_customAllocator(*addresses))

    def faults(self) -> list[str]:
        """Return what was written outside of tensors since the last call; waits for the GPU."""
        with self._entered():
            self._look_at_all()
        found, self._faults = self._faults, []
        return found

    def _look_at_all(self) -> None:
        self._call("cuCtxSynchronize")
        for address, size in self._live.items():
            self._faults += self._changed(address, size)
        self._captured.clear()  # graphs of a test end with it
        self._release()

    @contextmanager
    def _entered(self) -> Iterator[None]:
        """Make torch's context current: threads of autograd have none yet when they allocate first."""
        with self._lock:
            self._call("cuCtxPushCurrent_v2", self._context)
            try:
                yield
            finally:
                self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def _allocate(self, size: int, device: int, stream: int | None) -> int:
        del device
        with self._entered():
            address = self._allocated(size)
            if self._is_capturing(stream):
                self._captured.add(address)
            return address

    def _is_capturing(self, stream: int | None) -> bool:
        """Return whether a stream is being captured; the default one, 0, never is."""
        status = ctypes.c_int()
        return (
            bool(stream)
            and not self._cuda.cuStreamIsCapturing(ctypes.c_void_p(stream), ctypes.byref(status))
            and (status.value != 0)
        )

    def _allocated(self, size: int) -> int:
        mode = ctypes.c_int(_RELAXED)
        self._call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
        address = ctypes.c_uint64()
        whole = ctypes.c_size_t(size + 2 * BAND)
        failed = self._cuda.cuMemAlloc_v2(ctypes.byref(address), whole)
        if failed and not self._cuda.cuCtxSynchronize():  # freed memory is held: give it back
            self._release()
            failed = self._cuda.cuMemAlloc_v2(ctypes.byref(address), whole)
        if not failed:
            self._call("cuMemsetD8Async", ctypes.c_uint64(address.value), ctypes.c_ubyte(FILL), whole, self._stream)
            self._call("cuStreamSynchronize", self._stream)
            self._live[address.value + BAND] = size
        self._call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
        if failed:  # torch would go on with address 0
            raise SystemExit(f"{size} bytes of GPU memory could not be had: {failed}; use fewer processes")
        return address.value + BAND

    def _free(self, address: int | None, size: int, device: int, stream: int | None) -> None:
        del size, device, stream
        with self._lock:
            if not address or address not in self._live:
                return
            self._freed.append((address, self._live.pop(address)))
            held = sum(size for address, size in self._freed if address not in self._captured)
        if held <= MOST_HELD:
            return
        with self._entered():
            if not self._cuda.cuCtxSynchronize():
                self._release()

    def _release(self) -> None:
        """Look at the bands of what was freed, and give back what no graph may use."""
        freed, self._freed = self._freed, []
        for address, size in freed:
            self._faults += self._changed(address, size)
            if address in self._captured:
                self._freed.append((address, size))
            else:
                self._call("cuMemFree_v2", ctypes.c_uint64(address - BAND))

    def _changed(self, address: int, size: int) -> Iterator[str]:
        band = ctypes.create_string_buffer(BAND)
        for where, start in (("before", address - BAND), ("behind", address + size)):
            self._call("cuMemcpyDtoH_v2", band, ctypes.c_uint64(start), ctypes.c_size_t(BAND))
            places = [place for place, byte in enumerate(band.raw) if byte != FILL] if band.raw.strip(b"\xff") else []
            if places:
                self._call("cuMemsetD8_v2", ctypes.c_uint64(start), ctypes.c_ubyte(FILL), ctypes.c_size_t(BAND))
                yield f"wrote {len(places)} bytes {where} a tensor of {size} bytes, from {places[0]} of the band on"

    def _call(self, name: str, *arguments: Any) -> None:
        result = getattr(self._cuda, name)(*arguments)
        if result:
            raise RuntimeError(f"{name} returned {result}")
