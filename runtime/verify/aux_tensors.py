"""The oracle's masks and scores of expressions."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from codegen.expressions.nodes import Node
from codegen.spec import AttentionSpec
from runtime.expressions.evaluate import evaluate


def seen_by_expression(
    spec: AttentionSpec, sizes: Mapping[str, int], aux: Mapping[str, torch.Tensor], device: torch.device
) -> torch.Tensor:
    """Pairs that the expression makes visible: bool (batch, heads, q_len, kv_len), or a shape that broadcasts to it."""
    node = spec.pattern.expression
    assert node is not None
    return evaluate(node, places_of(sizes, device), aux)


def scored(node: Node, scores: torch.Tensor, aux: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Logits after a score, or its derivative there: float64 (batch, heads, q_len, kv_len)."""
    sizes = dict(zip(_NAMES, scores.shape, strict=True))
    values = {**places_of(sizes, scores.device), "score": scores}
    return evaluate(node, values, aux).to(scores.dtype).expand(scores.shape)


_NAMES = {"batch": "batch", "heads": "head", "q_len": "q_idx", "kv_len": "kv_idx"}


def places_of(sizes: Mapping[str, int], device: torch.device) -> dict[str, torch.Tensor | int | float]:
    """Values of the variables for all pairs, on four axes, and both lengths."""

    def along(size: int, axis: int) -> torch.Tensor:
        shape = [1] * 4
        shape[axis] = -1
        return torch.arange(size, device=device).view(shape)

    values = {variable: along(sizes[size], axis) for axis, (size, variable) in enumerate(_NAMES.items())}
    return {**values, "q_len": sizes["q_len"], "kv_len": sizes["kv_len"]}
