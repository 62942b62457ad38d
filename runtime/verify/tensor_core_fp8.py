"""Sums of FP8 products as the tensor core makes them: a model of its accumulator, on any device.

Of the products of a step of the instruction and the sum so far, the largest decides a unit; each is cut down to a
multiple of it, and then they are added up exactly. The unit is 2^-13 of the power of two that the largest begins with,
so about 14 bits are kept. Sources: Fasi et al., "Numerical behavior of NVIDIA tensor cores", 2021, of the way;
DeepSeek-V3, section 3.3.2, of the bits on Hopper.
"""

from __future__ import annotations

import torch

FRACTION_BITS = 13
STEP = 32  # elements of K that an instruction multiplies at once
_ELEMENTS = 2**27  # of products that are kept at once


def products(a: torch.Tensor, b: torch.Tensor, *, flush_every: int | None = None) -> torch.Tensor:
    """Return A B^T as the tensor core adds it up.

    Args:
        a: (..., M, K): codes, or what they stand for times a power of two.
        b: (..., N, K), of as many leading dimensions, all as long.
        flush_every: elements of K after which the sum is added to one in fp32, and begun anew; None: never.

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
    """Return sums (M, N) plus terms (M, N, STEP)."""
    largest = torch.maximum(sums.abs(), torch.amax(terms.abs(), -1))
    exponent = torch.frexp(largest).exponent - 1
    unit = torch.ldexp(torch.ones_like(largest), exponent - FRACTION_BITS)
    cut = (terms / unit[..., None]).trunc_().sum(-1) + (sums / unit).trunc()
    return cut * unit
