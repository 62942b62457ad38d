"""The score of a call: joined to the pattern as JSON, and its tensors to those of the pattern.

So all that passes a pattern on (torch's operators, exported programs, what remembers kernels) has the score with it.
"""

from __future__ import annotations

import json
from typing import Any

import torch

from runtime.errors import ArgumentError
from runtime.ops.block_sizes import Tensors
from runtime.patterns import Pattern, Score

_KEY = "score"


def joined(pattern: Pattern, tensors: Tensors, score: Any) -> tuple[str, Tensors]:
    """Return a pattern with a score, as JSON, and the tensors of both.

    Args:
        pattern: the pattern.
        tensors: its tensors, in order.
        score: a ``Score``, or what one is made of.

    Raises:
        ArgumentError: for what is none, and two tensors of one name.
    """
    made = score if isinstance(score, Score) else _made(score)
    aux = made.aux or {}
    of_mask = getattr(pattern, "aux", None) or {}
    for name, tensor in aux.items():
        if name in of_mask and of_mask[name] is not tensor:
            reason = f"has a tensor {name}, and so has the mask of the pattern: a name is one tensor, give it another"
            raise ArgumentError("score", reason)
    text = f'{pattern.spec_json[:-1]}, "{_KEY}": {made.spec_json}}}'
    return text, (*tensors, *(tensor for name, tensor in aux.items() if name not in of_mask))


def _made(score: Any) -> Score:
    if torch.compiler.is_dynamo_compiling():
        what = "a text" if isinstance(score, str) else "a function"
        raise ArgumentError("score", f"is {what}, in compiled code: make a runtime.patterns.Score of it before")
    return Score(score)


def split(spec_json: str) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Return the pattern of a call, and its score if it has one, as plain data."""
    pattern: dict[str, Any] = json.loads(spec_json)
    return pattern, pattern.pop(_KEY, None)
