"""Launches of attention kernels that a checked call has bound, for later calls with tensors like its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from runtime.driver.allocate import Allocate
from runtime.driver.context import is_elsewhere
from runtime.driver.enqueue import enqueue
from runtime.driver.launch import LoadedKernel, Signature
from runtime.driver.workspace import Memory
from runtime.kernels.arguments import TMA_ALIGNMENT, written

Layout = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]


class Outputs(NamedTuple):
    """What a signature knows of what the kernel writes.

    Attributes:
        out_layout: shape, strides and type of a new ``out``.
        lse_layout: those of the LSE; None without one.
        allocate: makes both.
        left_out: the LSE, index tensors that are not given, the sink if there is none: their addresses are 0.
        memory: what the launch needs beside its arguments.
    """

    out_layout: Layout
    lse_layout: Layout | None
    allocate: Allocate
    left_out: dict[str, int]
    memory: Memory


@dataclass(slots=True)
class AttentionLaunch:
    """A bound launch of attention, for calls whose tensors ``Launches.find`` found to be like those of a first one.

    Attributes:
        loaded: the kernel.
        signature: of the first call.
        outputs: what the kernel writes.
        names: parameters that the tensors are read by, in order; "" for a tensor that the kernel does not read.
        unaligned: how many of the first tensors may lie anywhere; others begin at multiples of 16 bytes.
        extents: bytes from the first element of each tensor to the end of its last one; () unless the last tensor is
            the one that the kernel writes into, which may overlap no other.
        result: makes the result of ``out`` and the log-sum-exp.
        written: parameter of a new result.
    """

    loaded: LoadedKernel
    signature: Signature
    outputs: Outputs
    names: tuple[str, ...]
    unaligned: int
    extents: tuple[int, ...]
    result: Callable[[torch.Tensor, torch.Tensor | None], Any]
    written: str = "o"

    def __call__(self, tensors: tuple[torch.Tensor, ...]) -> Any:
        """Launch on torch's current stream.

        Args:
            tensors: as many as there are names.

        Returns:
            The result; None, and nothing is launched, where the checks of a call are needed: for a tensor that does
            not begin at a multiple of 16 bytes, where ``out`` may overlap another tensor, and in a thread that has
            another context current.
        """
        last = tensors[-1]
        if is_elsewhere(last):
            return None
        places = [tensor.data_ptr() for tensor in tensors]
        bits = 0
        for place in places[self.unaligned :]:
            bits |= place
        if bits % TMA_ALIGNMENT or (self.extents and self._overlaps(places)):
            return None
        outputs = self.outputs
        addresses = dict(zip(self.names, places, strict=False))
        addresses |= outputs.left_out
        if self.extents:
            out = written(last)
        else:
            out = outputs.allocate(*outputs.out_layout)
            addresses[self.written] = out.data_ptr()
        lse = None
        if outputs.lse_layout is not None:
            lse = outputs.allocate(*outputs.lse_layout)
            addresses["lse"] = lse.data_ptr()
        enqueue(self.loaded, self.signature, addresses, last.device, outputs.memory)
        return self.result(out, lse)

    def _overlaps(self, places: list[int]) -> bool:
        """Whether the last tensor shares memory with another."""
        first = places[-1]
        end = first + self.extents[-1]
        for place, extent in zip(places[:-1], self.extents, strict=False):
            if place < end and first < place + extent:
                return True
        return False


def extent(tensor: torch.Tensor) -> int:
    """Bytes from the first element of a tensor to the end of its last one."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return int((last + 1) * tensor.element_size())
