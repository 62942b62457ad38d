"""Launches of BSR kernels that a checked call has bound, for later calls with tensors like its own."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from runtime.driver.allocate import Allocate
from runtime.driver.context import is_elsewhere
from runtime.driver.enqueue import enqueue
from runtime.driver.launch import LoadedKernel, Signature
from runtime.driver.workspace import NO_MEMORY, Memory
from runtime.kernels.arguments import TMA_ALIGNMENT

Layout = tuple[tuple[int, ...], tuple[int, ...]]
"""Shape and strides, in elements."""


class New(NamedTuple):
    """A tensor that each launch allocates.

    Attributes:
        allocate: makes it.
        layout: of its memory.
        dtype: of its elements.
        seen: the part of the memory that the tensor has; None: all of it.
    """

    allocate: Allocate
    layout: Layout
    dtype: torch.dtype
    seen: Layout | None = None

    def __call__(self) -> torch.Tensor:
        """The new tensor, of torch's current device."""
        made = self.allocate(*self.layout, self.dtype)
        # In place, as what is no view may be written to behind a custom function of autograd.
        return made if self.seen is None else made.as_strided_(*self.seen)


@dataclass(slots=True)
class ProductLaunch:
    """A bound launch of a product, for calls whose tensors ``Launches.find`` found to be like those of a first one.

    Attributes:
        loaded: the kernel.
        signature: of the first call.
        device: of the tensors.
        names: parameters that the tensors are read by, in order; "" for a tensor that the kernel does not read.
        aligned: range of the tensors that must begin at multiples of 16 bytes; others may lie anywhere.
        result: the product, parameter ``c``.
        memory: what the launch needs beside its arguments.
        copy: the copy of ``b`` by rows that the kernel reads; None without one.
        prologue: whether the plan's prologue goes before, if it has one.
    """

    loaded: LoadedKernel
    signature: Signature
    device: torch.device
    names: tuple[str, ...]
    aligned: slice
    result: New
    memory: Memory = NO_MEMORY
    copy: New | None = None
    prologue: bool = True

    def __call__(self, tensors: tuple[torch.Tensor, ...]) -> torch.Tensor | None:
        """Launch on torch's current stream.

        Args:
            tensors: as many as there are names.

        Returns:
            The product; None, and nothing is launched, where the checks of a call are needed: for a tensor that
            does not begin at a multiple of 16 bytes, and in a thread that has another context current.
        """
        if is_elsewhere(tensors[0]):
            return None
        places = [tensor.data_ptr() for tensor in tensors]
        bits = 0
        for place in places[self.aligned]:
            bits |= place
        if bits % TMA_ALIGNMENT:
            return None
        addresses: dict[str, int] = dict(zip(self.names, places, strict=False))
        found = self.result()
        addresses["c"] = found.data_ptr()
        addresses["b_columns"] = addresses["b_groups"] = addresses["b"]
        if self.copy is not None:
            copy = self.copy()  # held until the launch is enqueued
            addresses["b"] = addresses["b_groups"] = copy.data_ptr()
        enqueue(self.loaded, self.signature, addresses, self.device, self.memory, prologue=self.prologue)
        return found

    def returning(self, like: torch.Tensor) -> ProductLaunch:
        """The same launch, whose result is another view of the same memory, laid out as a tensor."""
        seen = (tuple(like.shape), like.stride())
        made = self.result
        made = made._replace(layout=seen) if made.seen is None else made._replace(seen=seen)
        return replace(self, result=made)
