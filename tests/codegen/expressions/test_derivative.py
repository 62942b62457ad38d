"""Derivatives of expressions: beside differences in float64, at ties as torch has them, and how they are written."""

from __future__ import annotations

import math

import pytest
from drawn_expressions import EXACT, NoValueError, Value, trees, value_of
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from codegen.expressions.cuda import printed
from codegen.expressions.derivative import derivative
from codegen.expressions.nodes import Aux, ExpressionError, Item, Literal, Node, Type, Variable, item
from codegen.expressions.nodes import operation as op
from codegen.expressions.parts import Parts

Q, K, HEAD, SCORE = (Variable(name) for name in ("q_idx", "kv_idx", "head", "score"))
SLOPE = item(Aux("slope", "fp32", ("heads",)), HEAD)
ONE, ZERO = Literal(1.0), Literal(0.0)
WHERE: dict[str, Value] = {"q_idx": 7, "kv_idx": 11, "batch": 1, "head": 2, "q_len": 40, "kv_len": 50}
STEPS = (1e-4, 5e-5)
TINY = 1e-7
"""A step inside one stair of a function of stairs, of which larger steps may climb several."""


def at(node: Node, score: float, **items: float) -> float:
    return float(value_of(node, WHERE | {"score": score}, EXACT, **items))


def difference(node: Node, score: float, step: float, **items: float) -> float:
    """The slope between two points near a score, or near the value of the only item."""
    if items:
        ((name, value),) = items.items()
        before, after = (at(node, score, **{name: value + sign * step}) for sign in (-1, 1))
    else:
        before, after = at(node, score - step), at(node, score + step)
    return (after - before) / (2 * step)


def check(node: Node, of: Node, score: float, **items: float) -> None:
    """Compare where the value is smooth: steps of two sizes make the same slope, a tiny one about the same."""
    try:
        slopes = [difference(node, score, step, **items) for step in STEPS]
        nearby = difference(node, score, TINY, **items)
        here = at(node, score, **items)
        found = at(derivative(node, of), score, **items)
    except NoValueError:
        assume(False)
    assume(all(map(math.isfinite, (*slopes, here, found))))
    assume(abs(here) < 1e6)  # the difference of larger ones has no digits left
    assume(abs(slopes[0] - slopes[1]) <= 1e-5 * max(1, abs(slopes[0])))
    assume(abs(nearby - slopes[0]) <= 0.1 * max(1, abs(slopes[0])))
    assert found == pytest.approx(slopes[1], rel=1e-3, abs=1e-4)


def has(node: Node, of: Node) -> bool:
    parts = Parts()
    parts.add(node)
    before = len(parts.all)
    parts.add(of)
    return len(parts.all) == before


scores = st.floats(-4, 4).map(lambda score: round(score, 2) + 0.00377)  # never one of the numbers that trees have


@settings(max_examples=120)
@given(trees(Type.FLOAT, 5).filter(lambda node: has(node, SCORE)), scores)
def test_by_the_score_it_is_the_slope(node: Node, score: float) -> None:
    check(node, SCORE, score)


BIAS = item(Aux("bias", "fp32", ()))
SMOOTH: dict[str, Node] = {
    "product": op("*", op("+", SCORE, BIAS), op("-", BIAS, Q)),
    "quotient": op("/", op("-", SCORE, BIAS), op("+", op("*", BIAS, BIAS), Literal(2))),
    "softcap": op("*", Literal(50.0), op("tanh", op("/", op("+", SCORE, BIAS), Literal(50)))),
    "exp": op("exp", op("neg", op("*", BIAS, BIAS))),
    "log2": op("log2", op("+", op("*", BIAS, SCORE), Literal(9.0))),
    "sqrt": op("sqrt", op("+", op("*", BIAS, BIAS), op("float", K))),
    "min": op("min", op("*", BIAS, Literal(3)), op("-", SCORE, BIAS)),
    "max": op("max", op("*", BIAS, SCORE), op("-", SCORE, BIAS)),
    "abs": op("abs", op("-", op("*", BIAS, BIAS), SCORE)),
    "where": op("where", op("<", Q, K), op("*", BIAS, SCORE), op("exp", SCORE)),
    "nested": op("tanh", op("exp", op("tanh", op("*", BIAS, SCORE)))),
}


@pytest.mark.parametrize("by", [SCORE, BIAS], ids=["score", "element"])
@pytest.mark.parametrize("name", SMOOTH)
def test_each_rule_gives_the_slope(name: str, by: Item | Variable) -> None:
    for score, value in ((0.7, -0.4), (-1.3, 0.9), (2.5, 1.1)):
        found = at(derivative(SMOOTH[name], by), score, bias=value)
        if by is BIAS:
            slope = difference(SMOOTH[name], score, 1e-5, bias=value)
        else:
            ahead, behind = (at(SMOOTH[name], score + step, bias=value) for step in (1e-5, -1e-5))
            slope = (ahead - behind) / 2e-5
        assert found == pytest.approx(slope, rel=1e-6, abs=1e-7)


@pytest.mark.parametrize(
    ("node", "score", "expected"),
    [
        (op("min", SCORE, Literal(2.0)), 2.0, 0.5),
        (op("max", SCORE, Literal(2.0)), 2.0, 0.5),
        (op("max", SCORE, op("*", Literal(3.0), SCORE)), 0.0, 2.0),
        (op("min", SCORE, Literal(2.0)), 1.0, 1.0),
        (op("min", SCORE, Literal(2.0)), 3.0, 0.0),
        (op("max", Literal(2.0), SCORE), 3.0, 1.0),
        (op("abs", SCORE), 0.0, 0.0),
        (op("abs", SCORE), -2.0, -1.0),
        (op("abs", SCORE), 2.0, 1.0),
    ],
)
def test_where_two_meet_it_is_as_torch_has_it(node: Node, score: float, expected: float) -> None:
    assert at(derivative(node, SCORE), score) == expected


def test_what_is_added_to_a_score_is_not_in_its_derivative() -> None:
    alibi = op("+", SCORE, op("*", SLOPE, op("-", K, Q)))
    assert derivative(alibi, SCORE) == ONE
    assert derivative(alibi, SLOPE) == op("float", op("-", K, Q))
    assert derivative(op("-", SLOPE, SCORE), SCORE) == Literal(-1.0)
    assert derivative(op("*", SCORE, SLOPE), SCORE) == SLOPE
    assert derivative(op("*", op("neg", SLOPE), op("neg", SCORE)), SCORE) == SLOPE
    assert derivative(op("/", SCORE, Literal(8)), SCORE) == Literal(0.125)
    assert derivative(op("*", Literal(8), op("*", SCORE, Literal(0.5))), SCORE) == Literal(4.0)
    assert derivative(op("where", op("<", Q, K), SCORE, op("+", SCORE, SLOPE)), SCORE) == ONE


@given(trees(Type.FLOAT, 3).filter(lambda node: not has(node, SCORE)))
def test_a_sum_with_anything_else_has_derivative_one(other: Node) -> None:
    assert derivative(op("+", SCORE, other), SCORE) == ONE
    assert derivative(other, SCORE) == ZERO


@given(trees())
def test_the_derivative_is_a_float_and_prints(node: Node) -> None:
    found = derivative(node, SCORE)
    assert found.type is Type.FLOAT
    assert printed(found).result
    if node.type is not Type.FLOAT:
        assert found == ZERO


def test_other_elements_are_other_things() -> None:
    aux = Aux("table", "fp32", (8,))
    one, other = item(aux, Literal(1)), item(aux, Literal(2))
    both = op("+", op("*", one, other), op("*", item(aux, Literal(1)), SCORE))
    assert derivative(both, one) == op("+", other, SCORE)
    assert derivative(both, other) == one


def test_conditions_comparisons_and_integers_have_none() -> None:
    for node in (op("<", SCORE, ZERO), op("int", SCORE), op("float", op("int", SCORE)), op("bool", SCORE), Q):
        assert derivative(node, SCORE) == ZERO
    assert derivative(op("where", op("<", SCORE, ZERO), SLOPE, Literal(2.0)), SCORE) == ZERO


def test_a_value_in_its_derivative_is_the_value() -> None:
    softcap = op("tanh", SCORE)
    assert derivative(softcap, SCORE) == op("-", ONE, op("*", softcap, softcap))
    assert [str(each) for each in printed(derivative(softcap, SCORE)).pair] == [
        "const float pair_0 = expression_tanh(score);"
    ]
    assert derivative(op("exp", SCORE), SCORE) == op("exp", SCORE)


@pytest.mark.parametrize("of", [Q, item(Aux("doc", "int32", ()))])
def test_a_derivative_by_an_integer_is_refused(of: Node) -> None:
    with pytest.raises(ExpressionError, match="a derivative is by a float, not by int"):
        derivative(SCORE, of)


def test_chains_do_not_double() -> None:
    chain: Node = SCORE
    for number in range(200):
        chain = op(("min", "max")[number % 2], op("+", chain, Literal(1.5)), op("*", SCORE, Literal(float(number))))
    parts = Parts()
    parts.add(derivative(chain, SCORE))
    assert len(parts.all) < 200 * 20
