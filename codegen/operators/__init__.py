"""One record per operator, with everything that differs between operators."""

from __future__ import annotations

from typing import Any

from codegen.operators.attention import ATTENTION_OPERATOR
from codegen.operators.attention_backward import ATTENTION_BACKWARD_OPERATOR
from codegen.operators.block_mask import BLOCK_MASK_OPERATOR
from codegen.operators.bsr_sddmm import BSR_SDDMM_OPERATOR
from codegen.operators.bsr_spgemm import BSR_SPGEMM_OPERATOR
from codegen.operators.bsr_spmm import BSR_SPMM_OPERATOR
from codegen.operators.key_lists_backward import KEY_LISTS_BACKWARD_OPERATOR
from codegen.operators.key_lists_forward import KEY_LISTS_FORWARD_OPERATOR
from codegen.operators.paged_attention import PAGED_ATTENTION_OPERATOR
from codegen.operators.quantize import QUANTIZE_OPERATOR
from codegen.operators.record import Operator
from codegen.operators.select_topk import SELECT_TOPK_OPERATOR
from codegen.operators.tile_copy import TILE_COPY_OPERATOR
from codegen.spec import Spec

OPERATORS: dict[str, Operator[Any]] = {
    operator.name: operator
    for operator in (
        ATTENTION_OPERATOR,
        ATTENTION_BACKWARD_OPERATOR,
        BLOCK_MASK_OPERATOR,
        BSR_SPMM_OPERATOR,
        BSR_SDDMM_OPERATOR,
        BSR_SPGEMM_OPERATOR,
        KEY_LISTS_BACKWARD_OPERATOR,
        KEY_LISTS_FORWARD_OPERATOR,
        PAGED_ATTENTION_OPERATOR,
        QUANTIZE_OPERATOR,
        SELECT_TOPK_OPERATOR,
        TILE_COPY_OPERATOR,
    )
}
"""Records by the name of the operator."""


def operator_of(spec: Spec) -> Operator[Any]:
    """The record of a spec's operator."""
    return OPERATORS[spec.op]
