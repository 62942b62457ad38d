"""Gradients of attention by the size of their heads: what a thread block holds, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from codegen.errors import SpecError
from codegen.library import find_spec
from codegen.plan import Plan
from codegen.planning import plan_for
from codegen.problem import AttentionShape
from codegen.scored_pattern import pattern_of
from codegen.select.backward import HEAD_DIMS, backward_kernels

WHICH = ("dq", "dkdv")


def plan_of(gradients: str, head_dim: int, pattern: dict[str, Any] | None = None, **fields: Any) -> Plan:
    given = {"op": "attention_backward", "arch": "sm_90a", "gradients": gradients, "head_dim": head_dim}
    return plan_for(find_spec({**given, "pattern": pattern or {"kind": "dense"}, **fields}))


def constants(plan: Plan) -> dict[str, Any]:
    return {constant.name: constant.value for constant in plan.constants}


def topk(rows: int, keys: int) -> dict[str, Any]:
    return {"kind": "topk", "block": {"q": rows, "kv": keys}}


@pytest.mark.parametrize("head_dim", HEAD_DIMS["wgmma"])
@pytest.mark.parametrize("gradients", WHICH)
def test_a_row_of_the_prologue_is_within_a_warp(gradients: str, head_dim: int) -> None:
    """Its threads add up by shuffles, and each has 16 bytes."""
    plan = plan_of(gradients, head_dim)
    lanes, threads = constants(plan)["kRowLanes"], constants(plan)["kPrologueThreads"]
    assert 32 % lanes == 0 and lanes * 8 >= head_dim
    rows = 2 * 3 * (128 + 128)  # batch, heads, and what each has of rows
    grid = plan.problem(AttentionShape(2, 3, 3, 100, 100)).prologue_grid
    assert (grid - 1) * threads < rows * lanes <= grid * threads


@pytest.mark.parametrize("head_dim", HEAD_DIMS["wgmma"])
@pytest.mark.parametrize("block", [None, (64, 64), (64, 128), (128, 64), (128, 128)])
@pytest.mark.parametrize("gradients", WHICH)
def test_every_block_has_a_default(gradients: str, block: tuple[int, int] | None, head_dim: int) -> None:
    plan = plan_of(gradients, head_dim, None if block is None else topk(*block))
    assert plan.shared_bytes <= plan.arch.shared_memory_per_block and plan.registers.needed <= plan.registers.limit


def test_steps_of_dq_overlap_and_need_two_stages() -> None:
    with pytest.raises(SpecError, match=r"stages: is 1; allowed: 2 or more \(two steps are in flight\)"):
        plan_of("dq", 64, stages=1)
    assert plan_of("dkdv", 64, stages=1).shared_bytes > 0


@pytest.mark.parametrize("head_dim", [192, 256])
def test_consumers_of_wide_heads_divide_the_products_of_64_keys(head_dim: int) -> None:
    for pattern in (None, topk(128, 128), topk(128, 64)):
        plan = plan_of("dkdv", head_dim, pattern)
        assert plan.spec.tile.n == 64 and constants(plan)["kConsumerWarpgroups"] == 2  # type: ignore[union-attr]
        weights = next(region for region in plan.shared if region.name == "Weights")
        assert weights.bytes == 64 * plan.spec.tile.m * 4  # type: ignore[union-attr]
    with pytest.raises(
        SpecError, match=rf"tile\.n: is 128; allowed with head_dim {head_dim}: 64 \(rows of a warpgroup\)"
    ):
        plan_of("dkdv", head_dim, tile={"m": 64, "n": 128})
    with pytest.raises(SpecError, match=r"stages: is 1; allowed: 2 or more \(two steps are in flight\)"):
        plan_of("dkdv", head_dim, stages=1)
    with pytest.raises(SpecError, match=r"tile: 128 x 64 needs about \d+ registers a thread|stages: 2 stages of tile"):
        plan_of("dkdv", head_dim, tile={"m": 128, "n": 64}, stages=2)


def test_v_has_a_stage_less_where_both_rings_do_not_fit() -> None:
    short = plan_of("dq", 256, tile={"m": 128, "n": 64}, stages=2)
    assert constants(short)["kVStages"] == 1 and constants(short)["kStages"] == 2
    rings = {region.name: region.bytes for region in short.shared}
    assert (rings["K"], rings["V"], rings["Barriers"]) == (2 * 64 * 512, 64 * 512, 8 * 7)
    for steps, stages in ((48, 2), (32, 3)):
        assert "kVStages" not in constants(plan_of("dq", 256, tile={"m": 128, "n": steps}, stages=stages))
    with pytest.raises(SpecError, match=r"stages: 3 stages of tile 128 x 64 need \d+ KB of shared memory"):
        plan_of("dq", 256, tile={"m": 128, "n": 64}, stages=3)


@pytest.mark.parametrize(("head_dim", "least"), [(128, 64), (192, 32)])
def test_steps_of_dq_are_narrower_with_wide_heads(head_dim: int, least: int) -> None:
    assert plan_of("dq", head_dim, tile={"m": 128, "n": least}).spec.tile.n == least  # type: ignore[union-attr]
    with pytest.raises(SpecError, match=rf"tile\.n: is 16; allowed: {least} to 160, multiples of 16"):
        plan_of("dq", head_dim, tile={"m": 128, "n": 16})


def test_a_tile_of_keys_may_be_a_part_of_a_listed_block() -> None:
    """Its tiles walk over the same transposed list, of which there is one for each key block."""
    plan = plan_of("dkdv", 128, topk(128, 128), tile={"m": 64, "n": 64})
    shape = AttentionShape(1, 2, 2, 300, 300, 1, 2, 4)
    args = plan.problem(shape)
    assert (args.tiles, args.numbers["key_tiles"], args.numbers["key_blocks"]) == (10, 5, 3)
    whole = plan_of("dkdv", 128, topk(128, 128), tile={"m": 64, "n": 128}).problem(shape)
    assert args.scratch == whole.scratch and "key_blocks" not in whole.numbers
    with pytest.raises(SpecError, match=r"tile.n: is 128; a tile is a key block or an equal part of one: 64 keys"):
        plan_of("dkdv", 64, topk(128, 64), tile={"m": 64, "n": 128})


@pytest.mark.parametrize(
    ("head_dim", "m", "row_bytes", "groups"),
    [(80, 80, 128, 2), (96, 80, 128, 2), (96, 96, 64, 3)],
)
def test_rows_are_narrow_where_zeros_would_not_fit(head_dim: int, m: int, row_bytes: int, groups: int) -> None:
    plan = plan_of("dq_dkdv", head_dim, tile={"m": m, "n": 128})
    of_plan = constants(plan)
    assert (of_plan["kGroups"], of_plan["kGroupColumns"]) == (groups, row_bytes // 2)
    assert of_plan["kQGroupBytes"] == m * row_bytes and of_plan["kQBytes"] == m * row_bytes * groups
    assert {how.swizzle for how in plan.tensor_maps.values()} == {row_bytes}
    for region in plan.shared:
        if region.name in ("K", "V", "Q", "Dout", "Ds"):
            assert region.offset % 1024 == 0
    assert of_plan["kQGroupBytes"] % (8 * row_bytes) == 0  # the swizzle repeats after eight rows


@pytest.mark.parametrize("gradients", WHICH)
def test_heads_of_80_have_one_kernel_alone(gradients: str) -> None:
    with pytest.raises(
        SpecError, match=f"^head_dim: is 80; allowed with gradients {gradients}: 64, 96, 128, 192, 256$"
    ):
        plan_of(gradients, 80)
    with pytest.raises(SpecError, match=r"^head_dim: is 80; allowed in a gradient on sm_89: "):
        plan_of(gradients, 80, arch="sm_89")


@pytest.mark.parametrize("head_dim", [72, 80])
def test_narrow_heads_take_the_kernel_of_80(head_dim: int) -> None:
    causal, lists = (
        backward_kernels(pattern_of(given), arch="sm_90a", dtype="bf16", head_dim=head_dim)
        for given in ({"kind": "causal"}, topk(128, 128))
    )
    assert causal.dq_dkdv is not None and causal.dq_dkdv.stem == "h100_causal_d80_dq_dkdv_bf16"
    assert lists.dq_dkdv is None and lists.dq.spec.head_dim == 96  # type: ignore[union-attr]
