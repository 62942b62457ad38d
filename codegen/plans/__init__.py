"""One module per kernel template: from a spec to its plan."""

from __future__ import annotations

from typing import TYPE_CHECKING

from codegen.dtypes import FP8
from codegen.errors import SpecError
from codegen.plan import Plan, require
from codegen.plans import (
    attention_backward,
    attention_backward_daux,
    attention_backward_dq_dkdv,
    attention_backward_mma_sync,
    attention_mma_sync,
    attention_sm90a,
    attention_wmma,
    block_mask,
    bsr_sddmm_multistage,
    bsr_sddmm_sm90a,
    bsr_sddmm_sm90a_fp8,
    bsr_sddmm_sm90a_swap_ab,
    bsr_spgemm_multistage,
    bsr_spgemm_sm90a,
    bsr_spmm_few_columns,
    bsr_spmm_mma,
    bsr_spmm_sm90a,
    bsr_spmm_sm90a_fp8,
    bsr_spmm_sm90a_gathered,
    bsr_spmm_sm90a_gathered_mma,
    bsr_spmm_sm90a_pairs,
    bsr_spmm_sm90a_swap_ab,
    bsr_spmm_sm90a_transposed,
    bsr_spmm_wmma,
    gathered,
    quantise,
    select_topk,
    tile_copy,
)
from codegen.spec import (
    AttentionBackwardSpec,
    AttentionSpec,
    BlockMaskSpec,
    BsrSddmmSpec,
    BsrSpgemmSpec,
    BsrSpmmSpec,
    QuantiseSpec,
    SelectTopkSpec,
    Spec,
    UnchosenSpec,
)

if TYPE_CHECKING:
    from codegen.library import NamedSpec


def plan_for(named: NamedSpec) -> Plan:
    """Work out the plan of a spec.

    Raises:
        SpecError: when the spec cannot work on its architecture, with the field, the numbers and the place in the file.
    """
    try:
        return plan_of(named.spec, named.stem)
    except SpecError as error:
        raise named.located(error) from None


def plan_of(spec: Spec, stem: str) -> Plan:
    """Work out the plan of a spec that has no place in a file.

    Raises:
        SpecError: as :func:`plan_for` does, without the place.
    """
    if isinstance(spec, AttentionSpec):
        if spec.mma == "wgmma":
            return attention_sm90a.plan(spec, stem)
        return attention_wmma.plan(spec, stem) if spec.mma == "wmma" else attention_mma_sync.plan(spec, stem)
    if isinstance(spec, BsrSddmmSpec):
        return _sddmm(spec, stem)
    if isinstance(spec, BsrSpgemmSpec):
        spgemm = bsr_spgemm_sm90a.plan if spec.mma == "wgmma" else bsr_spgemm_multistage.plan
        return spgemm(spec, stem)
    if isinstance(spec, BsrSpmmSpec):
        by_wgmma = spec.dtype in FP8 and spec.mma == "wgmma"
        return bsr_spmm_sm90a_fp8.plan(spec, stem) if by_wgmma else _spmm(spec, stem)
    return _unchosen(spec, stem)


def _unchosen(spec: UnchosenSpec, stem: str) -> Plan:
    if isinstance(spec, AttentionBackwardSpec):
        if spec.gradients == "daux":
            return attention_backward_daux.plan(spec, stem)
        if spec.mma == "mma":
            return attention_backward_mma_sync.plan(spec, stem)
        if spec.gradients == "dq_dkdv":
            return attention_backward_dq_dkdv.plan(spec, stem)
        return attention_backward.plan(spec, stem)
    if isinstance(spec, BlockMaskSpec | QuantiseSpec):
        return quantise.plan(spec, stem) if isinstance(spec, QuantiseSpec) else block_mask.plan(spec, stem)
    return select_topk.plan(spec, stem) if isinstance(spec, SelectTopkSpec) else tile_copy.plan(spec, stem)


def _spmm(spec: BsrSpmmSpec, stem: str) -> Plan:
    if gathered.gathers_rows(spec):
        if spec.mma == "mma":
            return bsr_spmm_sm90a_gathered_mma.plan(spec, stem)
        return bsr_spmm_sm90a_gathered.plan(spec, stem)
    if spec.mma == "wgmma" and not spec.transpose_a and spec.block.rows in bsr_spmm_sm90a_swap_ab.SIZES:
        return bsr_spmm_sm90a_swap_ab.plan(spec, stem)
    require(
        spec.ctas_per_sm == 1,
        "ctas_per_sm",
        f"is {spec.ctas_per_sm}; more than 1 is written for wgmma with blocks of 16 and 32 rows, not transposed",
    )
    if spec.mma != "wgmma":
        by_mma = {"cp_async": bsr_spmm_mma.plan, "ld_global": bsr_spmm_few_columns.plan}
        return by_mma[spec.copy_](spec, stem) if spec.mma == "mma" else bsr_spmm_wmma.plan(spec, stem)
    if spec.transpose_a:
        return bsr_spmm_sm90a_transposed.plan(spec, stem)
    pairs = (spec.block.rows, spec.tile.m) == (64, bsr_spmm_sm90a_pairs.ROWS)
    return bsr_spmm_sm90a_pairs.plan(spec, stem) if pairs else bsr_spmm_sm90a.plan(spec, stem)


def _sddmm(spec: BsrSddmmSpec, stem: str) -> Plan:
    if spec.dtype in FP8 and spec.mma == "wgmma":
        return bsr_sddmm_sm90a_fp8.plan(spec, stem)
    if spec.mma == "wgmma" and spec.block.rows in bsr_sddmm_sm90a_swap_ab.SIZES:
        return bsr_sddmm_sm90a_swap_ab.plan(spec, stem)
    require(
        spec.ctas_per_sm == 1,
        "ctas_per_sm",
        f"is {spec.ctas_per_sm}; more than 1 is written for wgmma with blocks of 16 and 32 rows",
    )
    return bsr_sddmm_sm90a.plan(spec, stem) if spec.mma == "wgmma" else bsr_sddmm_multistage.plan(spec, stem)
