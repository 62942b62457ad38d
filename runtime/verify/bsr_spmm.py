"""BSR x dense: case table, oracle, and the run of one case."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from codegen.operators.bsr_spmm import grouped_column_tiles
from codegen.plan import Plan
from codegen.spec import BsrSpmmSpec
from runtime.kernels.arguments import TORCH_DTYPES
from runtime.kernels.bsr_batch import column_step
from runtime.kernels.bsr_spmm import ACTIVATIONS, BsrSpmmKernel
from runtime.prepare.prepared import PreparedBsr
from runtime.verify import bsr_fp8
from runtime.verify.common import Outcome, Verification, generator, max_error, poisoned_memory, tolerance

BY_COLUMNS = (1, 0)
"""Strides of a B with contiguous columns."""


@dataclass(frozen=True)
class Case:
    """One set of inputs.

    Attributes:
        name: unique; also the seed.
        block_rows: M / block rows; block_columns: K / block columns.
        n: columns of B.
        row_counts: stored blocks of a row: ``random`` (0 to all), ``even`` (half of them), ``none``; ``few_long``,
            three long rows among empty and short ones; ``limit``, the longest row that a kernel does not split, one
            block more, and multiples.
        repeated: columns drawn with replacement.
        rising: the columns of a row ascend.
        wild: a fifth of the column indices are out of range; their blocks count as zeros.
        index_dtype: dtype of crow_indices and col_indices.
        strided: b and out are column slices of wider matrices.
        own_out: the kernel allocates its result.
        batch: batch size of b, if it has a batch dimension.
        beta: beta of kernels that accumulate; with 0, c is NaN.
        in_place: kernels that accumulate write their result over c.
        b_steps: row and column stride of B in elements, for kernels with any strides; 0 for a dense stride, plus three
            if ``strided``.
        b_offset: elements before the first element of B.
    """

    name: str
    block_rows: int = 4
    block_columns: int = 6
    n: int = 512
    row_counts: str = "random"
    repeated: bool = False
    rising: bool = False
    wild: bool = False
    index_dtype: torch.dtype = torch.int64
    strided: bool = False
    own_out: bool = False
    batch: int | None = None
    beta: float = 1.0
    in_place: bool = False
    b_steps: tuple[int, int] = (0, 1)
    b_offset: int = 0

    def describe(self) -> str:
        """Description of the parameters."""
        text = f"{self.block_rows} x {self.block_columns} blocks, N {self.n}, {self.row_counts} counts"
        extras = {
            "repeated columns": self.repeated,
            "rising columns": self.rising,
            "columns out of range": self.wild,
            "strided": self.strided,
            "own out": self.own_out,
            f"batch {self.batch}": self.batch is not None,
            "B by columns": self.b_steps == BY_COLUMNS,
            f"steps in B {self.b_steps}": min(self.b_steps) > 1,
            "B not aligned": self.b_offset > 0,
        }
        return ", ".join(
            [text, str(self.index_dtype).removeprefix("torch."), *(w for w, said in extras.items() if said)]
        )


CASES = (
    Case("plain", block_rows=8, block_columns=16, n=1024, row_counts="even"),
    Case("uneven_rows", block_rows=16, block_columns=12, n=768, beta=-0.5),
    Case("int32", block_rows=5, block_columns=7, n=256, index_dtype=torch.int32, beta=0.0),
    Case("odd_n", block_rows=3, block_columns=5, n=1000, in_place=True),
    Case("narrow_n", block_rows=3, block_columns=5, n=8),
    Case("padded_n", block_rows=3, block_columns=4, n=77, strided=True, own_out=True),
    Case("one_block", block_rows=1, block_columns=1, n=64, row_counts="even"),
    Case("no_blocks", block_rows=3, block_columns=3, n=128, row_counts="none"),
    Case("long_rows", block_rows=2, block_columns=70, n=320, row_counts="even"),
    Case("many_tiles", block_rows=40, block_columns=10, n=2048, beta=0.5, in_place=True),
    Case("repeated_columns", block_rows=4, block_columns=5, n=384, repeated=True),
    Case("rising_columns", block_rows=5, block_columns=80, n=256, row_counts="even", rising=True),
    Case("uneven_rising", block_rows=14, block_columns=9, n=384, rising=True),
    Case("columns_out_of_range", block_rows=4, block_columns=8, n=384, row_counts="even", wild=True),
    Case("strided", block_rows=4, block_columns=5, n=512, strided=True),
    Case("batch", block_rows=3, block_columns=5, n=136, batch=3),
    Case("batch_strided", block_rows=2, block_columns=3, n=77, batch=2, strided=True, own_out=True),
)
CUT_CASES = (
    Case("around_the_limit", block_rows=9, block_columns=960, n=1096, row_counts="limit", beta=0.5, in_place=True),
    Case("around_the_limit_int32", 9, 960, n=72, row_counts="limit", index_dtype=torch.int32, own_out=True),
    Case("few_long_rows", block_rows=120, block_columns=300, n=1536, row_counts="few_long", beta=-0.5),
    Case("few_long_rows_batch", block_rows=8, block_columns=400, n=136, row_counts="few_long", batch=3),
    Case("only_long_rows", block_rows=3, block_columns=300, n=2048, row_counts="few_long", own_out=True),
)
"""Additional cases of kernels that split long block rows."""

GATHER_CASES = (
    Case("several_row_groups", block_rows=130, block_columns=90, n=1096),
    Case("row_groups_repeated", block_rows=60, block_columns=40, n=264, repeated=True, index_dtype=torch.int32),
    Case("row_groups_few_long", block_rows=120, block_columns=300, n=136, row_counts="few_long"),
    Case("row_groups_batch", block_rows=50, block_columns=33, n=200, batch=2, own_out=True),
    Case("row_groups_out_of_range", block_rows=30, block_columns=20, n=384, row_counts="even", wild=True),
    Case("row_groups_many_tiles", block_rows=130, block_columns=90, n=8200, row_counts="half_empty"),
)
"""Additional cases of kernels whose tiles gather block rows."""


STRIDED_CASES = (
    Case("one_column", block_rows=24, block_columns=40, n=1, row_counts="even", b_steps=BY_COLUMNS),
    Case("one_column_apart", block_rows=5, block_columns=7, n=1, b_steps=(8, 1), index_dtype=torch.int32, strided=True),
    Case("one_column_not_aligned", block_rows=5, block_columns=9, n=1, b_steps=BY_COLUMNS, b_offset=3, beta=0.0),
    Case("two_columns", block_rows=9, block_columns=12, n=2, b_steps=BY_COLUMNS, strided=True, beta=-0.5),
    Case("three_columns_by_rows", block_rows=9, block_columns=12, n=3, in_place=True),
    Case("four_columns", block_rows=16, block_columns=12, n=4, b_steps=BY_COLUMNS, index_dtype=torch.int32),
    Case("five_columns_by_rows", block_rows=3, block_columns=5, n=5, strided=True, in_place=True, beta=0.5),
    Case("six_columns_apart", block_rows=4, block_columns=6, n=6, b_steps=(29, 3), b_offset=1),
    Case("seven_columns", block_rows=4, block_columns=6, n=7, b_steps=BY_COLUMNS, own_out=True),
    Case("eight_columns", block_rows=100, block_columns=24, n=8, b_steps=BY_COLUMNS),
    Case("eight_columns_by_rows", block_rows=100, block_columns=24, n=8, own_out=True),
    Case("several_tiles", block_rows=6, block_columns=8, n=21),
    Case("one_block", block_rows=1, block_columns=1, n=1, row_counts="even"),
    Case("no_blocks", block_rows=3, block_columns=3, n=2, row_counts="none"),
    Case("long_rows", block_rows=2, block_columns=300, n=4, row_counts="even", b_steps=BY_COLUMNS),
    Case("few_long_rows", block_rows=60, block_columns=60, n=1, row_counts="few_long", b_steps=BY_COLUMNS),
    Case("repeated_columns", block_rows=4, block_columns=5, n=8, repeated=True),
    Case("columns_out_of_range", block_rows=4, block_columns=80, n=3, row_counts="even", wild=True),
    Case("batch", block_rows=3, block_columns=5, n=3, batch=3),
    Case("batch_of_one", block_rows=3, block_columns=5, n=1, batch=1, own_out=True, b_steps=BY_COLUMNS),
)
"""Cases of kernels with any strides."""


def cases_of(plan: Plan) -> tuple[Case, ...]:
    """Cases of a kernel."""
    spec = plan.spec
    assert isinstance(spec, BsrSpmmSpec)
    if spec.b_layout == "strided":
        return STRIDED_CASES
    if plan.row_cutting is not None:
        return CASES + CUT_CASES
    if plan.gathered is not None:
        return CASES + GATHER_CASES
    if spec.mma == "mma":  # kernels process block rows in groups of 16 MB; half the blocks of these rows have 32 MB
        return (*CASES, Case("several_groups", 4096 // spec.block.rows, 8192 // spec.block.cols, n=264))
    group = grouped_column_tiles(plan, spec)
    if group > 1:  # column tiles in groups: two groups and a narrower one
        columns = 2 * group * spec.tile.n + 8
        return (*CASES, Case("several_groups", 3, 8192 // spec.block.cols, n=columns))
    return CASES


def row_counts(plan: Plan, case: Case, random: torch.Generator, device: torch.device) -> torch.Tensor:
    """Draw the stored blocks of each block row, int64 (block rows,)."""
    rows, most = case.block_rows, case.block_columns
    drawn = torch.randint(0, most + 1, (rows,), generator=random, device=device)
    if case.row_counts == "none":
        return torch.zeros(rows, dtype=torch.int64, device=device)
    if case.row_counts == "even":
        return torch.full((rows,), max(1, most // 2), device=device)
    if case.row_counts == "limit":
        assert plan.row_cutting is not None
        limit = plan.row_cutting.cut(rows, 0).limit
        lengths = [0, limit, 1, limit + 1, 2 * limit, 0, 2 * limit + 1, 3, 4 * limit - 1]
        return torch.tensor(lengths, device=device)
    if case.row_counts == "few_long":
        counts = drawn % 4
        counts[[0, rows // 2, rows - 1]] = torch.tensor([most, most - 7, 7 * most // 8], device=device)
        return counts
    if case.row_counts == "half_empty":  # full groups: long rows are grouped first
        drawn[torch.rand(rows, generator=random, device=device) < 0.5] = 0
    return drawn


@dataclass(frozen=True)
class Inputs:
    """The operands of a case. C's elements have a variance of about 1.

    Attributes:
        a: A in BSR.
        dense: A dense, in float64.
        codes: dense A without scales, the input of torch's kernel.
        b: B.
        b_numbers: B with its scales, in float64.
        scales: scale arguments of an FP8 call; empty for other dtypes.
    """

    a: torch.Tensor
    dense: torch.Tensor
    codes: torch.Tensor
    b: torch.Tensor
    b_numbers: torch.Tensor
    scales: dict[str, torch.Tensor]


def make_inputs(plan: Plan, case: Case, device: torch.device) -> Inputs:
    """Draw fresh random inputs."""
    spec = plan.spec
    assert isinstance(spec, BsrSpmmSpec)
    random = generator(case.name, device)
    dtype, block = TORCH_DTYPES[spec.dtype], spec.block
    counts = row_counts(plan, case, random, device)
    columns = []
    for count in counts.tolist():
        if case.repeated:
            columns.append(torch.randint(0, case.block_columns, (count,), generator=random, device=device))
        else:
            columns.append(torch.randperm(case.block_columns, generator=random, device=device)[:count])
        if case.rising:
            columns[-1] = columns[-1].sort().values
    crow = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    col = torch.cat(columns).to(torch.int64)
    known = torch.ones_like(col, dtype=torch.bool)
    if case.wild:
        known = torch.rand(col.shape, generator=random, device=device) > 0.2
    shape = (col.shape[0], block.rows, block.cols)
    depth = max(1, int(counts.max())) * block.cols
    if spec.transpose_a:
        depth = max(1, int(torch.bincount(col, minlength=1).max())) * block.rows
    unit, fp8 = depth**-0.5, spec.is_fp8
    values = (torch.randn(shape, generator=random, device=device) * (bsr_fp8.CODES if fp8 else unit)).to(dtype)
    size = (case.block_rows * block.rows, case.block_columns * block.cols)
    a = torch.sparse_bsr_tensor(
        crow.to(case.index_dtype),
        torch.where(known, col, case.block_columns + 5).to(case.index_dtype),
        values,
        size=size,
        device=crow.device,
        check_invariants=False,
    )
    rows = torch.repeat_interleave(torch.arange(case.block_rows, device=device), counts)

    def dense(blocks: torch.Tensor) -> torch.Tensor:
        found = torch.zeros((case.block_rows, case.block_columns, *shape[1:]), dtype=torch.float64, device=device)
        found.index_put_((rows, col), blocks * known[:, None, None], accumulate=True)
        return found.transpose(1, 2).reshape(size)

    width = -(-case.n // 8) * 8 + 64 if case.strided else case.n
    batch = () if case.batch is None else (case.batch,)
    rows_of_b = size[0] if spec.transpose_a else size[1]
    if spec.b_layout == "strided":
        b = _spread(torch.randn((*batch, rows_of_b, case.n), generator=random, device=device).to(dtype), case)
    elif spec.b_layout == "column_major":
        width = rows_of_b + (64 if case.strided else 0)
        b = torch.randn((*batch, case.n, width), generator=random, device=device)
        b = (b * bsr_fp8.CODES if fp8 else b).to(dtype)[..., :rows_of_b].mT
    else:
        b = torch.randn((*batch, rows_of_b, width), generator=random, device=device).to(dtype)[..., : case.n]
    codes = dense(values.double())
    if not fp8:
        return Inputs(a, codes, codes, b, b.double(), {})
    scales = bsr_fp8.draw_scales(spec, case.name, shape[0], b, unit / bsr_fp8.CODES)
    numbers = dense(bsr_fp8.scaled_values(spec, values, scales))
    return Inputs(a, numbers, codes, b, bsr_fp8.scaled_b(spec, b, scales), scales)


def _spread(b: torch.Tensor, case: Case) -> torch.Tensor:
    """A copy of B with the memory layout of the case."""
    batch, (rows, columns), gap = b.shape[:-2], b.shape[-2:], 3 if case.strided else 0
    row, column = case.b_steps
    row, column = row or columns + gap, column or rows + gap
    each = (rows - 1) * row + (columns - 1) * column + 1
    memory = b.new_zeros(case.b_offset + each * (batch[0] if batch else 1))
    return memory.as_strided(b.shape, (*((each,) if batch else ()), row, column), case.b_offset).copy_(b)


def _make_c_memory(spec: BsrSpmmSpec, case: Case, rows: torch.Size, dtype: torch.dtype, device: torch.device) -> Any:
    """NaN memory for a result, and a function that extracts the result from it."""
    if spec.b_layout != "strided":
        width = -(-case.n // 8) * 8 + (64 if case.strided else 0)
        return torch.full((*rows, width), float("nan"), dtype=dtype, device=device), lambda whole: whole[..., : case.n]
    width = 2 * case.n + 1 if case.strided else case.n
    first, step = (1, 2) if case.strided else (0, 1)
    whole = torch.full((*rows, width), float("nan"), dtype=dtype, device=device)
    return whole, lambda whole: whole[..., first::step]


def make_bias(spec: BsrSpmmSpec, case: Case, rows: int, device: torch.device) -> torch.Tensor | None:
    """Draw a bias, if the spec's epilogue has one: small enough that C's elements keep a variance of about 1."""
    if spec.epilogue is None or not spec.epilogue.bias:
        return None
    bias = torch.randn(rows, generator=generator(case.name + "bias", device), device=device) * 0.5
    return bias.to(TORCH_DTYPES[spec.dtype])


def make_c(spec: BsrSpmmSpec, case: Case, shape: torch.Size, device: torch.device) -> torch.Tensor | None:
    """Draw the addend if the spec accumulates: with the result's row length, NaN if it is not read."""
    if not spec.accumulate:
        return None
    width = -(-case.n // 8) * 8 + (64 if case.strided else 0)
    c = torch.randn((*shape[:-1], width), generator=generator(case.name + "c", device), device=device) * 0.5
    c = c.to(TORCH_DTYPES[spec.dtype])
    return (c if case.beta else c.fill_(float("nan")))[..., : case.n]


def finish(
    spec: BsrSpmmSpec, product: torch.Tensor, bias: torch.Tensor | None, added: torch.Tensor | None
) -> torch.Tensor:
    """Add the addend and apply the spec's epilogue, in the dtype of the product."""
    if added is not None:
        product = product + added.to(product.dtype)
    if spec.epilogue is None:
        return product
    shifted = product if bias is None else product + bias.to(product.dtype)[:, None]
    return ACTIVATIONS[spec.epilogue.activation](shifted)


def _prepared(
    kernel: BsrSpmmKernel, case: Case, a: torch.Tensor, b: torch.Tensor, run: int
) -> torch.Tensor | PreparedBsr:
    """A as an argument of the call; the first run prepares only what the kernel requires."""
    spec, columns = kernel.spec, case.n if b.dim() == 2 else b.shape[0] * column_step(b)
    if spec.is_dynamic and case.row_counts == "limit":
        return kernel.prepare(a)  # for any B, so that the limit is the one for which rows are drawn
    if kernel.compiled.plan.gathered is not None:
        return kernel.prepare(a, case.n, pack=bool(run), effort="best")
    return kernel.prepare(a, columns) if run and (spec.is_dynamic or spec.transpose_a) else a


def run_case(kernel: BsrSpmmKernel, case: Case, device: torch.device) -> Outcome:
    """Run one case twice on poisoned outputs and compare it with the oracle and with cuBLAS on the dense matrix."""
    spec = kernel.spec
    plan = kernel.compiled.plan
    inputs = make_inputs(plan, case, device)
    a, b = inputs.a, inputs.b
    dense = inputs.dense.T if spec.transpose_a else inputs.dense
    bias = make_bias(spec, case, dense.shape[0], device)
    product = dense @ inputs.b_numbers
    c = make_c(spec, case, product.shape, device)
    added = case.beta * c.double() if c is not None and case.beta else None
    more: dict[str, Any] = {"bias": bias} if c is None else {"bias": bias, "c": c, "beta": case.beta}
    more |= inputs.scales
    output = TORCH_DTYPES[plan.output]
    reference = finish(spec, product, bias, added)
    results = []
    problem = ""
    for run in range(2):
        given = _prepared(kernel, case, a, b, run)
        if case.own_out:
            with poisoned_memory():
                results.append(kernel(given, b, **more))
            continue
        whole, result_in = _make_c_memory(spec, case, product.shape[:-1], output, device)
        out = result_in(whole)
        if c is not None and case.in_place:
            more["c"] = out.copy_(c)
        results.append(kernel(given, b, **more, out=out))
        beside = whole.clone()
        result_in(beside).fill_(float("nan"))
        if not bool(beside.isnan().all()):
            problem = "wrote beside out"
    if not torch.equal(*results):
        problem = "two runs differ"
    # The sum of repeated blocks cannot be passed to cuBLAS without rounding.
    torch_error, error = None, max_error(results[0], reference)
    if spec.is_fp8:
        operands = None if case.repeated else (inputs.codes, b, inputs.scales)
        torch_error, allowed = bsr_fp8.limits(spec, operands, error, reference)
    else:
        if not case.repeated:
            torch_error = max_error(finish(spec, dense.to(b.dtype) @ b, bias, added), reference)
        allowed = tolerance(plan.output, torch_error, float(reference.abs().max()))
    return Outcome(
        name=case.name,
        description=case.describe() + ("" if c is None else f", beta {case.beta}" + ", in place" * case.in_place),
        max_error=error,
        torch_error=torch_error,
        tolerance=allowed,
        problem=problem,
    )


VERIFICATION = Verification(
    oracle="float64 product with the dense matrix, on the GPU",
    cases=lambda plan, spec: cases_of(plan),
    run_case=run_case,
)
