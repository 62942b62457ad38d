"""Whatever fields a spec has: it is refused with a reason, or it gives a plan that fits and a sealed source."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from likely_specs import likely_fields

from codegen.errors import SpecError
from codegen.library import NamedSpec, shipped_specs, unnamed_stem
from codegen.parse import parse_spec
from codegen.planning import plan_for
from codegen.render import render_plan, seal_is_intact
from codegen.spec import MODELS, Spec

block = st.fixed_dictionaries({"q": st.sampled_from([1, 4, 16, 32, 64, 128]), "kv": st.sampled_from([16, 32, 64, 128])})
pattern = st.one_of(
    st.just({"kind": "dense"}),
    st.fixed_dictionaries(
        {"kind": st.just("causal")}, optional={"align": st.sampled_from(["bottom_right", "top_left"])}
    ),
    st.sampled_from([{"kind": "sliding_window"}, {"kind": "sink_window"}]),
    st.fixed_dictionaries(
        {"kind": st.just("sliding_window"), "left": st.integers(0, 1 << 24), "right": st.integers(0, 1 << 24)}
    ),
    st.fixed_dictionaries(
        {
            "kind": st.just("sink_window"),
            "sink": st.integers(1, 1 << 24),
            "left": st.integers(0, 1 << 24),
            "right": st.integers(0, 1 << 24),
        }
    ),
    st.fixed_dictionaries(
        {
            "kind": st.just("strided"),
            "stride": st.integers(2, 1 << 16),
            "local": st.integers(0, 1 << 16),
            "block": st.sampled_from([64, 128]),
        },
        optional={"causal": st.booleans()},
    ),
    st.fixed_dictionaries({"kind": st.just("topk"), "k": st.none() | st.integers(1, 1 << 16), "block": block}),
    st.fixed_dictionaries(
        {"kind": st.just("block_lists"), "block": block}, optional={"mask": st.sampled_from(["none", "causal", "bits"])}
    ),
)
size = st.sampled_from([16, 32, 64, 80, 128, 192, 256]) | st.integers(-8, 512)
shared_fields = {
    "mma": st.sampled_from(["wmma", "mma", "wgmma", "none"]),
    "copy": st.sampled_from(["ld_global", "cp_async", "tma"]),
    "schedule": st.sampled_from(["multistage", "cooperative", "ping_pong"]),
    "stages": st.integers(0, 9),
    "dtype": st.sampled_from(["fp16", "bf16"]),
}
arch = st.sampled_from(["sm_80", "sm_86", "sm_89", "sm_90a", "sm_120"])
attention = st.fixed_dictionaries(
    {
        "op": st.just("attention"),
        "arch": arch,
        "head_dim": st.sampled_from([64, 96, 128, 192, 256]),
        "pattern": pattern,
    },
    optional={
        **shared_fields,
        "tile": st.fixed_dictionaries({}, optional={"m": size, "n": size}),
        "lse": st.booleans(),
        "softcap": st.none() | st.floats(0, 2000),
        "sink": st.booleans(),
        "pack_gqa": st.sampled_from([1, 2, 4, 8, 16, 32, 64]),
        "stream_k_tail": st.booleans(),
        "kv_splits": st.sampled_from([1, 2]),
        "share_kv_loads": st.booleans(),
        "query_grouping": st.sampled_from(["none", "given", "search"]),
        "l2_lockstep": st.booleans(),
        "warp_rows": st.sampled_from([16, 32]),
    },
)
spmm = st.fixed_dictionaries(
    {"op": st.just("bsr_spmm"), "arch": arch, "block": st.fixed_dictionaries({"rows": size, "cols": size})},
    optional={
        **shared_fields,
        "tile": st.fixed_dictionaries({"m": size, "n": size, "k": size}),
        "accumulate": st.booleans(),
        "scheduler": st.sampled_from(["static", "dynamic"]),
        "transpose_a": st.booleans(),
        "b_layout": st.sampled_from(["row_major", "column_major"]),
        "ctas_per_sm": st.sampled_from([1, 2, 3]),
    },
)


def other_bsr(op: str, **options: Any) -> Any:
    return st.fixed_dictionaries(
        {"op": st.just(op), "arch": arch, "block": st.fixed_dictionaries({"rows": size, "cols": size})},
        optional={**shared_fields, "tile": st.fixed_dictionaries({"m": size, "n": size, "k": size}), **options},
    )


sddmm, spgemm = (
    other_bsr("bsr_sddmm", ctas_per_sm=st.sampled_from([1, 2, 3])),
    other_bsr("bsr_spgemm", output=st.sampled_from(["dense", "bsr"]), scheduler=st.sampled_from(["static", "dynamic"])),
)
shipped = st.sampled_from([json.loads(named.spec.canonical_json()) for named in shipped_specs()])
changes = st.fixed_dictionaries(
    {},
    optional={**shared_fields, "arch": arch, "pattern": pattern, "lse": st.booleans(), "stream_k_tail": st.booleans()},
)
near_a_shipped_one = st.builds(
    lambda spec, change: {**spec, **{k: change[k] for k in change if k in spec}}, shipped, changes
)
small_sddmm = st.fixed_dictionaries(
    {
        "op": st.just("bsr_sddmm"),
        "arch": st.just("sm_90a"),
        "mma": st.just("wgmma"),
        "block": st.fixed_dictionaries({"rows": st.sampled_from([16, 32]), "cols": st.sampled_from([16, 32, 64])}),
    },
    optional={
        "stages": st.integers(1, 8),
        "dtype": st.sampled_from(["fp16", "bf16"]),
        "tile": st.fixed_dictionaries(
            {
                "m": st.sampled_from([16, 32]),
                "n": st.sampled_from([64, 128, 256, 512]),
                "k": st.sampled_from([32, 64, 128]),
            }
        ),
        "ctas_per_sm": st.sampled_from([1, 2, 3]),
    },
)


@st.composite
def likely(draw: st.DrawFn) -> dict[str, Any]:
    """Fields of which many are accepted, as tests/stress/sample_specs.py draws them."""
    return likely_fields(lambda values: draw(st.sampled_from(values)))


plausible = attention | spmm | sddmm | small_sddmm | spgemm | near_a_shipped_one | likely()
scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
anything = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner)
)
FIELDS = sorted({name for model in MODELS for name in model.model_json_schema()["properties"]})

TURNS = {"arch": "sm_90a", "head_dim": 64, "schedule": "ping_pong"}
GRADIENT = {"arch": "sm_90a", "gradients": "dkdv", "head_dim": 64}
LISTED = {"block": {"q": 64, "kv": 128}}
quick = settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])


def shuffled(value: Any, draw: Any) -> Any:
    if not isinstance(value, dict):
        return value
    keys = draw(st.permutations(list(value)))
    return {key: shuffled(value[key], draw) for key in keys}


def parsed(data: Any) -> Spec | None:
    """The spec, or None if it was refused as it should be: with a field and a reason in one line."""
    try:
        return parse_spec(data)
    except SpecError as error:
        assert error.field or not isinstance(data, dict)
        assert error.reason
        assert "\n" not in error.field
        return None


@quick
@given(plausible)
@example({"op": "attention", "arch": "sm_90a", "head_dim": 64, "pattern": {"kind": "dense"}, "kv_splits": 2})
@example({"op": "attention", **TURNS, "pattern": {"kind": "dense"}, "kv_splits": 2})
@example(
    {
        "op": "attention",
        **TURNS,
        "pattern": {"kind": "topk", "k": 8, "block": {"q": 64, "kv": 64}},
        "share_kv_loads": True,
    }
)
@example(
    {"op": "bsr_spmm", "arch": "sm_90a", "block": {"rows": 64, "cols": 64}, "accumulate": True, "transpose_a": True}
)
@example({"op": "bsr_spgemm", "arch": "sm_80", "block": {"rows": 16, "cols": 16}, "scheduler": "dynamic"})
@example({"op": "bsr_spgemm", "arch": "sm_89", "block": {"rows": 16, "cols": 16}, "output": "bsr"})
@example({"op": "bsr_spmm", "arch": "sm_80", "block": {"rows": 16, "cols": 128}, "b_layout": "column_major"})
@example(
    {
        "op": "bsr_spmm",
        "arch": "sm_90a",
        "mma": "wmma",
        "copy": "cp_async",
        "block": {"rows": 64, "cols": 64},
        "b_layout": "strided",
    }
)
@example({"op": "attention_backward", **GRADIENT, "pattern": {"kind": "prefix_lm"}})
@example({"op": "attention_backward", **GRADIENT, "pattern": {"kind": "block_lists", **LISTED, "mask": "bits"}})
def test_refused_or_rendered(data: dict[str, Any]) -> None:
    spec = parsed(data)
    if spec is None:
        return
    named = NamedSpec(unnamed_stem(spec), spec)
    try:
        plan = plan_for(named)
    except SpecError as error:
        assert error.field.split(".")[0] in type(spec).model_fields
        numbers = any(character.isdigit() for character in error.reason)
        allowed = ("patterns with a gradient: ", "leave it out", "allowed: ", "; use dq")  # where no number is
        assert numbers or any(words in error.reason for words in allowed), error.reason
        return
    assert plan.shared_bytes <= plan.arch.shared_memory_per_block
    assert plan.registers.needed <= plan.registers.limit <= plan.arch.registers_per_thread
    assert plan.threads <= 1024
    source = render_plan(plan)
    assert source == render_plan(plan_for(named))
    assert seal_is_intact(source)
    assert f" {named.stem}(const __grid_constant__ Params p)" in source
    assert source.isascii()


@quick
@given(plausible)
@example({"op": "bsr_spmm", "arch": "sm_90a", "block": {"rows": 16, "cols": 32}, "ctas_per_sm": 3, "tile": {"n": 1024}})
@example({"op": "attention", "arch": "sm_90a", "head_dim": 192, "pattern": {"kind": "causal"}, "tile": {"n": 128}})
def test_what_is_given_stays(data: dict[str, Any]) -> None:
    spec = parsed(data)
    if spec is not None:
        filled = spec.model_dump(mode="json", by_alias=True)
        assert parse_spec({**filled, **data, "tile": {**filled["tile"], **data.get("tile", {})}}) == spec


@quick
@given(plausible, st.data())
def test_key_order_is_irrelevant(data: dict[str, Any], draws: st.DataObject) -> None:
    spec, other = parsed(data), parsed(shuffled(data, draws.draw))
    assert spec == other
    if spec is not None and other is not None:
        assert spec.hash == other.hash


@quick
@given(plausible)
@example({"op": "bsr_spmm", "arch": "sm_90a", "block": {"rows": 16, "cols": 16}, "tile": {"m": 384}})
@example({"op": "bsr_spmm", "arch": "sm_90a", "block": {"rows": 32, "cols": 32}, "tile": {"m": 384}})
def test_canonical_json_keeps_the_hash(data: dict[str, Any]) -> None:
    spec = parsed(data)
    if spec is not None:
        again = parse_spec(json.loads(spec.canonical_json()))
        assert again == spec
        assert again.hash == spec.hash


@quick
@given(plausible, st.sampled_from(FIELDS), anything)
@example({"op": "attention", "arch": "sm_90a", "head_dim": 128, "pattern": {"kind": "dense"}}, "tile", {})
@example({"op": "attention", "arch": "sm_90a", "head_dim": 128, "pattern": {"kind": "dense"}}, "tile", {"\n": None})
@example({"op": "attention", "arch": "sm_90a", "head_dim": 128, "pattern": {"kind": "dense"}}, "kv_splits", True)
def test_any_value_in_any_field_is_accepted_or_refused(data: dict[str, Any], field: str, value: Any) -> None:
    spec = parsed({**data, field: value})
    if spec is not None:
        told = spec.model_dump(mode="json", by_alias=True)[field]
        if field == "tile":  # sizes that are left out are filled in
            assert isinstance(value, dict) and told == {**told, **value}
        else:
            assert told == value
        assert type(told) is type(value) or field == "softcap"


@quick
@given(anything)
def test_anything_at_all_is_refused(data: Any) -> None:
    assert parsed(data) is None


@pytest.mark.parametrize(
    "data", [{"": 2**63}, {"op": "attention", "arch": "sm_90a", "head_dim": 64, "pattern": {"kind": "dense"}, "": 1}]
)
def test_a_field_without_a_name_is_named(data: Any) -> None:
    with pytest.raises(SpecError) as caught:
        parse_spec(data)
    assert caught.value.field == "''" and str(caught.value).startswith("'': ")
