"""What is known of an expression: no value leaves its bounds, and what they prove."""

from __future__ import annotations

import pytest
from expression_trees import trees, values
from expression_values import value_of
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from codegen.expressions.bounds import (
    bounds_of,
    constant_of,
    divides_by_zero,
    is_inside,
)
from codegen.expressions.intervals import INT64, INTEGERS, TRUTHS, Interval
from codegen.expressions.nodes import (
    OPERATIONS,
    Aux,
    ExpressionError,
    Item,
    Type,
    Variable,
    children,
    item,
    literal,
    operation,
)
from codegen.expressions.parse import parse_aux, parse_expression

aux = parse_aux(
    {
        "doc": "int32[batch, q_len]",
        "wide": "int64[kv_len]",
        "table": "int32[8, heads]",
        "on": "bool[]",
        "slope": "fp32[4]",
    }
)
TERMS = sorted(set(INTEGERS) - {"where", "int"})


def parsed(text: str):
    return parse_expression(text, aux, score=True)


def parts(node):
    return [node, *(part for child in children(node) for part in parts(child))]


@settings(max_examples=200, suppress_health_check=list(HealthCheck))
@given(trees(whole=True) | trees(), values())
def test_values_of_all_parts_lie_in_their_bounds(node, drawn) -> None:
    variables, elements = drawn
    for part in parts(node):
        if part.type is Type.FLOAT:
            continue
        try:
            value = value_of(part, variables, elements)
        except ZeroDivisionError:
            assert divides_by_zero(part) is not None
            continue
        assert int(value) in bounds_of(part)
        if part.type is Type.BOOL and constant_of(part) is not None:
            assert value is constant_of(part)
        assert bounds_of(part).within(INT64)


small = st.integers(-40, 40)


@st.composite
def intervals_with_a_value(draw: st.DrawFn, numbers=small) -> tuple[Interval, int]:
    low, value, high = sorted(draw(st.tuples(numbers, numbers, numbers)))
    return Interval(low, high), value


@settings(max_examples=800)
@given(st.sampled_from(TERMS), intervals_with_a_value(), intervals_with_a_value())
def test_intervals_have_every_result(name: str, one, other) -> None:
    """Near zero, where signs and powers of two change, and where intervals are narrow enough to be wrong."""
    unary = name in ("neg", "~", "abs")
    if name in ("<<", ">>"):
        other = Interval(abs(other[1]), abs(other[1])), abs(other[1])
    assume(unary or name not in ("//", "%") or other[1] != 0)
    node = operation(name, *(literal(value) for _, value in (one, other)[: 1 if unary else 2]))
    result = INTEGERS[name](*(interval for interval, _ in (one, other)[: 1 if unary else 2]))
    assert value_of(node, {}) in result


@settings(max_examples=300)
@given(st.sampled_from(["==", "!=", "<", "<=", ">", ">="]), intervals_with_a_value(), intervals_with_a_value())
def test_comparisons_of_intervals(name: str, one, other) -> None:
    node = operation(name, literal(one[1]), literal(other[1]))
    assert int(value_of(node, {})) in TRUTHS[name](one[0], other[0])


@pytest.mark.parametrize(
    ("text", "low", "high"),
    [
        ("q_idx", 0, 2**30 - 1),
        ("kv_len", 1, 2**30),
        ("doc[batch, q_idx]", -(2**31), 2**31 - 1),
        ("wide[kv_idx]", -(2**63), 2**63 - 1),
        ("q_idx - kv_idx", 1 - 2**30, 2**30 - 1),
        ("q_idx * 4", 0, 4 * (2**30 - 1)),
        ("q_idx * kv_idx * head", -(2**63), 2**63 - 1),
        ("wide[kv_idx] + 1", -(2**63), 2**63 - 1),
        ("-wide[kv_idx]", -(2**63), 2**63 - 1),
        ("abs(wide[kv_idx])", -(2**63), 2**63 - 1),
        ("wide[kv_idx] // -1", -(2**63), 2**63 - 1),
        ("abs(q_idx - 5)", 0, 2**30 - 6),
        ("abs(max(q_idx, 3))", 3, 2**30 - 1),
        ("q_idx // 64", 0, (2**30 - 1) // 64),
        ("(q_idx - 1) // 64", -1, (2**30 - 2) // 64),
        ("doc[batch, q_idx] // -2", -(2**30), 2**30),
        ("q_idx // max(kv_idx, 2)", 0, 2**29 - 1),
        ("q_idx % 64", 0, 63),
        ("doc[batch, q_idx] % 64", 0, 63),
        ("doc[batch, q_idx] % -64", -63, 0),
        ("min(q_idx, 7) % 64", 0, 7),
        ("(min(q_idx, 7) + 70) % 64", 6, 13),
        ("q_idx % kv_len", 0, 2**30 - 1),
        ("q_idx >> 5", 0, (2**30 - 1) >> 5),
        ("doc[batch, q_idx] >> 31", -1, 0),
        ("on << 3", 0, 8),
        ("q_idx << 40", -(2**63), 2**63 - 1),
        ("doc[batch, q_idx] & 255", 0, 255),
        ("min(q_idx, 5) | min(kv_idx, 9)", 0, 15),
        ("min(q_idx, 5) ^ min(kv_idx, 9)", 0, 15),
        ("~q_idx", -(2**30), -1),
        ("6 & 3", 2, 2),
        ("6 ^ 3", 5, 5),
        ("6 | 1", 7, 7),
        ("min(q_idx, 5)", 0, 5),
        ("max(doc[batch, q_idx], 0, 3)", 3, 2**31 - 1),
        ("5 if on else -2", -2, 5),
        ("5 if q_idx >= 0 else -2", 5, 5),
        ("int(on) + on", 0, 2),
        ("int(score)", -(2**63), 2**63 - 1),
        ("-on", -1, 0),
        ("slope[0] < 1", 0, 1),
    ],
)
def test_bounds(text: str, low: int, high: int) -> None:
    assert bounds_of(parsed(text)) == Interval(low, high)


def test_floating_point_numbers_have_no_bounds() -> None:
    with pytest.raises(ValueError, match="no bounds"):
        bounds_of(parsed("score + 1"))


@pytest.mark.parametrize(
    ("text", "at_fault"),
    [
        ("q_idx // kv_idx", "q_idx // kv_idx"),
        ("q_idx % (kv_idx + 1)", None),
        ("q_idx // kv_len + q_idx % 64", None),
        ("q_idx // 64 % doc[batch, q_idx] < 1", "q_idx // 64 % doc[batch, q_idx]"),
        ("q_idx // max(doc[batch, q_idx], 1)", None),
        ("q_idx % (q_idx - 1073741824)", None),
        ("score / q_idx", None),
        ("score + q_idx // on", "q_idx // on"),
        ("doc[0, q_idx // batch] // head", "q_idx // batch"),
    ],
)
def test_divisions_by_zero(text: str, at_fault: str | None) -> None:
    found = divides_by_zero(parsed(text))
    assert found == (at_fault and parsed(at_fault))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("q_idx < 0", False),
        ("q_idx >= 0", True),
        ("q_idx >= 0 and kv_idx > 3", None),
        ("q_idx >= 0 or kv_idx > 3", True),
        ("q_idx < 0 and kv_idx > 3", False),
        ("not q_idx < 0", True),
        ("~(q_idx < 0)", True),
        ("(q_idx < 0) ^ (kv_idx >= 0)", True),
        ("q_idx == -1", False),
        ("q_idx != -1", True),
        ("q_len", None),
        ("bool(q_len)", True),
        ("bool(kv_idx - kv_idx)", None),
        ("True", True),
        ("q_idx >= kv_idx", None),
        ("q_idx > 1073741823", False),
        ("q_idx > 1073741822", None),
        ("wide[kv_idx] > 9223372036854775806", None),
        ("score == score", None),
    ],
)
def test_constants(text: str, value: bool | None) -> None:
    assert constant_of(parsed(text)) is value


@pytest.mark.parametrize(
    ("text", "inside"),
    [
        ("doc[batch, q_idx]", (True, True)),
        ("doc[head, kv_idx]", (False, False)),
        ("doc[0, q_idx - 1]", (True, False)),
        ("doc[1, q_len]", (False, False)),
        ("table[q_idx % 8, head]", (True, True)),
        ("table[q_idx % 9, head // 1]", (False, False)),
        ("table[7, 0]", (True, True)),
        ("table[-1, kv_idx]", (False, False)),
        ("table[head, head]", (False, True)),
        ("slope[min(q_idx // 64, 3)]", (True,)),
    ],
)
def test_indices_inside_their_dims(text: str, inside: tuple[bool, ...]) -> None:
    node = parsed(text)
    assert isinstance(node, Item)
    assert tuple(is_inside(node, axis) for axis in range(len(inside))) == inside


def test_shared_parts_are_looked_at_once() -> None:
    """Each of 200 sums has the one before twice: more paths than can be walked."""
    node = Variable("q_idx")
    for _ in range(200):
        node = operation("%", operation("+", node, node), literal(100))
    assert bounds_of(node) == Interval(0, 99)
    assert divides_by_zero(node) is None
    assert is_inside(item(Aux("t", "bool", (100,)), node), 0)


OPERANDS = [(one, *others) for one in (literal(1), literal(True), literal(1.0)) for others in ((), (literal(2),))]
OPERANDS += [(literal(True), literal(True)), (literal(True), literal(1), literal(2)), (literal(True),) * 3]


def test_every_operator_has_a_rule() -> None:
    """Whatever an operator of integers or truth values makes, there is a rule for it, and it is right of one value."""
    for name in OPERATIONS:
        for operands in OPERANDS:
            try:
                node = operation(name, *operands)
            except ExpressionError:
                continue
            if node.type is not Type.FLOAT and Type.FLOAT not in {operand.type for operand in operands}:
                value = int(value_of(node, {}))
                assert bounds_of(node) == Interval(value, value), node
