"""Gradients of attention by the size of their heads: what a thread block holds, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from codegen.errors import SpecError
from codegen.library import find_spec
from codegen.plan import Plan
from codegen.plans import plan_for
from codegen.problem import AttentionShape
from codegen.select.backward import HEAD_DIMS

WHICH = ("dq", "dkdv")


def plan_of(gradients: str, head_dim: int, pattern: dict[str, Any] | None = None, **fields: Any) -> Plan:
    given = {"op": "attention_backward", "arch": "sm_90a", "gradients": gradients, "head_dim": head_dim}
    return plan_for(find_spec({**given, "pattern": pattern or {"kind": "dense"}, **fields}))


def constants(plan: Plan) -> dict[str, Any]:
    return {constant.name: constant.value for constant in plan.constants}


def topk(rows: int, keys: int) -> dict[str, Any]:
    return {"kind": "topk", "block": {"q": rows, "kv": keys}}


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("gradients", WHICH)
def test_a_row_of_the_prologue_is_within_a_warp(gradients: str, head_dim: int) -> None:
    """Its threads add up by shuffles, and each has 16 bytes."""
    plan = plan_of(gradients, head_dim)
    lanes, threads = constants(plan)["kRowLanes"], constants(plan)["kPrologueThreads"]
    assert 32 % lanes == 0 and lanes * 8 >= head_dim
    rows = 2 * 3 * (128 + 128)  # batch, heads, and what each has of rows
    grid = plan.problem(AttentionShape(2, 3, 3, 100, 100)).prologue_grid
    assert (grid - 1) * threads < rows * lanes <= grid * threads


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("block", [None, (64, 64), (64, 128), (128, 64), (128, 128)])
@pytest.mark.parametrize("gradients", WHICH)
def test_every_block_has_a_default(gradients: str, block: tuple[int, int] | None, head_dim: int) -> None:
    plan = plan_of(gradients, head_dim, None if block is None else topk(*block))
    assert plan.shared_bytes <= plan.arch.shared_memory_per_block and plan.registers.needed <= plan.registers.limit


def test_steps_of_dq_overlap_and_need_two_stages() -> None:
    with pytest.raises(SpecError, match=r"stages: is 1; allowed: 2 or more \(two steps are in flight\)"):
        plan_of("dq", 64, stages=1)
    assert plan_of("dkdv", 64, stages=1).shared_bytes > 0


def test_a_tile_of_keys_may_be_a_part_of_a_listed_block() -> None:
    """Its tiles walk over the same transposed list, of which there is one for each key block."""
    plan = plan_of("dkdv", 128, topk(128, 128), tile={"m": 64, "n": 64})
    shape = AttentionShape(1, 2, 2, 300, 300, 1, 2, 4)
    args = plan.problem(shape)
    assert (args.tiles, args.numbers["key_tiles"], args.numbers["key_blocks"]) == (10, 5, 3)
    whole = plan_of("dkdv", 128, topk(128, 128), tile={"m": 64, "n": 128}).problem(shape)
    assert args.scratch == whole.scratch and "key_blocks" not in whole.numbers
    with pytest.raises(SpecError, match=r"tile.n: is 128; a tile is a key block, or an equal part: 64 keys"):
        plan_of("dkdv", 64, topk(128, 64), tile={"m": 64, "n": 128})
