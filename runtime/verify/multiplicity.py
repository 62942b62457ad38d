"""Inputs of attention, and how often each pair of a query and a key counts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from codegen.attention_cases import Case
from codegen.spec import AttentionSpec
from runtime.verify.aux_tensors import seen_by_expression
from runtime.verify.mask_bits import visible_pairs


@dataclass(frozen=True)
class Inputs:
    """Tensors of one call."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    indices: tuple[torch.Tensor | None, ...]
    sink: torch.Tensor | None
    aux: dict[str, torch.Tensor] = field(default_factory=dict)
    numbers: dict[str, int | tuple[int, ...]] = field(default_factory=dict)

    def options(self) -> dict[str, Any]:
        """Arguments of a call for aux tensors and pattern numbers, if any."""
        return {**({"aux": self.aux} if self.aux else {}), **self.numbers}


def sizes_of(case: Case) -> dict[str, int]:
    """Sizes of a case by name, for the axes of aux tensors."""
    return {"batch": case.batch, "heads": case.heads, "q_len": case.q_len, "kv_len": case.kv_len}


def multiplicity(spec: AttentionSpec, case: Case, inputs: Inputs) -> torch.Tensor:
    """Multiplicity of each pair: float64 (batch, heads, q_len, kv_len), 0 for hidden pairs."""
    shown = _shown_by_pattern(spec, case, inputs)
    if not spec.kv_lengths:
        return shown
    lengths = dict(zip((t.name for t in spec.index_tensors), inputs.indices, strict=True))["kv_lengths"]
    assert lengths is not None
    return shown * (torch.arange(case.kv_len, device=shown.device) < lengths[:, None, None, None])


def _shown_by_pattern(spec: AttentionSpec, case: Case, inputs: Inputs) -> torch.Tensor:
    """Multiplicity of each pair by the pattern alone, without lengths."""
    device = inputs.q.device
    q_len, kv_len = case.q_len, case.kv_len
    query = torch.arange(q_len, device=device)[:, None]
    key = torch.arange(kv_len, device=device)[None, :]
    values = {name: t[:, None, None, None] for name, t in spec.pattern.values_of(inputs.indices).items()}
    pattern = spec.pattern.with_numbers(inputs.numbers) if inputs.numbers else spec.pattern
    seen: torch.Tensor = pattern.visible(query, key, q_len, kv_len, values)
    if spec.pattern.expression is not None:
        seen = seen & seen_by_expression(spec, sizes_of(case), inputs.aux, device)
    block = spec.pattern.fixed_block
    if block is None:
        return seen.double().expand(case.batch, case.heads, q_len, kv_len)
    key_blocks = -(-kv_len // block.kv)

    def listed(lists: torch.Tensor, counts: torch.Tensor | None, bits: torch.Tensor | None = None) -> Any:
        used = (lists >= 0) & (lists < key_blocks)
        if counts is not None:
            used = used & (torch.arange(lists.shape[3], device=device) < counts[..., None])
        if bits is not None:
            pairs = visible_pairs(bits, lists, used, block, key_blocks)[:, :, :q_len, :kv_len]
        else:
            total = torch.zeros((*lists.shape[:3], key_blocks), dtype=torch.float64, device=device)
            total.scatter_add_(3, lists.clamp(0, key_blocks - 1).long(), used.double())
            pairs = total.repeat_interleave(block.q, 2)[:, :, :q_len].repeat_interleave(block.kv, 3)[..., :kv_len]
        if pairs.shape[1] > 1:  # one list per pack of heads
            pairs = pairs.repeat_interleave(spec.pack_gqa, 1)
        return pairs.expand(case.batch, case.heads, -1, -1)

    given = dict(zip((t.name for t in spec.pattern.index_tensors), inputs.indices, strict=False))
    lists = given["kv_indices"]
    assert lists is not None
    result: torch.Tensor = listed(lists, given.get("kv_num_blocks"), given.get("mask_bits")) * seen
    full = given.get("full_kv_indices")
    return result if full is None else result + listed(full, given["full_kv_num_blocks"])
