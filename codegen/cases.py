"""Requirements of a receipt: the cases of its spec, and the largest tolerance of a case.

Names alone: inputs and oracles are in ``runtime/verify``, whose tests hold its tables to these names.
"""

from __future__ import annotations

from codegen.attention_cases import cases_of as attention_cases_of
from codegen.attention_cases import gradient_cases_of
from codegen.dtypes import FP8
from codegen.plan import Plan
from codegen.problem import SpmmShape
from codegen.spec import AttentionBackwardSpec, AttentionSpec, BsrSpgemmSpec, BsrSpmmSpec

RANDOM_SHAPES = "random_shapes"
"""The case of attention that is many: all its random shapes."""
MANY_COLUMNS = 1 << 24
"""Of B: more than any kernel has at once."""

_CASES = {
    "block_mask": "plain no_order odd_lengths few_queries few_keys one_pair block_ends many_key_blocks many_batches",
    "bsr_spmm": "plain uneven_rows int32 odd_n narrow_n padded_n one_block no_blocks long_rows many_tiles "
    "repeated_columns rising_columns uneven_rising columns_out_of_range strided batch batch_strided",
    "bsr_sddmm": "plain uneven_rows int32 odd_k short_k padded_k long_k one_block one_a_row no_blocks empty_rows "
    "many_rows many_tiles repeated_columns columns_out_of_range strided own_out",
    "bsr_spgemm": "plain uneven_rows int32 int32_and_int64 one_block one_a_row full no_blocks_of_a no_blocks_of_b "
    "nothing_meets long_rows chunks_without_hits wide many_tiles unsorted long_unsorted_rows columns_out_of_range "
    "strided own_out",
    "quantise": "plain many_heads long one_row odd_length short_of_a_block outliers offset small zeros strange given "
    "into given_into",
    "select_topk": "plain causal causal_short_queries causal_more_queries ties ties_causal one_block "
    "more_than_there_are odd_lengths narrow_head odd_head wide_head many_key_blocks many_query_blocks always_beyond "
    "always_near",
    "tile_copy": "plain one_tile one_chunk odd_rows odd_columns odd_both many_tiles tall wide strided",
}
_CUT = "around_the_limit around_the_limit_int32 few_long_rows few_long_rows_batch only_long_rows"
_GATHERED = (
    "several_row_groups row_groups_repeated row_groups_few_long row_groups_batch row_groups_out_of_range "
    "row_groups_many_tiles"
)
_PATTERN_OF_C = (
    "all_of_c one_of_a_row nothing_of_c last_row_of_c many_rows_of_c repeated_blocks_of_c columns_of_c_out_of_range"
)
_BALANCED = "all_tiles_put_off no_tile_put_off long_rows_handed_out"

# Largest absolute difference allowed on normal inputs. bf16 has 8 times fewer digits than fp16.
ABSOLUTE = {"fp16": 2e-3, "bf16": 1.6e-2}
BEYOND_FP8 = 1.0
"""Of FP8, whose errors are held to emulations: results are about 1, and one that is off by as much is no result."""
CLOSE_PRODUCTS = 1e-3
"""Of top-k selection: products that differ by as much never change places."""


def case_names(plan: Plan) -> list[str]:
    """Return the names of a kernel's cases, as ``codegen verify`` runs them; the random shapes count as one."""
    spec = plan.spec
    if isinstance(spec, AttentionSpec):
        return [*(case.name for case in attention_cases_of(spec)), RANDOM_SHAPES]
    if isinstance(spec, AttentionBackwardSpec):
        return [*(case.name for case in gradient_cases_of(spec)), RANDOM_SHAPES]
    more = ""
    if isinstance(spec, BsrSpmmSpec):
        more = _more_of_spmm(plan, spec)
    elif isinstance(spec, BsrSpgemmSpec):
        more = _PATTERN_OF_C if spec.output == "bsr" else _BALANCED if spec.is_dynamic else ""
    return [*_CASES[spec.op].split(), *more.split()]


def _more_of_spmm(plan: Plan, spec: BsrSpmmSpec) -> str:
    if plan.row_cutting is not None:
        return _CUT
    if plan.gathered is not None:
        return _GATHERED
    return "several_groups" if spec.mma == "mma" or grouped_column_tiles(plan) > 1 else ""


def grouped_column_tiles(plan: Plan) -> int:
    """The number of column tiles of BSR x dense by WGMMA that are computed as a group; 1 without groups."""
    spec = plan.spec
    assert isinstance(spec, BsrSpmmSpec)
    if spec.mma != "wgmma" or spec.transpose_a:
        return 1
    wide = SpmmShape(rows=3 * spec.block.rows, depth=8192, columns=MANY_COLUMNS, blocks=0)
    return int(plan.problem(wide).numbers.get("group_tiles", 1))


def most_allowed(plan: Plan) -> float:
    """Return the largest tolerance that a case of a kernel has, whatever its inputs are."""
    spec = plan.spec
    if spec.op in ("block_mask", "quantise", "tile_copy"):  # bit for bit
        return 0.0
    if spec.op == "attention_backward":  # errors are shares of what is allowed
        return 1.0
    if spec.op == "select_topk":
        return CLOSE_PRODUCTS
    return BEYOND_FP8 if spec.dtype in FP8 else ABSOLUTE[plan.output]
