"""Aux tensors of cases, and the mask and the score of expressions as the oracle has them."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from codegen.expressions.nodes import SIZES, Aux, Node
from codegen.spec import AttentionSpec
from runtime.expressions.dtypes import TORCH_DTYPES
from runtime.expressions.evaluate import evaluate

VALUES = 4
"""Different integers that are drawn: documents, say. Some are beyond what is looked up with them."""


def draw_aux(
    aux: tuple[Aux, ...], sizes: Mapping[str, int], source: torch.Generator, device: torch.device
) -> dict[str, torch.Tensor]:
    """Draw the aux tensors of a case; of every other one a size of a name is 1, for all, and its elements lie apart."""
    return {each.name: _drawn(each, sizes, source, device, shares=place % 2 == 1) for place, each in enumerate(aux)}


def _drawn(
    aux: Aux, sizes: Mapping[str, int], source: torch.Generator, device: torch.device, *, shares: bool
) -> torch.Tensor:
    shape = [1 if shares and dim == "batch" else sizes[str(dim)] if dim in SIZES else int(dim) for dim in aux.dims]
    apart = [*shape, 3] if shares else shape
    if aux.dtype in ("int32", "int64", "bool"):
        drawn = torch.randint(-1, VALUES, apart, generator=source, device=device)
    else:
        drawn = torch.randn(apart, generator=source, device=device)
    drawn = drawn.to(TORCH_DTYPES[aux.dtype])
    return drawn[..., 1] if shares else drawn


def seen_by_expression(
    spec: AttentionSpec, sizes: Mapping[str, int], aux: Mapping[str, torch.Tensor], device: torch.device
) -> torch.Tensor:
    """Return which pairs the expression shows: (batch, heads, q_len, kv_len), or what broadcasts to it."""
    node = spec.pattern.expression
    assert node is not None
    return evaluate(node, places_of(sizes, device), aux)


def scored(node: Node, scores: torch.Tensor, aux: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return what a score, or its derivative, makes of logits, (batch, heads, q_len, kv_len) in float64."""
    sizes = dict(zip(_NAMES, scores.shape, strict=True))
    values = {**places_of(sizes, scores.device), "score": scores}
    return evaluate(node, values, aux).to(scores.dtype).expand(scores.shape)


_NAMES = {"batch": "batch", "heads": "head", "q_len": "q_idx", "kv_len": "kv_idx"}


def places_of(sizes: Mapping[str, int], device: torch.device) -> dict[str, torch.Tensor | int | float]:
    """Return what variables are for all pairs, on four axes, and the two lengths."""

    def along(size: int, axis: int) -> torch.Tensor:
        shape = [1] * 4
        shape[axis] = -1
        return torch.arange(size, device=device).view(shape)

    values = {variable: along(sizes[size], axis) for axis, (size, variable) in enumerate(_NAMES.items())}
    return {**values, "q_len": sizes["q_len"], "kv_len": sizes["kv_len"]}
