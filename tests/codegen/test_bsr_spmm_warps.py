"""BSR x dense by mma.sync and WMMA: what their plans work out and refuse, where tiles lie in shared memory."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from codegen.errors import SpecError
from codegen.library import find_spec
from codegen.plan import Plan
from codegen.plans import plan_for


def fields(**changes: Any) -> dict[str, Any]:
    return {"op": "bsr_spmm", "arch": "sm_89", "mma": "mma", "block": {"rows": 128, "cols": 128}, **changes}


def plan_of(**changes: Any) -> Plan:
    return plan_for(find_spec(fields(**changes)))


def constants(plan: Plan) -> dict[str, int]:
    return {constant.name: int(constant.value) for constant in plan.constants}


@pytest.mark.parametrize(("size", "n", "stages", "warps"), [(128, 128, 3, 4), (64, 256, 2, 4), (32, 256, 2, 4)])
def test_default_tiles_let_two_thread_blocks_share_an_sm(size: int, n: int, stages: int, warps: int) -> None:
    spec = {"op": "bsr_spmm", "arch": "sm_89", "block": {"rows": size, "cols": size}}
    plan = plan_for(find_spec(spec))
    assert (plan.spec.mma, plan.spec.copy_, plan.spec.stages, plan.spec.tile.model_dump()) == (
        *("mma", "cp_async", stages),
        {"m": size, "n": n, "k": 32},
    )
    assert (plan.threads, plan.blocks_per_sm) == (32 * warps, 2)


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("block.rows", {"block": {"rows": 16, "cols": 64}}),
        ("block.rows", {"block": {"rows": 256, "cols": 64}}),
        ("block.cols", {"block": {"rows": 64, "cols": 16}}),
        ("tile.m", {"tile": {"m": 64, "n": 128, "k": 32}}),
        ("tile.n", {"tile": {"m": 128, "n": 64, "k": 32}}),
        ("tile.k", {"tile": {"m": 128, "n": 128, "k": 16}}),
        ("tile.k", {"block": {"rows": 64, "cols": 32}, "tile": {"m": 64, "n": 128, "k": 64}}),
        ("stages", {"stages": 1}),
        ("stages", {"stages": 7}),
        ("epilogue", {"epilogue": {"bias": True}}),
    ],
)
def test_what_mma_is_not_written_for_is_refused(field: str, changes: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match=rf"^{field}: "):
        plan_of(**changes)


@pytest.mark.parametrize(("m", "n", "k"), [*itertools.product((32, 64, 128), (128, 256), (32, 64))], ids=str)
def test_swizzled_tiles_of_mma(m: int, n: int, k: int) -> None:
    """The formulas of templates/bsr_spmm/mma.cu.j2: each chunk is copied once, and found without bank conflicts."""
    plan = plan_of(block={"rows": m, "cols": 64}, tile={"m": m, "n": n, "k": k}, stages=2)
    c = constants(plan)
    a_row_bytes, b_row_bytes = c["kAChunks"] * 16, c["kBChunks"] * 16

    def a_offset(row: int, chunk: int) -> int:
        return row * a_row_bytes + (chunk ^ row // c["kARowsPerLine"] % c["kAChunks"]) * 16

    def b_offset(row: int, chunk: int) -> int:
        return row * b_row_bytes + (chunk ^ row % 8) * 16

    a_tile, b_tile = {}, {}
    for thread in range(plan.threads):
        a_row, a_chunk = divmod(thread, c["kAChunks"])
        b_row, b_chunk = divmod(thread, c["kBChunks"])
        for row in range(0, m, c["kAPassRows"]):
            a_tile[a_offset(a_row, a_chunk) + row * a_row_bytes] = (a_row + row, a_chunk)
        for row in range(0, k, c["kBPassRows"]):
            b_tile[(b_offset(b_row, b_chunk) ^ row % 8 * 16) + row * b_row_bytes] = (b_row + row, b_chunk)
    assert sorted(a_tile) == list(range(0, c["kATile"], 16))
    assert sorted(b_tile) == list(range(0, c["kBTile"], 16))

    for warp, slice_, matrix in itertools.product(range(plan.threads // 32), range(k // 16), range(4)):
        part_row = warp // c["kWarpsN"] * c["kWarpRows"]
        part_column = warp % c["kWarpsN"] * c["kWarpColumns"]
        lanes = range(8 * matrix, 8 * matrix + 8)
        for i in range(c["kWarpRows"] // 16):
            found = [
                (a_offset(part_row + lane % 16, lane // 16) ^ slice_ * 32) + i * 16 * a_row_bytes for lane in lanes
            ]
            assert [a_tile[x] for x in found] == [
                (part_row + 16 * i + lane % 16, 2 * slice_ + lane // 16) for lane in lanes
            ]
            assert len({x // 16 % 8 for x in found}) == 8
        for j in range(c["kWarpColumns"] // 16):
            found = [
                (b_offset(lane % 16, part_column // 8 + lane // 16) ^ j * 32) + slice_ * 16 * b_row_bytes
                for lane in lanes
            ]
            assert [b_tile[x] for x in found] == [
                (16 * slice_ + lane % 16, part_column // 8 + 2 * j + lane // 16) for lane in lanes
            ]
            assert len({x // 16 % 8 for x in found}) == 8
