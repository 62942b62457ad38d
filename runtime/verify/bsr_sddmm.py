"""Sampled product: case table, oracle, and the run of one case."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from codegen.spec import BsrSddmmSpec
from runtime.kernels.arguments import TORCH_DTYPES
from runtime.kernels.bsr_sddmm import BsrSddmmKernel
from runtime.verify import bsr_fp8
from runtime.verify.common import Outcome, Verification, generator, max_error, poisoned_memory, tolerance


@dataclass(frozen=True)
class Case:
    """One set of inputs.

    Attributes:
        name: unique; also the seed.
        block_rows: M / block rows; block_columns: N / block columns.
        k: columns of A and B.
        row_counts: stored blocks of a row: ``random`` (0 to all), ``even`` (half of them), ``one``, ``last`` (all of
            them in the last block row, none before), ``none``.
        repeated: columns drawn with replacement.
        wild: a fifth of the column indices are out of range; their blocks are zeros.
        index_dtype: dtype of crow_indices and col_indices.
        strided: a and b are column slices of wider matrices.
        own_out: the kernel allocates its result.
    """

    name: str
    block_rows: int = 4
    block_columns: int = 6
    k: int = 256
    row_counts: str = "random"
    repeated: bool = False
    wild: bool = False
    index_dtype: torch.dtype = torch.int64
    strided: bool = False
    own_out: bool = False

    def describe(self) -> str:
        """Description of the parameters."""
        text = f"{self.block_rows} x {self.block_columns} blocks, K {self.k}, {self.row_counts} counts"
        extras = {
            "repeated columns": self.repeated,
            "columns out of range": self.wild,
            "strided": self.strided,
            "own out": self.own_out,
        }
        return ", ".join(
            [text, str(self.index_dtype).removeprefix("torch."), *(w for w, said in extras.items() if said)]
        )


CASES = (
    Case("plain", block_rows=8, block_columns=16, k=512, row_counts="even"),
    Case("uneven_rows", block_rows=17, block_columns=13, k=192),
    Case("int32", block_rows=5, block_columns=7, index_dtype=torch.int32),
    Case("odd_k", block_rows=3, block_columns=5, k=200),
    Case("short_k", block_rows=3, block_columns=5, k=8),
    Case("padded_k", block_rows=3, block_columns=5, k=77, strided=True),
    Case("long_k", block_rows=3, block_columns=5, k=4096),
    Case("one_block", block_rows=1, block_columns=1, row_counts="even"),
    Case("one_a_row", block_rows=19, block_columns=3, row_counts="one"),
    Case("no_blocks", block_rows=3, block_columns=3, row_counts="none"),
    Case("empty_rows", block_rows=75, block_columns=3, row_counts="last"),
    Case("many_rows", block_rows=1100, block_columns=2, k=64),
    Case("many_tiles", block_rows=40, block_columns=24, k=128),
    Case("repeated_columns", block_rows=4, block_columns=5, repeated=True),
    Case("columns_out_of_range", block_rows=4, block_columns=8, row_counts="even", wild=True),
    Case("strided", block_rows=4, block_columns=5, strided=True),
    Case("own_out", block_rows=4, block_columns=5, own_out=True),
)


def make_pattern(spec: BsrSddmmSpec, case: Case, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw a pattern, and a mask of its blocks whose column is inside the matrix."""
    random = generator(case.name, device)
    counts = {
        "none": torch.zeros(case.block_rows, dtype=torch.int64, device=device),
        "one": torch.ones(case.block_rows, dtype=torch.int64, device=device),
        "last": torch.tensor([0] * (case.block_rows - 1) + [case.block_columns], device=device),
        "even": torch.full((case.block_rows,), max(1, case.block_columns // 2), device=device),
        "random": torch.randint(0, case.block_columns + 1, (case.block_rows,), generator=random, device=device),
    }[case.row_counts]
    columns = []
    for count in counts.tolist():
        if case.repeated:
            columns.append(torch.randint(0, case.block_columns, (count,), generator=random, device=device))
        else:
            columns.append(torch.randperm(case.block_columns, generator=random, device=device)[:count])
    crow = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    col = torch.cat(columns).to(torch.int64)
    known = torch.ones_like(col, dtype=torch.bool)
    if case.wild:
        known = torch.rand(col.shape, generator=random, device=device) > 0.2
    pattern = torch.sparse_bsr_tensor(
        crow.to(case.index_dtype),
        torch.where(known, col, case.block_columns + 5).to(case.index_dtype),
        torch.full((col.shape[0], spec.block.rows, spec.block.cols), float("nan"), device=device),
        size=(case.block_rows * spec.block.rows, case.block_columns * spec.block.cols),
        device=crow.device,
        check_invariants=False,
    )
    return pattern, known


def sampled(dense: torch.Tensor, pattern: torch.Tensor, known: torch.Tensor) -> torch.Tensor:
    """Blocks of a dense (M, N) matrix that the pattern lists; blocks outside the matrix are zeros."""
    rows, cols = pattern.values().shape[1:]
    blocks = dense.unflatten(0, (-1, rows)).unflatten(2, (-1, cols)).transpose(1, 2)
    crow, col = pattern.crow_indices().long(), pattern.col_indices().long()
    row = torch.repeat_interleave(torch.arange(crow.shape[0] - 1, device=crow.device), crow.diff())
    return torch.where(known[:, None, None], blocks[row, torch.where(known, col, 0)], 0)


def _stored(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """The tensor in a layout; where its rows are parts of wider ones, its columns are parts of longer ones."""
    if layout == "row_major":
        return tensor
    rows, columns = tensor.shape
    more = (tensor.stride(0) - columns) // 8 * 8
    return tensor.new_empty((columns, rows + more))[:, :rows].copy_(tensor.mT).mT


def run_case(kernel: BsrSddmmKernel, case: Case, device: torch.device) -> Outcome:
    """Run one case twice on poisoned outputs and compare it with the oracle and with cuBLAS' dense product."""
    spec = kernel.spec
    pattern, known = make_pattern(spec, case, device)
    random = generator(case.name + "ab", device)
    fp8, unit = spec.is_fp8, case.k**-0.25
    step = 16 if fp8 else 8  # the row stride is a multiple of this number of elements
    width = -(-case.k // step) * step + (64 if case.strided else 0)
    # C's elements have a variance of about 1.
    a, b = (
        (torch.randn((size, width), generator=random, device=device) * (bsr_fp8.CODES if fp8 else unit)).to(
            TORCH_DTYPES[spec.dtype]
        )
        for size in pattern.shape
    )
    a, b = a[:, : case.k], b[:, : case.k]
    a, b = (_stored(tensor, layout) for tensor, layout in ((a, spec.a_layout), (b, spec.b_layout)))
    output = TORCH_DTYPES[kernel.compiled.plan.output]
    scales: dict[str, Any] = {}
    numbers = a.double(), b.double().T
    if fp8:
        scales = bsr_fp8.draw_scales(spec, case.name, a.shape[0], b.mT, unit**2 / bsr_fp8.CODES)
        numbers = bsr_fp8.scaled_rows(spec, a, scales), bsr_fp8.scaled_b(spec, b.mT, scales)
    reference = sampled(torch.matmul(*numbers), pattern, known)
    results = []
    problem = ""
    for _ in range(2):
        if case.own_out:
            with poisoned_memory():
                c = kernel(a, b, pattern, **scales)
        else:
            out = torch.full(pattern.values().shape, float("nan"), dtype=output, device=device)
            c = kernel(a, b, pattern, **scales, out=out)
            if c.values().data_ptr() != out.data_ptr():
                problem = "the result does not contain out"
        same = torch.equal(c.crow_indices(), pattern.crow_indices())
        if c.shape != pattern.shape or not (same and torch.equal(c.col_indices(), pattern.col_indices())):
            problem = "the result has another pattern"
        results.append(c.values())
    if not torch.equal(*results):
        problem = "two runs differ"
    if not reference.numel():
        return Outcome(case.name, case.describe(), 0.0, 0.0, 0.0, problem)
    error = max_error(results[0], reference)
    torch_error: float | None
    if fp8:
        operands = a.double(), b.mT, scales
        torch_error, allowed = bsr_fp8.limits(spec, operands, error, reference, lambda c: sampled(c, pattern, known))
    else:
        torch_error = max_error(sampled(a @ b.T, pattern, known), reference)
        allowed = tolerance(kernel.compiled.plan.output, torch_error, float(reference.abs().max()))
    return Outcome(
        name=case.name,
        description=case.describe(),
        max_error=error,
        torch_error=torch_error,
        tolerance=allowed,
        problem=problem,
    )


VERIFICATION = Verification(
    oracle="blocks of the float64 dense product, on the GPU",
    cases=lambda plan, spec: CASES,
    run_case=run_case,
)
