"""The value of a pattern and a score, and its JSON: what is read, what is refused, what is equal."""

from __future__ import annotations

import json
from typing import Any

import pytest

from codegen.errors import SpecError
from codegen.patterns import PATTERNS, Block
from codegen.scored_pattern import ScoredPattern, pattern_of, pattern_with_score, scored_pattern

FIELDS: dict[str, dict[str, Any]] = {
    "block_lists": {"block": {"q": 200, "kv": 48}, "mask": "doc[q_idx] == doc[kv_idx]", "aux": {"doc": "int32[64]"}},
    "causal": {"align": "top_left"},
    "dense": {},
    "prefix_lm": {},
    "sink_window": {"sink": 4, "left": 9, "right": 0},
    "sliding_window": {"left": 9, "right": 1},
    "strided": {"stride": 3, "local": 1, "block": 64, "causal": True},
    "topk": {"block": {"q": 256, "kv": 64}},
}
SCORE = {"value": "score + slope[head] * doc[kv_idx]", "aux": {"doc": "int32[64]", "slope": "fp32[heads]"}}


def text_of(kind: str, **more: Any) -> str:
    return json.dumps({"kind": kind, **FIELDS[kind], **more})


@pytest.mark.parametrize("kind", PATTERNS)
def test_a_text_and_its_value_have_the_same_fields(kind: str) -> None:
    scored = scored_pattern(text_of(kind))
    assert json.loads(scored.text) == scored.pattern_fields == {"kind": kind, **FIELDS[kind]}
    assert scored_pattern(scored.text) == scored and scored_pattern(text_of(kind)) is scored
    assert scored.score is None and scored.pattern == pattern_of(scored.pattern_fields)
    assert scored.block == (Block.model_construct(**FIELDS[kind]["block"]) if scored.pattern.lists else None)


def test_a_score_is_a_field_of_the_text_or_a_text_of_its_own() -> None:
    apart = pattern_with_score(text_of("block_lists"), json.dumps(SCORE))
    scored = scored_pattern(text_of("block_lists", score=SCORE))
    assert scored == apart and hash(scored) == hash(apart) and {scored: 1}[apart] == 1
    assert scored.score_fields == SCORE and scored_pattern(scored.text) == scored
    assert (scored.aux_names, scored.score_names) == (("doc", "slope"), ("doc", "slope"))
    assert pattern_with_score(text_of("dense"), json.dumps(SCORE)) != scored != scored_pattern(text_of("block_lists"))
    assert scored != scored.text


def test_other_fields_make_another_pattern_with_the_same_score() -> None:
    scored = scored_pattern(text_of("topk", score=SCORE))
    assert scored.with_pattern(block={"q": 64, "kv": 64}).pattern == pattern_of(
        {"kind": "topk", "block": {"q": 64, "kv": 64}}
    )
    bits = scored.with_pattern(kind="block_lists", mask="bits", block={"q": 64, "kv": 64})
    assert bits.pattern.kind == "block_lists" and bits.score == scored.score
    with pytest.raises(SpecError, match=r"^pattern\.k: is 0; "):
        scored.with_pattern(k=0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "^pattern: is not JSON: "),
        ("[1]", r"^pattern: is \[1\]; a mapping of fields is expected"),
        ("{}", r"^pattern\.kind: is missing; allowed: 'block_lists', 'causal'"),
        ('{"kind": "causel"}', r"^pattern\.kind: is 'causel'; allowed: 'block_lists', 'causal'"),
        ('{"kind": "causal", "algin": "top_left"}', r"^pattern\.algin: is not a field of a pattern; .*align"),
        ('{"kind": "sliding_window", "left": true, "right": 0}', r"^pattern\.left: is True; "),
        ('{"kind": "sliding_window", "left": 1.0, "right": 0}', r"^pattern\.left: is 1\.0; "),
        ('{"kind": "sliding_window"}', r"^pattern\.left: is missing; the pattern of a call must have it$"),
        ('{"kind": "sink_window"}', r"^pattern\.sink: is missing; the pattern of a call must have it$"),
        (
            '{"kind": "sliding_window", "left": 1}',
            r"^pattern: is .*right is missing; give left, right, or omit all of them",
        ),
        ('{"kind": "topk"}', r"^pattern\.block: is None; expected q and kv, the queries and keys per block, 1 or more"),
        ('{"kind": "topk", "block": {"q": 64}}', r"^pattern\.block: is \{'q': 64\}; expected q and kv"),
        ('{"kind": "topk", "block": {"q": 0, "kv": 64}}', r"^pattern\.block: is \{'q': 0, 'kv': 64\}; expected q"),
        (
            '{"kind": "topk", "block": {"q": true, "kv": 64}}',
            r"^pattern\.block: is \{'q': True, 'kv': 64\}; expected q",
        ),
        ('{"kind": "block_lists", "block": {"q": 64, "kv": 64}, "mask": "q_idx +"}', r"^pattern\.mask: is 'q_idx \+'"),
        ('{"kind": "dense", "score": 3}', r"^score: is 3; a mapping of fields is expected"),
        ('{"kind": "dense", "score": {"aux": {}}}', r"^score\.value: is missing"),
        ('{"kind": "dense", "score": {"value": "score", "scale": 2}}', r"^score\.scale: is not a field of a score; "),
        ('{"kind": "dense", "score": {"value": "score +"}}', r"^score\.value: is 'score \+'; "),
    ],
)
def test_what_is_no_pattern_is_refused_by_its_field(text: str, message: str) -> None:
    for _ in range(2):
        with pytest.raises(SpecError, match=message):
            scored_pattern(text)


def test_values_are_frozen() -> None:
    scored: Any = ScoredPattern(pattern_of({"kind": "dense"}))
    with pytest.raises(AttributeError):
        scored.pattern = None
