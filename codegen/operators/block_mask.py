"""The record of the operator that builds block lists from a mask."""

from __future__ import annotations

from codegen.operators.record import Operator
from codegen.plans import block_mask
from codegen.problem import BlockMaskShape
from codegen.select.default_tables import BLOCK_MASK
from codegen.spec import BlockMaskSpec

_CASES = "plain no_order odd_lengths few_queries few_keys one_pair block_ends many_key_blocks many_batches"

BLOCK_MASK_OPERATOR = Operator(
    model=BlockMaskSpec,
    shape=BlockMaskShape,
    kernel=lambda spec: block_mask,
    rows=BLOCK_MASK,
    stem=lambda spec: [spec.pattern.stem()],
    title=lambda spec: spec.op,
    computes=lambda spec: ("pattern",),  # lists are int32 for any type
    cases=lambda plan, spec: _CASES.split(),
    tolerance=0.0,  # bit for bit
)
