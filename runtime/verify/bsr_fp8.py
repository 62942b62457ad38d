"""Shared parts of the cases of FP8 BSR products: scales, torch's own kernel, tolerances."""

from __future__ import annotations

from collections.abc import Callable

import torch

from codegen.spec import BsrSddmmSpec, BsrSpmmSpec
from runtime.kernels.arguments import TORCH_DTYPES
from runtime.kernels.bsr_scales import SCALE_DEPTH, STEP, by_block, by_row
from runtime.verify import tensor_core_fp8
from runtime.verify.common import RELATIVE_TO_TORCH, ROUNDOFF, generator, max_error

Fp8Spec = BsrSpmmSpec | BsrSddmmSpec
CODES = 16.0  # standard deviation of codes: in e4m3, 1 in 20 is then below 1 and none is 448
# Largest allowed absolute error if the elements of C have a variance of 1. The error comes from the rounding of C, and
# from the tensor core, which keeps about 14 bits when it accumulates and whose errors all have the same sign.
ABSOLUTE = {"fp16": 1.6e-2, "bf16": 3.2e-2, "fp32": 1.6e-2}
ROUNDOFF_OF_OUTPUT = {**ROUNDOFF, "fp32": 2.0**-24}


def draw_scales(spec: Fp8Spec, name: str, lines: int, b: torch.Tensor, unit: float) -> dict[str, torch.Tensor]:
    """Draw the scales of a call.

    Args:
        spec: spec of the kernel.
        name: name of the case, the seed.
        lines: stored blocks of A; for sampled products, rows of A.
        b: codes of B, (..., K, N).
        unit: approximate scale of A.
    """
    random, device = generator(name + "scales", b.device), b.device
    if not by_block(spec) and not by_row(spec):
        # The strides of a scale do not matter.
        return {
            "scale_a": torch.full((), unit, device=device),
            "scale_b": torch.full((3, 2), 1 / CODES, device=device)[1, :1],
        }
    *batch, depth, columns = b.shape

    def of_depths(lines: int, unit: float, *batch: int) -> torch.Tensor:
        padded = -(-lines // STEP) * STEP + STEP
        drawn = torch.rand((*batch, -(-depth // SCALE_DEPTH), padded), generator=random, device=device)
        # Row scales are at most 1, so that no element of C has a larger variance. Block scales have a mean square of
        # 13/12.
        return ((drawn + 0.5) * (unit / 1.5 if by_row(spec) else unit)).mT[..., :lines, :]

    if by_row(spec):
        return {"scale_a": of_depths(lines, unit), "scale_b": of_depths(columns, 1 / CODES)}
    of_blocks = (torch.rand(lines, generator=random, device=device) + 0.5) * unit
    return {"scale_a": of_blocks, "scale_b": of_depths(columns, 1 / CODES, *batch)}


def scaled_values(spec: Fp8Spec, values: torch.Tensor, scales: dict[str, torch.Tensor]) -> torch.Tensor:
    """Values of A's stored blocks, float64."""
    scale = scales["scale_a"].double()
    return values.double() * (scale[:, None, None] if by_block(spec) else scale)


def scaled_b(spec: Fp8Spec, b: torch.Tensor, scales: dict[str, torch.Tensor]) -> torch.Tensor:
    """Values of B, (..., K, N), float64."""
    scale = scales["scale_b"].double()
    if by_block(spec) or by_row(spec):
        scale = _of_elements(scale, b.shape[-2]).mT
    return b.double() * scale


def scaled_rows(spec: Fp8Spec, a: torch.Tensor, scales: dict[str, torch.Tensor]) -> torch.Tensor:
    """Values of a dense A, (M, K), float64."""
    scale = scales["scale_a"].double()
    return a.double() * (_of_elements(scale, a.shape[1]) if by_row(spec) else scale)


def _of_elements(scale: torch.Tensor, depth: int) -> torch.Tensor:
    """Scale of each element of K."""
    return scale.repeat_interleave(SCALE_DEPTH, -1)[..., :depth]


def torch_product(
    spec: Fp8Spec, codes: torch.Tensor, b: torch.Tensor, scales: dict[str, torch.Tensor], output: torch.dtype
) -> torch.Tensor | None:
    """Multiply a dense A (M, K), float64 codes, and B (..., K, N) with torch's own kernel.

    None if torch has no kernel: for two e5m2 operands, for these block scales, and on a CPU. Torch's kernel accumulates
    like the kernel under test, with or without promotion.
    """
    if spec.dtype == "e5m2" or by_block(spec) or by_row(spec) or not b.is_cuda:
        return None
    if b.dim() == 3:
        found = [torch_product(spec, codes, each, scales, output) for each in b]
        return torch.stack([each for each in found if each is not None])
    rows, columns, depth = codes.shape[0], b.shape[1], codes.shape[1]
    padded = [-(-size // 16) * 16 for size in (rows, columns, depth)]
    a_codes = torch.zeros((padded[0], padded[2]), dtype=b.dtype, device=b.device)
    b_codes = torch.zeros((padded[1], padded[2]), dtype=b.dtype, device=b.device)
    a_codes[:rows, :depth], b_codes[:columns, :depth] = codes.to(b.dtype), b.mT
    product: torch.Tensor = torch._scaled_mm(
        a_codes,
        b_codes.T,
        scales["scale_a"].reshape(()).clone(),
        scales["scale_b"].reshape(()).clone(),
        out_dtype=output,
        use_fast_accum=spec.accumulate_every == 0,
    )
    return product[:rows, :columns]


def tolerance(output: str, torch_error: float | None, largest: float) -> float:
    """Tolerance of an error: the same as for other dtypes if torch's kernel has the same accumulators."""
    if torch_error is None:
        return ABSOLUTE[output]
    return min(ABSOLUTE[output], max(RELATIVE_TO_TORCH * torch_error, ROUNDOFF_OF_OUTPUT[output] * largest))


def model_product(
    spec: Fp8Spec, codes: torch.Tensor, b: torch.Tensor, scales: dict[str, torch.Tensor]
) -> torch.Tensor | None:
    """Compute the product of a dense A (M, K) and B (..., K, N) with a model of the tensor core's accumulation.

    An error above ``tolerance`` may be up to twice the model's error. Torch's kernel splits K between thread blocks, or
    promotes more often than the spec, so the tensor core can lose more bits than there. With promotion, each block row
    of a sparse A is accumulated separately, because only its stored blocks are steps. None for row and block scales.
    """
    if by_block(spec) or by_row(spec):
        return None
    every = spec.accumulate_every * spec.tile.k or None
    if isinstance(spec, BsrSddmmSpec) or every is None:
        product = _modeled(codes, b, every)
    else:
        parts = []
        for rows in codes.split(spec.block.rows):
            stored = rows.reshape(rows.shape[0], -1, spec.block.cols).ne(0).any(0).any(-1)
            elements = stored.repeat_interleave(spec.block.cols)
            parts.append(_modeled(rows[:, elements], b[..., elements, :], every))
        product = torch.cat(parts, -2)
    return product.double() * float(scales["scale_a"]) * float(scales["scale_b"])


def _modeled(codes: torch.Tensor, b: torch.Tensor, every: int | None) -> torch.Tensor:
    """A B by the model, float32 (..., M, N), promoted after ``every`` elements of K."""
    left = codes.float() if b.dim() == 2 else codes.float().expand(b.shape[0], *codes.shape)
    return tensor_core_fp8.products(left, b.mT.float(), flush_every=every)


def limits(
    spec: Fp8Spec,
    operands: tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]] | None,
    error: float,
    reference: torch.Tensor,
    part: Callable[[torch.Tensor], torch.Tensor] = lambda product: product,
) -> tuple[float | None, float]:
    """Error of torch's kernel, if it has one, and the tolerance.

    Args:
        spec: spec of the kernel.
        operands: codes of a dense A, (M, K), float64, codes of B, (..., K, N), and scales; None if A is not a matrix of
            codes, as with repeated blocks.
        error: error of the kernel.
        reference: the exact result.
        part: function from a dense C to the computed part of C.
    """
    largest = float(reference.abs().max())
    if operands is None:
        return None, tolerance(spec.output, None, largest)
    theirs = torch_product(spec, *operands, TORCH_DTYPES[spec.output])
    torch_error = None if theirs is None else max_error(part(theirs), reference)
    allowed = tolerance(spec.output, torch_error, largest)
    if error > allowed and (model := model_product(spec, *operands)) is not None:
        allowed = max(allowed, RELATIVE_TO_TORCH * max_error(part(model), reference))
    return torch_error, allowed
