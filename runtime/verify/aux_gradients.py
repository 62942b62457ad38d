"""Gradients of a score's tensors in float64: each pair adds to the element that it reads."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from codegen.aux_gradients import reads_of
from codegen.expressions.nodes import SIZES
from codegen.score import Score
from runtime.expressions.evaluate import evaluate
from runtime.verify.aux_tensors import places_of, scored


def added_to_elements(
    score: Score,
    names: tuple[str, ...],
    logits: torch.Tensor,
    of_scores: torch.Tensor,
    aux: Mapping[str, torch.Tensor],
    *,
    sizes: bool = False,
) -> dict[str, torch.Tensor]:
    """Compute the gradients of a score's tensors, by name.

    Args:
        score: the score.
        names: names of the tensors.
        logits: (batch, heads, q_len, kv_len) in float64, before the score.
        of_scores: gradient of the loss with respect to the score's results; 0 for hidden pairs.
        aux: the tensors of the score.
        sizes: whether to sum the magnitudes of the terms.
    """
    places = places_of(dict(zip(SIZES, logits.shape, strict=True)), logits.device)
    found = {name: torch.zeros(aux[name].shape, dtype=torch.float64, device=logits.device) for name in names}
    for read in reads_of(score, names):
        to = found[read.item.aux.name]
        parts = torch.where(of_scores == 0, 0.0, of_scores * scored(read.slope, logits, aux))
        parts = parts.abs() if sizes else parts
        indices = zip(read.item.indices, to.shape, strict=True)
        elements = [evaluate(each, places, aux).clamp(0, size - 1).expand(parts.shape) for each, size in indices]
        if elements:
            to.index_put_(tuple(elements), parts, accumulate=True)
        else:
            to.add_(parts.sum())
    return found
