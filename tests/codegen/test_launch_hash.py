"""The launch hash is over what a host passes, not over what that is called."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from codegen.library import find_spec, shipped_specs
from codegen.plan import PARAM_ABI, Plan, Prologue, TensorMap, i32, param_offsets, pointer, tensor_map
from codegen.planning import plan_for

NAMES = (
    *("h100_topk32", "h100_dense", "h100_topk32_b64_self_ordered", "h100_bsr_spmm_b64_balanced"),
    *("h100_bsr_spmm_b16_gathered", "h100_tile_copy_tma", "l4_topk32", "l4_bsr_sddmm_b64"),
)
plans = st.sampled_from(NAMES).map(lambda name: plan_for(find_spec(name)))
names = st.from_regex(r"[a-z]\w{0,8}", fullmatch=True)


def renamed(plan: Plan, found: list[str]) -> Plan:
    """Return a plan whose parameters have other names."""
    called = dict(zip([param.name for param in plan.params], found, strict=True))
    return replace(
        plan,
        params=tuple(replace(param, name=called[param.name], doc="", ctype="T") for param in plan.params),
        # In another order, as a plan's author may name them in any.
        tensor_maps={called[name]: plan.tensor_maps[name] for name in reversed(plan.tensor_maps)},
    )


@given(st.data())
def test_names_are_not_in_it(data: st.DataObject) -> None:
    plan = data.draw(plans)
    count = len(plan.params)
    other = renamed(plan, data.draw(st.lists(names, min_size=count, max_size=count, unique=True)))
    assert other.launch_sha256 == plan.launch_sha256
    if plan.prologue is not None:
        called = replace(other, prologue=replace(plan.prologue, symbol="other"))
        assert called.launch_sha256 == plan.launch_sha256


def seen(plan: Plan) -> list[Any]:
    """Return what a host writes at each place of the parameter struct."""
    return [(param.type, plan.tensor_maps.get(param.name)) for param in plan.params]


@given(st.data())
def test_another_order_is_another_launch(data: st.DataObject) -> None:
    plan = data.draw(plans)
    other = replace(plan, params=tuple(data.draw(st.permutations(plan.params))))
    assert (other.launch_sha256 == plan.launch_sha256) == (seen(other) == seen(plan))


@given(st.data())
def test_types_and_boxes_are_in_it(data: st.DataObject) -> None:
    plan = data.draw(plans)
    i = data.draw(st.integers(0, len(plan.params) - 1))
    param = plan.params[i]
    if param.type == "tensor_map":
        how = plan.tensor_maps[param.name]
        change = data.draw(
            st.one_of(
                st.sampled_from([0, 32, 64, 128]).map(lambda swizzle: replace(how, swizzle=swizzle)),
                st.sampled_from([128, 256]).map(lambda promotion: replace(how, promotion=promotion)),
                st.lists(st.integers(1, 256), min_size=1, max_size=5).map(lambda box: replace(how, box=tuple(box))),
            )
        )
        other = replace(plan, tensor_maps=plan.tensor_maps | {param.name: change})
        assert (other.launch_sha256 == plan.launch_sha256) == (change == how)
    else:
        kind = data.draw(st.sampled_from(["pointer", "i32", "i64", "f32"]))
        changed = replace(plan, params=(*plan.params[:i], replace(param, type=kind), *plan.params[i + 1 :]))
        assert (changed.launch_sha256 == plan.launch_sha256) == (kind == param.type)
    without = replace(
        plan,
        params=plan.params[:i] + plan.params[i + 1 :],
        tensor_maps={name: how for name, how in plan.tensor_maps.items() if name != param.name},
    )
    assert without.launch_sha256 != plan.launch_sha256


@pytest.mark.parametrize("name", NAMES)
def test_what_else_a_host_passes_is_in_it(name: str) -> None:
    plan = plan_for(find_spec(name))
    before = Prologue("before", 64)
    assert json.loads(json.dumps(plan.launch())) == plan.launch()
    changes: list[dict[str, Any]] = [
        {"threads": plan.threads + 32},
        {"shared_bytes": plan.shared_bytes + 16},
        {"cluster": plan.cluster + 1},
        {"prologue": before},
        {"prologue": replace(before, threads=32)},
        {"prologue": replace(before, shared_bytes=16)},
        {"prologue": replace(before, overlaps=True)},
    ]
    found = {plan.launch_sha256, *(replace(plan, **change).launch_sha256 for change in changes)}
    assert len(found) == 1 + len(changes)
    # What no host asks for.
    assert replace(plan, stem="x", summary=(), flops=1, constants=()).launch_sha256 == plan.launch_sha256


def test_a_place_is_a_type_an_offset_and_a_size() -> None:
    params = (i32("n", ""), tensor_map("a_map", "", ()), pointer("p", "int", ""), i32("m", ""))
    plan = replace(plan_for(find_spec("h100_dense")), params=params, tensor_maps={"a_map": TensorMap((64, 8), 128)})
    assert param_offsets(params) == (0, 64, 192, 200)
    launch = plan.launch()
    assert launch["params"] == [["i32", 0, 4], ["tensor_map", 64, 128], ["pointer", 192, 8], ["i32", 200, 4]]
    assert launch["tensor_maps"] == [[1, [64, 8], 128, 256]]


def test_every_launch_has_places_that_do_not_overlap() -> None:
    for named in shipped_specs():
        params = plan_for(named).params
        offsets = param_offsets(params)
        ends = [offset + PARAM_ABI[param.type][0] for param, offset in zip(params, offsets, strict=True)]
        assert all(end <= offset for end, offset in zip(ends, offsets[1:], strict=False))
        assert not [
            param.name for param, offset in zip(params, offsets, strict=True) if offset % PARAM_ABI[param.type][1]
        ]
