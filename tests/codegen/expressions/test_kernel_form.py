"""Scores as kernels compute them: the value of the text, in the instructions that are wanted for each pair."""

from __future__ import annotations

import math

import pytest
from drawn_expressions import EXACT, SIZES, NoValueError, Value, trees, value_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from codegen.expressions.cuda import Printed, printed
from codegen.expressions.kernel_form import LOG2_E, kernel_form
from codegen.expressions.nodes import Node, Type
from codegen.expressions.parse import parse_aux, parse_expression
from codegen.expressions.parts import Parts
from codegen.score import Score

SCALE = 0.125
quick = settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])


def values(node: Node, variables: dict[str, Value]) -> list[float]:
    """What a tree and all of its parts are worth, in float64; the tree itself is the last one."""
    parts = Parts()
    parts.add(node)
    return [float(value_of(part.node, variables, EXACT)) for part in parts.all]


def places(kv_idx: int, column: int, score: float) -> dict[str, Value]:
    """What variables are: those of a text, and those of kernels."""
    own: dict[str, Value] = {"q_idx": 17, "kv_idx": kv_idx, "batch": 1, "head": 2, "score": score}
    own |= {"q_len": SIZES["q_len"], "kv_len": SIZES["kv_len"], "first_key": kv_idx - column}
    column_of: dict[str, Value] = dict.fromkeys(("column", "column_of_pair"), float(column))
    return own | column_of | {"qk": score / SCALE, "scale_log2": SCALE * LOG2_E}


@quick
@given(
    node=trees(Type.FLOAT),
    factor=st.sampled_from([1.0, LOG2_E]),
    kv_idx=st.integers(0, SIZES["kv_len"] - 1),
    column=st.integers(0, 7),
    score=st.floats(-20, 20).map(lambda x: x + math.pi / 1000),  # no number that a text compares with
)
def test_the_value_is_that_of_the_text(node: Node, factor: float, kv_idx: int, column: int, score: float) -> None:
    variables = places(kv_idx, min(column, kv_idx), score)
    try:
        of_text, of_kernel = values(node, variables), values(kernel_form(node, factor), variables)
    except (NoValueError, OverflowError):
        return
    if all(map(math.isfinite, of_text)):
        largest = max(map(abs, (*of_text, *of_kernel)))
        assert of_kernel[-1] == pytest.approx(factor * of_text[-1], rel=1e-9, abs=1e-9 * largest)


def form(text: str, *, rows_have_heads: bool = False, factor: float = LOG2_E, **aux: str) -> Printed:
    node = parse_expression(text, parse_aux(aux), score=True)
    return printed(kernel_form(node, factor), rows_have_heads=rows_have_heads)


def test_alibi_is_two_additions_with_products() -> None:
    found = form("score + slope[head] * (kv_idx - q_idx)", slope="fp32[heads]")
    assert found.result == "qk * p.scale_log2 + (row_0 * column + row_1)"
    assert found.pair == found.column == ()
    first = "row_0 * static_cast<float>(first_key - query)"
    assert [part.value for part in found.row] == ["load_slope(p, head)", "1.442695f * slope_of_row", first]


def test_a_softcap_is_what_the_softcap_of_specs_is() -> None:
    found = form("20 * tanh(score / 20)")
    assert found.result == "28.8539f - 57.7078f * rcp(1.0f + ex2(qk * row_0))"
    assert [part.value for part in found.row] == ["0.1f * p.scale_log2"]


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("score", "qk * p.scale_log2"),
        ("2 * score - score / -4", "qk * row_0 + qk * row_1"),
        ("score + bias[q_idx - kv_idx]", "qk * p.scale_log2 + 1.442695f * bias_of_pair"),
        ("score - abs(q_idx - kv_idx)", "qk * p.scale_log2 - fabsf(-1.442695f * column + row_0)"),
        ("score / temperature[head]", "qk * row_0"),
        ("3 * score * temperature[head]", "qk * row_0"),
        ("score + exp(score)", "pair_0 + 1.442695f * ex2(pair_0)"),
        ("score + bias[kv_idx]", "qk * p.scale_log2 + column_0"),
        ("score if q_idx < kv_idx else 3", "query < key ? qk * p.scale_log2 : 4.328085f"),
    ],
)
def test_what_is_left_for_a_pair(text: str, result: str) -> None:
    aux = {"bias": "fp32[64]", "temperature": "fp32[heads]"}
    assert form(text, **{name: each for name, each in aux.items() if name in text}).result == result


def test_what_is_compared_and_what_becomes_an_integer_is_computed_as_it_is_written() -> None:
    found = form("score + bias[int(kv_idx / 3.0)] if kv_idx * 0.1 < 7.5 else score", bias="fp32[64]")
    text = " ".join([found.result, *(part.value for part in (*found.column, *found.pair))])
    assert "static_cast<float>(key) / 3.0f" in text or "key / 3.0f" in text
    assert "0.1f" in text and "7.5f" in text


def test_a_head_of_packed_rows_is_known_with_the_row() -> None:
    found = form(
        "score * gain[head] + bias[head, kv_idx]", rows_have_heads=True, gain="fp32[heads]", bias="fp32[heads, kv_len]"
    )
    assert "load_gain(p, head)" in [part.value for part in found.row]
    assert found.column == () and any("load_bias(p, head, key)" in part.value for part in found.pair)


def test_a_derivative_is_computed_likewise() -> None:
    assert printed(Score(value="score + 0.5 * kv_idx").slope_of_pair).result == "1.0f"
    squared = printed(Score(value="score * score").slope_of_pair)
    assert squared.result == "pair_0 + pair_0" and str(squared.pair[0]) == "const float pair_0 = qk * row_0;"
