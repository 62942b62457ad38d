"""The call of ``block_sparse_attention`` behind the functions of other libraries, and checks that they share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from codegen.wording import shown
from runtime.checks import check_dense, check_flag
from runtime.errors import ArgumentError
from runtime.kernels.arguments import check_number
from runtime.kernels.attention import AttentionResult
from runtime.ops.attention import block_sparse_attention
from runtime.patterns import Pattern

TORCH_NAMES: Mapping[str, str] = {"q": "query", "k": "key", "v": "value"}
"""torch's names of the arguments of ``block_sparse_attention``."""


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pattern: Pattern, names: Mapping[str, str], **options: Any
) -> AttentionResult:
    """Call ``block_sparse_attention`` with ``return_lse=True``; errors carry the argument's name in the original.

    Args:
        q, k, v: (batch, heads, length, head_dim).
        pattern: the keys that each query sees.
        names: names of arguments in the original, by their names in ``block_sparse_attention``.
        options: other arguments.

    Raises:
        ArgumentError, SpecError: as ``block_sparse_attention``.
    """
    try:
        return block_sparse_attention(q, k, v, pattern, **{"return_lse": True, **options})  # type: ignore[no-any-return]
    except ArgumentError as error:
        if error.argument not in names:
            raise
        raise ArgumentError(names[error.argument], error.reason) from None


def refuse(argument: str, value: Any, reason: str) -> None:
    """Refuse an argument that has no counterpart.

    Args:
        argument: its name.
        value: its value.
        reason: why it is refused, and the alternative.

    Raises:
        ArgumentError: always.
    """
    what = f"a {type(value).__name__}" if isinstance(value, torch.Tensor) else shown(value)
    raise ArgumentError(argument, f"is {what}: {reason}")


def check_dropout(dropout_p: Any) -> None:
    """Check that a call has no dropout.

    Raises:
        ArgumentError: for any probability but 0.
    """
    if check_number("dropout_p", dropout_p) != 0:
        refuse("dropout_p", dropout_p, "kernels have no dropout of attention weights; pass dropout_p=0.0")


def check_gqa(query: Any, key: Any, enable_gqa: Any) -> None:
    """Check the numbers of heads as torch does: they differ with ``enable_gqa`` only.

    Raises:
        ArgumentError: naming ``enable_gqa``.
    """
    check_flag("enable_gqa", enable_gqa)
    for name, tensor in (("query", query), ("key", key)):
        check_dense(name, tensor)
    if not enable_gqa and query.dim() == key.dim() == 4 and query.shape[1] != key.shape[1]:
        heads = f"query has {query.shape[1]} heads and key has {key.shape[1]}"
        raise ArgumentError("enable_gqa", f"is False, and {heads}: pass enable_gqa=True")
