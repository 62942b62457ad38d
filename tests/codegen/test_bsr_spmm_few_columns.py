"""BSR x dense for few columns: what its plan works out and refuses."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from codegen.errors import SpecError
from codegen.library import find_spec
from codegen.plan import Plan
from codegen.plans import plan_for
from codegen.plans.bsr_spmm_few_columns import SLICES, STRIP_ROWS
from codegen.problem import SpmmShape


def plan_of(rows: int = 16, cols: int = 16, **changes: Any) -> Plan:
    fields = {"op": "bsr_spmm", "arch": "sm_90a", "mma": "mma", "copy": "ld_global"}
    return plan_for(find_spec({**fields, "block": {"rows": rows, "cols": cols}, **changes}))


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("block.rows", {"rows": 128}),
        ("block.cols", {"cols": 128}),
        ("tile.m", {"tile": {"m": 80, "n": 16, "k": 1024}}),
        ("tile.n", {"tile": {"m": 256, "n": 128, "k": 1024}}),
        ("tile.k", {"tile": {"m": 256, "n": 16, "k": 1040}}),
        ("stages", {"stages": 1}),
        ("stages", {"tile": {"m": 960, "n": 64, "k": 2048}}),  # shared memory
        ("epilogue", {"epilogue": {"bias": True}}),
        ("transpose_a", {"transpose_a": True}),
        ("b_layout", {"b_layout": "column_major"}),
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
    block=st.sampled_from([(16, 16), (32, 32), (64, 64), (16, 32), (64, 16)]),
    rows=st.integers(1, 2000),
    depth=st.integers(1, 256),
    columns=st.integers(1, 200),
    at_once=st.sampled_from([0, 1, 8, 15, 16]),
)
def test_tiles_and_slices_cover_the_product(
    block: tuple[int, int], rows: int, depth: int, columns: int, at_once: int
) -> None:
    plan = plan_of(*block)
    shape = SpmmShape(rows * block[0], depth * block[1], columns, blocks=rows, b_row_stride=columns)
    args = plan.problem(shape, at_once * SLICES)
    numbers = args.numbers
    tile_rows = numbers["tile_strips"] * STRIP_ROWS
    assert 0 < tile_rows <= plan.spec.tile.m
    assert tile_rows % block[0] == 0
    assert (numbers["row_tiles"] - 1) * tile_rows < shape.rows <= numbers["row_tiles"] * tile_rows
    assert 1 <= numbers["row_clusters"] <= numbers["row_tiles"]  # each has a tile, so that its barriers end
    assert numbers["slice_blocks"] * SLICES >= depth
    if shape.depth <= plan.depth:
        assert numbers["slice_blocks"] * block[1] <= plan.spec.tile.k
    column_tiles = -(-columns // plan.spec.tile.n)
    assert args.tiles == numbers["row_clusters"] * column_tiles * SLICES
    if at_once >= column_tiles and at_once:
        assert args.tiles <= at_once * SLICES


def test_registers_have_room() -> None:
    for rows, stages, width in ((16, 8, 16), (32, 4, 16), (16, 4, 32), (32, 2, 64)):
        plan = plan_of(rows, rows, tile={"m": 320, "n": width, "k": 640}, stages=stages)
        assert plan.registers.needed <= plan.registers.limit == 96
