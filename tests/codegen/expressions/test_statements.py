"""How expressions are written as CUDA: what is named and where, on short lines, by helpers that are there."""

from __future__ import annotations

import re

import pytest
from drawn_expressions import trees
from expression_program import helpers
from hypothesis import example, given

from codegen.expressions.cuda import HELPERS, MOST_COLUMNS, printed
from codegen.expressions.nodes import Aux, ExpressionError, Literal, Node, Variable, item
from codegen.expressions.nodes import operation as op
from codegen.prune import prune

Q, K, BATCH, HEAD = (Variable(name) for name in ("q_idx", "kv_idx", "batch", "head"))
HIDDEN = Aux("hidden", "int32", ("q_len", "kv_len"))
KV_LEN, SCORE = Variable("kv_len"), Variable("score")


def words(text: str) -> set[str]:
    return set(re.findall(r"[A-Za-z_]\w*", text))


@given(trees())
def test_statements_name_only_what_is_known_where_they_stand(node: Node) -> None:
    result = printed(node)
    rows, columns, pairs = ({each.name for each in of} for of in (result.row, result.column, result.pair))
    for each in result.row:
        assert not words(each.value) & ({"key", "score"} | columns | pairs)
    for each in result.column:
        assert not words(each.value) & ({"query", "score"} | rows | pairs)
    assert len(rows | columns | pairs) == len(result.row) + len(result.column) + len(result.pair)
    known: set[str] = set()
    for each in (*result.row, *result.column, *result.pair):
        assert not words(each.value) & ((rows | columns | pairs) - known), "used before it is there"
        known.add(each.name)


@given(trees())
@example(op("+", item(HIDDEN, Q, K), item(HIDDEN, Q, op("//", K, Literal(1)))))
def test_each_element_is_looked_up_once_for_what_it_depends_on(node: Node) -> None:
    result = printed(node)
    loads = [name for each in (*result.row, *result.column, *result.pair) for name in words(each.value)]
    assert {name for name in loads if name.startswith("load_")} == {f"load_{aux.name}" for aux in result.reads}
    assert "load_" not in result.result
    for of in (result.row, result.column, result.pair):
        values = [each.value for each in of]
        assert len(set(values)) == len(values)


@given(trees())
def test_helpers_are_those_that_are_called(node: Node) -> None:
    result = printed(node)
    text = " ".join([result.result, *(each.value for each in (*result.row, *result.column, *result.pair))])
    called = set(re.findall(r"\b(\w+)\(", text)) - {"load_" + aux.name for aux in result.reads}
    constants = words(text) & {"kInfinity", "kMinusInfinity", "kNan"}
    assert set(result.helpers) == (called | constants) - {"static_cast", "min", "max", "abs", "fabsf"}


def shown(node: Node) -> list[str]:
    result = printed(node)
    lines = [f"{place}: {each}" for place in ("row", "column", "pair") for each in getattr(result, place)]
    return [*lines, result.result]


def test_documents_and_causal() -> None:
    q_doc, kv_doc = Aux("q_doc", "int32", ("batch", "q_len")), Aux("kv_doc", "int32", ("batch", "kv_len"))
    same = op("==", item(q_doc, BATCH, Q), item(kv_doc, BATCH, K))
    assert shown(op("and", same, op(">=", Q, K))) == [
        "row: const int q_doc_of_row = load_q_doc(p, batch, query);",
        "column: const int kv_doc_of_column = load_kv_doc(p, batch, key);",
        "(q_doc_of_row == kv_doc_of_column) & (query >= key)",
    ]


def test_alibi() -> None:
    slope = item(Aux("slope", "fp32", ("heads",)), HEAD)
    assert shown(op("+", SCORE, op("*", slope, op("-", K, Q)))) == [
        "row: const float slope_of_row = load_slope(p, head);",
        "score + slope_of_row * (key - query)",
    ]


def test_blocks_and_a_table() -> None:
    table = Aux("table", "fp32", ("heads", 65))
    far = op("min", op("abs", op("-", Q, K)), Literal(64))
    assert shown(op("+", SCORE, item(table, HEAD, far))) == [
        "pair: const float table_of_pair = load_table(p, head, min(abs(query - key), 64));",
        "score + table_of_pair",
    ]
    assert shown(op("==", op("//", Q, Literal(64)), op("//", K, Literal(48)))) == [
        "row: const int row_0 = query >> 6;",
        "column: const int column_0 = key / 48;",
        "row_0 == column_0",
    ]


def test_an_index_that_may_be_outside_is_clamped() -> None:
    doc, table = Aux("doc", "int32", ("kv_len",)), Aux("table", "fp32", (8,))
    assert shown(op("<", item(doc, Q), Literal(0))) == [
        "row: const int doc_of_row = load_doc(p, clamp_index(query, p.aux_doc_size0));",
        "doc_of_row < 0",
    ]
    assert shown(item(table, op("-", Q, K))) == [
        "pair: const float table_of_pair = load_table(p, clamp_index(query - key, 8));",
        "table_of_pair",
    ]


def test_one_sum_or_comparison_has_no_name() -> None:
    assert shown(op("or", op("<", K, Literal(4)), op("<=", op("-", Q, Literal(9)), K))) == [
        "(key < 4) | (query - 9 <= key)"
    ]


def test_what_is_used_twice_has_a_name() -> None:
    distance = op("-", Q, K)
    near = op("<", op("abs", distance), Literal(128))
    assert shown(op("and", near, op("==", op("%", distance, Literal(7)), Literal(0)))) == [
        "pair: const int pair_0 = query - key;",
        "(abs(pair_0) < 128) & (floor_mod(pair_0, 7) == 0)",
    ]


def test_a_key_does_not_wait_for_a_query() -> None:
    """What depends on neither is looked up beside both."""
    shift = item(Aux("shift", "int32", ("batch",)), BATCH)
    rows, columns = op("%", Q, shift), op("%", K, shift)
    lines = shown(op("==", rows, columns))
    assert "row: const int shift_of_row = load_shift(p, batch);" in lines
    assert "column: const int shift_of_column = load_shift(p, batch);" in lines


def test_a_product_of_64_bits_is_cast_before_it_is_one() -> None:
    assert shown(op("<", op("*", op("-", Q, K), op("-", Q, K)), KV_LEN))[-1] == (
        "static_cast<int64>(pair_0) * pair_0 < p.kv_len"
    )


def test_names_are_not_those_that_are_taken() -> None:
    aux = Aux("q", "fp32", ("q_len",))
    score = op("+", SCORE, op("*", item(aux, Q), item(aux, op("+", Q, Literal(1)))))
    result = printed(score, score="q_of_row[0]")
    assert [each.name for each in result.row] == ["q_of_row_1", "q_of_row_2", "row_0"]
    assert result.result == "q_of_row[0] + row_0"


def test_lines_are_short() -> None:
    far: Node = op("<", Q, K)
    for number in range(80):
        one = op("!=", op("%", op("+", Q, K), Literal(number + 3)), op("*", Q, op("-", K, Literal(number))))
        far = op("and" if number % 3 else "or", far, one)
    result = printed(far)
    lines = [*map(str, (*result.row, *result.column, *result.pair)), result.result]
    assert len(result.pair) > 20
    assert max(map(len, lines)) <= MOST_COLUMNS


def test_a_deep_tree_needs_no_stack() -> None:
    deep: Node = SCORE
    for _ in range(3000):
        deep = op("+", deep, Literal(1.0))
    assert printed(deep).result.endswith("+ 1.0f")


@pytest.mark.parametrize("name", HELPERS)
def test_a_helper_is_there_if_it_is_named(name: str) -> None:
    text = helpers((name,))
    others = (each for each in HELPERS if each != name)
    assert re.search(rf"\b{name}\b[ (]", text)
    assert not [other for other in others if re.search(rf"\b{other}\b", text)]
    assert name not in helpers(tuple(each for each in HELPERS if each != name))
    assert name in prune(f"{text}\nx = {name};\n") and name not in prune(f"{text}\n")


def test_an_integer_of_more_bits_is_refused() -> None:
    with pytest.raises(ExpressionError, match="9223372036854775808 is not an integer of 64 bits"):
        printed(op("+", Q, Literal(2**63)))
