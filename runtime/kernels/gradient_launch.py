"""Launches of gradient kernels that a checked call has bound, for later calls with tensors like its own."""

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
from runtime.kernels.arguments import TMA_ALIGNMENT
from runtime.kernels.attention_launch import Layout


class Outputs(NamedTuple):
    """What a signature knows: layouts of the gradients, the statistics and the sums, and what else a launch needs.

    Attributes:
        gradients: layouts of the gradients by parameter.
        stats: layout of the row statistics.
        sums: layouts of sums that each call allocates, by parameter.
        cleared: those of them that begin as 0.
        allocate: makes all of these.
        left_out: index tensors that are not given: their addresses are 0.
        memory: workspaces of the launch.
    """

    gradients: dict[str, Layout]
    stats: Layout
    sums: dict[str, Layout]
    cleared: tuple[str, ...]
    allocate: Allocate
    left_out: dict[str, int]
    memory: Memory

    def new_sums(self) -> dict[str, torch.Tensor]:
        """The sums of a call; those that parts are added to in any order are 0."""
        made = {name: self.allocate(*layout) for name, layout in self.sums.items()}
        for name in self.cleared:
            made[name].zero_()
        return made


class Step(NamedTuple):
    """A bound launch of one kernel.

    Attributes:
        loaded: the kernel.
        signature: of the first call.
        names: parameters that the call's tensors are read by, in order; "" for a tensor that the kernel does not read.
        absent: parameters of tensors that are not given, all 0.
        prologue: whether to launch the plan's prologue.
        makes_stats: whether the kernel writes the row statistics; otherwise it reads those of the step before.
    """

    loaded: LoadedKernel
    signature: Signature
    names: tuple[str, ...]
    absent: dict[str, int]
    prologue: bool
    makes_stats: bool


@dataclass(slots=True)
class GradientLaunch:
    """Bound launches of the kernels of a backward pass.

    Calls have tensors that ``Launches.find`` found to be like those of a first call.

    Attributes:
        steps: the kernels, in order.
        unaligned: how many of the first tensors may lie anywhere; others begin at multiples of 16 bytes.
        result: makes the result of the gradients by parameter.
    """

    steps: tuple[Step, ...]
    unaligned: int
    result: Callable[[dict[str, torch.Tensor]], Any]

    def __call__(self, tensors: tuple[torch.Tensor, ...]) -> Any:
        """Launch on torch's current stream.

        Args:
            tensors: as many as the steps have names.

        Returns:
            The result; None, and nothing is launched, where the checks of a call are needed: for a tensor that does
            not begin at a multiple of 16 bytes, and in a thread that has another context current.
        """
        last = tensors[-1]
        if is_elsewhere(last):
            return None
        places = [tensor.data_ptr() for tensor in tensors]
        bits = 0
        for place in places[self.unaligned :]:
            bits |= place
        if bits % TMA_ALIGNMENT:
            return None
        gradients: dict[str, torch.Tensor] = {}
        stats: Any = None
        for step in self.steps:
            outputs: Outputs = step.signature.extra
            made = {name: outputs.allocate(*layout) for name, layout in outputs.gradients.items()}
            if step.makes_stats:
                stats = outputs.allocate(*outputs.stats)
            sums = outputs.new_sums()
            addresses = dict(zip(step.names, places, strict=False))
            addresses |= step.absent
            addresses["stats"] = stats.data_ptr()
            for of in (made, sums):
                for name, tensor in of.items():
                    addresses[name] = tensor.data_ptr()
            enqueue(step.loaded, step.signature, addresses, last.device, outputs.memory, prologue=step.prologue)
            gradients |= made
        return self.result(gradients)
