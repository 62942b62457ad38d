"""Specs: fields, defaults, the hash, and what is refused."""

from __future__ import annotations

import copy
import hashlib
import json
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from each import every_spec, looped
from pydantic import ValidationError

from codegen.arch import ARCHS
from codegen.errors import SpecError
from codegen.library import NamedSpec, find_spec, shipped_names, shipped_specs
from codegen.parse import parse_spec
from codegen.patterns import PATTERNS
from codegen.planning import plan_for
from codegen.spec import AttentionSpec, BsrSddmmSpec, BsrSpgemmSpec, BsrSpmmSpec, json_schema

Fields = dict[str, Any]
FILLED_IN = ("mma", "copy", "schedule", "stages", "tile", "dtype", "lse", "stream_k_tail")

OPTIONS = [("softcap", None, 30.0), ("sink", False, True), ("pack_gqa", 1, 8)]


def with_field(data: Fields, dotted: str, value: object) -> Fields:
    *parents, last = dotted.split(".")
    target = data
    for parent in parents:
        target = target[parent]
    target[last] = value
    return data


def refusal(data: object) -> SpecError:
    with pytest.raises(SpecError) as caught:
        parse_spec(data)
    return caught.value


def test_discriminators_pick_the_model(attention: Fields, spmm: Fields, sddmm: Fields, spgemm: Fields) -> None:
    assert isinstance(parse_spec(attention), AttentionSpec)
    assert isinstance(parse_spec(spmm), BsrSpmmSpec)
    assert isinstance(parse_spec(sddmm), BsrSddmmSpec)
    assert isinstance(parse_spec(spgemm), BsrSpgemmSpec)


def test_a_spec_cannot_be_changed(attention: Fields) -> None:
    spec = parse_spec(attention)
    with pytest.raises(ValidationError, match="frozen"):
        spec.stages = 3  # type: ignore[misc]
    assert hash(spec) == hash(parse_spec(attention))


@pytest.mark.parametrize("op", ["attention", "spmm", "sddmm", "spgemm"])
def test_left_out_fields_are_filled_in(op: str, request: pytest.FixtureRequest) -> None:
    whole: Fields = request.getfixturevalue(op)
    short = {key: value for key, value in whole.items() if key not in FILLED_IN}
    assert parse_spec(short) == parse_spec(whole)


@pytest.mark.parametrize("op", ["sddmm", "spgemm"])
def test_operator_without_kernels_for_an_architecture(
    op: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("sm_80", "sm_86", "sm_89", "sm_120"):
        others = tuple(c for c in ARCHS[name].combinations if c.op != f"bsr_{op}")
        monkeypatch.setitem(ARCHS, name, replace(ARCHS[name], combinations=others))
    error = refusal(request.getfixturevalue(op) | {"arch": "sm_89"})
    assert error.field == "arch"
    assert error.reason == f"is sm_89; bsr_{op} is written for sm_90a"


@pytest.mark.parametrize("op", ["sddmm", "spgemm"])
def test_operator_without_kernels_of_an_instruction(op: str, request: pytest.FixtureRequest) -> None:
    error = refusal(request.getfixturevalue(op) | {"arch": "sm_89"})
    assert error.field == "mma"
    assert error.reason.startswith("wgmma is not possible here")
    assert error.reason.endswith(
        f"bsr_{op} on sm_89 has: mma: mma, copy: cp_async, schedule: multistage; "
        "mma: wmma, copy: cp_async, schedule: multistage"
    )


def test_left_out_tile_follows_the_block(attention: Fields) -> None:
    del attention["tile"]
    attention["pattern"]["block"] = {"q": 64, "kv": 64}
    assert parse_spec(attention).tile.model_dump() == {"m": 128, "n": 64}


@pytest.mark.parametrize(("head_dim", "keys"), [(64, 128), (96, 128), (128, 128), (192, 64), (256, 64)])
def test_left_out_tile_follows_the_head(attention: Fields, head_dim: int, keys: int) -> None:
    del attention["tile"]
    attention["head_dim"] = head_dim
    assert parse_spec(attention).tile.model_dump() == {"m": 128, "n": keys}
    plan_for(find_spec(attention))


@pytest.mark.parametrize("arch", ARCHS)
def test_left_out_combination_is_a_legal_one(arch: str) -> None:
    for op, rest in (
        ("attention", {"head_dim": 64, "pattern": {"kind": "dense"}}),
        ("bsr_spmm", {"block": {"rows": 64, "cols": 64}}),
    ):
        spec = parse_spec({"op": op, "arch": arch, **rest})
        assert (spec.mma, spec.copy_, spec.schedule) in {(c.mma, c.copy, c.schedule) for c in ARCHS[arch].of(op)}


def test_half_given_combination_keeps_what_was_given(attention: Fields) -> None:
    attention["schedule"] = "cooperative"
    del attention["mma"], attention["copy"]
    spec = parse_spec(attention)
    assert (spec.mma, spec.copy_, spec.schedule) == ("wgmma", "tma", "cooperative")


def test_hash_ignores_the_order_of_fields(attention: Fields) -> None:
    turned = {key: attention[key] for key in reversed(attention)}
    turned["pattern"] = {key: attention["pattern"][key] for key in reversed(attention["pattern"])}
    assert parse_spec(turned).hash == parse_spec(attention).hash


@looped
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("dtype", "bf16"),
        ("head_dim", 64),
        ("pattern.k", 33),
        ("pattern.block.q", 64),
        ("pattern.block.kv", 64),
        ("pattern", {"kind": "dense"}),
        ("tile.n", 64),
        ("schedule", "cooperative"),
        ("stages", 3),
        ("lse", False),
        ("softcap", 30.0),
        ("sink", True),
        ("pack_gqa", 8),
        ("stream_k_tail", False),
    ],
)
def test_every_field_changes_the_hash(attention: Fields, field: str, value: object) -> None:
    before = parse_spec(attention).hash
    assert parse_spec(with_field(attention, field, value)).hash != before


@pytest.mark.parametrize(("option", "off", "on"), OPTIONS)
def test_an_option_that_is_off_is_no_part_of_the_hash(attention: Fields, option: str, off: object, on: object) -> None:
    plain = parse_spec(attention)
    assert option not in plain.canonical_json()
    assert parse_spec({**attention, option: off}).hash == plain.hash
    assert json.loads(parse_spec({**attention, option: on}).canonical_json()) == {**attention, option: on}


def test_split_tail_is_part_of_the_hash_where_a_kernel_can_have_it(attention: Fields) -> None:
    off = parse_spec({**attention, "stream_k_tail": False})
    assert json.loads(off.canonical_json())["stream_k_tail"] is False
    assert not parse_spec(json.loads(off.canonical_json())).stream_k_tail
    # Elsewhere it is an option that is off, whether the file says so or not.
    causal = {**attention, "pattern": {"kind": "causal"}}
    del causal["stream_k_tail"]
    plain = parse_spec(causal)
    assert "stream_k_tail" not in plain.canonical_json()
    assert parse_spec({**causal, "stream_k_tail": False}).hash == plain.hash


@pytest.mark.parametrize(
    ("arch", "pattern"),
    [
        ("sm_90a", {"kind": "causal"}),
        ("sm_90a", {"kind": "sink_window", "sink": 4, "left": 100, "right": 0}),
        ("sm_90a", {"kind": "strided", "stride": 4, "local": 1, "block": 64}),
        ("sm_90a", {"kind": "block_lists", "block": {"q": 128, "kv": 128}}),
        ("sm_89", {"kind": "dense"}),
        ("sm_89", {"kind": "topk", "k": 8, "block": {"q": 64, "kv": 64}}),
    ],
)
def test_split_tail_is_refused_where_no_kernel_has_it(arch: str, pattern: Fields) -> None:
    fields = {"op": "attention", "arch": arch, "head_dim": 64, "pattern": pattern}
    assert not parse_spec(fields).stream_k_tail
    error = refusal({**fields, "stream_k_tail": True})
    assert error.field == "stream_k_tail"
    assert error.reason == f"is true; {pattern['kind']} on {arch} does not support it: leave it out"


def test_hash_is_over_the_sorted_json(attention: Fields) -> None:
    text = json.dumps(attention, sort_keys=True, separators=(",", ":"))
    spec = parse_spec(attention)
    assert spec.canonical_json() == text
    assert spec.hash == hashlib.sha256(text.encode()).hexdigest()


def test_canonical_json_reads_back(attention: Fields, spmm: Fields) -> None:
    for data in (attention, spmm):
        spec = parse_spec(data)
        assert json.loads(spec.canonical_json()) == data
        assert parse_spec(json.loads(spec.canonical_json())) == spec


@looped
@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("op", "conv", "allowed: 'attention', 'attention_backward', 'block_mask', 'bsr_spmm'"),
        ("op", ["attention"], "allowed: 'attention', 'attention_backward'"),
        ("arch", "sm_90", "is 'sm_90'; allowed: 'sm_80', 'sm_86', 'sm_89', 'sm_90a' or 'sm_120'"),
        ("arch", ["sm_90a"], "allowed: 'sm_80', 'sm_86', 'sm_89', 'sm_90a' or 'sm_120'"),
        ("dtype", "fp8", "allowed: 'fp16', 'bf16', 'e4m3' or 'e5m2'"),
        ("head_dim", 72, "is 72; allowed: 64, 80, 96, 128, 192 or 256"),
        ("head_dim", "128", "is '128'"),
        ("head_dim", 128.0, "is 128.0; expected an integer"),
        ("head_dim", True, "is True"),
        ("stages", 0, "is 0; input should be greater than or equal to 1"),
        ("stages", "2", "is '2'"),
        ("stages", 2.0, "is 2.0"),
        ("stages", True, "is True"),
        ("lse", 1, "is 1; allowed: true, false"),
        ("lse", "yes", "is 'yes'"),
        ("pack_gqa", 3, "is 3; allowed: 1, 2, 4, 8, 16, 32 or 64"),
        ("pack_gqa", 8.0, "is 8.0; expected an integer"),
        ("sink", 4.0, "is 4.0; allowed: true, false"),
        ("softcap", 0, "is 0; input should be greater than or equal to 0.001"),
        ("softcap", -30.0, "is -30.0; input should be greater than"),
        ("softcap", 1e9, "input should be less than or equal to 1000"),
        ("softcap", float("inf"), "is inf"),
        ("softcap", float("nan"), "is nan"),
        ("softcap", "30", "is '30'"),
        ("softcap", True, "is True"),
        ("mma", "hgmma", "allowed: 'wmma', 'mma', 'wgmma' or 'none'"),
        ("tile", 128, "is 128; a mapping of fields is expected"),
        ("tile.m", "128", "is '128'"),
        ("tile.depth", 2, "is not a field of this spec"),
        ("warps", 4, "is not a field of this spec"),
        ("copy_", "tma", "is not a field of this spec"),
        ("pattern", "dense", "is 'dense'; a mapping of fields is expected"),
        ("pattern", None, "a mapping of fields is expected"),
        ("pattern.k", 0, "is 0"),
        ("pattern.k", 8.0, "is 8.0"),
        ("pattern.size", 8, "is not a field of this spec"),
        ("pattern.block.q", 48, "is 48; allowed: 1, 2, 4, 8, 16, 32, 64 or 128"),
        ("pattern.block.kv", 8, "is 8; allowed: 16, 32, 64 or 128"),
        ("pattern.block.q", 64.0, "expected an integer"),
    ],
)
def test_wrong_value_names_field_value_and_choice(attention: Fields, field: str, value: object, says: str) -> None:
    error = refusal(with_field(attention, field, value))
    assert error.field == field
    assert says in error.reason


@pytest.mark.parametrize(
    ("field", "misspelt", "near"),
    [
        ("head_dim", "headdim", "head_dim"),
        ("pattern", "patern", "pattern"),
        ("pattern.block", "blocks", "block"),
        ("pattern.block.kv", "kvs", "kv"),
        ("tile", "tiles", "tile"),
    ],
)
def test_a_misspelt_field_is_named_before_one_that_is_missing(
    attention: Fields, field: str, misspelt: str, near: str
) -> None:
    *parents, last = field.split(".")
    target = attention
    for parent in parents:
        target = target[parent]
    target[misspelt] = target.pop(last)
    error = refusal(attention)
    assert error.field == ".".join([*parents, misspelt])
    assert error.reason == f"is not a field of this spec; did you mean {near}?"


def test_an_unknown_field_names_those_that_there_are(attention: Fields, spmm: Fields) -> None:
    assert refusal(with_field(attention, "pattern.xyz", 8)).reason.endswith("; there are kind, k, block")
    assert refusal(with_field(spmm, "epilogue", {"xyz": 1})).reason.endswith("; there are bias, activation")


@pytest.mark.parametrize(
    ("op", "more", "tile"),
    [
        ("attention", {"m": 64}, (64, 128)),
        ("attention", {"n": 64}, (128, 64)),
        ("spmm", {"k": 32}, (128, 256, 32)),
        ("spmm", {"m": 384, "rows": 16}, (384, 128, 16)),
        ("spmm", {"m": 384, "rows": 32}, (384, 128, 32)),
        ("spmm", {"n": 256, "rows": 64}, (64, 256, 64)),
        ("spmm", {"m": 64, "rows": 64}, (64, 512, 32)),
    ],
)
def test_a_tile_is_completed(
    op: str, more: dict[str, int], tile: tuple[int, ...], request: pytest.FixtureRequest
) -> None:
    data = {key: value for key, value in request.getfixturevalue(op).items() if key not in FILLED_IN}
    size = more.pop("rows", None)
    if size:
        data["block"] = {"rows": size, "cols": size}
    spec = find_spec({**data, "tile": more}).spec
    assert tuple(spec.tile.model_dump().values()) == tile
    assert plan_for(find_spec(spec))


def test_fewer_stages_are_filled_in_where_a_plan_refuses_more(attention: Fields) -> None:
    fields = {key: value for key, value in attention.items() if key not in FILLED_IN}
    fields |= {"pattern": {"kind": "causal"}, "head_dim": 192}
    assert plan_for(find_spec({**fields, "tile": {"n": 64}})).spec.stages == 2
    assert plan_for(find_spec({**fields, "tile": {"n": 128}})).spec.stages == 1
    with pytest.raises(SpecError, match="stages: "):
        plan_for(find_spec({**fields, "tile": {"n": 128}, "stages": 2}))


def test_a_refusal_names_the_fewest_stages_that_were_tried(attention: Fields) -> None:
    fields = {key: value for key, value in attention.items() if key not in FILLED_IN}
    fields |= {"pattern": {"kind": "causal"}, "head_dim": 256, "tile": {"m": 64, "n": 256}}
    with pytest.raises(SpecError, match="1 stages of tile"):
        plan_for(find_spec(fields))


def test_schedule_where_there_is_nobody_to_take_turns_with(attention: Fields) -> None:
    short = {key: value for key, value in attention.items() if key not in FILLED_IN}
    assert parse_spec(short).schedule == "ping_pong"
    assert parse_spec({**short, "tile": {"m": 64}}).schedule == "cooperative"
    small = {"kind": "topk", "k": 8, "block": {"q": 64, "kv": 64}}
    assert parse_spec({**short, "pattern": small, "share_kv_loads": True}).schedule == "cooperative"


def test_blocks_of_112_columns_have_steps_of_16(spmm: Fields) -> None:
    short = {key: value for key, value in spmm.items() if key not in FILLED_IN}
    for arch in ("sm_89", "sm_90a"):
        named = find_spec({**short, "arch": arch, "mma": "wmma", "block": {"rows": 64, "cols": 112}})
        assert plan_for(named).spec.tile.k == 16


@pytest.mark.parametrize(
    ("given", "field", "says"),
    [
        ({"mma": "wgmma", "copy": "cp_async"}, "copy", "cp_async is not possible with mma: wgmma; "),
        ({"copy": "cp_async", "schedule": "ping_pong"}, "schedule", "ping_pong is not possible with copy: cp_async; "),
        ({"schedule": "ping_pong"}, "schedule", "ping_pong is not possible here; "),
    ],
)
def test_only_given_fields_are_to_blame(spmm: Fields, given: Fields, field: str, says: str) -> None:
    short = {key: value for key, value in spmm.items() if key not in FILLED_IN}
    error = refusal({**short, **given})
    assert error.field == field
    assert error.reason.startswith(says)


def test_unknown_pattern_kind(attention: Fields) -> None:
    error = refusal(with_field(attention, "pattern.kind", "bigbird"))
    assert error.field == "pattern.kind"
    assert f"allowed: {', '.join(map(repr, PATTERNS))}" in error.reason


@pytest.mark.parametrize(
    "field", ["op", "arch", "head_dim", "pattern", "pattern.kind", "pattern.block", "pattern.block.kv"]
)
def test_missing_field(attention: Fields, field: str) -> None:
    *parents, last = field.split(".")
    target = attention
    for parent in parents:
        target = target[parent]
    del target[last]
    error = refusal(attention)
    assert error.field == field
    assert "is missing" in error.reason


@pytest.mark.parametrize("data", [None, 3, "dense", ["op"]])
def test_not_a_mapping(data: object) -> None:
    assert "a spec is a mapping of fields" in refusal(data).reason


def test_every_combination_is_legal_or_names_the_legal_ones(attention: Fields, spmm: Fields) -> None:
    del attention["stream_k_tail"]  # that of the architecture
    for data in (attention, spmm):
        for arch in ARCHS.values():
            legal = {(c.mma, c.copy, c.schedule) for c in arch.of(data["op"])}
            for mma in ("wmma", "mma", "wgmma", "none"):
                for how in ("ld_global", "cp_async", "tma"):
                    for schedule in ("multistage", "cooperative", "ping_pong"):
                        case = {**data, "arch": arch.name, "mma": mma, "copy": how, "schedule": schedule}
                        if (mma, how, schedule) in legal:
                            parse_spec(case)
                            continue
                        error = refusal(case)
                        assert error.field in ("mma", "copy", "schedule")
                        assert f"{case[error.field]} is not possible" in error.reason
                        assert all(f"mma: {m}, copy: {c}, schedule: {s}" in error.reason for m, c, s in legal)


def test_a_model_is_checked_too(attention: Fields) -> None:
    spec = parse_spec(attention)
    assert parse_spec(spec) == spec
    assert refusal(spec.model_copy(update={"head_dim": 100})).field == "head_dim"
    smuggled = AttentionSpec(**{**attention, "arch": "sm_89"})
    assert refusal(smuggled).field == "mma"


def test_an_epilogue_that_is_left_out_is_not_in_the_hash(spmm: Fields) -> None:
    plain = parse_spec(spmm)
    assert "epilogue" not in plain.canonical_json()
    assert parse_spec(spmm | {"epilogue": None}).hash == plain.hash
    with_bias = parse_spec(spmm | {"epilogue": {"bias": True}})
    assert json.loads(with_bias.canonical_json())["epilogue"] == {"activation": "none", "bias": True}
    assert with_bias.hash != plain.hash


@pytest.mark.parametrize(
    ("epilogue", "field", "says"),
    [
        ({}, "epilogue", "has no effect"),
        ({"bias": False, "activation": "none"}, "epilogue", "has no effect"),
        ({"activation": "tanh"}, "epilogue.activation", "is 'tanh'; allowed: 'none', 'relu', 'gelu' or 'silu'"),
        ({"bias": 1}, "epilogue.bias", "is 1"),
        ({"beta": 1.0}, "epilogue.beta", "is not a field"),
        (3, "epilogue", "is 3"),
    ],
)
def test_epilogues_that_make_no_sense(spmm: Fields, epilogue: object, field: str, says: str) -> None:
    error = refusal(spmm | {"epilogue": epilogue})
    assert error.field == field
    assert says in error.reason


def test_shared_memory_is_refused_with_numbers(attention: Fields, write_yaml: Callable[..., Any]) -> None:
    attention["stages"] = 4
    with pytest.raises(SpecError, match=r"stages: .*need \d+ KB of shared memory, sm_90a has 227 KB"):
        plan_for(find_spec(attention))
    path = write_yaml("# a comment\n" + json.dumps(attention, indent=1))
    with pytest.raises(SpecError, match=r"^kernel\.yaml:\d+: stages: "):
        plan_for(find_spec(path))


def test_find_spec_takes_everything_a_user_may_call_a_spec(attention: Fields) -> None:
    by_name = find_spec("h100_topk32")
    assert find_spec(by_name) is by_name
    assert by_name.path is not None
    assert find_spec(by_name.path) == find_spec(str(by_name.path)) == by_name
    assert by_name.origin == "specs/h100_topk32.yaml"
    assert find_spec(attention).spec == find_spec(by_name.spec).spec == by_name.spec


def test_unknown_name_gets_near_matches() -> None:
    with pytest.raises(SpecError, match=r"did you mean .*h100_topk32"):
        find_spec("h100_topk_32")
    with pytest.raises(SpecError, match=r"there are \d+, among them .*; codegen list shows all"):
        find_spec("")


@every_spec
def test_shipped_specs_spell_out_every_field(named: NamedSpec) -> None:
    assert named.lines is not None
    assert {key for key in named.lines if "." not in key} == set(json.loads(named.spec.canonical_json()))
    assert named.path is not None
    assert named.path.read_text().startswith("# ")


def test_shipped_specs_differ() -> None:
    hashes = {named.spec.hash: named.stem for named in shipped_specs()}
    assert len(hashes) == len(shipped_names())


def test_schema_lets_a_file_leave_out_what_is_filled_in() -> None:
    schema = json_schema()
    for model, required in (
        ("AttentionSpec", {"op", "arch", "head_dim", "pattern"}),
        ("BsrSpmmSpec", {"op", "arch", "block"}),
        ("BsrSddmmSpec", {"op", "arch", "block"}),
        ("BsrSpgemmSpec", {"op", "arch", "block"}),
        ("TileCopySpec", {"op", "arch"}),
    ):
        definition = schema["$defs"][model]
        assert set(definition["required"]) == required
        assert definition["additionalProperties"] is False
        assert set(FILLED_IN) - {"lse", "stream_k_tail"} < set(definition["properties"])
    assert schema["$defs"]["AttentionSpec"]["properties"]["head_dim"]["enum"] == [64, 80, 96, 128, 192, 256]
    assert schema["$defs"]["Block"]["properties"]["q"]["enum"] == [1, 2, 4, 8, 16, 32, 64, 128]
    assert schema["$defs"]["Block"]["properties"]["kv"]["enum"] == [16, 32, 64, 128]


def test_schema_describes_every_field() -> None:
    for model in json_schema()["$defs"].values():
        for name, field in model["properties"].items():
            assert name == "kind" or field.get("description"), f"{model['title']}.{name}"


DENSE_HEADS = {"op": "attention", "arch": "sm_90a", "pattern": {"kind": "dense"}, "kv_splits": 2}
CAUSAL_HEADS = DENSE_HEADS | {"pattern": {"kind": "causal"}}


def blocks_of(op: str, rows: int, **more: Any) -> Fields:
    return {"op": op, "arch": "sm_90a", "block": {"rows": rows, "cols": rows}, **more}


@looped
@pytest.mark.parametrize(
    ("fields", "tile", "stages"),
    [
        (DENSE_HEADS | {"head_dim": 64}, (128, 64), 4),
        (CAUSAL_HEADS | {"head_dim": 64}, (64, 64), 4),
        (DENSE_HEADS | {"head_dim": 128}, (64, 64), 2),
        (blocks_of("bsr_sddmm", 128), (128, 256), 4),
        (blocks_of("bsr_sddmm", 16), (16, 256), 3),
        (blocks_of("bsr_sddmm", 32), (32, 512), 3),
        (blocks_of("bsr_sddmm", 128, arch="sm_89"), (128, 128), 3),
        (blocks_of("bsr_sddmm", 64, arch="sm_89"), (64, 256), 2),
        (blocks_of("bsr_spgemm", 128), (128, 128), 3),
        (blocks_of("bsr_spgemm", 64), (64, 64), 4),
        (blocks_of("bsr_spgemm", 64, arch="sm_89"), (64, 64), 3),
        (blocks_of("bsr_spgemm", 32, arch="sm_89"), (32, 32), 2),
        ({"op": "tile_copy", "arch": "sm_89", "copy": "ld_global"}, (64, 128), 1),
        ({"op": "tile_copy", "arch": "sm_89", "copy": "cp_async"}, (64, 128), 3),
    ],
)
def test_left_out_tile_and_stages(fields: Fields, tile: tuple[int, int], stages: int) -> None:
    spec = parse_spec(fields)
    assert ((spec.tile.m, spec.tile.n), spec.stages) == (tile, stages)


@looped
@pytest.mark.parametrize("wrong", ["x", None, 1.5, [16], {"a": 1}, True, -4])
@pytest.mark.parametrize("arch", ["sm_89", "sm_90a"])
def test_a_wrong_value_is_told_where_other_fields_are_left_out(arch: str, wrong: object) -> None:
    listed = {"kind": "topk", "k": 8, "block": {"q": 64, "kv": 64}}
    heads = {"op": "attention", "arch": arch, "head_dim": 96, "pattern": listed, "tile": {"n": 64}}
    block = {"rows": 16, "cols": 32}
    for fields, names in (
        (
            heads,
            ("head_dim", "pattern.block.q", "pattern.block.kv", "tile.n", "pack_gqa", "warp_rows", "share_kv_loads"),
        ),
        (blocks_of("bsr_spmm", 16, arch=arch, block=block, tile={"n": 256}), ("block.cols", "tile.n", "accumulate")),
        (blocks_of("bsr_sddmm", 16, arch=arch, block=block, tile={"n": 256}), ("block.cols", "tile.n")),
    ):
        more = {"ctas_per_sm": 3} if fields["op"] != "attention" else {}
        for name in (*names, *more):
            data = with_field(copy.deepcopy({**fields, **more}), name, wrong)
            if name in ("share_kv_loads", "accumulate") and wrong is True:
                continue
            with pytest.raises(SpecError) as caught:
                plan_for(find_spec(data))
            assert caught.value.field in (name, "share_kv_loads", "ctas_per_sm", "accumulate"), data


def test_errors_travel_between_processes() -> None:
    from runtime.errors import ArgumentError, CompileError

    for error in (
        SpecError("tile.n", "is 12", "x.yaml:3"),
        CompileError("x.cu", "a\nlog"),
        ArgumentError("q", "is on cpu"),
    ):
        again = pickle.loads(pickle.dumps(error))
        assert type(again) is type(error) and str(again) == str(error) and vars(again) == vars(error)
