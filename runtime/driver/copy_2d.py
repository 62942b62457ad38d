"""Strided 2D copies by one driver call, which uses a copy engine."""

from __future__ import annotations

from typing import Any

from runtime.driver.api import call, driver

MAX_PITCH = 2**31 - 1
"""Bytes from one row to the next, at most (CU_DEVICE_ATTRIBUTE_MAX_PITCH of all GPUs since compute capability 2)."""


def copy_2d(target: int, source: int, *, pitches: tuple[int, int], width: int, rows: int, stream: int) -> None:
    """Enqueue a copy of rows, in the current context.

    Args:
        target, source: device addresses on this GPU or on a peer that it can access.
        pitches: row strides of target and source in bytes, from width to MAX_PITCH.
        width: bytes of a row.
        rows: number of rows.
        stream: CUDA stream.

    Raises:
        DeviceError: if the driver refuses it.
    """
    cuda = driver()
    copy: Any = cuda.CUDA_MEMCPY2D()
    copy.dstMemoryType = copy.srcMemoryType = cuda.CUmemorytype.CU_MEMORYTYPE_DEVICE
    copy.dstDevice, copy.srcDevice = target, source
    copy.dstPitch, copy.srcPitch = pitches
    copy.WidthInBytes, copy.Height = width, rows
    call(cuda.cuMemcpy2DAsync, copy, stream)
