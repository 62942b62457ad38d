"""Reference workloads of BSR products in FP8: operands, scales, and torch's own products beside them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from codegen.spec import BsrSddmmSpec, BsrSpmmSpec
from runtime.kernels.arguments import TORCH_DTYPES
from runtime.kernels.bsr_scales import SCALE_DEPTH, by_block, by_row

CODES = 16.0  # standard deviation of codes
DENSE, EQUAL = "torch._scaled_mm, dense", "torch._scaled_mm, dense, as many FLOPs"


def codes(*shape: int, dtype: torch.dtype, device: str = "cuda") -> torch.Tensor:
    """Random normal FP8 codes."""
    return (torch.randn(shape, device=device) * CODES).to(dtype)


def scales(
    spec: BsrSpmmSpec | BsrSddmmSpec, lines: int, columns: int, depth: int, device: str = "cuda"
) -> dict[str, torch.Tensor]:
    """Random scales for which the values of A and B have a variance of about 1.

    Args:
        spec: spec of the kernel.
        lines: stored blocks of A; rows of A for sampled products.
        columns: columns of C.
        depth: K.
        device: device of the scales.
    """
    if not by_block(spec) and not by_row(spec):
        return {name: torch.full((), 1 / CODES, device=device) for name in ("scale_a", "scale_b")}

    def of_depths(lines: int) -> torch.Tensor:
        return (torch.rand((-(-depth // SCALE_DEPTH), lines), device=device) + 0.5).mT / CODES

    of_a = of_depths(lines) if by_row(spec) else (torch.rand(lines, device=device) + 0.5) / CODES
    return {"scale_a": of_a, "scale_b": of_depths(columns)}


def peers(
    spec: BsrSpmmSpec | BsrSddmmSpec, rows: int, columns: int, depth: int, flops: float
) -> tuple[dict[str, Callable[[], Any]], dict[str, float]]:
    """torch's dense products with fast accumulation: with equal FLOPs, and of the same shape, with its FLOPs."""
    if spec.dtype != "e4m3":  # cuBLAS does not multiply two e5m2 operands
        return {}, {}
    dtype, one = TORCH_DTYPES[spec.dtype], torch.ones((), device="cuda")

    def product(width: int, inner: int) -> Callable[[], Any]:
        a, b = codes(rows, inner, dtype=dtype), codes(width, inner, dtype=dtype).T
        return lambda: torch._scaled_mm(a, b, one, one, out_dtype=torch.bfloat16, use_fast_accum=True)

    equal = int(flops / (2.0 * rows))
    calls = {
        EQUAL: product(equal // depth, depth) if isinstance(spec, BsrSddmmSpec) else product(columns, equal // columns),
        DENSE: product(columns, depth),
    }
    return calls, {DENSE: 2.0 * rows * columns * depth}
