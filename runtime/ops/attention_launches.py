"""Launches of earlier attention: a call with arguments like those of one before checks nothing and launches."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from codegen.scored_pattern import ScoredPattern
from runtime.kernels.launches import Launch, Launches
from runtime.receipts.mode import mode

launches = Launches()
"""Those of attention, of operands in FP8 too."""
_grad_enabled = torch.is_grad_enabled


class Place(NamedTuple):
    """Where the launch of a call is kept.

    Attributes:
        key: all that decides about the launch beside the tensors.
        tensors: those of the pattern and its expressions, lengths, sinks and other operands, then q, k, v and out.
    """

    key: tuple[Any, ...]
    tensors: tuple[torch.Tensor, ...]


def find_attention(
    scored: ScoredPattern,
    tensors: tuple[Any, ...],
    operands: tuple[Any, ...],
    options: tuple[Any, ...],
    out: Any,
) -> tuple[Place | None, Launch | None]:
    """The launch of an earlier call with arguments like these.

    Args:
        scored: the pattern and the score.
        tensors: of the pattern and of expressions, then sinks, lengths and other operands; None for those that are not
            given.
        operands: q, k and v.
        options: all else that decides about the launch.
        out: where to write the result, or None.

    Returns:
        The place for a launch, None for arguments that the checks of a call must name; the launch that is kept there.
    """
    left_out = tuple([tensor is None for tensor in tensors])
    given = tuple([tensor for tensor in tensors if tensor is not None]) if True in left_out else tensors
    try:
        q, k, _ = operands
        given = (*given, *operands) if out is None else (*given, *operands, out)
        key = (scored.text, left_out, q.shape, k.shape, out is None, options, _grad_enabled(), mode())
        return Place(key, given), launches.find(key, given)
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return None, None
