"""The tensors of expressions, which are the last ones of a call: those of the mask, then those of the score."""

from __future__ import annotations

from typing import Any

import torch

from codegen.scored_pattern import ScoredPattern
from runtime.errors import ArgumentError
from runtime.ops.block_sizes import Tensors
from runtime.patterns import Pattern, Score


def learned_aux(scored: ScoredPattern, tensors: Tensors) -> tuple[str, ...]:
    """Names of the score's tensors that require a gradient, of a call's tensors.

    Raises:
        ArgumentError: for a tensor of the mask alone that requires one: what a mask shows does not change by little.
    """
    aux = apart(scored, tensors)[1]
    required = [name for name, tensor in aux.items() if tensor is not None and tensor.requires_grad]
    for name in required:
        if name not in scored.score_names:
            reason = "requires a gradient, and tensors of masks have none"
            raise ArgumentError(f"aux[{name!r}]", f"{reason}: pass it with .detach()")
    return tuple(name for name in scored.score_names if name in required)


def apart(scored: ScoredPattern, tensors: Tensors) -> tuple[Tensors, dict[str, torch.Tensor]]:
    """Index tensors of a call, and its aux tensors by name.

    Raises:
        ArgumentError: where there are fewer tensors than the pattern has aux tensors.
    """
    names = scored.aux_names
    if not names:
        return tensors, {}
    if len(tensors) < len(names):
        raise ArgumentError("tensors", f"are {len(tensors)}, and the expressions have {', '.join(names)}")
    aux: dict[str, Any] = dict(zip(names, tensors[-len(names) :], strict=True))
    return tensors[: -len(names)], aux


def with_score(pattern: Pattern, tensors: Tensors, score: Any) -> tuple[Score, Tensors]:
    """A score, and the tensors of a pattern with those of the score behind them.

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
    return made, (*tensors, *(tensor for name, tensor in aux.items() if name not in of_mask))


def _made(score: Any) -> Score:
    if torch.compiler.is_dynamo_compiling():
        what = "a text" if isinstance(score, str) else "a function"
        raise ArgumentError("score", f"is {what}, in compiled code: make a runtime.patterns.Score of it before")
    return Score(score)
