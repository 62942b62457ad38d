"""BSR products of benchmarks/fp8.py: our calls, torch's calls, and the errors of their results."""

from __future__ import annotations

from typing import Any

import bsr
import torch
from bsr_peers import SLOW as SLOW_MM
from bsr_peers import Problem, scaled_mm
from fp8_peers import Makers, Result, relative
from fp8_rows import CUBE, EQUAL, FP16, QUANTIZING, SLOW, ProductRow
from records import OURS

from runtime import load_kernel, quantize_matrix
from runtime.kernels.bsr_scales import SCALE_DEPTH
from runtime.tools.bench import bsr_fp8

NAMES = {EQUAL: bsr_fp8.EQUAL, CUBE: bsr_fp8.DENSE}  # of torch's products in benchmarks/bsr_peers.py


def product_makers(row: ProductRow, problem: Problem) -> Makers:
    """A function that makes the calls of a product, by label."""
    scale_a, scale_b = (problem.scales[name] for name in ("scale_a", "scale_b"))
    of_b = scale_b.repeat_interleave(SCALE_DEPTH, 1).mT if scale_b.dim() else scale_b
    numbers = problem.b.float() * of_b  # (K, N), stored by columns

    def fp16() -> Result:
        a = problem.a
        values = a.values().float() * (scale_a[:, None, None] if scale_a.dim() else scale_a)
        half = torch.sparse_bsr_tensor(
            a.crow_indices(), a.col_indices(), values.half(), a.shape, check_invariants=False
        )
        kernel: Any = load_kernel(row.fp16)
        by_columns = numbers.mT.half().contiguous().mT
        out = torch.empty((a.shape[0], problem.b.shape[1]), device=a.device, dtype=torch.float16)
        prepared = kernel.prepare(half, problem.b.shape[1], effort="best")
        return Result(lambda: kernel(prepared, by_columns, out=out))

    def quantizing() -> Result:
        kernel: Any = load_kernel(problem.spec)
        x = numbers.mT.to(torch.bfloat16).contiguous()
        a = kernel.prepare(problem.a, problem.b.shape[1], effort="best")
        out = torch.empty((problem.a.shape[0], problem.b.shape[1]), device=x.device, dtype=torch.bfloat16)

        def call() -> torch.Tensor:
            codes, scales = quantize_matrix(x)
            return kernel(a, codes.mT, scale_a=scale_a, scale_b=scales, out=out)  # type: ignore[no-any-return]

        return Result(call)

    makers: Makers = {OURS: lambda: Result(bsr.ours(problem)[OURS]), FP16: fp16}
    if scale_b.dim():
        makers[QUANTIZING] = quantizing
    for label, name in NAMES.items():
        for behind, slow in (("", ""), (SLOW, SLOW_MM)):
            makers[label + behind] = lambda name=name + slow: Result(scaled_mm(problem)[name])  # type: ignore[misc]
    return makers


def product_error(problem: Problem, label: str, out: torch.Tensor) -> float:
    """The error of a product on the first, the middle and the last block row."""
    named = NAMES.get(label.removesuffix(SLOW), OURS)
    rows = problem.spec.block.rows
    blocks = (0, out.shape[0] // rows // 2, out.shape[0] // rows - 1)
    exact = torch.cat([bsr.exact(problem, named, i) for i in blocks])
    return relative(torch.cat([out[i * rows : (i + 1) * rows] for i in blocks]), exact)
