"""Launches of BSR kernels, bound by a checked call, for later calls with matching tensors."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from runtime.driver.allocate import Allocate, allocator
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
        allocate: the allocator.
        layout: layout of its memory.
        dtype: dtype of its elements.
        seen: the part of the memory that the tensor covers; None for all of it.
    """

    allocate: Allocate
    layout: Layout
    dtype: torch.dtype
    seen: Layout | None = None

    def __call__(self) -> torch.Tensor:
        """Allocate the tensor on torch's current device."""
        made = self.allocate(*self.layout, self.dtype)
        # In place, because an output of a custom autograd function may be written to only if it is not a view.
        return made if self.seen is None else made.as_strided_(*self.seen)


def copied_rows(like: torch.Tensor) -> New:
    """A tensor for a copy by rows, with the layout of another one, which begins its memory and may have padded rows."""
    shape, (stride, _) = tuple(like.shape), like.stride()
    layout = ((shape[0], stride), (stride, 1))
    return New(allocator(like.device), layout, like.dtype, None if stride == shape[1] else (shape, (stride, 1)))


@dataclass(slots=True)
class ProductLaunch:
    """A bound launch of a product, for calls whose tensors match the first call's (``Launches.find``).

    Attributes:
        loaded: the kernel.
        signature: signature of the first call.
        device: device of the tensors.
        names: parameters of the tensors, in order; "" for a tensor that the kernel does not read.
        aligned: range of the tensors that must begin at multiples of 16 bytes; others may lie anywhere.
        result: the product, parameter ``c``.
        memory: workspaces of the launch.
        copy: row-major copy of ``b`` for the kernel; None without one.
        prologue: whether to launch the plan's prologue first, if it has one.
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
            tensors: one tensor for each name.

        Returns:
            The product; None without a launch if the call needs checks, because a tensor does not begin at a multiple
            of 16 bytes or the thread has another current context.
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
            copy = self.copy()  # kept until the launch is enqueued
            addresses["b"] = addresses["b_groups"] = copy.data_ptr()
        enqueue(self.loaded, self.signature, addresses, self.device, self.memory, prologue=self.prologue)
        return found

    def returning(self, like: torch.Tensor) -> ProductLaunch:
        """The same launch with another view of the result's memory, which has the layout of a given tensor."""
        seen = (tuple(like.shape), like.stride())
        made = self.result
        made = made._replace(layout=seen) if made.seen is None else made._replace(seen=seen)
        return replace(self, result=made)
