"""BSR x dense for up to 8 columns: what its plan works out and refuses."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from codegen.errors import SpecError
from codegen.library import find_spec
from codegen.plan import Plan
from codegen.planning import plan_for
from codegen.plans.bsr.spmm_gemv import COLUMNS, WARPS
from codegen.problem import SpmmShape


def plan_of(rows: int = 16, cols: int = 16, **changes: Any) -> Plan:
    fields = {"op": "bsr_spmm", "arch": "sm_90a", "b_layout": "strided", "block": {"rows": rows, "cols": cols}}
    return plan_for(find_spec({**fields, **changes}))


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("tile.m", {"tile": {"m": 32, "n": 8, "k": 16}}),  # more than a block has rows
        ("tile.m", {"rows": 24}),  # no whole part of them
        ("tile.n", {"tile": {"m": 16, "n": 16, "k": 16}}),
        ("tile.k", {"tile": {"m": 16, "n": 8, "k": 32}}),  # more than a block has columns
        ("tile.k", {"cols": 128, "tile": {"m": 16, "n": 8, "k": 64}}),
        ("stages", {"stages": 1}),
        ("stages", {"stages": 3}),
        ("tile", {"rows": 64, "cols": 64, "tile": {"m": 64, "n": 8, "k": 32}, "stages": 4}),  # registers
        ("mma", {"mma": "mma", "copy": "cp_async"}),
        ("mma", {"mma": "wgmma"}),
        ("dtype", {"dtype": "e4m3"}),
        ("transpose_a", {"transpose_a": True}),
        ("scheduler", {"scheduler": "dynamic"}),
        ("ctas_per_sm", {"ctas_per_sm": 2}),
    ],
)
def test_what_the_kernel_is_not_written_for_is_refused(field: str, changes: dict[str, Any]) -> None:
    with pytest.raises(SpecError) as caught:
        plan_of(**changes)
    assert caught.value.field == field


@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90a", "sm_120"])
def test_architectures_with_mma_sync_have_it_and_other_layouts_have_not(arch: str) -> None:
    assert plan_of(arch=arch).template == "bsr_spmm/gemv.cu.j2"
    by_rows = {"arch": arch, "mma": "mma", "copy": "ld_global", "b_layout": "row_major"}
    if arch == "sm_90a":
        assert plan_of(**by_rows).template == "bsr_spmm/sm90a_few_columns.cu.j2"
        return
    with pytest.raises(SpecError, match=rf"b_layout: is row_major; {arch} has kernels with mma and ld_global for"):
        plan_of(**by_rows)


@pytest.mark.parametrize(("rows", "cols", "tile"), [(16, 16, (16, 16)), (48, 32, (16, 32)), (128, 64, (32, 32))])
def test_blocks_whose_sides_are_multiples_of_16_have_a_default(rows: int, cols: int, tile: tuple[int, int]) -> None:
    found = plan_of(rows, cols).spec.tile
    assert (found.m, found.n, found.k) == (tile[0], COLUMNS, tile[1])


@given(
    block=st.sampled_from([(16, 16), (32, 32), (64, 64), (128, 128), (16, 32), (64, 16), (48, 48)]),
    rows=st.integers(1, 2000),
    columns=st.integers(1, 20),
    sms=st.integers(1, 132),
)
def test_a_launch_covers_the_product(block: tuple[int, int], rows: int, columns: int, sms: int) -> None:
    plan = plan_of(*block)
    shape = SpmmShape(rows * block[0], 4 * block[1], columns, blocks=rows, b_row_stride=columns)
    args = plan.problem(shape, sms * plan.ctas_per_sm)
    numbers, tile = args.numbers, plan.spec.tile
    assert numbers["column_tiles"] * COLUMNS >= columns > (numbers["column_tiles"] - 1) * COLUMNS
    assert args.tiles * tile.m == shape.rows * numbers["column_tiles"]
    assert args.block is not None and args.block.threads % 32 == 0
    warps = args.block.threads // 32
    assert warps in WARPS and args.block.threads <= plan.threads
    assert args.block.shared_bytes == warps * tile.m * COLUMNS * 4
    # All tiles run at once, if they can, and could not with twice as many warps each.
    assert args.tiles <= sms * plan.arch.blocks_for(32 * warps, plan.registers.limit) or warps == WARPS[-1]
    assert warps == WARPS[0] or args.tiles > sms * plan.arch.blocks_for(64 * warps, plan.registers.limit)


def test_parameters_follow_the_epilogue() -> None:
    def names(**changes: Any) -> set[str]:
        return {param.name for param in plan_of(**changes).params}

    plain, added = names(), {"c_in", "c_in_row_stride", "c_in_column_stride", "beta"}
    assert names(accumulate=True) - plain == added
    assert names(epilogue={"activation": "gelu", "bias": True}) - plain == {"bias"}
    assert names(epilogue={"activation": "relu"}) == plain
