"""Launches of BSR kernels that a checked call has bound, for later calls with tensors like its own."""

from __future__ import annotations

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


class ProductLaunch:
    """A bound launch of a product: calls pass tensors that ``Launches.find`` found to be like those of the first call.

    Attributes:
        result: the product that each launch writes.
    """

    __slots__ = ("_copy", "_device", "_loaded", "_memory", "_names", "_prologue", "_signature", "_unaligned", "result")

    def __init__(
        self,
        loaded: LoadedKernel,
        signature: Signature,
        device: torch.device,
        names: tuple[str, ...],
        *,
        unaligned: int,
        result: New,
        memory: Memory = NO_MEMORY,
        copy: New | None = None,
        prologue: bool = True,
    ) -> None:
        """Bind a launch.

        Args:
            loaded: the kernel.
            signature: of the call.
            device: of the tensors.
            names: parameters that the tensors are read by, in order; "" for a tensor that the kernel does not read.
            unaligned: how many of the first tensors may lie anywhere; others begin at multiples of 16 bytes.
            result: the product, parameter ``c``.
            memory: what the launch needs beside its arguments.
            copy: the copy of ``b`` by rows; None without one.
            prologue: whether the plan's prologue goes before, if it has one.
        """
        self._loaded, self._signature, self._device, self._names = loaded, signature, device, names
        self._unaligned, self._memory, self._copy = unaligned, memory, copy
        self._prologue, self.result = prologue, result

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
        for place in places[self._unaligned :]:
            bits |= place
        if bits % TMA_ALIGNMENT:
            return None
        addresses: dict[str, int] = dict(zip(self._names, places, strict=False))
        found = self.result()
        addresses["c"] = found.data_ptr()
        addresses["b_columns"] = addresses["b_groups"] = addresses["b"]
        if self._copy is not None:
            copy = self._copy()  # held until the launch is enqueued
            addresses["b"] = addresses["b_groups"] = copy.data_ptr()
        enqueue(self._loaded, self._signature, addresses, self._device, self._memory, prologue=self._prologue)
        return found

    def returning(self, result: New) -> ProductLaunch:
        """The same launch with another view of its result, of the same memory."""
        return ProductLaunch(
            self._loaded,
            self._signature,
            self._device,
            self._names,
            unaligned=self._unaligned,
            result=result,
            memory=self._memory,
            copy=self._copy,
            prologue=self._prologue,
        )
