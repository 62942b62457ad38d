"""The mask expression of partial blocks as a token mask and as a FlexAttention ``mask_mod``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from codegen.expressions.nodes import Node
from codegen.patterns.block_lists import expression_of
from runtime.expressions.evaluate import evaluate
from runtime.patterns import BlockLists


def _expression(pattern: BlockLists) -> Node:
    spec = pattern.spec_pattern()
    return expression_of(spec["mask"], spec.get("aux", {}))


def visible_pairs(pattern: BlockLists, q_len: int, kv_len: int, batch: int, heads: int) -> torch.Tensor:
    """Visible pairs of partial blocks: bool (batch or 1, heads or 1, q_len or 1, kv_len or 1).

    Args:
        pattern: lists with an expression.
        q_len: queries.
        kv_len: keys.
        batch: batches that the expression may depend on.
        heads: heads that the expression may depend on.
    """
    device, aux = pattern.kv_indices.device, dict(pattern.aux or {})
    sizes = {"batch": batch, "head": heads, "q_idx": q_len, "kv_idx": kv_len}
    values: dict[str, Any] = {"q_len": q_len, "kv_len": kv_len}
    for axis, (name, size) in enumerate(sizes.items()):
        values[name] = torch.arange(size, device=device).view([-1 if place == axis else 1 for place in range(4)])
    return evaluate(_expression(pattern), values, aux)


def mask_mod_of(pattern: BlockLists, q_len: int, kv_len: int) -> Callable[..., torch.Tensor]:
    """The expression as a function of batch, head, query and key, which torch can vmap and compile."""
    node, aux = _expression(pattern), dict(pattern.aux or {})

    def mask_mod(b: torch.Tensor, h: torch.Tensor, q_idx: torch.Tensor, kv_idx: torch.Tensor) -> torch.Tensor:
        values: dict[str, Any] = {
            "batch": b,
            "head": h,
            "q_idx": q_idx,
            "kv_idx": kv_idx,
            "q_len": q_len,
            "kv_len": kv_len,
        }
        return evaluate(node, values, aux)

    return mask_mod
