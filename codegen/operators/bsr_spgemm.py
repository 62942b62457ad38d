"""The record of BSR x BSR."""

from __future__ import annotations

from codegen.operators.record import Kernel, Operator, Sizes, Unit
from codegen.plan import Plan
from codegen.plans.bsr import spgemm_multistage as bsr_spgemm_multistage
from codegen.plans.bsr import spgemm_sm90a as bsr_spgemm_sm90a
from codegen.problem import SpgemmShape
from codegen.select.default_tables import BSR_SPGEMM
from codegen.select.defaults import bsr_spgemm_features
from codegen.select.variations import spgemm_variations
from codegen.spec import BsrSpgemmSpec

_CASES = (
    "plain uneven_rows int32 int32_and_int64 one_block one_a_row full no_blocks_of_a no_blocks_of_b nothing_meets "
    "long_rows chunks_without_hits wide many_tiles unsorted long_unsorted_rows columns_out_of_range strided own_out"
)
_PATTERN_OF_C = (
    "all_of_c one_of_a_row nothing_of_c last_row_of_c many_rows_of_c repeated_blocks_of_c columns_of_c_out_of_range"
)
_BALANCED = "all_tiles_put_off no_tile_put_off long_rows_handed_out"


def _kernel(spec: BsrSpgemmSpec) -> Kernel:
    return bsr_spgemm_sm90a if spec.mma == "wgmma" else bsr_spgemm_multistage


def _units(spec: BsrSpgemmSpec, sizes: Sizes) -> list[Unit]:
    del sizes
    cols = spec.block.cols, "the columns of a block"
    return [("rows", spec.block.rows, "the rows of a block"), ("depth", *cols), ("columns", *cols)]


def _cases(plan: Plan, spec: BsrSpgemmSpec) -> list[str]:
    del plan
    more = _PATTERN_OF_C if spec.output == "bsr" else _BALANCED if spec.is_dynamic else ""
    return [*_CASES.split(), *more.split()]


BSR_SPGEMM_OPERATOR = Operator(
    model=BsrSpgemmSpec,
    shape=SpgemmShape,
    kernel=_kernel,
    rows=BSR_SPGEMM,
    features=bsr_spgemm_features,
    variations=spgemm_variations,
    stem=lambda spec: [f"b{spec.block.rows}x{spec.block.cols}"],
    title=lambda spec: f"blocks {spec.block.rows} x {spec.block.cols}",
    units=_units,
    counts=lambda plan, spec: ("blocks",) if spec.output == "bsr" else (),
    smallest=lambda plan, spec: {"blocks": 1},
    cases=_cases,
)
