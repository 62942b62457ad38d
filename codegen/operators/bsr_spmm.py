"""The record of BSR x dense."""

from __future__ import annotations

from codegen.operators.record import Kernel, Operator, Sizes, Unit
from codegen.plan import Plan, require
from codegen.plans.bsr import gathered
from codegen.plans.bsr import spmm_few_columns as bsr_spmm_few_columns
from codegen.plans.bsr import spmm_gemv as bsr_spmm_gemv
from codegen.plans.bsr import spmm_mma as bsr_spmm_mma
from codegen.plans.bsr import spmm_sm90a as bsr_spmm_sm90a
from codegen.plans.bsr import spmm_sm90a_fp8 as bsr_spmm_sm90a_fp8
from codegen.plans.bsr import spmm_sm90a_gathered as bsr_spmm_sm90a_gathered
from codegen.plans.bsr import spmm_sm90a_gathered_mma as bsr_spmm_sm90a_gathered_mma
from codegen.plans.bsr import spmm_sm90a_narrow as bsr_spmm_sm90a_narrow
from codegen.plans.bsr import spmm_sm90a_pairs as bsr_spmm_sm90a_pairs
from codegen.plans.bsr import spmm_sm90a_swap_ab as bsr_spmm_sm90a_swap_ab
from codegen.plans.bsr import spmm_sm90a_transposed as bsr_spmm_sm90a_transposed
from codegen.plans.bsr import spmm_wmma as bsr_spmm_wmma
from codegen.problem import SpmmShape
from codegen.select.default_tables import BSR_SPMM
from codegen.select.defaults import bsr_spmm_features
from codegen.select.variations import spmm_variations
from codegen.spec import BsrSpmmSpec

MANY_COLUMNS = 1 << 24
"""Columns of B: more than those of any tile."""
_CASES = (
    "plain uneven_rows int32 odd_n narrow_n padded_n one_block no_blocks long_rows many_tiles repeated_columns "
    "rising_columns uneven_rising columns_out_of_range strided batch batch_strided"
)
_CUT = "around_the_limit around_the_limit_int32 few_long_rows few_long_rows_batch only_long_rows"
_GATHERED = (
    "several_row_groups row_groups_repeated row_groups_few_long row_groups_batch row_groups_out_of_range "
    "row_groups_many_tiles"
)


_STRIDED = (
    "one_column one_column_apart one_column_not_aligned two_columns three_columns_by_rows four_columns "
    "five_columns_by_rows six_columns_apart seven_columns eight_columns eight_columns_by_rows several_tiles one_block "
    "no_blocks long_rows few_long_rows repeated_columns columns_out_of_range batch batch_of_one"
)


def _kernel(spec: BsrSpmmSpec) -> Kernel:
    if spec.b_layout == "strided":
        return bsr_spmm_gemv
    if spec.is_fp8 and spec.mma == "wgmma":
        return bsr_spmm_sm90a_fp8
    if gathered.gathers_rows(spec):
        by_mma = spec.mma == "mma"
        return bsr_spmm_sm90a_gathered_mma if by_mma else bsr_spmm_sm90a_gathered
    if spec.mma == "wgmma":
        return _kernel_wgmma(spec)
    _require_one_cta(spec)
    by_copy: dict[str, Kernel] = {"cp_async": bsr_spmm_mma, "ld_global": bsr_spmm_few_columns}
    return by_copy[spec.copy_] if spec.mma == "mma" else bsr_spmm_wmma


def _kernel_wgmma(spec: BsrSpmmSpec) -> Kernel:
    if not spec.transpose_a and spec.block.rows in bsr_spmm_sm90a_swap_ab.SIZES:
        return bsr_spmm_sm90a_swap_ab
    if bsr_spmm_sm90a_narrow.is_narrow(spec):
        return bsr_spmm_sm90a_narrow
    _require_one_cta(spec)
    if spec.transpose_a:
        return bsr_spmm_sm90a_transposed
    pairs = (spec.block.rows, spec.tile.m) == (64, bsr_spmm_sm90a_pairs.ROWS)
    return bsr_spmm_sm90a_pairs if pairs else bsr_spmm_sm90a


def _require_one_cta(spec: BsrSpmmSpec) -> None:
    require(
        spec.ctas_per_sm == 1,
        "ctas_per_sm",
        f"is {spec.ctas_per_sm}; more than 1 requires wgmma with blocks of 16 or 32 rows, not transposed",
    )


def _units(spec: BsrSpmmSpec, sizes: Sizes) -> list[Unit]:
    del sizes
    down, across = spec.block.rows, spec.block.cols
    if spec.transpose_a:
        down, across = across, down
    return [("rows", down, "the side of a block"), ("depth", across, "the side of a block")]


def _counts(plan: Plan, spec: BsrSpmmSpec) -> tuple[str, ...]:
    del spec
    return (*(("chunk_blocks",) if plan.row_cutting else ()), *(("groups", "rounds") if plan.gathered else ()))


def _smallest(plan: Plan, spec: BsrSpmmSpec) -> dict[str, int | None]:
    del spec
    chunk = None if plan.row_cutting is None else plan.row_cutting.step
    return {"chunk_blocks": chunk, "groups": 1 if plan.gathered else None, "rounds": 1}


def _cases(plan: Plan, spec: BsrSpmmSpec) -> list[str]:
    if spec.b_layout == "strided":
        return _STRIDED.split()
    if plan.row_cutting is not None:
        more = _CUT
    elif plan.gathered is not None:
        more = _GATHERED
    else:
        more = "several_groups" if spec.mma == "mma" or grouped_column_tiles(plan, spec) > 1 else ""
    return [*_CASES.split(), *more.split()]


def grouped_column_tiles(plan: Plan, spec: BsrSpmmSpec) -> int:
    """Column tiles that a WGMMA kernel computes as a group; 1 without groups."""
    if spec.mma != "wgmma" or spec.transpose_a:
        return 1
    wide = SpmmShape(rows=3 * spec.block.rows, depth=8192, columns=MANY_COLUMNS, blocks=0)
    return int(plan.problem(wide).numbers.get("group_tiles", 1))


BSR_SPMM_OPERATOR = Operator(
    model=BsrSpmmSpec,
    shape=SpmmShape,
    kernel=_kernel,
    heights=(bsr_spmm_sm90a_pairs.ROWS, gathered.ROWS),
    rows=BSR_SPMM,
    features=bsr_spmm_features,
    variations=spmm_variations,
    stem=lambda spec: [f"b{spec.block.rows}x{spec.block.cols}"],
    title=lambda spec: f"blocks {spec.block.rows} x {spec.block.cols}",
    units=_units,
    counts=_counts,
    smallest=_smallest,
    cases=_cases,
)
