"""BSR products in FP8: what their plans work out and refuse."""

from __future__ import annotations

from typing import Any

import pytest

from codegen.errors import SpecError
from codegen.library import find_spec
from codegen.plan import Plan
from codegen.planning import plan_for
from codegen.plans.bsr.fp8 import SIZES
from codegen.plans.bsr.parts import copies_b
from codegen.problem import SddmmShape, SpmmShape
from codegen.render import generate
from codegen.select import choose

SPMM = {"op": "bsr_spmm", "b_layout": "column_major"}
SDDMM = {"op": "bsr_sddmm"}


def plan_of(rows: int = 128, cols: int = 128, **changes: Any) -> Plan:
    fields = {**SPMM, "arch": "sm_90a", "dtype": "e4m3", "block": {"rows": rows, "cols": cols}, **changes}
    if fields["op"] == "bsr_sddmm":
        del fields["b_layout"]
    return plan_for(find_spec(fields))


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("block.rows", {"rows": 16, "cols": 32}),
        ("block.cols", {"rows": 32, "cols": 16}),
        ("tile.m", {"tile": {"m": 64}}),
        ("tile.n", {"tile": {"n": 512}}),  # registers
        ("tile.n", {"tile": {"n": 64}}),
        ("tile.k", {"tile": {"k": 64}}),
        ("stages", {"stages": 1}),
        ("stages", {"stages": 5}),  # shared memory
        ("ctas_per_sm", {"ctas_per_sm": 2}),
        ("accumulate_every", {"accumulate_every": 4}),  # no more than are in the ring
        ("accumulate_every", {"accumulate_every": 1, "scales": "block"}),  # their steps are promoted by themselves
        ("accumulate_every", {"accumulate_every": 0, "scales": "block"}),
        ("block.rows", {"op": "bsr_sddmm", "rows": 16, "cols": 16}),
        ("scales", {"rows": 128, "cols": 64, "scales": "block"}),
        ("epilogue", {"epilogue": {"bias": True}}),
        ("accumulate", {"accumulate": True}),
        ("scheduler", {"scheduler": "dynamic"}),
        ("transpose_a", {"transpose_a": True}),
        ("mma", {"mma": "mma", "arch": "sm_90a", "copy": "ld_global"}),
        ("dtype", {"arch": "sm_86"}),
        ("dtype", {"arch": "sm_89", "mma": "wmma"}),
        ("block.rows", {"arch": "sm_89", "rows": 16, "cols": 32}),
        ("block.cols", {"arch": "sm_89", "rows": 32, "cols": 16}),
        ("scales", {"arch": "sm_89", "cols": 64, "scales": "block"}),
        ("tile.k", {"arch": "sm_89", "scales": "block", "tile": {"k": 32}}),  # of one slice
        ("accumulate_every", {"arch": "sm_89", "scales": "block", "accumulate_every": 0}),
        ("accumulate_every", {"arch": "sm_89", "op": "bsr_sddmm", "scales": "row", "accumulate_every": 2}),
        ("accumulate_every", {"accumulate_every": 2, "op": "bsr_sddmm", "scales": "row"}),
        ("tile.k", {"arch": "sm_89", "tile": {"k": 16}}),
        ("tile.k", {"arch": "sm_89", "op": "bsr_sddmm", "tile": {"k": 32}}),
        ("tile.k", {"arch": "sm_89", "op": "bsr_sddmm", "rows": 32, "cols": 32, "tile": {"k": 64}}),  # copies beside A
        ("tile.k", {"arch": "sm_89", "op": "bsr_sddmm", "tile": {"k": 128}}),  # registers
        ("tile", {"arch": "sm_89", "tile": {"n": 256}}),  # registers
        ("output", {"output": "e4m3"}),
    ],
)
def test_what_the_kernel_is_not_written_for_is_refused(field: str, changes: dict[str, Any]) -> None:
    if field == "mma":
        field = "dtype"  # which is what mma.sync does not have
    with pytest.raises(SpecError) as caught:
        plan_of(**changes)
    assert caught.value.field == field


@pytest.mark.parametrize("size", [32, 64, 128])
@pytest.mark.parametrize("scales", ["tensor", "row"])
def test_a_pass_of_copies_stays_in_a_tile_of_a(size: int, scales: str) -> None:
    plan = plan_of(size, size, op="bsr_sddmm", arch="sm_89", scales=scales)
    sizes = {constant.name: constant.value for constant in plan.constants}
    assert sizes["kTileM"] % sizes["kPassRows"] == 0 and sizes["kTileN"] % sizes["kPassRows"] == 0


def test_b_by_rows_is_refused_with_the_reason() -> None:
    with pytest.raises(SpecError, match=r"b_layout: is row_major; wgmma of e5m2 requires K-major operands"):
        plan_of(dtype="e5m2", b_layout="row_major")
    with pytest.raises(SpecError, match=r"b_layout: is row_major; mma.sync of e4m3 requires K-major operands"):
        plan_of(arch="sm_89", b_layout="row_major")


@pytest.mark.parametrize(("field", "value"), [("output", "fp32"), ("accumulate_every", 0), ("scales", "block")])
def test_options_of_fp8_are_refused_for_other_types(field: str, value: Any) -> None:
    with pytest.raises(
        SpecError, match=rf"{field}: is {value}; it requires FP8 inputs, and dtype is fp16: leave it out"
    ):
        plan_of(dtype="fp16", **{field: value})


@pytest.mark.parametrize("op", ["bsr_spmm", "bsr_sddmm"])
@pytest.mark.parametrize("rows", SIZES)
@pytest.mark.parametrize("cols", SIZES)
def test_defaults_fit(op: str, rows: int, cols: int) -> None:
    for output in ("fp16", "bf16", "fp32"):
        for every in (0, 1, 2):
            plan = plan_of(rows, cols, op=op, output=output, accumulate_every=every)
            assert plan.registers.needed <= plan.registers.limit
            # What TMA's swizzle applies to begins at a multiple of what it repeats after.
            assert all(region.offset % 1024 == 0 for region in plan.shared[:3])
            box = plan.tensor_maps["c_map"]
            assert box.dtype == output and box.swizzle in (64, 128)
            assert box.box[0] * {"fp16": 2, "bf16": 2, "fp32": 4}[output] == box.swizzle


@pytest.mark.parametrize("rows", SIZES)
def test_a_stage_is_what_the_copies_bring(rows: int) -> None:
    for changes in ({"scales": "block"}, {}):
        plan = plan_of(rows, 128, **changes)
        maps, constants = plan.tensor_maps, {constant.name: constant.value for constant in plan.constants}
        copies = plan.spec.tile.n // maps["b_map"].box[1]
        brought = rows * 128 + copies * 128 * maps["b_map"].box[1]
        if changes:
            brought += 4 * copies * maps["b_scale_map"].box[0]
            assert maps["b_scale_map"].dtype == "fp32"
        assert constants["kStageBytes"] == brought


@pytest.mark.parametrize("size", SIZES)
def test_scales_of_rows_come_with_their_stage(size: int) -> None:
    plan = plan_of(size, size, op="bsr_sddmm", scales="row")
    maps, constants = plan.tensor_maps, {constant.name: constant.value for constant in plan.constants}
    assert maps["a_scale_map"].dtype == maps["b_scale_map"].dtype == "fp32"
    assert constants["kStageBytes"] == size * 128 + 4 * maps["a_scale_map"].box[0]
    assert constants["kBlockBytes"] == size * 128 + 4 * maps["b_scale_map"].box[0]
    assert all(region.offset % 128 == 0 for region in plan.shared if region.name.endswith("Scales"))
    assert plan.registers.needed <= plan.registers.limit


@pytest.mark.parametrize("rows", SIZES)
def test_b_is_read_as_it_is(rows: int) -> None:
    plan = plan_of(rows, 64)
    args = plan.problem(SpmmShape(rows=640, depth=512, columns=1000, blocks=17, b_row_stride=1))
    assert args.copy_stride is None and args.prologue_grid == 0  # kernels of 16 bits have B copied by rows
    assert not copies_b(plan.spec)  # type: ignore[arg-type]


def test_a_launch_covers_the_product() -> None:
    plan = plan_of(64, 64)
    args = plan.problem(SpmmShape(rows=640, depth=512, columns=1000, blocks=17))
    assert args.numbers["block_rows"] == 10 and args.tiles == 10 * -(-1000 // plan.spec.tile.n)
    plan = plan_of(64, 64, op="bsr_sddmm")
    args = plan.problem(SddmmShape(rows=640, columns=512, depth=200, blocks=17))
    assert args.numbers["steps"] == 2 and args.tiles == -(-17 * 64 // plan.spec.tile.n)


def test_a_source_has_what_its_options_say() -> None:
    def source(**changes: Any) -> str:
        fields = {**SPMM, "arch": "sm_90a", "dtype": "e4m3", "block": {"rows": 128, "cols": 128}, **changes}
        return generate(find_spec(fields)).source

    fast, promoted, scaled = source(accumulate_every=0), source(), source(scales="block")
    assert "kAccumulateEvery" not in fast and "kAccumulateEvery = 2" in promoted
    assert "b_scale_map" in scaled and "b_scale_map" not in promoted
    assert ".f32.e5m2.e5m2" in source(dtype="e5m2")
    assert "stmatrix" not in source(output="fp32") and "st.shared.f32" in source(output="fp32")


def test_whole_and_partial_specs_are_taken_without_measurements() -> None:
    fields = {**SPMM, "arch": "sm_90a", "dtype": "e4m3", "block": {"rows": 64, "cols": 64}}
    choice = choose(fields)
    assert choice.rule == "default" and "no kernel of dtype e4m3 is in the table" in choice.reason
    assert choose(choice.named).rule == "written"
    with pytest.raises(SpecError, match="problem: is given, but a bsr_spmm of dtype e4m3 is not chosen by problem"):
        choose(fields, {"n": 8192})
