"""Launches from torch: on its current stream, with the device memory that they need beside their arguments."""

from __future__ import annotations

import torch

from runtime.driver.launch import LoadedKernel, Signature
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
        signature: of the call.
        addresses: of its tensors by name; those of memory that is reserved here are added.
        device: of the tensors.
        memory: what the launch needs beside its arguments.
        prologue: whether the plan's prologue goes before, if it has one.
    """
    # What torch.cuda.current_device() is; tensors on the device show that CUDA is initialised.
    if device.index != torch._C._cuda_getDevice():
        with torch.cuda.device(device):
            enqueue(loaded, signature, addresses, device, memory, prologue=prologue)
        return
    # What torch.cuda.current_stream(device).cuda_stream is, without the Stream object.
    stream = torch._C._cuda_getCurrentRawStream(device.index)
    more, held = reserve(device, stream, memory)
    addresses |= more
    loaded.launch(signature, addresses, stream, prologue=prologue)
    del held  # not before: freed memory could be allocated again
