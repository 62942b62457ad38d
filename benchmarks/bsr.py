"""Times the kernels for BSR products beside their peers, in one run on the same inputs.

    python benchmarks/bsr.py --json bsr.json                        # every row
    python benchmarks/bsr.py --rows spmm_b128 --peers triton        # one row, one peer
    python benchmarks/bsr.py --groups crossover --budget 120        # a sweep; no row is begun after 120 seconds
    python benchmarks/bsr.py --from bsr.json --plot bsr             # no GPU: print and draw an earlier run

Groups: "main"; "crossover", which sweeps the density of A, beside cuBLAS on a dense A; "gathered", small blocks whose
rows are gathered, and the same not gathered; "uneven", block rows whose
lengths follow a power law, beside rows of equal length and the same number of blocks; "rectangular", blocks that are
not square; "column_major", B stored by columns; "fp8", products in e4m3, beside torch._scaled_mm;
"few", an A of few rows, or a B of few columns;
"small", sampled products and BSR x BSR with smaller blocks; "ada",
the kernels for sm_89, which a newer GPU runs through PTX.

Before a call is timed, three block rows of its result are compared with the float64 product; a call that fails or
computes something else gets no time, and the report has the reason. docs/notebook/measuring.md says how numbers are
taken.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import harness
import torch
from bsr_peers import DENSE, FP8_DENSE, FP8_EQUAL, PEERS, Problem
from harness import (
    OURS,
    Fields,
    can_plot,
    check_and_time,
    check_own,
    free_memory,
    of_group,
    plot_rows,
    report_of,
    save,
    show,
)

from codegen.dtypes import FP8
from codegen.library import NamedSpec, find_spec
from codegen.select import choose
from codegen.spec import BsrSddmmSpec, BsrSpgemmSpec, BsrSpmmSpec, Spec
from runtime import load_kernel
from runtime.kernels.arguments import TORCH_DTYPES
from runtime.tools.bench import bsr_fp8
from runtime.tools.bench.timing import Call
from runtime.verify.bsr_fp8 import scaled_b, scaled_rows
from runtime.verify.rows import kernel_fields

PACKAGES = ("torch", "triton")
SIZE = 8192  # rows and columns of A
ROW_BLOCKS = 16  # stored blocks of a block row, unless a row says otherwise
GATHERED_DENSITY = 1 / 2  # up to which block rows are gathered: more is for dense products
DENSITIES = (1 / 32, 1 / 16, 1 / 8, 1 / 4, 3 / 8, 1 / 2, 3 / 4, 1.0)


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        name: what --rows takes.
        op: the operator.
        block: rows of its blocks, and their columns, unless
        block_columns: says otherwise.
        columns: of B; K of a sampled product.
        peers: names of PEERS that can compute it.
        target: effective TFLOPS on an H200 that the project set out to reach, if it did, or
        target_ratio: how often those of the best peer.
        groups: what --groups takes.
        row_blocks: stored blocks of a block row, on average.
        pattern: which columns: ``random``; ``clustered``, rows next to each other share 3/4 of theirs; ``power_law``,
            random, with row lengths from many to few.
        even: the row with the same work and equal row lengths, for those of a power law.
        dynamic: whether the tile scheduler is dynamic, in the kernel or in one that is otherwise the same; of BSR x
            dense longest block rows first, which are prepared.
        packed: whether A is packed beforehand, as weights can be, not by each call.
        height: rows of A.
        quick: whether --quick takes it.
        written: what the row writes of its kernel's spec beside; codegen.select chooses the rest.
    """

    name: str
    op: str
    block: int
    columns: int
    peers: tuple[str, ...]
    target: float | None = None
    target_ratio: float | None = None
    groups: tuple[str, ...] = ("main",)
    row_blocks: int = ROW_BLOCKS
    block_columns: int | None = None
    pattern: Literal["random", "clustered", "power_law"] = "random"
    even: str | None = None
    dynamic: bool = False
    packed: bool = False
    height: int = SIZE
    quick: bool = False
    written: Fields = field(default_factory=dict)


SPMM, SDDMM, SPGEMM = "bsr_spmm", "bsr_sddmm", "bsr_spgemm"
GATHERS: Fields = {"tile": {"m": 384}}  # of many block rows
STATIC: Fields = {"scheduler": "static"}
DYNAMIC: Fields = {"scheduler": "dynamic"}
SPMM_PEERS = ("cublas", "torch", "triton", "blocked_ell")
BOTH = ("main", "uneven")
GATHERED = ("main", "gathered")
MAIN_ROWS = (
    Row("spmm_b128", SPMM, 128, 8192, SPMM_PEERS, 690, groups=BOTH, quick=True),
    Row("spmm_b128_n1024", SPMM, 128, 1024, SPMM_PEERS, 600),
    Row("spmm_b64", SPMM, 64, 8192, SPMM_PEERS, 470, groups=BOTH, quick=True),
    Row("spmm_b64_n1024", SPMM, 64, 1024, SPMM_PEERS, 430),
    Row("spmm_b64_clustered", SPMM, 64, 8192, SPMM_PEERS, 600, pattern="clustered"),
    Row("spmm_b32", SPMM, 32, 8192, SPMM_PEERS, 250, groups=BOTH, quick=True),
    Row("spmm_b32_n1024", SPMM, 32, 1024, SPMM_PEERS, 225),
    Row("spmm_b16", SPMM, 16, 8192, SPMM_PEERS, target_ratio=1.5, groups=BOTH, quick=True),
    Row("spmm_b16_n1024", SPMM, 16, 1024, SPMM_PEERS, target_ratio=1.5),
    Row("spmm_b16_gathered", SPMM, 16, 8192, SPMM_PEERS, target_ratio=1.5, groups=GATHERED, written=GATHERS),
    *(
        Row(
            f"spmm_b16_packed{name}",
            *(SPMM, 16, columns, SPMM_PEERS),
            target_ratio=1.5,
            groups=GATHERED,
            packed=True,
            written=GATHERS,
        )
        for name, columns in (("", 8192), ("_n1024", 1024))
    ),
    *(
        Row(name, SPGEMM, 128, 8192, ("cublas",), 480, dynamic=dynamic, quick=not dynamic, written=written)
        for name, dynamic, written in (("spgemm_b128", False, STATIC), ("spgemm_b128_balanced", True, DYNAMIC))
    ),
    Row("spgemm_b128_bsr", SPGEMM, 128, 8192, ("cublas",), written={"output": "bsr"}),
    Row("sddmm_b128", SDDMM, 128, 8192, ("cublas",), 560, quick=True),
)
UNEVEN_ROWS = tuple(
    Row(
        f"spmm_b{block}_uneven" + ("" if dynamic else "_static"),
        *(SPMM, block, 8192, ("cublas", "triton") if dynamic else ()),
        groups=("uneven",),
        pattern="power_law",
        even=f"spmm_b{block}",
        dynamic=dynamic,
        written=DYNAMIC if dynamic else STATIC,
    )
    for block in (128, 64, 32, 16)
    for dynamic in (True, False)
)
CROSSOVER_ROWS = tuple(
    Row(
        f"spmm_b{block}_density{1000 * density:04.0f}",
        *(SPMM, block, 8192, ("cublas",)),
        groups=("crossover", "gathered") if block <= 32 and density <= GATHERED_DENSITY else ("crossover",),
        row_blocks=round(density * SIZE / block),
    )
    for block in (128, 64, 32, 16)
    for density in DENSITIES
) + tuple(
    Row(
        f"spmm_b{block}_gathered_density{1000 * density:04.0f}",
        *(SPMM, block, 8192, ("cublas", "triton")),
        groups=("crossover", "gathered"),
        written=GATHERS,
        row_blocks=round(density * SIZE / block),
    )
    for block in (32, 16)
    for density in DENSITIES
    if density <= GATHERED_DENSITY
)
# No Blocked-ELL beside them: its blocks are square.
RECTANGULAR_ROWS = tuple(
    Row(
        f"spmm_b{block}x{columns}",
        *(SPMM, block, 8192, ("cublas", "torch", "triton")),
        groups=("rectangular",),
        block_columns=columns,
    )
    for block, columns in ((64, 128), (128, 64))
)
COLUMN_MAJOR_ROWS = tuple(
    Row(
        f"spmm_b{block}_column_major",
        *(SPMM, block, 8192, ("copied", *SPMM_PEERS)),
        groups=("column_major",),
        written={"b_layout": "column_major"},
    )
    for block in (128, 64, 32, 16)
)
# So few tiles that most SMs have none, unless rows are cut; and a list of 64 blocks for each of them.
FEW_ROWS = tuple(
    Row(
        f"spmm_b{block}_few_rows" + ("" if dynamic else "_static"),
        *(SPMM, block, 512, ("cublas", "torch", "triton") if dynamic else ()),
        groups=("few",),
        row_blocks=64,
        dynamic=dynamic,
        written=DYNAMIC if dynamic else STATIC,
        height=512,
    )
    for block in (32, 16)
    for dynamic in (True, False)
) + tuple(
    # As a linear layer of which a tenth is stored has them for a few tokens.
    Row(
        f"spmm_b{block}_few_columns",
        *(SPMM, block, 64, ("cublas", "torch", "triton")),
        groups=("few",),
        row_blocks=row_blocks,
        height=4096,
    )
    for block, row_blocks in ((128, 6), (64, 13), (32, 26), (16, 51))
)
SMALL_ROWS = tuple(
    Row(f"{op.removeprefix('bsr_')}_b{block}", op, block, 8192, ("cublas",), groups=("small",))
    for op in (SDDMM, SPGEMM)
    for block in (64, 32, 16)
)


def whole(stem: str) -> Fields:
    """All fields of a shipped spec."""
    fields: Fields = json.loads(find_spec(stem).spec.canonical_json())
    return fields


# Targets are shares of torch._scaled_mm with as many FLOPs, back to back, but of blocks of 64.
FP8_ROWS = tuple(
    Row(
        f"e4m3_{name}",
        *(SDDMM if name.startswith("sddmm") else SPMM, block, 8192, ("scaled_mm",), target),
        target_ratio=ratio,
        groups=("fp8",),
        written=whole(f"h100_e4m3_bsr_{name}"),
    )
    for name, block, target, ratio in (
        ("spmm_b128", 128, None, 0.85),
        ("spmm_b128_block_scales", 128, None, 0.75),
        ("spmm_b64", 64, 900, None),
        ("sddmm_b128", 128, None, None),
        ("sddmm_b128_row_scales", 128, None, 0.75),
    )
)
# On a GPU newer than Ada they run through PTX: right there, but no speed of an Ada GPU.
ADA_ROWS = (
    *(
        Row(
            f"ada_spmm_b{block}",
            *(SPMM, block, 8192, SPMM_PEERS, target),
            groups=("ada",),
            written=whole(f"l4_bsr_spmm_b{block}"),
        )
        for block, target in ((128, 440), (64, 370), (32, 205), (16, None))
    ),
    Row("ada_spmm_wmma_b16", SPMM, 16, 8192, SPMM_PEERS, groups=("ada",), written=whole("l4_bsr_spmm_wmma_b16")),
    *(
        Row(f"ada_{name}", op, block, 8192, ("cublas",), groups=("ada",), written=whole(f"l4_bsr_{name}"))
        for op, name, block in (
            *((SDDMM, "sddmm_b128", 128), (SDDMM, "sddmm_b64", 64), (SDDMM, "sddmm_b32", 32)),
            *((SDDMM, "sddmm_wmma", 128), (SPGEMM, "spgemm_b128", 128)),
            *((SPGEMM, "spgemm_b64", 64), (SPGEMM, "spgemm_wmma", 128)),
        )
    ),
)
ROWS = (
    MAIN_ROWS
    + UNEVEN_ROWS
    + CROSSOVER_ROWS
    + RECTANGULAR_ROWS
    + COLUMN_MAJOR_ROWS
    + FEW_ROWS
    + SMALL_ROWS
    + FP8_ROWS
    + ADA_ROWS
)
GROUPS = ("main", "crossover", "gathered", "uneven", "rectangular", "column_major", "few", "small", "fp8", "ada")
MOST_LOST = 0.1  # of the speed by uneven rows, as the project set out


def power_law(rows: int, total: int, most: int) -> list[int]:
    """Return ``total`` blocks shared out to rows as 1, 1/2, 1/3, ..., at least one and at most ``most`` each."""

    def share(scale: float) -> list[int]:
        return [min(most, max(1, round(scale / (rank + 1)))) for rank in range(rows)]

    low, high = 0.0, float(rows * most)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(share(middle)) <= total else (low, middle)
    counts = share(low)
    for rank in range(rows):  # what rounding left over goes to the longest rows that are not full
        more = min(most - counts[rank], total - sum(counts))
        counts[rank] += more
    return counts


def draw_pattern(row: Row, block_rows: int, block_columns: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw crow_indices and col_indices, int64; the columns of a row rise."""
    count = min(row.row_blocks, block_columns)
    counts = torch.full((block_rows,), count)
    if row.pattern == "power_law":
        counts = torch.tensor(power_law(block_rows, block_rows * count, block_columns))[torch.randperm(block_rows)]
    columns: list[torch.Tensor] = []
    for length in counts.tolist():
        order = torch.randperm(block_columns)
        if row.pattern == "clustered" and columns:
            kept = columns[-1][torch.randperm(length)[: 3 * length // 4]]
            fresh = order[~torch.isin(order, columns[-1])]
            order = torch.cat([kept, fresh])
        columns.append(order[:length].sort().values)
    crow = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    return crow.to(device), torch.cat(columns).to(device)


def spec_of(row: Row) -> Spec:
    """The spec of a row's kernel, as chosen."""
    return named_of(row).spec


def named_of(row: Row) -> NamedSpec:
    """The kernel of a row, as chosen: its name is that of a shipped one, if it is one."""
    block = {"rows": row.block, "cols": row.block_columns or row.block}
    prepared = "packed" if row.packed else "rows" if row.dynamic or row.written == GATHERS else "none"
    sizes = problem_sizes(row.op, block, row.height, row.columns, row.row_blocks, row.pattern)
    written = {"op": row.op, "arch": "sm_90a", "block": block, **row.written}
    if written.get("dtype") in FP8:  # in no table of measurements
        return find_spec(written)
    return choose(written, {**sizes, "prepared": prepared}).named


def problem_sizes(
    op: str, block: Fields, height: int, columns: int, row_blocks: int, pattern: str, size: int = SIZE
) -> Fields:
    """The sizes of a row's problem, as codegen.select has them."""
    block_columns = size // block["cols"]
    mean = min(row_blocks, block_columns)
    m, n, k = (size, size, columns) if op == SDDMM else (height, columns, size)
    longest = mean
    if pattern == "power_law":
        longest = max(power_law(m // block["rows"], m // block["rows"] * mean, block_columns))
    return {
        **{"m": m, "n": n, "k": k, "density": round(mean / block_columns, 6), "evenness": round(longest / mean, 2)},
        "overlap": 0.75 if pattern == "clustered" else 0.0,
    }


def make_problem(row: Row, device: str = "cuda", size: int = SIZE) -> Problem:
    """Draw random normal inputs and the patterns of a row."""
    torch.manual_seed(0)
    spec = spec_of(row)
    assert isinstance(spec, BsrSpmmSpec | BsrSpgemmSpec | BsrSddmmSpec)
    dtype, block = TORCH_DTYPES[spec.dtype], spec.block

    def draw(*shape: int) -> torch.Tensor:
        if spec.dtype in FP8:
            return bsr_fp8.codes(*shape, dtype=dtype, device=device)
        return torch.randn(shape, device=device, dtype=dtype)

    def dense(rows: int, columns: int) -> torch.Tensor:
        return draw(rows, columns)

    def sparse(rows: int, columns: int) -> torch.Tensor:
        crow, col = draw_pattern(row, rows // block.rows, columns // block.cols, device)
        values = draw(col.numel(), block.rows, block.cols)
        return torch.sparse_bsr_tensor(crow, col, values, size=(rows, columns), check_invariants=False)

    if isinstance(spec, BsrSddmmSpec):
        a, b = dense(size, row.columns), dense(size, row.columns)
        pattern = sparse(size, size)
        if spec.dtype not in FP8:
            return Problem(spec, a, b, pattern, (a, b.T))
        width = pattern.values().shape[0] * block.rows * block.cols // size
        equal = dense(size, row.columns), dense(width, row.columns).T
        scales = bsr_fp8.scales(spec, size, size, row.columns, device)
        return Problem(spec, a, b, pattern, (a, b.T), scales=scales, equal=equal)
    height = min(row.height, size)
    a = sparse(height, size)
    if isinstance(spec, BsrSpgemmSpec):
        b, shown = sparse(size, row.columns), sparse(size, row.columns) if spec.output == "bsr" else None
        return Problem(spec, a, b, shown, (dense(height, size), dense(size, row.columns)))
    b = dense(row.columns, size).T if spec.b_layout == "column_major" else dense(size, row.columns)
    if spec.dtype not in FP8:
        return Problem(spec, a, b, None, (dense(height, size), b), row.packed)
    depth = a.values().numel() // height
    scales = bsr_fp8.scales(spec, a.values().shape[0], row.columns, size, device)
    equal = dense(height, depth), dense(row.columns, depth).T
    return Problem(spec, a, b, None, (dense(height, size), b), scales=scales, equal=equal)


def stored(matrix: torch.Tensor) -> torch.Tensor:
    """Return which blocks of a BSR matrix without repeated ones are stored: 1 or 0, float32 (block rows, columns)."""
    rows, cols = matrix.values().shape[1:]
    found = torch.zeros((matrix.shape[0] // rows, matrix.shape[1] // cols), device=matrix.device)
    lengths = matrix.crow_indices().diff()
    found[torch.arange(found.shape[0], device=matrix.device).repeat_interleave(lengths), matrix.col_indices()] = 1
    return found


def flops(problem: Problem) -> float:
    """Count what a row has to compute."""
    block, pattern = problem.spec.block, problem.pattern
    if problem.b.layout == torch.sparse_bsr:  # blocks that meet, in those blocks of C that are computed
        meetings = stored(problem.a) @ stored(problem.b)
        if pattern is not None:
            meetings = meetings * stored(pattern)
        return 2.0 * float(meetings.sum(dtype=torch.float64)) * block.rows * block.cols**2
    if pattern is not None:
        return 2.0 * pattern.values().numel() * problem.a.shape[1]
    return 2.0 * problem.a.values().numel() * problem.b.shape[1]


def block_row(matrix: torch.Tensor, i: int, scale: torch.Tensor | None = None) -> torch.Tensor:
    """Return block row ``i`` of a BSR matrix, dense, float64 (block rows, columns), times the scales of its blocks."""
    first, end = matrix.crow_indices()[i : i + 2].tolist()
    values = matrix.values()
    rows, cols = values.shape[1:]
    dense = torch.zeros((matrix.shape[1] // cols, rows, cols), dtype=torch.float64, device=values.device)
    numbers = values[first:end].double()
    if scale is not None:
        numbers = numbers * scale.double().expand(values.shape[0])[first:end, None, None]
    dense.index_add_(0, matrix.col_indices()[first:end], numbers)
    return dense.transpose(0, 1).reshape(rows, matrix.shape[1])


def exact(problem: Problem, label: str, i: int) -> torch.Tensor:
    """Return block row ``i`` of what a call computes, float64 (block rows, N)."""
    block = problem.spec.block
    rows = slice(i * block.rows, (i + 1) * block.rows)
    left, right = problem.dense if problem.equal is None or not label.startswith(FP8_EQUAL) else problem.equal
    scales = problem.scales
    if label.startswith((DENSE, FP8_DENSE)):
        return left[rows].double() @ right.double()
    if isinstance(problem.spec, BsrSddmmSpec):
        if not scales or label != OURS:
            return left[rows].double() @ right.double()
        of_a = scales["scale_a"][rows] if scales["scale_a"].dim() else scales["scale_a"]
        return scaled_rows(problem.spec, left[rows], {"scale_a": of_a}) @ scaled_b(problem.spec, right, scales)
    left = block_row(problem.a, i, scales.get("scale_a"))
    if isinstance(problem.spec, BsrSpmmSpec):
        return left @ (scaled_b(problem.spec, problem.b, scales) if scales else problem.b.double())
    first, end = problem.a.crow_indices()[i : i + 2].tolist()
    met = problem.a.col_indices()[first:end].tolist()
    out = torch.zeros((block.rows, problem.b.shape[1]), dtype=torch.float64, device=left.device)
    for k in met:
        out += left[:, k * block.cols : (k + 1) * block.cols] @ block_row(problem.b, k)
    return out


def indices_of(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mask of the stored blocks of a BSR matrix."""
    return matrix.crow_indices(), matrix.col_indices()


def largest_error(problem: Problem, label: str, out: torch.Tensor) -> float:
    """The worst error of the first, the middle and the last block row, relative to their largest element."""
    block, (left, right) = problem.spec.block, problem.dense
    if problem.equal is not None and label.startswith(FP8_EQUAL):
        left, right = problem.equal
    shape = (left.shape[0], right.shape[1])
    if tuple(out.shape) != shape:
        raise ValueError(f"the result has shape {tuple(out.shape)}, expected {shape}")
    if out.layout == torch.sparse_bsr and problem.pattern is not None:
        for found, listed in zip(indices_of(out), indices_of(problem.pattern), strict=True):
            if not torch.equal(found, listed):
                raise ValueError("the result has other blocks than the pattern")
    errors = []
    for i in (0, shape[0] // block.rows // 2, shape[0] // block.rows - 1):
        expected = exact(problem, label, i)
        if out.layout == torch.sparse_bsr:
            found = block_row(out, i)
            first, end = out.crow_indices()[i : i + 2].tolist()
            listed = torch.zeros(shape[1] // block.cols, dtype=torch.bool, device=found.device)
            listed[out.col_indices()[first:end]] = True
            expected = expected * listed.repeat_interleave(block.cols)
        else:
            found = out[i * block.rows : (i + 1) * block.rows].double()
        errors.append((found - expected).abs().max() / expected.abs().max())
    return float(torch.stack(errors).max())  # NaN if there is one


def result_type(spec: BsrSpmmSpec | BsrSddmmSpec | BsrSpgemmSpec) -> torch.dtype:
    """The type of C."""
    return TORCH_DTYPES[spec.output if spec.dtype in FP8 else spec.dtype]


def ours(problem: Problem) -> dict[str, Call]:
    kernel: Any = load_kernel(problem.spec, forward_compatible=problem.spec.arch == "sm_89")
    a, b, pattern = problem.a, problem.b, problem.pattern
    if pattern is not None:
        out = torch.empty_like(pattern.values())
        out = out.to(result_type(problem.spec))
        return {OURS: lambda: kernel(a, b, pattern, **problem.scales, out=out)}
    out = torch.empty((a.shape[0], b.shape[1]), device=a.device, dtype=result_type(problem.spec))
    if isinstance(problem.spec, BsrSpmmSpec):
        a = kernel.prepare(a, b.shape[1], pack=problem.packed, effort="best")
    return {OURS: lambda: kernel(a, b, **problem.scales, out=out)}


def run_row(row: Row, peers: list[str], quick: bool) -> Fields:
    """Check and time one row; return its record."""
    problem = make_problem(row)
    work = flops(problem)
    makers = [ours, *(PEERS[peer].make for peer in row.peers if peer in peers)]
    outcome = check_and_time(makers, problem, lambda label, out: largest_error(problem, label, out), work, quick)
    blocks = problem.pattern if problem.pattern is not None else problem.a
    return {
        "name": row.name,
        "groups": row.groups,
        "kernel": named_of(row).stem,
        "size": SIZE,
        "height": row.height,
        "columns": row.columns,
        "row_blocks": row.row_blocks,
        "density": blocks.values().numel() / (blocks.shape[0] * blocks.shape[1]),
        "pattern": row.pattern,
        "even": row.even,
        "packed": row.packed,
        **kernel_fields(find_spec(problem.spec), ran=OURS in outcome["results"]),
        "flops": work,
        "target_tflops": row.target,
        "target_ratio": row.target_ratio,
        **outcome,
    }


def lost(report: Fields) -> dict[str, float]:
    """The part of their speed that uneven rows lose, for those whose even row was measured too."""
    own = {record["name"]: record["results"].get(OURS) for record in report["rows"]}
    even = {record["name"]: own.get(record["even"]) for record in report["rows"] if record.get("even")}
    return {name: 1 - own[name]["tflops"] / base["tflops"] for name, base in even.items() if base and own[name]}


def gains(report: Fields) -> dict[str, dict[float, float]]:
    """Return how often cuBLAS's speed on a dense A is ours, by density, in ascending order.

    There is an entry for each block size, and for those of kernels that gather block rows.
    """
    found: dict[str, dict[float, float]] = {}
    for record in sorted(of_group(report, "crossover"), key=lambda record: record["density"]):
        own, dense = (record["results"].get(label) for label in (OURS, DENSE))
        if own and dense:
            gathered = ", block rows gathered" if record["kernel"].endswith("_gathered") else ""
            by_density = found.setdefault(f"{record['spec']['block']['rows']}{gathered}", {})
            by_density[record["density"]] = dense["milliseconds"] / own["milliseconds"]
    return found


def crossover(by_density: dict[float, float]) -> float | None:
    """The density where ours and cuBLAS take as long, between two that were measured; None if there is none."""
    points = list(by_density.items())
    for (left, before), (right, after) in itertools.pairwise(points):
        if before >= 1 > after:
            part = math.log(before) / math.log(before / after)
            return math.exp(math.log(left) + part * math.log(right / left))
    return None


def remarks(report: Fields) -> list[str]:
    """Text beside the table: the cost of uneven rows, and the density at which dense products become faster."""
    lines = [
        f"{name}: {part:.1%} slower than even rows ({MOST_LOST:.0%} allowed)" for name, part in lost(report).items()
    ]
    for block, by_density in gains(report).items():
        place = crossover(by_density)
        least, most = min(by_density), max(by_density)
        where = f"up to a density of {place:.1%}" if place else f"at densities from {least:.1%} to {most:.1%}"
        if not place and by_density[least] < 1:
            where = f"nowhere from {least:.1%} to {most:.1%}"
        lines.append(f"blocks of {block}: faster than cuBLAS on a dense A {where}")
    return lines


def plot(report: Fields, path: Path) -> None:
    """Draw the main rows, and beside them (``_crossover``) the sweep; each as a PNG and an SVG."""
    if not can_plot():
        return
    if records := of_group(report, "main"):
        plot_rows(report, records, path, "BSR products")
    if found := gains(report):
        plot_crossover(report, found, path.with_name(f"{path.stem}_crossover"))


def plot_crossover(report: Fields, found: dict[str, dict[float, float]], path: Path) -> None:
    """Draw how often cuBLAS's speed ours is, over the density, a line for each block size, gathered rows apart."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6.5, 4.2), layout="constrained")
    for block, by_density in found.items():
        place = crossover(by_density)
        label = f"blocks of {block}" + (f": equal at {place:.0%}" if place else "")
        axes.plot(list(by_density), list(by_density.values()), marker="o", markersize=4, label=label)
    axes.axhline(1.0, color="black", linewidth=0.8, label="cuBLAS on a dense A")
    places = sorted({density for by_density in found.values() for density in by_density})
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(places, [f"{100 * place:.3g}" for place in places], fontsize=7)
    gained = [gain for by_density in found.values() for gain in by_density.values()]
    powers = range(math.floor(math.log2(min(gained))), math.ceil(math.log2(max(gained))) + 1)
    axes.set_yticks([2.0**power for power in powers], [f"{2.0**power:g}" for power in powers])
    axes.set_xlabel("stored blocks of A, %")
    axes.set_ylabel("time of cuBLAS / time of this project")
    axes.set_title(f"BSR x dense, 8192 x 8192 x 8192, on {report['device']}, driver {report['driver']}", fontsize=9)
    axes.legend(fontsize=8)
    save(figure, path)


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    return harness.parse_arguments(__doc__, ROWS, GROUPS, PEERS, arguments)


@torch.no_grad()
def measure(options: argparse.Namespace) -> Fields:
    """Run the chosen rows."""
    rows = harness.chosen_rows(options, ROWS)
    return harness.measure(options, rows, PEERS, run_row, harness.environment(PACKAGES), free_memory)


def main() -> None:
    options = parse_arguments()
    report = report_of(options, measure)
    show(report, remarks(report))
    if options.plot:
        plot(report, options.plot)
    check_own(report)


if __name__ == "__main__":
    main()
