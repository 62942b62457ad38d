"""Built-in patterns whose kernels print an expression: it says what the pattern says, of pairs and of blocks."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from drawn_expressions import SIZES
from hypothesis import given, settings
from hypothesis import strategies as st
from range_program import outcomes

from codegen.expressions.cuda import printed
from codegen.expressions.nodes import Item, Literal, Node, Operation
from codegen.patterns import PATTERNS, PatternBase

torch = pytest.importorskip("torch")

from runtime.expressions.evaluate import evaluate  # noqa: E402

REACH = st.integers(0, 60)
DRAWN = st.one_of(
    st.fixed_dictionaries({"kind": st.just("causal"), "align": st.sampled_from(("bottom_right", "top_left"))}),
    st.just({"kind": "prefix_lm"}),
    st.fixed_dictionaries({"kind": st.just("sliding_window"), "left": REACH, "right": REACH}),
    st.fixed_dictionaries({"kind": st.just("sink_window"), "sink": st.integers(1, 60), "left": REACH, "right": REACH}),
    st.just({"kind": "block_lists", "block": {"q": 64, "kv": 64}, "mask": "causal"}),
)
LENGTH = st.integers(1, 70)


def pattern_of(fields: dict[str, Any]) -> PatternBase:
    return PATTERNS[fields["kind"]].model_validate(fields)


def sees(fields: dict[str, Any], query: int, key: int, q_len: int, kv_len: int, prefix: int) -> bool:
    """Say anew what patterns mean, counting from the ends, where the last query meets the last key."""
    if fields.get("align") == "top_left":
        return key in range(query + 1)
    back = (kv_len - key) - (q_len - query)  # how far a key lies before the query's own position
    if fields["kind"] == "prefix_lm":
        return back >= 0 or key in range(prefix)
    left, right = fields.get("left", kv_len + q_len), fields.get("right", 0)
    within = back in range(-right, left + 1)
    return within or (key < fields.get("sink", 0) and not back < -right)


@settings(max_examples=60, deadline=None)
@given(DRAWN, LENGTH, LENGTH, st.integers(-2, 80))
def test_expressions_say_what_patterns_mean(fields: dict[str, Any], q_len: int, kv_len: int, prefix: int) -> None:
    pattern = pattern_of(fields)
    node = pattern.pair_expression
    assert node is not None
    wanted = torch.tensor(
        [[sees(fields, query, key, q_len, kv_len, prefix) for key in range(kv_len)] for query in range(q_len)]
    )
    query, key = torch.arange(q_len)[:, None], torch.arange(kv_len)
    variables = {"q_idx": query, "kv_idx": key, "q_len": q_len, "kv_len": kv_len, "batch": 1}
    found = evaluate(node, variables, {"prefix_len": torch.tensor([1000, prefix], dtype=torch.int32)})
    assert torch.equal(found.expand(q_len, kv_len), wanted)
    values = pattern.values_of([torch.tensor(prefix)])
    assert torch.equal(pattern.visible(query, key, q_len, kv_len, values).expand(q_len, kv_len), wanted)


def with_numbers(node: Node, prefix: int) -> Node:
    """Return a tree without names of constants, and with a prefix of this length."""
    if isinstance(node, Item):
        return Literal(prefix)
    if isinstance(node, Operation):
        return Operation(node.name, tuple(with_numbers(each, prefix) for each in node.operands), node.type)
    return Literal(node.value) if isinstance(node, Literal) else node


BLOCK = (8, 16)
TOLD_WHOLE: list[dict[str, Any]] = [
    {"kind": "causal"},
    {"kind": "causal", "align": "top_left"},
    {"kind": "prefix_lm", "prefix": 0},
    {"kind": "prefix_lm", "prefix": 21},
    {"kind": "prefix_lm", "prefix": 50},
    *({"kind": "sliding_window", "left": left, "right": right} for left, right in ((0, 0), (7, 0), (20, 9), (60, 60))),
    *({"kind": "sink_window", "sink": sink, "left": 9, "right": 3} for sink in (16, 32)),
    {"kind": "block_lists", "block": {"q": 64, "kv": 64}, "mask": "causal"},
]


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_intervals_tell_full_partial_and_empty_blocks(recorded: Callable[..., None], tmp_path: Path) -> None:
    """As the pairs are by the pattern: where no block has both the end of the sinks and the window's edge, of all."""
    masks: list[Node] = []
    for fields in TOLD_WHOLE:
        pattern = pattern_of({name: value for name, value in fields.items() if name != "prefix"})
        assert pattern.pair_expression is not None
        masks.append(with_numbers(pattern.pair_expression, fields.get("prefix", 0)))
    found = outcomes(masks, BLOCK, tmp_path, recorded)
    for fields, (wrong, told, uniform) in zip(TOLD_WHOLE, found, strict=True):
        assert (wrong, told) == (0, uniform), fields
        assert uniform == uniform_blocks(fields) * SIZES["batch"] * SIZES["heads"], fields


def uniform_blocks(fields: dict[str, Any]) -> int:
    """Count the blocks of which all pairs are seen, or none."""
    q_len, kv_len = SIZES["q_len"], SIZES["kv_len"]
    found = 0
    for first_query in range(0, q_len, BLOCK[0]):
        for first_key in range(0, kv_len, BLOCK[1]):
            pairs = {
                sees(fields, query, key, q_len, kv_len, fields.get("prefix", 0))
                for query in range(first_query, min(first_query + BLOCK[0], q_len))
                for key in range(first_key, min(first_key + BLOCK[1], kv_len))
            }
            found += len(pairs) == 1
    return found


def test_a_source_names_its_constants() -> None:
    node = pattern_of({"kind": "sliding_window", "left": 5, "right": 5}).pair_expression
    assert node is not None
    made = printed(node, in_one_place=True)
    assert not (made.row or made.column)
    assert [str(part) for part in made.pair] == ["const int pair_0 = key - (query + p.kv_len - p.q_len);"]
    assert made.result == "(pair_0 >= -kWindowLeft) & (pair_0 <= kWindowRight)"


def test_patterns_that_print_none() -> None:
    strided = {"kind": "strided", "stride": 4, "local": 1, "block": 64}
    assert pattern_of(strided).pair_expression is None
    assert pattern_of({"kind": "dense"}).pair_expression is None
    assert pattern_of({"kind": "block_lists", "block": {"q": 64, "kv": 64}, "mask": "bits"}).pair_expression is None
