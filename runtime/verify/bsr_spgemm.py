"""BSR x BSR: case table, oracle, and the run of one case."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from codegen.spec import BsrSpgemmSpec
from runtime.kernels.arguments import TORCH_DTYPES
from runtime.kernels.bsr_spgemm import BsrSpgemmKernel
from runtime.verify.bsr_sddmm import sampled
from runtime.verify.common import Outcome, Verification, generator, max_error, poisoned_memory, tolerance


@dataclass(frozen=True)
class Case:
    """One set of inputs.

    Attributes:
        name: unique; also the seed.
        rows, inner, columns: M, K and N in blocks.
        a_counts, b_counts: stored blocks of a row: ``random`` (0 to all), ``even`` (half of them), ``one``, ``all``,
            ``none``.
        c_counts: the same for the blocks in a pattern of C, for kernels that take one; their columns are unsorted.
        c_repeated: some of these blocks are listed twice; c_wild: a fifth of their columns are out of range.
        apart: no block of A meets a block of B: A has the even inner blocks, B the odd ones.
        unsorted: the columns of A's rows are shuffled and some are repeated.
        wild: a fifth of A's column indices are out of range; their blocks count as zeros.
        a_indices, b_indices: dtypes of the indices; C's indices have A's dtype.
        strided: out is a column slice of a wider matrix, if C is dense.
        own_out: the kernel allocates its result.
    """

    name: str
    rows: int = 4
    inner: int = 6
    columns: int = 5
    a_counts: str = "random"
    b_counts: str = "random"
    c_counts: str = "random"
    c_repeated: bool = False
    c_wild: bool = False
    apart: bool = False
    unsorted: bool = False
    wild: bool = False
    a_indices: torch.dtype = torch.int64
    b_indices: torch.dtype = torch.int64
    strided: bool = False
    own_out: bool = False

    def describe(self, patterned: bool = False) -> str:
        """Description of the parameters."""
        extras = {
            f"C {self.c_counts} counts": patterned,
            "repeated blocks of C": patterned and self.c_repeated,
            "columns of C out of range": patterned and self.c_wild,
            "nothing meets": self.apart,
            "unsorted, repeated columns": self.unsorted,
            "columns out of range": self.wild,
            "strided": self.strided and not patterned,
            "own out": self.own_out,
        }
        types = [str(dtype).removeprefix("torch.") for dtype in (self.a_indices, self.b_indices)]
        return ", ".join(
            [
                f"{self.rows} x {self.inner} times {self.inner} x {self.columns} blocks",
                f"{self.a_counts} and {self.b_counts} counts",
                " and ".join(types),
                *(words for words, said in extras.items() if said),
            ]
        )


CASES = (
    Case("plain", rows=8, inner=16, columns=8, a_counts="even", b_counts="even"),
    Case("uneven_rows", rows=9, inner=11, columns=13),
    Case("int32", a_indices=torch.int32, b_indices=torch.int32),
    Case("int32_and_int64", a_indices=torch.int32),
    Case("one_block", rows=1, inner=1, columns=1, a_counts="all", b_counts="all"),
    Case("one_a_row", rows=7, inner=9, columns=6, a_counts="one", b_counts="one"),
    Case("full", rows=3, inner=4, columns=6, a_counts="all", b_counts="all"),
    Case("no_blocks_of_a", a_counts="none"),
    Case("no_blocks_of_b", b_counts="none"),
    Case("nothing_meets", rows=5, inner=8, columns=9, apart=True),
    Case("long_rows", rows=2, inner=100, columns=6, a_counts="all"),
    Case("chunks_without_hits", rows=3, inner=100, columns=6, a_counts="all", b_counts="one"),
    Case("wide", rows=2, inner=5, columns=90, b_counts="even"),
    Case("many_tiles", rows=40, inner=10, columns=42),
    Case("unsorted", rows=4, inner=40, columns=7, a_counts="even", unsorted=True),
    # 133 blocks of A in a row: more than any kernel searches at once with one block per thread.
    Case("long_unsorted_rows", rows=2, inner=100, columns=6, a_counts="all", unsorted=True),
    Case("columns_out_of_range", rows=4, inner=8, columns=6, a_counts="even", wild=True),
    Case("strided", strided=True),
    Case("own_out", own_out=True),
)
PATTERN_CASES = (
    Case("all_of_c", rows=6, inner=9, columns=7, a_counts="even", b_counts="even", c_counts="all"),
    Case("one_of_a_row", rows=75, inner=9, columns=7, c_counts="one"),
    Case("nothing_of_c", c_counts="none"),
    Case("last_row_of_c", rows=75, inner=5, columns=9, c_counts="last"),
    Case("many_rows_of_c", rows=1100, inner=3, columns=2, a_counts="all", b_counts="all", c_counts="one"),
    Case("repeated_blocks_of_c", rows=5, inner=9, columns=8, c_counts="even", c_repeated=True),
    Case("columns_of_c_out_of_range", rows=6, inner=7, columns=8, c_counts="even", c_wild=True),
)
"""Additional cases of kernels that take a pattern of C."""
BALANCED_CASES = (
    # More tiles than thread blocks on any device. Either all tiles but each block's first are deferred, or none is, or,
    # in rows of A of up to 70 blocks, only some of the tiles whose row is one chunk.
    Case("all_tiles_put_off", rows=40, inner=10, columns=42, apart=True),
    Case("no_tile_put_off", rows=40, inner=3, columns=42, a_counts="all", b_counts="all"),
    Case("long_rows_handed_out", rows=40, inner=70, columns=42),
)
"""Additional cases of kernels that distribute tiles dynamically."""


def cases_of(spec: BsrSpgemmSpec) -> tuple[Case, ...]:
    """Cases of a kernel."""
    if spec.output == "bsr":
        return CASES + PATTERN_CASES
    return CASES + BALANCED_CASES if spec.is_dynamic else CASES


def _columns(case: Case, counts: str, size: int, shuffled: bool, random: torch.Generator) -> torch.Tensor:
    """Draw the block columns of one row of ``size`` blocks."""
    count = {
        "none": 0,
        "one": 1,
        "even": max(1, size // 2),
        "all": size,
        "random": int(torch.randint(0, size + 1, (), generator=random, device=random.device)),
    }[counts]
    picks = torch.randperm(size, generator=random, device=random.device)[:count]
    return torch.cat([picks, picks[: count // 3]]) if shuffled else picks.sort().values


def make_matrix(
    spec: BsrSpgemmSpec, case: Case, side: str, random: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one matrix, ``side`` a or b: in BSR, and dense in float64. C's elements have a variance of at most 1."""
    dtype, block, device = TORCH_DTYPES[spec.dtype], spec.block.rows, random.device
    rows, columns = (case.rows, case.inner) if side == "a" else (case.inner, case.columns)
    counts = case.a_counts if side == "a" else case.b_counts
    lists = [_columns(case, counts, columns, side == "a" and case.unsorted, random) for _ in range(rows)]
    if case.apart:
        lists = [c[c % 2 == 0] if side == "a" else c[: c.shape[0] * (row % 2)] for row, c in enumerate(lists)]
    col = torch.cat(lists).to(torch.int64)
    count = torch.tensor([c.shape[0] for c in lists], device=device)
    crow = torch.cat([count.new_zeros(1), count.cumsum(0)])
    known = torch.ones_like(col, dtype=torch.bool)
    if case.wild and side == "a":
        known = torch.rand(col.shape, generator=random, device=device) > 0.2
    scale = (case.inner * block) ** -0.25
    values = (torch.randn((col.shape[0], block, block), generator=random, device=device) * scale).to(dtype)
    indices = case.a_indices if side == "a" else case.b_indices
    matrix = torch.sparse_bsr_tensor(
        crow.to(indices),
        torch.where(known, col, columns + 5).to(indices),
        values,
        size=(rows * block, columns * block),
        device=crow.device,
        check_invariants=False,
    )
    dense = torch.zeros((rows, columns, block, block), dtype=torch.float64, device=device)
    row = torch.repeat_interleave(torch.arange(rows, device=device), count)
    dense.index_put_((row, col), values.double() * known[:, None, None], accumulate=True)
    return matrix, dense.transpose(1, 2).reshape(matrix.shape)


def make_pattern(spec: BsrSpgemmSpec, case: Case, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw a pattern of C, and a mask of its blocks whose column is inside the matrix."""
    random = generator(case.name + "c", device)
    last = case.c_counts == "last"
    counts = ["none"] * (case.rows - 1) + ["all"] if last else [case.c_counts] * case.rows
    lists = [_columns(case, count, case.columns, case.c_repeated, random) for count in counts]
    lists = [columns[torch.randperm(columns.shape[0], generator=random, device=device)] for columns in lists]
    col = torch.cat(lists).to(torch.int64)
    count = torch.tensor([columns.shape[0] for columns in lists], device=device)
    known = torch.ones_like(col, dtype=torch.bool)
    if case.c_wild:
        known = torch.rand(col.shape, generator=random, device=device) > 0.2
    pattern = torch.sparse_bsr_tensor(
        torch.cat([count.new_zeros(1), count.cumsum(0)]).to(case.a_indices),
        torch.where(known, col, case.columns + 5).to(case.a_indices),
        torch.full((col.shape[0], spec.block.rows, spec.block.cols), float("nan"), device=device),
        size=(case.rows * spec.block.rows, case.columns * spec.block.cols),
        device=count.device,
        check_invariants=False,
    )
    return pattern, known


def run_case(kernel: BsrSpgemmKernel, case: Case, device: torch.device) -> Outcome:
    """Run one case twice on poisoned outputs and compare it with the oracle and with cuBLAS on dense matrices."""
    if kernel.spec.output == "bsr":
        return run_patterned_case(kernel, case, device)
    spec = kernel.spec
    random = generator(case.name, device)
    (a, a_dense), (b, b_dense) = (make_matrix(spec, case, side, random) for side in "ab")
    reference = a_dense @ b_dense
    dtype, columns = TORCH_DTYPES[spec.dtype], b.shape[1]
    results = []
    problem = ""
    for _ in range(2):
        if case.own_out:
            with poisoned_memory():
                results.append(kernel(a, b))
            continue
        width = columns + (64 if case.strided else 0)
        whole = torch.full((a.shape[0], width), float("nan"), dtype=dtype, device=device)
        results.append(kernel(a, b, out=whole[:, :columns]))
        if not bool(whole[:, columns:].isnan().all()):
            problem = "wrote beside out"
    if not torch.equal(*results):
        problem = "two runs differ"
    # The sum of repeated blocks cannot be passed to cuBLAS without rounding.
    torch_error = None if case.unsorted else max_error(a_dense.to(dtype) @ b_dense.to(dtype), reference)
    return Outcome(
        name=case.name,
        description=case.describe(),
        max_error=max_error(results[0], reference),
        torch_error=torch_error,
        tolerance=tolerance(spec.dtype, torch_error, float(reference.abs().max())),
        problem=problem,
    )


def run_patterned_case(kernel: BsrSpgemmKernel, case: Case, device: torch.device) -> Outcome:
    """``run_case`` for a kernel that computes the blocks in a pattern of C."""
    spec, dtype = kernel.spec, TORCH_DTYPES[kernel.spec.dtype]
    random = generator(case.name, device)
    (a, a_dense), (b, b_dense) = (make_matrix(spec, case, side, random) for side in "ab")
    pattern, known = make_pattern(spec, case, device)
    reference = sampled(a_dense @ b_dense, pattern, known)
    results = []
    problem = ""
    for _ in range(2):
        if case.own_out:
            with poisoned_memory():
                c = kernel(a, b, pattern)
        else:
            out = torch.full(pattern.values().shape, float("nan"), dtype=dtype, device=device)
            c = kernel(a, b, pattern, out=out)
            if c.values().data_ptr() != out.data_ptr():
                problem = "the result does not contain out"
        same = torch.equal(c.crow_indices(), pattern.crow_indices())
        if c.shape != pattern.shape or not (same and torch.equal(c.col_indices(), pattern.col_indices())):
            problem = "the result has another pattern"
        results.append(c.values())
    if not torch.equal(*results):
        problem = "two runs differ"
    if not reference.numel():
        return Outcome(case.name, case.describe(patterned=True), 0.0, 0.0, 0.0, problem)
    product = a_dense.to(dtype) @ b_dense.to(dtype)
    torch_error = None if case.unsorted else max_error(sampled(product, pattern, known), reference)
    return Outcome(
        name=case.name,
        description=case.describe(patterned=True),
        max_error=max_error(results[0], reference),
        torch_error=torch_error,
        tolerance=tolerance(spec.dtype, torch_error, float(reference.abs().max())),
        problem=problem,
    )


VERIFICATION = Verification(
    oracle="float64 product of the dense matrices, on the GPU",
    cases=lambda plan, spec: cases_of(spec),
    run_case=run_case,
)
