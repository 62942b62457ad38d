"""The record of sampled products."""

from __future__ import annotations

from codegen.operators.record import Kernel, Operator, Sizes, Unit
from codegen.plan import require
from codegen.plans.bsr import sddmm_multistage as bsr_sddmm_multistage
from codegen.plans.bsr import sddmm_sm90a as bsr_sddmm_sm90a
from codegen.plans.bsr import sddmm_sm90a_fp8 as bsr_sddmm_sm90a_fp8
from codegen.plans.bsr import sddmm_sm90a_swap_ab as bsr_sddmm_sm90a_swap_ab
from codegen.problem import SddmmShape
from codegen.select.default_tables import BSR_SDDMM
from codegen.select.defaults import bsr_sddmm_features
from codegen.select.variations import sddmm_variations
from codegen.spec import BsrSddmmSpec

_CASES = (
    "plain uneven_rows int32 odd_k short_k padded_k long_k one_block one_a_row no_blocks empty_rows many_rows "
    "many_tiles repeated_columns columns_out_of_range strided own_out"
)


def _kernel(spec: BsrSddmmSpec) -> Kernel:
    large = spec.mma == "wgmma" and not spec.is_fp8 and spec.block.rows not in bsr_sddmm_sm90a_swap_ab.SIZES
    for name, layout in (("a_layout", spec.a_layout), ("b_layout", spec.b_layout)):
        where = "16-bit types, wgmma and blocks of 64 or 128 rows"
        require(large or layout == "row_major", name, f"is {layout}, which requires {where}; allowed: row_major")
    if spec.is_fp8 and spec.mma == "wgmma":
        return bsr_sddmm_sm90a_fp8
    if spec.mma == "wgmma" and spec.block.rows in bsr_sddmm_sm90a_swap_ab.SIZES:
        return bsr_sddmm_sm90a_swap_ab
    require(
        spec.ctas_per_sm == 1,
        "ctas_per_sm",
        f"is {spec.ctas_per_sm}; more than 1 requires wgmma with blocks of 16 or 32 rows",
    )
    return bsr_sddmm_sm90a if spec.mma == "wgmma" else bsr_sddmm_multistage


def _units(spec: BsrSddmmSpec, sizes: Sizes) -> list[Unit]:
    del sizes
    return [("rows", spec.block.rows, "the rows of a block"), ("columns", spec.block.cols, "its columns")]


BSR_SDDMM_OPERATOR = Operator(
    model=BsrSddmmSpec,
    shape=SddmmShape,
    kernel=_kernel,
    rows=BSR_SDDMM,
    features=bsr_sddmm_features,
    variations=sddmm_variations,
    stem=lambda spec: [f"b{spec.block.rows}x{spec.block.cols}"],
    title=lambda spec: f"blocks {spec.block.rows} x {spec.block.cols}",
    units=_units,
    cases=lambda plan, spec: _CASES.split(),
)
