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
from codegen.plans.bsr.spmm_gemv import COLUMNS, RING_SHARE, SMALL_B, WARPS
from codegen.problem import SpmmShape
from codegen.spec import BsrSpmmSpec


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
        ("tile.k", {"cols": 128, "tile": {"m": 16, "n": 8, "k": 128}}),
        ("stages", {"stages": 1}),
        ("stages", {"stages": 5}),
        ("mma", {"mma": "wgmma"}),
        ("mma", {"mma": "wmma"}),
        ("dtype", {"dtype": "e4m3", "arch": "sm_89"}),
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
def test_all_architectures_have_it(arch: str) -> None:
    for block in (16, 32, 64, 128):
        plan = plan_of(block, block, arch=arch)
        assert plan.shared_bytes <= plan.arch.shared_memory_per_block and plan.threads >= 256


@pytest.mark.parametrize(
    ("rows", "cols", "tile"), [(16, 16, (16, 16)), (48, 32, (16, 32)), (128, 64, (16, 64)), (64, 96, (16, 32))]
)
def test_blocks_whose_sides_are_multiples_of_16_have_a_default(rows: int, cols: int, tile: tuple[int, int]) -> None:
    spec = plan_of(rows, cols).spec
    assert isinstance(spec, BsrSpmmSpec)
    found = spec.tile
    assert (found.m, found.n, found.k) == (tile[0], COLUMNS, tile[1])


@given(
    block=st.sampled_from([(16, 16), (32, 32), (64, 64), (128, 128), (16, 32), (64, 16), (48, 48)]),
    rows=st.integers(1, 2000),
    depth=st.integers(1, 200),
    columns=st.integers(1, 20),
    sms=st.integers(1, 132),
)
def test_a_launch_covers_the_product(block: tuple[int, int], rows: int, depth: int, columns: int, sms: int) -> None:
    plan = plan_of(*block)
    shape = SpmmShape(rows * block[0], depth * block[1], columns, blocks=rows, b_row_stride=columns)
    args = plan.problem(shape, sms * plan.ctas_per_sm)
    assert isinstance(plan.spec, BsrSpmmSpec)
    numbers, tile = args.numbers, plan.spec.tile
    assert numbers["column_tiles"] * COLUMNS >= columns > (numbers["column_tiles"] - 1) * COLUMNS
    assert args.tiles * tile.m == shape.rows * numbers["column_tiles"]
    assert args.block is not None and args.block.threads % 32 == 0
    warps, most = args.block.threads // 32, plan.threads // 32
    assert 1 <= warps <= most <= WARPS
    assert args.block.shared_bytes * most == plan.shared_bytes * warps

    each, of_an_sm = plan.shared_bytes // most, -(-args.tiles // sms)

    def fits(warps: int) -> bool:
        """Whether all tiles run at once, by registers and shared memory, and leave the L1 room."""
        memory = plan.arch.shared_memory_per_sm // (each * warps + 1024)
        blocks = min(24, memory, plan.arch.blocks_for(32 * warps, plan.registers.limit))
        share = 1 if shape.depth * columns * 2 <= SMALL_B else RING_SHARE
        return of_an_sm <= blocks and of_an_sm * warps * each <= share * plan.arch.shared_memory_per_sm

    # They do so if they can, and could not with another warp each.
    assert fits(warps) or warps == 1
    assert warps == most or not fits(warps + 1)


@pytest.mark.parametrize("depth", [16, 32, 64])
def test_lanes_copy_each_chunk_once_and_read_all_banks(depth: int) -> None:
    """The map of a slot, as bsr_spmm/gemv.cu.j2 has it: in chunks of 16 bytes, of 16 rows."""
    row_chunks, swizzled = depth // 8, 4 if depth == 64 else 0

    def place(row: int, chunk: int) -> int:
        return row * row_chunks + (chunk ^ row % 2 * swizzled)

    copied = [place(row, chunk) for row in range(16) for chunk in range(row_chunks)]
    assert sorted(copied) == list(range(16 * row_chunks))
    if depth > 16:  # of 16 columns two lanes read a chunk
        for quarter in range(4):  # lanes whose 16 bytes come in one access
            for part in range(depth // 32):
                lanes = [place(lane // 4, part * 4 + lane % 4) for lane in range(8 * quarter, 8 * quarter + 8)]
                assert len({chunk % 8 for chunk in lanes}) == 8


def test_parameters_follow_the_epilogue() -> None:
    def names(**changes: Any) -> set[str]:
        return {param.name for param in plan_of(**changes).params}

    plain, added = names(), {"c_in", "c_in_row_stride", "c_in_column_stride", "beta"}
    assert names(accumulate=True) - plain == added
    assert names(epilogue={"activation": "gelu", "bias": True}) - plain == {"bias"}
    assert names(epilogue={"activation": "relu"}) == plain
