"""Which of the tensors of a call belong to expressions: the last ones, those of the mask, then those of the score."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

import torch

from runtime.errors import ArgumentError
from runtime.ops.block_sizes import Tensors


@lru_cache(maxsize=1024)
def aux_names(spec_json: str) -> tuple[str, ...]:
    """Return the names of the aux tensors of a pattern, and of its score, as JSON, in order; of both once."""
    pattern = json.loads(spec_json)
    of_mask = sorted(pattern.get("aux", ()))
    return (*of_mask, *(name for name in sorted(pattern.get("score", {}).get("aux", ())) if name not in of_mask))


@lru_cache(maxsize=1024)
def score_names(spec_json: str) -> tuple[str, ...]:
    """Return the names of the tensors of the score of a pattern, as JSON, in order."""
    return tuple(sorted(json.loads(spec_json).get("score", {}).get("aux", ())))


def learned_aux(spec_json: str, tensors: Tensors) -> tuple[str, ...]:
    """Return the names of the tensors of the score that require a gradient, of a call's tensors.

    Raises:
        ArgumentError: for a tensor of the mask alone that requires one: what a mask shows does not change by little.
    """
    aux = apart(spec_json, tensors)[1]
    required = [name for name, tensor in aux.items() if tensor is not None and tensor.requires_grad]
    names = score_names(spec_json) if required else ()
    for name in required:
        if name not in names:
            reason = "requires a gradient, and tensors of masks have none"
            raise ArgumentError(f"aux[{name!r}]", f"{reason}: pass it with .detach()")
    return tuple(name for name in names if name in required)


def apart(spec_json: str, tensors: Tensors) -> tuple[Tensors, dict[str, torch.Tensor]]:
    """Return the index tensors of a call, and its aux tensors by name.

    Raises:
        ArgumentError: where there are fewer tensors than the pattern has aux tensors.
    """
    names = aux_names(spec_json)
    if not names:
        return tensors, {}
    if len(tensors) < len(names):
        raise ArgumentError("tensors", f"are {len(tensors)}, and the expressions have {', '.join(names)}")
    aux: dict[str, Any] = dict(zip(names, tensors[-len(names) :], strict=True))
    return tensors[: -len(names)], aux
