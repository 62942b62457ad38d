"""Plans of gradients of packed sequences: tiles, rows of statistics and sums of a launch, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from codegen.errors import SpecError
from codegen.library import find_spec
from codegen.patterns import PATTERNS
from codegen.plan import Plan
from codegen.planning import plan_for
from codegen.problem import AttentionShape
from codegen.scored_pattern import pattern_of
from codegen.select.backward import backward_kernels
from codegen.select.backward import check_pattern as check_gradient
from codegen.varlen_cases import gradient_cases_of, random_gradient_cases

FIELDS: dict[str, Any] = {
    "op": "attention_backward",
    "arch": "sm_90a",
    "head_dim": 128,
    "pattern": {"kind": "causal"},
    "layout": "varlen",
}


def plan_of(gradients: str, **changes: Any) -> Plan:
    return plan_for(find_spec({**FIELDS, "gradients": gradients, **changes}))


@pytest.mark.parametrize("arch", ["sm_90a", "sm_89"])
@pytest.mark.parametrize("gradients", ["dq", "dkdv"])
def test_a_launch_has_tiles_for_all_tokens(gradients: str, arch: str) -> None:
    plan = plan_of(gradients, arch=arch)
    launch = plan.problem(AttentionShape(1, 8, 2, 1000, 900, sequences=7), 100)
    is_dq = gradients == "dq"
    rows, tokens, heads = (plan.spec.tile.m, 1000, 8) if is_dq else (plan.spec.tile.n, 900, 2)  # type: ignore[union-attr]
    tiles = tokens // rows + 7 + 2
    assert launch.numbers["query_tiles" if is_dq else "key_tiles"] == tiles and launch.tiles == heads * tiles
    assert launch.numbers["padded_q_len"] == (1000 // 128 + 2 * (7 + 2)) * 128
    assert launch.numbers["sequences"] == 7
    names = {param.name for param in plan.params}
    assert names >= {"cu_seqlens_q", "cu_seqlens_k", "sequences", "dlse", "lse", "stats"}
    assert not {name for name in names if name.endswith("_batch_stride")} and "batch_heads" not in names


@pytest.mark.parametrize("deterministic", [True, False])
def test_one_kernel_sums_steps_of_all_sequences(deterministic: bool) -> None:
    plan = plan_of("dq_dkdv", deterministic=deterministic)
    launch = plan.problem(AttentionShape(1, 8, 2, 1000, 900, sequences=7), 100)
    steps = 1000 // 80 + 7 + 2
    assert plan.spec.tile.m == 80 and launch.numbers["query_steps"] == steps  # type: ignore[union-attr]
    assert launch.epilogue_grid == 8 * steps
    padded = plan_of("dq_dkdv", layout="padded", deterministic=deterministic)
    one = padded.problem(AttentionShape(1, 8, 2, 1000, 900), 100)
    assert one.prologue_grid + deterministic <= launch.prologue_grid
    sums = launch.scratch if deterministic else launch.sums
    assert sums["dq_accum"] == 8 * steps * 80 * 128 * 4
    assert {name: launch.scratch.get(name) for name in ("rising_q", "rising_k")} == dict.fromkeys(
        ("rising_q", "rising_k"), 32 if deterministic else None
    )
    assert launch.counters == ({"dq_semaphore": 8 * steps, "scheduler": 1} if deterministic else {})


@pytest.mark.parametrize(
    ("kind", "shape", "group"),
    [
        ("dense", AttentionShape(1, 24, 24, 4608, 4608), 12),  # 24 heads of 36 tiles: at most 14
        ("dense", AttentionShape(2, 13, 13, 4608, 4608), 13),
        ("causal", AttentionShape(16, 12, 12, 1024, 1024), 64),
        ("causal", AttentionShape(1, 32, 8, 8192, 8192), 4),
        ("causal", AttentionShape(0, 32, 8, 8192, 8192), 1),
        ("causal", AttentionShape(1, 4, 4, 131072, 131072), 1),
    ],
)
def test_groups_of_interleaved_heads_have_the_same_size(kind: str, shape: AttentionShape, group: int) -> None:
    plan = plan_of("dq_dkdv", layout="padded", pattern={"kind": kind})
    assert plan.problem(shape, 100).numbers["head_group"] == group


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"pattern": {"kind": "prefix_lm"}}, "pattern.kind: is prefix_lm, which is not written for layout varlen"),
        (
            {"pattern": {"kind": "strided", "stride": 2, "local": 0, "block": 64}},
            "pattern.kind: is strided, .*; allowed: block_lists, causal",
        ),
        ({"kv_lengths": True}, "kv_lengths: is not written for layout varlen; leave it out"),
        ({"score": {"value": "score + 1"}}, "score: is not written for layout varlen; leave it out"),
        (
            {"gradients": "daux"},
            "gradients: is daux, which is not written for layout varlen; allowed: dq, dkdv, dq_dkdv",
        ),
        ({"gradients": "dq_dkdv", "pattern": {"kind": "sink_window"}}, "pattern.kind: is sink_window"),
        ({"layout": "packed"}, "layout"),
    ],
)
def test_what_is_not_written_is_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(SpecError, match=says):
        plan_of(**{"gradients": "dkdv", **changes})


def test_patterns_of_packed_sequences_have_gradients() -> None:
    for kind in (name for name, pattern in PATTERNS.items() if pattern.packs_sequences):
        block = {"block": {"q": 128, "kv": 128}} if PATTERNS[kind].lists else {}
        pattern = pattern_of({"kind": kind, **block})
        check_gradient(pattern)
        options: dict[str, Any] = {"arch": "sm_90a", "dtype": "fp16", "head_dim": 64}
        padded, packed = (backward_kernels(pattern, **options, layout=layout) for layout in ("padded", "varlen"))
        in_one = padded.dq_dkdv is not None and not block  # lists of packed sequences have two kernels
        assert (packed.dq_dkdv is not None) == in_one, kind
        assert all(named.spec.layout == "varlen" for named in (packed.dq, packed.dkdv))  # type: ignore[union-attr]


def test_cases_fit_the_oracle_and_hold_what_is_unusual() -> None:
    spec: Any = plan_of("dkdv", head_dim=64).spec
    cases = {case.name: case for case in gradient_cases_of(spec)}
    assert {"plain", "empty_sequences", "without_keys", "without_queries", "tokens_around", "huge_sinks"} <= set(cases)
    assert {"gqa_8_to_1", "more_queries_than_keys", "chunks_of_queries", "one_sequence", "d56"} <= set(cases)
    assert max(case.pairs for case in cases.values()) <= 2 * 4096 * 4096 < 2 * 8192 * 8192
    assert len({case.name for case in random_gradient_cases(spec)}) == 60
