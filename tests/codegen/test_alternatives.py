"""A kernel on a device of another architecture is refused with the spec that would serve there."""

from __future__ import annotations

import json
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from each import check_each, some_of_each_kind

from codegen.alternatives import problem_of, suggest, suggest_for
from codegen.library import NamedSpec, find_spec
from codegen.planning import plan_for

HOPPER, ADA = "h100_causal", "l4_causal"
ALL_ADA = "l4_causal, which computes"
ALL_HOPPER = "h100_causal_short or h100_causal or h100_causal_few_tiles, which compute"


@pytest.mark.parametrize(
    ("name", "arch", "others"),
    [
        (HOPPER, "sm_89", ALL_ADA),
        (ADA, "sm_90a", ALL_HOPPER),
        ("h100_bsr_spmm_b16_gathered", "sm_89", "l4_bsr_spmm_b16 or l4_bsr_spmm_wmma_b16, which compute"),
        ("h100_topk32_b64_self_ordered", "sm_89", "l4_topk32, which computes"),
        ("h100_topk32_b64_shared_long", "sm_89", "l4_topk32, which computes"),
        ("h100_quantise_k", "sm_89", "l4_quantise_k, which computes"),
        ("h100_select_topk", "sm_89", "l4_select_topk, which computes"),
        ("h100_tile_copy_tma", "sm_89", "l4_tile_copy_cp_async or l4_tile_copy_ld_global, which compute"),
        ("h100_e4m3_bsr_spmm_b128_block_scales", "sm_89", "l4_e4m3_bsr_spmm_b128_block_scales, which computes"),
    ],
)
def test_the_shipped_specs_that_compute_the_same_are_named(name: str, arch: str, others: str) -> None:
    assert suggest(find_spec(name).spec, arch) == f"choose {others} the same on {arch}"


QUANTIZE = {"op": "quantize", "arch": "sm_89", "head_dim": 128, "scales": "row_block", "tile": {"m": 128}}
LISTS = {"kind": "block_lists", "block": {"q": 128, "kv": 128}, "mask": "q_idx >= kv_idx"}
BLOCK_MASK = {"op": "block_mask", "arch": "sm_89", "pattern": LISTS}
FP8 = {"op": "attention", "arch": "sm_89", "dtype": "e4m3", "head_dim": 128, "pattern": {"kind": "dense"}}


@pytest.mark.parametrize(
    ("fields", "other", "same"),
    [
        (QUANTIZE, {"codes": "e5m2"}, False),
        (QUANTIZE, {"dtype": "bf16"}, False),
        (QUANTIZE, {"scales": "row"}, False),
        (QUANTIZE, {"hadamard": True}, False),
        (QUANTIZE, {"tile": {"m": 64}}, False),  # rows that share a scale
        ({**QUANTIZE, "scales": "row"}, {"tile": {"m": 64}}, True),
        (QUANTIZE, {"arch": "sm_90a"}, True),
        (BLOCK_MASK, {"dtype": "bf16"}, True),
        (BLOCK_MASK, {"pattern": {**LISTS, "mask": "q_idx > kv_idx"}}, False),
        (BLOCK_MASK, {"pattern": {**LISTS, "block": {"q": 64, "kv": 64}}}, False),
        ({"op": "select_topk", "arch": "sm_89"}, {"dtype": "bf16"}, False),
        ({"op": "tile_copy", "arch": "sm_89", "copy": "cp_async"}, {"copy": "ld_global"}, True),
        (FP8, {"scale_rows": {"q": 64, "k": 64}}, False),
    ],
)
def test_specs_compute_the_same_if_no_field_of_the_problem_differs(fields: Any, other: Any, same: bool) -> None:
    first, second = (find_spec(each).spec for each in (fields, {**fields, **other}))
    assert first != second and (problem_of(first) == problem_of(second)) is same


def test_every_advice_holds(request: pytest.FixtureRequest) -> None:
    seed = request.config.getoption("--kernel-seed")
    check_each({named.stem: partial(check_advice, named) for named in some_of_each_kind(seed)})


def check_advice(named: NamedSpec) -> None:
    for arch in ("sm_80", "sm_89", "sm_90a", "sm_120"):
        said = suggest(named.spec, arch)
        if "this spec does: " in said:
            spec = find_spec(json.loads(said.partition("this spec does: ")[2]))
            assert spec.spec.arch == arch and problem_of(spec.spec) == problem_of(named.spec)
            plan_for(spec)
        elif said.startswith("choose "):
            for stem in said.removeprefix("choose ").partition(",")[0].split(" or "):
                assert problem_of(find_spec(stem).spec) == problem_of(named.spec) and find_spec(stem).spec.arch == arch
        else:
            assert said.startswith(f"{arch} has no kernel that computes the same: ")


def test_an_architecture_without_kernels_is_told_of_those_that_have_some() -> None:
    assert suggest_for(find_spec(ADA).spec, (7, 5)) == "supported architectures: sm_80, sm_86, sm_89, sm_90a, sm_120"


@pytest.mark.parametrize(
    ("name", "capability", "forward", "says"),
    [
        (ADA, (8, 9), False, None),
        (ADA, (9, 0), True, None),
        (ADA, (9, 0), False, f"choose {ALL_HOPPER} the same on sm_90a, or pass forward_compatible=True"),
        (ADA, (8, 0), True, "this spec does"),
        (HOPPER, (8, 9), True, f"choose {ALL_ADA} the same on sm_89$"),
        (HOPPER, (12, 0), True, "this spec does: .*}$"),  # PTX of sm_90a is for sm_90a alone
    ],
)
def test_devices(
    monkeypatch: pytest.MonkeyPatch, name: str, capability: tuple[int, int], forward: bool, says: str | None
) -> None:
    arguments: Any = pytest.importorskip("runtime.kernels.arguments", exc_type=ImportError)
    cuda = SimpleNamespace(get_device_capability=lambda _: capability, get_device_name=lambda _: "GPU")
    monkeypatch.setattr(arguments, "torch", SimpleNamespace(cuda=cuda))
    if says is None:
        arguments.check_device(find_spec(name), None, forward)
        return
    with pytest.raises(arguments.DeviceError, match=says) as caught:
        arguments.check_device(find_spec(name), None, forward)
    assert f"{name} is written for {find_spec(name).spec.arch}, and GPU is sm_" in str(caught.value)
