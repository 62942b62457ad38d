"""Random aux tensors for cases of a verification and for measurements."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from codegen.expressions.nodes import SIZES, Aux
from runtime.expressions.dtypes import TORCH_DTYPES

VALUES = 4
"""Number of distinct random integers, such as document numbers. Some are out of range when used as an index."""


def draw_aux(
    aux: tuple[Aux, ...], sizes: Mapping[str, int], source: torch.Generator, device: torch.device
) -> dict[str, torch.Tensor]:
    """Draw the aux tensors of a case. In every other one, named sizes are 1 (broadcast), and elements are strided."""
    return {each.name: _drawn(each, sizes, source, device, shares=place % 2 == 1) for place, each in enumerate(aux)}


def _drawn(
    aux: Aux, sizes: Mapping[str, int], source: torch.Generator, device: torch.device, *, shares: bool
) -> torch.Tensor:
    shape = [1 if shares and dim == "batch" else sizes[str(dim)] if dim in SIZES else int(dim) for dim in aux.dims]
    apart = [*shape, 3] if shares else shape
    if aux.dtype in ("int32", "int64", "bool"):
        drawn = torch.randint(-1, VALUES, apart, generator=source, device=device)
    else:
        drawn = torch.randn(apart, generator=source, dtype=torch.float32, device=device)
    drawn = drawn.to(TORCH_DTYPES[aux.dtype])
    return drawn[..., 1] if shares else drawn
