"""Launches of earlier attention: a call with arguments like those of one before checks nothing and launches."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from codegen.scored_pattern import ScoredPattern
from runtime.kernels.attention import AttentionResult
from runtime.kernels.launches import Launches
from runtime.receipts.mode import mode

launches = Launches()
"""Those of attention, of operands in FP8 too."""
_grad_enabled = torch.is_grad_enabled
_NONE = type(None)


class Place(NamedTuple):
    """Where the launch of a call is kept.

    Attributes:
        key: all that decides about the launch beside the tensors.
        tensors: those of the pattern and its expressions, lengths, sinks and other operands, then q, k, v and out.
    """

    key: tuple[Any, ...]
    tensors: tuple[torch.Tensor, ...]


def launch_again(
    scored: ScoredPattern,
    tensors: tuple[Any, ...],
    operands: tuple[Any, ...],
    options: tuple[Any, ...],
    out: Any,
) -> tuple[AttentionResult | None, Place | None]:
    """Launch attention as an earlier call with arguments like these did, without checks.

    Args:
        scored: the pattern and the score.
        tensors: of the pattern and of expressions, then optional ones and other operands; None for those that are not
            given.
        operands: q, k and v.
        options: all else that decides about the launch.
        out: where to write the result, or None.

    Returns:
        The result, None if the checks of a call are needed; the place for the launch of this call, None if none is to
        be kept.
    """
    types = tuple(map(type, tensors))
    given = tuple([tensor for tensor in tensors if tensor is not None]) if _NONE in types else tensors
    try:
        q, k, _ = operands
        given = given + operands if out is None else (*given, *operands, out)
        key = (scored.text, types, q.shape, k.shape, out is None, options, _grad_enabled(), mode())
        launch = launches.find(key, given)
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return None, None
    return (None, Place(key, given)) if launch is None else (launch(given), None)
