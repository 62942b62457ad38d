"""Launches on torch's current stream, with their device workspaces."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from runtime.driver.launch import LoadedKernel, Signature
from runtime.driver.streams import current_stream, is_lasting
from runtime.driver.workspace import NO_MEMORY, Memory, reserve


def enqueue(
    loaded: LoadedKernel,
    signature: Signature,
    addresses: dict[str, int],
    device: torch.device,
    memory: Memory = NO_MEMORY,
    *,
    prologue: bool = True,
) -> None:
    """Launch on torch's current stream of a device.

    Args:
        loaded: the kernel.
        signature: signature of the call.
        addresses: addresses of its tensors by name. Workspace addresses are added.
        device: device of the tensors; its primary context is current.
        memory: workspaces of the launch.
        prologue: whether to launch the plan's prologue first, if it has one.
    """
    stream = current_stream(device)
    note_launch(loaded, device, stream)
    held = reserve(device, stream, memory, addresses)
    loaded.launch(signature, addresses, stream, prologue=prologue)
    del held  # kept until here: freed memory could be allocated again


def enqueue_prologue(loaded: LoadedKernel, device: torch.device, grid: int, addresses: Mapping[str, int]) -> None:
    """Launch the plan's prologue by itself on torch's current stream of a device.

    Args:
        loaded: the kernel.
        device: device of the tensors; its primary context is current.
        grid: thread blocks.
        addresses: addresses of its input and output tensors, by parameter.
    """
    stream = current_stream(device)
    note_launch(loaded, device, stream)
    loaded.launch_prologue(device.index, grid, addresses, stream)


def note_launch(loaded: LoadedKernel, device: torch.device, stream: int) -> None:
    """Record the graph or stream that still needs a kernel's code, so that the code stays loaded.

    Args:
        loaded: the kernel.
        device: device of the launch; its primary context is current.
        stream: handle of torch's current stream of the device.
    """
    launched = loaded.library.launched
    if torch.cuda.is_current_stream_capturing():
        loaded.library.keep()
    elif (device.index, stream) not in launched:
        if is_lasting(device, stream):
            launched.add((device.index, stream))
        else:
            loaded.library.keep()
