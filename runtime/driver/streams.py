"""torch's current stream of a device, and the lifetime of its handle."""

from __future__ import annotations

import torch

_lasting: set[tuple[int, int]] = set()  # device and handle: torch has 32 streams of each priority per device


def current_stream(device: torch.device) -> int:
    """Handle of torch's current stream of a device, without the cost of a torch Stream object."""
    stream: int = torch._C._cuda_getCurrentRawStream(device.index)
    return stream


def is_lasting(device: torch.device, stream: int) -> bool:
    """Whether a stream is the default stream of a device or from torch's pool.

    These streams live as long as the process, so their handles are unique. The handle of any other stream
    (``torch.cuda.ExternalStream``, ``cudaStreamPerThread``) may denote another stream later or in another thread.

    Args:
        device: device of the stream.
        stream: handle of torch's current stream of the device.
    """
    if (device.index, stream) in _lasting:
        return True
    number = torch.cuda.current_stream(device).stream_id
    if number != 0 and number % 2 == 0:  # the id of an external stream is its pointer
        return False
    _lasting.add((device.index, stream))
    return True
