"""Model of the tensor core's accumulator for FP8 products, on any device.

The largest of a step's products and the running sum determines a unit. Each of them is truncated to a multiple of the
unit, and then they are added exactly. The unit is 2^-13 times the leading power of two of the largest one, so about 14
bits remain. Sources: Fasi et al., "Numerical behavior of NVIDIA tensor cores", 2021, for the method; DeepSeek-V3,
section 3.3.2, for the bits on Hopper.
"""

from __future__ import annotations

import torch

FRACTION_BITS = 13
STEP = 32  # elements of K per instruction
_ELEMENTS = 2**27  # products in memory at once


def products(a: torch.Tensor, b: torch.Tensor, *, flush_every: int | None = None) -> torch.Tensor:
    """Compute A B^T with the tensor core's accumulation.

    Args:
        a: (..., M, K): codes, or their values times a power of two.
        b: (..., N, K), with the same leading dimensions.
        flush_every: elements of K after which the sum is added to an fp32 accumulator and reset; None for never.

    Returns:
        float32 (..., M, N).
    """
    if a.dim() > 2:
        found = [products(left, right, flush_every=flush_every) for left, right in zip(a, b, strict=True)]
        return torch.stack(found)
    rows = max(1, _ELEMENTS // (STEP * b.shape[0]))
    return torch.cat([_product(part, b.float(), flush_every or a.shape[1]) for part in a.float().split(rows)])


def _product(a: torch.Tensor, b: torch.Tensor, flush_every: int) -> torch.Tensor:
    total = torch.zeros((a.shape[0], b.shape[0]), device=a.device)
    for begin in range(0, a.shape[1], flush_every):
        end, sums = min(begin + flush_every, a.shape[1]), torch.zeros_like(total)
        for step in range(begin, end, STEP):
            keys = slice(step, min(step + STEP, end))
            sums = _accumulate(sums, a[:, None, keys] * b[None, :, keys])
        total += sums
    return total


def _accumulate(sums: torch.Tensor, terms: torch.Tensor) -> torch.Tensor:
    """Sums (M, N) plus terms (M, N, STEP)."""
    largest = torch.maximum(sums.abs(), torch.amax(terms.abs(), -1))
    exponent = torch.frexp(largest).exponent - 1
    unit = torch.ldexp(torch.ones_like(largest), exponent - FRACTION_BITS)
    cut = (terms / unit[..., None]).trunc_().sum(-1) + (sums / unit).trunc()
    return cut * unit
