"""Which of the tensors of a call belong to an expression of its pattern: the last ones, in the order of their names."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

import torch

from runtime.errors import ArgumentError
from runtime.ops.block_sizes import Tensors


@lru_cache(maxsize=1024)
def aux_names(spec_json: str) -> tuple[str, ...]:
    """Return the names of the aux tensors of a pattern, as JSON, in order."""
    return tuple(sorted(json.loads(spec_json).get("aux", ())))


def apart(spec_json: str, tensors: Tensors) -> tuple[Tensors, dict[str, torch.Tensor]]:
    """Return the index tensors of a call, and its aux tensors by name.

    Raises:
        ArgumentError: where there are fewer tensors than the pattern has aux tensors.
    """
    names = aux_names(spec_json)
    if not names:
        return tensors, {}
    if len(tensors) < len(names):
        raise ArgumentError("tensors", f"are {len(tensors)}, and the pattern's expression has {', '.join(names)}")
    aux: dict[str, Any] = dict(zip(names, tensors[-len(names) :], strict=True))
    return tensors[: -len(names)], aux
