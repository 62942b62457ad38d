"""FP8 products of BSR matrices by mma.sync that run on the host, thread by thread (tests/support/host_mma_fp8.py)."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from host_mma_fp8 import HostLoaded

from codegen.library import NamedSpec
from codegen.render import generate
from runtime.kernels.bsr_sddmm import BsrSddmmKernel
from runtime.kernels.bsr_spmm import BsrSpmmKernel


class HostSpmm(BsrSpmmKernel):
    """A bsr_spmm kernel that takes tensors of the CPU.

    Attributes:
        host: how it is run.
    """

    def __init__(self, named: NamedSpec, folder: Path, source: str | None = None) -> None:
        generated = generate(named)
        self.host = HostLoaded(generated.source if source is None else source, generated.plan, folder)
        super().__init__(SimpleNamespace(named=named, plan=generated.plan), self.host)  # type: ignore[arg-type]

    def __call__(self, a: Any, b: Any, **named: Any) -> Any:
        self.host.tensors = (a.values(), b, named["scale_b"])
        return super().__call__(a, b, **named)

    def _operands(self, *given: Any, **named: Any) -> Any:
        """Matrices of a batch beside each other, copies of which the kernel reads too."""
        operands = super()._operands(*given, **named)
        self.host.tensors = (*self.host.tensors, operands[0], *(t for t in operands[3] if isinstance(t, torch.Tensor)))
        return operands


class HostSddmm(BsrSddmmKernel):
    """A bsr_sddmm kernel that takes tensors of the CPU.

    Attributes:
        host: how it is run.
    """

    def __init__(self, named: NamedSpec, folder: Path, source: str | None = None) -> None:
        generated = generate(named)
        self.host = HostLoaded(generated.source if source is None else source, generated.plan, folder)
        super().__init__(SimpleNamespace(named=named, plan=generated.plan), self.host)  # type: ignore[arg-type]

    def __call__(self, a: Any, b: Any, pattern: Any, **named: Any) -> Any:
        self.host.tensors = (a, b, named["scale_a"], named["scale_b"])
        return super().__call__(a, b, pattern, **named)
