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
