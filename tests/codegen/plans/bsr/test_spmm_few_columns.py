"""BSR x dense for few columns: what its plan works out and refuses."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from codegen.errors import SpecError
from codegen.library import find_spec
from codegen.plan import Plan
from codegen.planning import plan_for
from codegen.plans.bsr.spmm_few_columns import WARPS
from codegen.problem import SpmmShape


def plan_of(rows: int = 16, cols: int = 16, **changes: Any) -> Plan:
    fields = {"op": "bsr_spmm", "arch": "sm_90a", "mma": "mma", "copy": "ld_global"}
    return plan_for(find_spec({**fields, "block": {"rows": rows, "cols": cols}, **changes}))


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("tile.m", {"tile": {"m": 32, "n": 16, "k": 16}}),  # more than a block has rows
        ("tile.m", {"rows": 48, "tile": {"m": 32, "n": 16, "k": 16}}),  # no whole part of them
        ("tile.n", {"tile": {"m": 16, "n": 128, "k": 16}}),
        ("tile.k", {"tile": {"m": 16, "n": 16, "k": 32}}),  # more than a block has columns
        ("tile.k", {"cols": 128, "tile": {"m": 16, "n": 16, "k": 64}}),
        ("stages", {"stages": 1}),
        ("stages", {"stages": 8}),
        ("tile", {"rows": 64, "cols": 64, "tile": {"m": 64, "n": 64, "k": 32}, "stages": 4}),  # registers
        ("epilogue", {"epilogue": {"bias": True}}),
        ("transpose_a", {"transpose_a": True}),
        ("scheduler", {"scheduler": "dynamic"}),
        ("accumulate", {"accumulate": True}),
        ("ctas_per_sm", {"ctas_per_sm": 2}),
    ],
)
def test_what_the_kernel_is_not_written_for_is_refused(field: str, changes: dict[str, Any]) -> None:
    with pytest.raises(SpecError) as caught:
        plan_of(**changes)
    assert caught.value.field == field


@given(
    block=st.sampled_from([(16, 16), (32, 32), (64, 64), (128, 128), (16, 32), (64, 16)]),
    rows=st.integers(1, 2000),
    columns=st.integers(1, 200),
    sms=st.integers(1, 132),
)
def test_a_launch_covers_the_product(block: tuple[int, int], rows: int, columns: int, sms: int) -> None:
    plan = plan_of(*block)
    shape = SpmmShape(rows * block[0], 4 * block[1], columns, blocks=rows, b_row_stride=columns)
    slots = sms * plan.ctas_per_sm
    args = plan.problem(shape, slots)
    numbers, tile = args.numbers, plan.spec.tile
    assert numbers["column_tiles"] * tile.n >= columns > (numbers["column_tiles"] - 1) * tile.n
    assert args.tiles * tile.m == shape.rows * numbers["column_tiles"]
    assert args.block is not None and args.block.threads % 32 == 0
    warps = args.block.threads // 32
    assert warps in WARPS and args.block.threads <= plan.threads
    assert args.block.shared_bytes * WARPS[0] == plan.shared_bytes * warps
    # All tiles run at once, if they can, and could not with twice as many warps each.
    assert args.tiles <= sms * plan.arch.blocks_for(32 * warps, plan.registers.limit) or warps == 1
    assert warps == WARPS[0] or args.tiles > sms * plan.arch.blocks_for(64 * warps, plan.registers.limit)


def test_a_lane_has_words_of_columns_where_b_is_stored_so() -> None:
    tile = {"m": 32, "n": 64, "k": 32}
    by_rows, by_columns = (plan_of(32, 32, tile=tile, b_layout=layout) for layout in ("row_major", "column_major"))
    assert by_rows.registers == by_columns.registers
    names = [{param.name for param in plan.params} for plan in (by_rows, by_columns)]
    assert names[0] ^ names[1] == {"b_row_stride", "b_column_stride"}


def test_registers_have_room() -> None:
    for rows, width in ((16, 16), (16, 32), (16, 64), (32, 16), (64, 32), (128, 32)):
        side = min(rows, 32)
        plan = plan_of(rows, rows, tile={"m": side, "n": width, "k": side}, stages=2)
        assert plan.registers.needed <= plan.registers.limit
        assert plan.ctas_per_sm >= 2
