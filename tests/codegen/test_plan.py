"""Plans: what is handed out does not overlap, and what does not fit is refused with the numbers."""

from __future__ import annotations

import re
from typing import Any

import pytest

from codegen.arch import KIB
from codegen.errors import SpecError
from codegen.explain import blocks_by_shared_memory, blocks_by_threads, launch_registers
from codegen.library import NamedSpec, find_spec, shipped_names, shipped_specs
from codegen.plan import Plan, Registers, SharedLayout, check_budget
from codegen.plans import plan_for
from codegen.render import render_plan
from codegen.spec import AttentionSpec, parse_spec

C_TYPES = {"i32": {"int"}, "i64": {"long long"}, "f32": {"float"}, "tensor_map": {"TensorMap"}}

every_plan = pytest.mark.parametrize("named", shipped_specs(), ids=shipped_names())


@every_plan
def test_shared_memory_map(named: NamedSpec) -> None:
    plan = plan_for(named)
    end = 0
    for region in plan.shared:
        assert region.bytes > 0
        # A region may take over the memory of another that is idle by then; its comment says so.
        reuses = re.search(r"\b(over|in) the\b", region.doc)
        assert reuses or region.offset >= end, f"{region.name} overlaps the region before it"
        end = max(end, region.offset + region.bytes)
    assert end == plan.shared_bytes <= plan.arch.shared_memory_per_block
    assert len({region.name for region in plan.shared}) == len(plan.shared)


@every_plan
def test_alignment(named: NamedSpec) -> None:
    plan = plan_for(named)
    # What TMA and WGMMA swizzle by 128 bytes repeats every 1024; mbarriers are 8 bytes; vector loads are 16.
    swizzled = any(box.swizzle == 128 for box in plan.tensor_maps.values())
    for region in plan.shared:
        if region.name == "Barriers":
            assert region.offset % 8 == 0
        elif region.bytes >= KIB:
            assert region.offset % (1024 if swizzled else 16) == 0, region.name


@every_plan
def test_blocks_fit_an_sm(named: NamedSpec) -> None:
    plan = plan_for(named)
    assert plan.threads % 32 == 0
    assert plan.threads <= 1024
    assert plan.blocks_per_sm <= min(blocks_by_shared_memory(plan), blocks_by_threads(plan))
    assert plan.registers.needed <= plan.registers.limit <= plan.arch.registers_per_thread
    if named.spec.schedule == "multistage":  # no registers change hands: every thread has what it started with
        assert plan.registers.needed <= launch_registers(plan)


@every_plan
def test_registers_handed_over_add_up(named: NamedSpec) -> None:
    plan = plan_for(named)
    constants = {constant.name: constant.value for constant in plan.constants}
    if "kProducerRegisters" not in constants:
        pytest.skip("one kind of warp")
    warpgroups = plan.threads // 128
    total = 128 * (constants["kProducerRegisters"] + (warpgroups - 1) * constants["kConsumerRegisters"])
    assert total <= plan.threads * launch_registers(plan)
    assert constants["kConsumerRegisters"] == plan.registers.limit


@every_plan
def test_names_and_comments(named: NamedSpec) -> None:
    plan = plan_for(named)
    for names in ([c.name for c in plan.constants], [p.name for p in plan.params]):
        assert len(set(names)) == len(names)
    assert all(c.comment and c.name.startswith("k") for c in plan.constants)
    assert all(p.doc for p in plan.params)
    for param in plan.params:
        assert param.ctype in C_TYPES[param.type] if param.type in C_TYPES else param.ctype.endswith("*")
    assert set(plan.tensor_maps) == {p.name for p in plan.params if p.type == "tensor_map"}
    assert plan.flops > 0
    assert plan.bytes > 0
    assert plan.summary


@every_plan
def test_tma_boxes_are_encodable(named: NamedSpec) -> None:
    plan = plan_for(named)
    for name, tensor in plan.tensor_maps.items():
        assert all(1 <= extent <= 256 for extent in tensor.box), name
        assert tensor.swizzle in (0, 32, 64, 128)
        if tensor.swizzle:
            assert tensor.box[0] * plan.dtype.bytes <= tensor.swizzle


@every_plan
def test_pattern_tensors_reach_the_kernel(named: NamedSpec) -> None:
    spec = named.spec
    if not isinstance(spec, AttentionSpec):
        pytest.skip("not attention")
    params = {param.name for param in plan_for(named).params}
    for tensor in spec.pattern.index_tensors:
        assert {tensor.name, f"{tensor.name}_batch_stride", f"{tensor.name}_row_stride"} <= params
    assert ("lse" in params) == spec.lse


def test_layout_aligns_and_counts() -> None:
    layout = SharedLayout()
    assert layout.add("A", 100, "").offset == 0
    assert layout.add("B", 8, "").offset == 1024
    assert layout.add("C", 8, "", align=8).offset == 1032
    assert layout.size == 1040


def plan_of(data: dict[str, Any]) -> Plan:
    return plan_for(find_spec(data))


def test_too_much_shared_memory_is_refused_with_numbers(attention: dict[str, Any]) -> None:
    spec = parse_spec(attention)
    enough = Registers(accumulators=100, overhead=40, limit=240)
    check_budget(spec, 227 * KIB, enough)
    with pytest.raises(SpecError) as caught:
        check_budget(spec, 227 * KIB + 1, enough)
    assert caught.value.field == "stages"
    assert "need 228 KB of shared memory, sm_90a has 227 KB" in caught.value.reason


def test_too_many_registers_are_refused_with_numbers(attention: dict[str, Any]) -> None:
    spec = parse_spec(attention)
    check_budget(spec, 0, Registers(accumulators=200, overhead=40, limit=240))
    with pytest.raises(SpecError) as caught:
        check_budget(spec, 0, Registers(accumulators=201, overhead=40, limit=240))
    assert caught.value.field == "tile"
    assert "241 registers" in caught.value.reason
    assert "240 are available" in caught.value.reason


@pytest.mark.parametrize("stages", range(1, 9))
def test_stages_fit_or_are_refused(attention: dict[str, Any], stages: int) -> None:
    attention["stages"] = stages
    if stages <= 2:
        assert plan_of(attention).shared_bytes <= 227 * KIB
        return
    with pytest.raises(
        SpecError, match=r"^stages: \d stages of tile 128 x 128 need \d+ KB of shared memory, sm_90a has"
    ):
        plan_of(attention)


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("tile.m", {"tile": {"m": 64, "n": 128}}),
        ("tile.n", {"tile": {"m": 128, "n": 64}}),
        ("pattern.block.q", {"pattern": {"kind": "topk", "k": 8, "block": {"q": 32, "kv": 128}}}),
        ("pattern.block.kv", {"pattern": {"kind": "topk", "k": 8, "block": {"q": 128, "kv": 32}}}),
    ],
)
def test_tile_the_kernel_is_not_written_for(attention: dict[str, Any], field: str, change: dict[str, Any]) -> None:
    with pytest.raises(SpecError) as caught:
        plan_of(attention | change)
    assert caught.value.field == field
    assert "is " in caught.value.reason


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("block.rows", {"block": {"rows": 48, "cols": 64}}),
        ("block.cols", {"block": {"rows": 128, "cols": 32}}),
        ("block.cols", {"block": {"rows": 32, "cols": 64}, "tile": {"m": 32, "n": 256, "k": 64}}),
        ("tile.m", {"block": {"rows": 32, "cols": 32}, "tile": {"m": 64, "n": 256, "k": 32}}),
        ("tile.n", {"block": {"rows": 32, "cols": 32}, "tile": {"m": 32, "n": 64, "k": 32}}),
        ("tile.k", {"block": {"rows": 32, "cols": 16}, "tile": {"m": 32, "n": 256, "k": 32}}),
        ("stages", {"block": {"rows": 16, "cols": 16}, "tile": {"m": 16, "n": 256, "k": 16}, "stages": 1}),
    ],
)
def test_blocks_the_spmm_kernels_are_not_written_for(spmm: dict[str, Any], field: str, change: dict[str, Any]) -> None:
    with pytest.raises(SpecError) as caught:
        plan_of(spmm | change)
    assert caught.value.field == field
    assert "is " in caught.value.reason


@pytest.mark.parametrize(
    ("op", "field", "change"),
    [
        ("sddmm", "block.rows", {"block": {"rows": 32, "cols": 64}}),
        ("sddmm", "block.cols", {"block": {"rows": 64, "cols": 32}}),
        ("sddmm", "tile.m", {"tile": {"m": 64, "n": 256, "k": 64}}),
        ("sddmm", "tile.n", {"tile": {"m": 128, "n": 64, "k": 64}}),
        ("sddmm", "tile.k", {"tile": {"m": 128, "n": 256, "k": 32}}),
        ("sddmm", "stages", {"stages": 1}),
        ("sddmm", "stages", {"stages": 5}),
        ("spgemm", "block.rows", {"block": {"rows": 32, "cols": 32}}),
        ("spgemm", "block.cols", {"block": {"rows": 128, "cols": 64}}),
        ("spgemm", "tile.m", {"tile": {"m": 64, "n": 128, "k": 64}}),
        ("spgemm", "tile.n", {"tile": {"m": 128, "n": 256, "k": 64}}),
        ("spgemm", "tile.k", {"tile": {"m": 128, "n": 128, "k": 128}}),
        ("spgemm", "stages", {"stages": 1}),
        ("spgemm", "stages", {"stages": 7}),
    ],
)
def test_what_the_other_bsr_kernels_are_not_written_for(
    op: str, field: str, change: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    with pytest.raises(SpecError) as caught:
        plan_of(request.getfixturevalue(op) | change)
    assert caught.value.field == field
    assert any(character.isdigit() for character in caught.value.reason)


@pytest.mark.parametrize("size", [128, 64, 32, 16])
def test_an_epilogue_adds_what_it_needs_and_nothing_else(size: int) -> None:
    fields = {"op": "bsr_spmm", "arch": "sm_90a", "block": {"rows": size, "cols": size}}
    plain = plan_of(fields)
    source = render_plan(plan_of(fields | {"epilogue": {"bias": True, "activation": "silu"}}))
    assert "What is stored is silu(A B + bias)" in source
    assert "const unsigned short* bias;" in source and "load_bias(p, " in source and "activate(acc" in source
    banner, _, source = render_plan(plan_of(fields | {"epilogue": {"activation": "relu"}})).partition("\n\n")
    assert '"bias":false' in banner
    assert "bias" not in source and "activate(acc" in source
    assert "activate" not in render_plan(plain) and "bias" not in render_plan(plain)


def test_an_epilogue_is_refused_where_there_is_none() -> None:
    fields = {"op": "bsr_spmm", "arch": "sm_89", "block": {"rows": 128, "cols": 128}, "epilogue": {"bias": True}}
    with pytest.raises(SpecError, match=r"^epilogue: is not written for sm_89"):
        plan_of(fields)


@pytest.mark.parametrize(("block", "stages", "wanted"), [(128, 3, 2), (128, 4, 1), (64, 4, 3), (64, 2, 5), (64, 8, 1)])
def test_thread_blocks_of_spgemm_share_an_sm(block: int, stages: int, wanted: int) -> None:
    fields = {"op": "bsr_spgemm", "arch": "sm_90a", "block": {"rows": block, "cols": block}, "stages": stages}
    plan = plan_of(fields)
    assert plan.blocks_per_sm == wanted
    assert wanted <= min(blocks_by_shared_memory(plan), blocks_by_threads(plan))
    assert plan.registers.needed <= launch_registers(plan)


@pytest.mark.parametrize(("rows", "cols"), [(16, 16), (16, 32), (32, 16), (32, 32)])
def test_small_blocks_get_a_wide_tile_and_a_deep_ring(rows: int, cols: int) -> None:
    plan = plan_of({"op": "bsr_spmm", "arch": "sm_90a", "block": {"rows": rows, "cols": cols}})
    assert plan.template == "bsr_spmm/sm90a_narrow.cu.j2"
    assert plan.spec.tile.model_dump() == {"m": rows, "n": 512, "k": cols}
    assert plan.tensor_maps["a_map"].swizzle == 2 * cols
    assert plan.spec.stages * plan.bytes >= 96 * KIB  # on their way: what the L2 takes to be busy
