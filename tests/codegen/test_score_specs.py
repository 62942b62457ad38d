"""Specs with a score: what they say of it, what is refused, what is in the source, which tile they get."""

from __future__ import annotations

import json
from typing import Any

import pytest

from codegen.errors import SpecError
from codegen.indexing import what
from codegen.library import find_spec
from codegen.parse import parse_spec
from codegen.planning import plan_for
from codegen.render import render
from codegen.score import Score
from codegen.select import choose
from codegen.spec import AttentionBackwardSpec, AttentionSpec
from codegen.tools.explain import explained

ALIBI: dict[str, Any] = {"value": "score + slope[head] * (kv_idx - q_idx)", "aux": {"slope": "fp32[heads]"}}
TABLE: dict[str, Any] = {"value": "score + bias[head, q_idx - kv_idx]", "aux": {"bias": "fp16[heads, 99]"}}
CAP: dict[str, Any] = {"value": "20 * tanh(score / 20)"}
LISTS: dict[str, Any] = {"kind": "block_lists", "block": {"q": 128, "kv": 128}}
DOCUMENTS: dict[str, Any] = {
    **LISTS,
    "mask": "doc[batch, q_idx] == doc[batch, kv_idx]",
    "aux": {"doc": "int32[batch, kv_len]"},
}


def spec(**fields: Any) -> AttentionSpec:
    causal = {"kind": "causal"}
    found = parse_spec(
        {"op": "attention", "arch": "sm_90a", "head_dim": 128, "pattern": causal, "score": ALIBI, **fields}
    )
    assert isinstance(found, AttentionSpec)
    return found


def gradient(**fields: Any) -> AttentionBackwardSpec:
    given = {"op": "attention_backward", "arch": "sm_90a", "head_dim": 128, "gradients": "dq", "pattern": LISTS}
    found = parse_spec({**given, "score": ALIBI, **fields})
    assert isinstance(found, AttentionBackwardSpec)
    return found


def test_the_hash_is_of_the_tree() -> None:
    other = {"value": "score+ (slope[ head ])*((kv_idx)-q_idx)", "aux": {"slope": " fp32[ heads ]"}}
    assert spec().hash == spec(score=other).hash != spec(score=CAP).hash
    assert json.loads(spec(score=CAP).canonical_json())["score"] == CAP
    without = parse_spec({"op": "attention", "arch": "sm_90a", "head_dim": 128, "pattern": {"kind": "causal"}})
    assert "score" not in without.canonical_json()


def test_a_mask_and_a_score_have_one_name_space() -> None:
    both = spec(
        pattern=DOCUMENTS, score={"value": "score + w[doc[batch, kv_idx]]", "aux": {**DOCUMENTS["aux"], "w": "fp32[8]"}}
    )
    assert [tensor.name for tensor in both.aux_tensors] == ["doc", "w"] and len(both.expressions) == 2
    source = render(find_spec(both))
    assert source.count("load_doc(const Params& p") == source.count("// doc: int32[batch, kv_len]") == 1
    assert [param.name for param in plan_for(find_spec(both)).params].count("aux_doc") == 1


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"score": {"value": "scor"}},
            r"score.value: is 'scor'; column 1 \(\"scor\"\): no such name, did you mean score",
        ),
        ({"score": {"value": "score > 1"}}, "score.value: .*Boolean"),
        (
            {"score": {"value": "score", "aux": {"w": "fp32[3]"}}},
            "score.value: .*w: declared, but no expression uses it",
        ),
        ({"score": {"value": "score", "aux": {"w": "fp99[3]"}}}, "score.aux: .*'fp99' is not an element type"),
        ({"score": {"value": "score + q_idx // kv_idx"}}, "score.value: .*may divide by zero"),
        ({"score": {"valu": "score"}}, "score.valu: .*is not a field.*did you mean value"),
        ({"score": {}}, "score.value: is missing"),
        ({"score": "score"}, "score: is 'score'; a mapping of fields is expected"),
        ({"softcap": 30}, r"softcap: is 30; .*write the tanh in score.value, as in 30 \* tanh\(score / 30\)"),
        (
            {"pattern": DOCUMENTS, "score": {"value": "score + doc", "aux": {"doc": "fp32[]"}}},
            r"score.aux.doc: is fp32\[\], but pattern.aux has int32\[batch, kv_len\]: mask and score share",
        ),
        (
            {
                "pattern": {
                    **LISTS,
                    "mask": " and ".join(f"a{i}" for i in range(5)),
                    "aux": {f"a{i}": "bool[]" for i in range(5)},
                },
                "score": {"value": " + ".join(f"b{i}" for i in range(4)), "aux": {f"b{i}": "fp32[]" for i in range(4)}},
            },
            "score.aux: has, with pattern.aux, 9 tensors; at most 8",
        ),
    ],
)
def test_what_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        spec(**fields)
    with pytest.raises(SpecError, match=message):
        gradient(**fields)


def test_wmma_is_refused_by_name() -> None:
    with pytest.raises(SpecError, match="score: is an expression; attention with wmma does not support it"):
        plan_for(find_spec(spec(arch="sm_89", mma="wmma", head_dim=64)))


def test_what_is_nested_too_deeply_for_the_stack_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    nested = "tanh(" * 140 + "score" + ")" * 140
    render(find_spec(gradient(score={"value": nested})))

    def exhausted(*_: Any) -> Any:
        raise RecursionError

    monkeypatch.setattr("codegen.score.kernel_form", exhausted)
    with pytest.raises(SpecError, match=r"score.value: .*its derivative is nested too deeply"):
        spec(score={"value": "score + 0.123"})


def test_a_long_derivative_is_not_written_out() -> None:
    nested = "tanh(" * 30 + "score" + ")" * 30
    source = render(find_spec(gradient(score={"value": nested})))
    assert len(source) < 100_000
    assert "The derivative of the score by scale * q.k:\n//   see its computation\n" in source


def test_a_source_has_the_text_above_the_function() -> None:
    for named in (find_spec(spec()), find_spec(spec(arch="sm_89")), find_spec(gradient())):
        source = render(named)
        assert f"The score is\n//   {ALIBI['value']}\n__device__ __forceinline__ float score_log2(" in source
        assert "score_slope(" not in source  # which is 1
    source = render(find_spec(gradient(gradients="dkdv", score=CAP)))
    assert "//   20.0 * (0.05 * (1.0 - tanh(score / 20) * tanh(score / 20)))\n__device__" in source


def test_a_listing_has_a_short_name() -> None:
    assert what(spec()) == "causal, d 128, score"


def test_explained() -> None:
    told = json.dumps(explained(plan_for(find_spec(spec(score=TABLE)))))
    assert "instructions per pair" in told and TABLE["value"] in told and "aux bias" in told


def test_heavy_scores_have_smaller_steps_and_none_is_refused() -> None:
    assert spec().tile.n == spec(score=CAP).tile.n == 128 and spec(score=TABLE).tile.n == 64
    assert spec(pattern=DOCUMENTS, score=CAP).tile.n == 64
    assert gradient(gradients="dkdv").tile.m == 64 and gradient(gradients="dkdv", score=TABLE).tile.m == 32
    heavy = {
        "value": " + ".join(f"t{i}[q_idx, kv_idx] * score" for i in range(8)),
        "aux": {f"t{i}": "fp32[q_len, kv_len]" for i in range(8)},
    }
    for arch in ("sm_90a", "sm_89", "sm_80"):
        for head_dim in (64, 96, 128, 192, 256):
            plan_for(find_spec(spec(arch=arch, head_dim=head_dim, score=heavy)))
            if head_dim != 96 or arch == "sm_90a":
                for gradients in ("dq", "dkdv"):
                    plan_for(find_spec(gradient(arch=arch, head_dim=head_dim, score=heavy, gradients=gradients)))


def test_kernels_are_chosen_as_without_a_score() -> None:
    given = {"op": "attention", "arch": "sm_90a", "head_dim": 128, "pattern": {"kind": "causal"}}
    sizes = {"batch": 1, "heads": 16, "kv_heads": 16, "q_len": 8192, "kv_len": 8192}
    chosen = choose({**given, "score": ALIBI}, sizes)
    assert isinstance(chosen.spec, AttentionSpec) and chosen.spec.score == Score(**ALIBI)
    assert chosen.spec.tile == choose(given, sizes).spec.tile
