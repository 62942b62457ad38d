"""What torch says an expression is worth is what plain Python says, number by number."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from codegen.expressions.nodes import (  # noqa: E402
    OPERATIONS,
    Aux,
    Item,
    Literal,
    Node,
    Type,
    Variable,
    children,
    item,
    operation,
)
from runtime.errors import ArgumentError  # noqa: E402
from runtime.expressions.evaluate import evaluate  # noqa: E402

Q, KV, HEAD, SCORE = Variable("q_idx"), Variable("kv_idx"), Variable("head"), Variable("score")
VALUES = {
    "q_idx": torch.tensor([[0], [5], [900]]),
    "kv_idx": torch.tensor([[3, 0, 1023]], dtype=torch.int32),
    "batch": 1,
    "head": torch.tensor(2),
    "q_len": 901,
    "kv_len": 1024,
    "score": torch.tensor([[0.0, -3.25, 1e9], [math.inf, -0.5, 0.1], [2.5, -1e-30, math.nan]], dtype=torch.float64),
}
AUX = {
    "table": (
        Aux("table", "int32", ("batch", 4)),
        torch.tensor([[3, -9, 1 << 30, 0], [7, 1, -1, 2]], dtype=torch.int32),
    ),
    "one": (Aux("one", "int64", ()), torch.tensor(-(1 << 63))),
    "slope": (Aux("slope", "fp16", ("heads",)), torch.tensor([0.5, -0.1, 3.0], dtype=torch.float16)),
    "shared": (Aux("shared", "fp32", ("batch", "kv_len")), torch.tensor([[0.1], [0.7]])),
    "seen": (Aux("seen", "bool", ("q_len",)), torch.tensor([True, False, True])),
}
TENSORS = {name: tensor for name, (_, tensor) in AUX.items()}
NOT_ROUNDED_ALIKE = {"exp", "tanh", "log2"}
OF_TYPE: dict[Type, list[str]] = {
    Type.BOOL: ["==", "!=", "<", "<=", ">", ">=", "and", "or", "not", "&", "|", "^", "~", "bool", "where"],
    Type.INT: ["+", "-", "*", "//", "%", "<<", ">>", "&", "|", "^", "~", "neg", "min", "max", "abs", "where", "int"],
    Type.FLOAT: ["+", "-", "*", "/", "neg", "min", "max", "abs", "where", "sqrt", "float"],
}
COMPARED, NUMBERS = {"==", "!=", "<", "<=", ">", ">=", "bool", "int", "float"}, [Type.BOOL, Type.INT, Type.FLOAT]
LEAVES: dict[Type, Any] = {
    Type.BOOL: st.builds(Literal, st.booleans()),
    Type.INT: st.builds(Literal, st.integers(-(1 << 63), (1 << 63) - 1) | st.integers(-9, 9))
    | st.sampled_from([Variable(name) for name in VALUES if name != "score"]),
    Type.FLOAT: st.builds(Literal, st.floats(allow_nan=False)) | st.just(SCORE),
}


def operand_types(draw: st.DrawFn, name: str, result: Type) -> list[Type]:
    """Types of operands for which an operation has this result."""
    count = OPERATIONS[name][1]
    if name == "where":
        return [Type.BOOL, result, result]
    if name in COMPARED or name in ("/", "sqrt"):
        return [draw(st.sampled_from(NUMBERS)) for _ in range(count)]
    if result is Type.BOOL:
        return [Type.BOOL] * count
    lower = [draw(st.sampled_from(NUMBERS[: NUMBERS.index(result) + 1])) for _ in range(count)]
    lower[draw(st.integers(0, count - 1))] = result
    return lower


@st.composite
def trees(draw: st.DrawFn, result: Type, depth: int = 4) -> Node:
    if depth == 0 or draw(st.integers(0, 5)) == 0:
        return draw(LEAVES[result])
    if draw(st.integers(0, 4)) == 0:
        aux = draw(st.sampled_from([aux for aux, _ in AUX.values() if Item(aux, ()).type is result]))
        return item(aux, *(draw(trees(Type.INT, depth - 1)) for _ in aux.dims))
    name = draw(st.sampled_from(OF_TYPE[result]))
    operands = [draw(trees(each, depth - 1)) for each in operand_types(draw, name, result)]
    if name in ("<<", ">>"):
        operands[1] = Literal(draw(st.integers(0, 62)))
    assume(not (name in ("//", "%", "/") and isinstance(operands[1], Literal) and operands[1].value == 0))
    made = operation(name, *operands)
    assert made.type is result
    return made


def wrapped(value: int) -> int:
    """An integer of any size as one of 64 bits."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


def divided(one: float, by: float) -> float:
    if by != 0:
        return one / by
    return math.nan if one == 0 or math.isnan(one) else math.copysign(math.inf, one) * math.copysign(1, by)


def least(one: Any, other: Any) -> Any:
    assume(one != 0 or other != 0 or math.copysign(1, one) == math.copysign(1, other))  # torch returns either zero
    return math.nan if math.isnan(one) or math.isnan(other) else min(one, other)


def most(one: Any, other: Any) -> Any:
    return -least(-one, -other)


def to_int(value: Any) -> int:
    assume(math.isfinite(value) and abs(value) < 1 << 63)
    return int(value)


PYTHON: dict[str, Callable[..., Any]] = {
    "+": lambda x, y: x + y,
    "-": lambda x, y: x - y,
    "*": lambda x, y: x * y,
    "/": divided,
    "//": lambda x, y: x // y if y else 0,
    "%": lambda x, y: x % y if y else 0,
    "<<": lambda x, y: x << y,
    ">>": lambda x, y: x >> y,
    "&": lambda x, y: x & y,
    "|": lambda x, y: x | y,
    "^": lambda x, y: x ^ y,
    "neg": lambda x: -x,
    "==": lambda x, y: x == y,
    "!=": lambda x, y: x != y,
    "<": lambda x, y: x < y,
    "<=": lambda x, y: x <= y,
    ">": lambda x, y: x > y,
    ">=": lambda x, y: x >= y,
    "and": lambda x, y: x and y,
    "or": lambda x, y: x or y,
    "not": lambda x: not x,
    "min": least,
    "max": most,
    "abs": abs,
    "where": lambda condition, one, other: one if condition else other,
    "sqrt": lambda x: torch.tensor(x, dtype=torch.float64).sqrt().item(),  # that of torch may be off by a last bit
    "int": to_int,
    "float": float,
    "bool": bool,
    "exp": math.exp,
    "tanh": math.tanh,
    "log2": math.log2,
}


def by_python(node: Node, values: dict[str, Any]) -> Any:
    """What a node is worth where each variable is one number of Python."""
    parts = [by_python(child, values) for child in children(node)]
    if isinstance(node, Literal):
        return node.value
    if isinstance(node, Variable):
        return values[node.name]
    if isinstance(node, Item):
        element = TENSORS[node.aux.name]
        for index in parts:
            element = element[min(max(index, 0), len(element) - 1)]
        return element.item()
    if node.name == "~":
        return not parts[0] if node.type is Type.BOOL else ~parts[0]
    types = {child.type for child in children(node)}
    is_float = node.type is Type.FLOAT or (node.name in COMPARED - {"int"} and Type.FLOAT in types)
    if is_float and node.name != "where":
        parts = [float(part) for part in parts]
    result = PYTHON[node.name](*parts)
    if node.type is Type.INT:
        return wrapped(int(result))
    return float(result) if node.type is Type.FLOAT else result


def at(row: int, column: int) -> dict[str, Any]:
    grids = {name: torch.as_tensor(value).expand(3, 3) for name, value in VALUES.items()}
    return {name: grid[row, column].item() for name, grid in grids.items()}


@settings(max_examples=200, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much], deadline=None)
@given(st.sampled_from(NUMBERS).flatmap(trees))
def test_random_trees(node: Node) -> None:
    wanted = [by_python(node, at(row, column)) for row, column in itertools.product(range(3), range(3))]
    found = evaluate(node, VALUES, TENSORS)
    assert found.dtype == {Type.BOOL: torch.bool, Type.INT: torch.int64, Type.FLOAT: torch.float64}[node.type]
    assert [repr(each) for each in found.expand(3, 3).flatten().tolist()] == [repr(each) for each in wanted]


@pytest.mark.parametrize("by", [-1, 0, 1, 2, -7])
def test_the_least_integer_is_divided(by: int) -> None:
    least_of_all, values = -(1 << 63), {"head": torch.tensor(by)}
    for name in ("//", "%"):
        found = evaluate(operation(name, item(AUX["one"][0]), HEAD), values, TENSORS)
        assert found.item() == wrapped(PYTHON[name](least_of_all, by))


def test_all_operations_are_drawn_and_evaluated() -> None:
    assert set(OPERATIONS) == set(PYTHON) | {"~"} == set().union(*OF_TYPE.values()) | NOT_ROUNDED_ALIKE


@pytest.mark.parametrize("name", sorted(NOT_ROUNDED_ALIKE))
def test_functions_are_rounded_nearly_alike(name: str) -> None:
    found = evaluate(operation(name, SCORE), {"score": torch.tensor([0.25, 1.0, 3.5], dtype=torch.float64)}, {})
    assert found.tolist() == pytest.approx([PYTHON[name](value) for value in (0.25, 1.0, 3.5)], rel=1e-15)


def test_floats_are_float32_unless_the_score_is_float64() -> None:
    third = operation("/", Literal(1), operation("+", KV, Literal(3)))
    values = {"kv_idx": 0, "score": torch.zeros(2)}
    assert evaluate(third, values, {}).dtype == torch.float32
    assert (
        evaluate(operation("+", SCORE, third), {**values, "score": torch.zeros(2).bfloat16()}, {}).dtype
        == torch.float32
    )
    double = evaluate(third, {**values, "score": torch.zeros(2).double()}, {})
    assert double.dtype == torch.float64 and double.item() == 1 / 3


def test_results_broadcast_and_constants_have_no_dims() -> None:
    values = {"q_idx": torch.arange(4)[:, None], "kv_idx": torch.arange(5), "batch": torch.arange(2)[:, None, None]}
    assert evaluate(operation(">=", Q, KV), values, {}).shape == (4, 5)
    everywhere = operation("+", operation("-", Q, KV), Variable("batch"))
    assert evaluate(everywhere, values, {}).shape == (2, 4, 5)
    assert evaluate(Literal(True), values, {}).shape == ()


def test_a_shared_part_is_evaluated_once() -> None:
    node: Node = operation("-", Q, KV)
    for _ in range(200):  # of 2**200 paths
        node = operation("&", node, node)
    assert evaluate(node, {"q_idx": 5, "kv_idx": 9}, {}).item() == -4


def test_a_deep_tree_is_evaluated() -> None:
    node: Node = Q
    for _ in range(5000):
        node = operation("+", node, Literal(1))
    assert evaluate(node, {"q_idx": 5}, {}).item() == 5005


def test_indices_beyond_an_end_are_that_ends() -> None:
    aux = Aux("t", "int64", ("kv_len", 2))
    node = item(aux, operation("-", KV, Literal(2)), operation("*", Q, Literal(7)))
    values = {"kv_idx": torch.arange(6), "q_idx": torch.tensor([[-1], [0], [1]])}
    table = torch.tensor([[1, 10], [2, 20], [3, 30]])
    wanted = [1, 1, 1, 2, 3, 3]
    assert evaluate(node, values, {"t": table}).tolist() == [wanted, wanted, [10 * each for each in wanted]]


@pytest.mark.parametrize(
    ("values", "aux", "told"),
    [
        ({}, {"t": torch.ones(2, 3)}, r"values: has no q_idx"),
        ({"q_idx": 1}, {}, "aux: has no t, which the expression uses"),
        ({"q_idx": 1}, {"t": torch.ones(2, 4)}, r"aux: t has the shape \(2, 4\), expected fp32\[q_len, 3\]"),
        ({"q_idx": 1}, {"t": torch.ones(3)}, r"aux: t has the shape \(3,\), expected fp32\[q_len, 3\]"),
        ({"q_idx": 1}, {"t": torch.ones(0, 3)}, r"aux: t has the shape \(0, 3\)"),
    ],
)
def test_what_is_missing_is_named(values: dict[str, Any], aux: dict[str, Any], told: str) -> None:
    with pytest.raises(ArgumentError, match=told):
        evaluate(item(Aux("t", "fp32", ("q_len", 3)), Q, Literal(0)), values, aux)
