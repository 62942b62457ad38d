"""BSR x dense with narrow tiles of wgmma: what its plan works out and refuses."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from codegen.errors import SpecError
from codegen.library import find_spec
from codegen.plan import Plan
from codegen.planning import plan_for
from codegen.plans.bsr.spmm_sm90a_narrow import FEWEST_BLOCKS, MOST_PARTS, PARTS_PER_SM
from codegen.problem import SpmmShape
from codegen.spec import BsrSpmmSpec

TEMPLATE = "bsr_spmm/sm90a_narrow.cu.j2"


def plan_of(rows: int = 64, cols: int = 64, tile: tuple[int, int, int] = (64, 32, 64), **changes: Any) -> Plan:
    m, n, k = tile
    fields = {"op": "bsr_spmm", "arch": "sm_90a", "b_layout": "column_major", "mma": "wgmma", "stages": 4}
    fields |= {"block": {"rows": rows, "cols": cols}, "tile": {"m": m, "n": n, "k": k}}
    return plan_for(find_spec({**fields, **changes}))


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("tile.m", {"tile": (128, 32, 64)}),  # more than a block has rows
        ("tile.m", {"rows": 128, "cols": 128, "tile": (32, 32, 64)}),
        ("tile.n", {"tile": (64, 48, 64)}),
        ("tile.k", {"tile": (64, 32, 32)}),
        ("block.rows", {"rows": 192, "cols": 64}),
        ("block.cols", {"cols": 32}),
        ("stages", {"stages": 1}),
        ("ctas_per_sm", {"tile": (64, 128, 64), "ctas_per_sm": 3}),  # shared memory
        ("accumulate", {"accumulate": True}),
        ("scheduler", {"scheduler": "dynamic"}),
        ("tile.n", {"b_layout": "row_major"}),
        ("tile.n", {"transpose_a": True}),
    ],
)
def test_what_the_kernel_is_not_written_for_is_refused(field: str, changes: dict[str, Any]) -> None:
    with pytest.raises(SpecError) as caught:
        plan_of(**changes)
    assert caught.value.field == field


def test_tiles_of_128_columns_are_narrow_with_several_thread_blocks_on_an_sm() -> None:
    assert plan_of(tile=(64, 128, 64), ctas_per_sm=2).template == TEMPLATE
    assert plan_of(tile=(64, 128, 64)).template == "bsr_spmm/sm90a.cu.j2"
    assert all(plan_of(tile=(64, n, 64)).template == TEMPLATE for n in (16, 32, 64))


@given(
    block=st.sampled_from([(64, 64, 64), (128, 128, 128), (128, 64, 64), (128, 128, 64), (64, 128, 64)]),
    rows=st.integers(1, 500),
    stored=st.integers(0, 60),
    columns=st.integers(1, 200),
    sms=st.integers(1, 132),
)
def test_a_launch_covers_the_product(
    block: tuple[int, int, int], rows: int, stored: int, columns: int, sms: int
) -> None:
    down, across, height = block
    plan = plan_of(down, across, (height, 64, 64), ctas_per_sm=2)
    assert isinstance(plan.spec, BsrSpmmSpec)
    shape = SpmmShape(rows * down, 64 * across, columns, blocks=rows * stored, b_row_stride=1)
    args = plan.problem(shape, sms * plan.ctas_per_sm)
    numbers, tile = args.numbers, plan.spec.tile
    parts, tiles = numbers["row_parts"], shape.rows // tile.m * numbers["column_tiles"]
    assert numbers["column_tiles"] * tile.n >= columns > (numbers["column_tiles"] - 1) * tile.n
    assert args.tiles == tiles * parts
    # Rows are divided as long as all thread blocks run at once and have blocks.
    assert 1 <= parts <= MOST_PARTS
    assert parts == 1 or (tiles * parts <= PARTS_PER_SM * sms and parts * FEWEST_BLOCKS <= stored)
    more = parts + 1
    assert more > MOST_PARTS or tiles * more > PARTS_PER_SM * sms or more * FEWEST_BLOCKS > stored
    # Partial sums of whole tiles in fp32, and a counter of each warpgroup.
    divided = tiles if parts > 1 else 0
    assert args.scratch == {"parts": divided * parts * tile.m * tile.n * 4}
    assert args.counters == {"parts_done": divided * tile.m // 64}


def test_parameters_follow_the_epilogue() -> None:
    def names(**changes: Any) -> set[str]:
        return {param.name for param in plan_of(**changes).params}

    assert names(epilogue={"activation": "gelu", "bias": True}) - names() == {"bias"}
    assert names(epilogue={"activation": "relu"}) == names()
