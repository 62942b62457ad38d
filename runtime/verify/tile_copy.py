"""Tile copy: case table, oracle, and the run of one case."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from runtime.kernels.arguments import TORCH_DTYPES
from runtime.kernels.tile_copy import TileCopyKernel
from runtime.verify.common import Outcome, Verification, generator, max_error, poisoned_memory, worst


@dataclass(frozen=True)
class Case:
    """One matrix.

    Attributes:
        name: unique; also the seed.
        rows: rows of the matrix; columns: columns, a multiple of 8.
        strided: in and out are column slices of wider matrices.
        own_out: the kernel allocates its result.
    """

    name: str
    rows: int
    columns: int
    strided: bool = False
    own_out: bool = False

    def describe(self) -> str:
        """Description of the parameters."""
        extras = {"strided": self.strided, "own out": self.own_out}
        return ", ".join([f"{self.rows} x {self.columns}", *(word for word, said in extras.items() if said)])


CASES = (
    Case("plain", 1024, 1024),
    Case("one_tile", 32, 64),
    Case("one_chunk", 1, 8),
    Case("odd_rows", 777, 512),
    Case("odd_columns", 256, 1000),
    Case("odd_both", 333, 1208, own_out=True),
    Case("many_tiles", 4096, 8192),
    Case("tall", 100_000, 72),
    Case("wide", 3, 100_000),
    Case("strided", 500, 640, strided=True),
)


def run_case(kernel: TileCopyKernel, case: Case, device: torch.device) -> Outcome:
    """Run one case twice on poisoned outputs; every bit must match the input."""
    dtype, beside = TORCH_DTYPES[kernel.spec.dtype], 64 if case.strided else 0
    shape = (case.rows, case.columns + beside)
    x = torch.randn(shape, generator=generator(case.name, device), device=device).to(dtype)[:, : case.columns]
    errors, problem = [], ""
    for _ in range(2):
        whole = torch.full(shape, float("nan"), dtype=dtype, device=device)
        if case.own_out:
            with poisoned_memory():
                out = kernel(x)
        else:
            out = kernel(x, out=whole[:, : case.columns])
        errors.append(max_error(out, x.double()))
        if not torch.equal(out.contiguous().view(torch.int16), x.contiguous().view(torch.int16)):
            problem = "not the same bits"
        if not bool(whole[:, case.columns :].isnan().all()):
            problem = "wrote beside out"
    return Outcome(case.name, case.describe(), worst(errors), torch_error=None, tolerance=0.0, problem=problem)


VERIFICATION = Verification(
    oracle="the input, bit for bit, on the GPU",
    cases=lambda plan, spec: CASES,
    run_case=run_case,
)
