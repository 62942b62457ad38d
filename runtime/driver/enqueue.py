"""Launches from torch: on its current stream, with the device memory that they need beside their arguments."""

from __future__ import annotations

import torch

from runtime.driver.launch import LoadedKernel, Signature
from runtime.driver.workspace import NO_MEMORY, Memory, reserve


def current_stream(device: torch.device) -> int:
    """Return the handle of torch's current stream of a device, without the Stream object that torch makes of it."""
    stream: int = torch._C._cuda_getCurrentRawStream(device.index)
    return stream


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
        signature: of the call.
        addresses: of its tensors by name, to which those of memory that is reserved here are added.
        device: of the tensors; its primary context is current.
        memory: what the launch needs beside its arguments.
        prologue: whether the plan's prologue goes before, if it has one.
    """
    stream = current_stream(device)
    held = reserve(device, stream, memory, addresses)
    loaded.launch(signature, addresses, stream, prologue=prologue)
    del held  # not before: freed memory could be allocated again
