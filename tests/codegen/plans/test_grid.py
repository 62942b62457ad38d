"""How many thread blocks a launch has."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from codegen.library import find_spec
from codegen.plan import Plan
from codegen.planning import plan_for


def plan_of(name: str) -> Plan:
    return plan_for(find_spec(name))


STATIC = plan_of("h100_bsr_spmm_b128")


@given(tiles=st.integers(1, 10_000), slots=st.integers(1, 200))
@example(tiles=2048, slots=132)
@example(tiles=1, slots=132)
def test_as_few_as_take_no_more_rounds(tiles: int, slots: int) -> None:
    grid = STATIC.thread_blocks(tiles, slots)
    rounds = -(-tiles // slots)
    assert 1 <= grid <= min(tiles, slots)
    assert -(-tiles // grid) == rounds
    assert grid == 1 or -(-tiles // (grid - 1)) > rounds


def test_sixteen_rounds_of_128_instead_of_132() -> None:
    assert STATIC.thread_blocks(2048, 132) == 128


@given(clusters=st.integers(1, 2000), slots=st.integers(2, 200))
def test_clusters_stay_whole(clusters: int, slots: int) -> None:
    plan = plan_of("h100_bsr_spmm_b32_gathered")
    assert plan.cluster == 2
    grid = plan.thread_blocks(clusters * 2, slots)
    assert grid % 2 == 0 and 2 <= grid <= slots
    assert -(-clusters // (grid // 2)) == -(-clusters // (slots // 2))


@pytest.mark.parametrize(
    "name",
    [
        "h100_bsr_spmm_b128_balanced",  # dynamic tile scheduler
        "h100_causal",  # likewise
        "h100_topk32",  # stream-K tail
        "h100_bsr_spmm_b16",  # two thread blocks share an SM
    ],
)
def test_all_slots_where_tiles_are_not_taken_by_number_or_thread_blocks_overlap(name: str) -> None:
    assert plan_of(name).thread_blocks(2048, 132) == 132
    assert plan_of(name).thread_blocks(100, 132) == 100


def test_a_thread_block_for_each_tile_of_other_kernels() -> None:
    assert plan_of("l4_dense").thread_blocks(2048, 132) == 2048
    assert replace(STATIC, persistent=False).thread_blocks(2048, 132) == 2048
