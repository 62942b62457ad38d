"""The text of an expression: what is read, what is refused and where, and the text that a tree has."""

from __future__ import annotations

import math

import pytest
from each import looped
from expression_trees import AUX, trees
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from codegen.expressions.declared import MOST_AUX
from codegen.expressions.nodes import (
    MOST_DEPTH,
    Aux,
    ExpressionError,
    Item,
    Literal,
    Node,
    Variable,
    check_size,
    item,
    literal,
    operation,
)
from codegen.expressions.parse import check_used, parse_aux, parse_expression
from codegen.expressions.scan import MOST_TEXT
from codegen.expressions.text import text_of

DECLARED = {
    "q_doc": "int32[batch, q_len]",
    "kv_doc": "int32[batch, kv_len]",
    "slope": "fp32[heads]",
    "on": "bool[]",
    "wide": "int64[8, heads]",
}
TENSORS = parse_aux(DECLARED)
q, k, head, score = (Variable(name) for name in ("q_idx", "kv_idx", "head", "score"))
one, two = literal(1), literal(2)


def parsed(text: str) -> Node:
    return parse_expression(text, TENSORS, score=True)


def doc(name: str, index: Node) -> Item:
    return item(TENSORS[name], Variable("batch"), index)


@looped
@pytest.mark.parametrize(
    ("text", "tree"),
    [
        ("q_idx", q),
        ("1", one),
        ("-1", literal(-1)),
        ("- 1", literal(-1)),
        ("-(1)", literal(-1)),
        ("-+1", operation("neg", one)),
        ("--1", operation("neg", literal(-1))),
        ("+q_idx", q),
        ("+on", operation("int", item(TENSORS["on"]))),
        ("1.5e3", literal(1500.0)),
        ("1.", literal(1.0)),
        (".5", literal(0.5)),
        ("-.5", literal(-0.5)),
        ("inf", Literal(math.inf)),
        ("-inf", Literal(-math.inf)),
        ("-+inf", operation("neg", Literal(math.inf))),
        ("0xff", literal(255)),
        ("1_000", literal(1000)),
        ("True", literal(True)),
        ("-True", operation("neg", literal(True))),
        ("-9223372036854775808", literal(-(2**63))),
        ("9223372036854775807", literal(2**63 - 1)),
        ("q_idx + kv_idx * 2", operation("+", q, operation("*", k, two))),
        ("(q_idx + kv_idx) * 2", operation("*", operation("+", q, k), two)),
        ("q_idx - kv_idx - 1", operation("-", operation("-", q, k), one)),
        ("q_idx // 2 % 2", operation("%", operation("//", q, two), two)),
        ("q_idx / 2", operation("/", q, two)),
        ("q_idx << 2 >> 1", operation(">>", operation("<<", q, two), one)),
        ("q_idx & 1 | kv_idx ^ 2", operation("|", operation("&", q, one), operation("^", k, two))),
        ("~q_idx", operation("~", q)),
        ("-q_idx", operation("neg", q)),
        ("-q_idx * 2", operation("*", operation("neg", q), two)),
        ("1 < q_idx <= 2", operation("and", operation("<", one, q), operation("<=", q, two))),
        ("(1 < q_idx) < 2", operation("<", operation("<", one, q), two)),
        (
            "q_idx == 1 or q_idx != 2 or q_idx > 2",
            operation("or", operation("or", operation("==", q, one), operation("!=", q, two)), operation(">", q, two)),
        ),
        ("not on and on", operation("and", operation("not", item(TENSORS["on"])), item(TENSORS["on"]))),
        ("1 if on else 2", operation("where", item(TENSORS["on"]), one, two)),
        ("where(on, 1, 2)", operation("where", item(TENSORS["on"]), one, two)),
        ("min(q_idx, 1, 2)", operation("min", operation("min", q, one), two)),
        ("max(q_idx, max(1, 2))", operation("max", q, operation("max", one, two))),
        ("abs(exp(score))", operation("abs", operation("exp", score))),
        ("int(float(bool(1)))", operation("int", operation("float", operation("bool", one)))),
        ("on", item(TENSORS["on"])),
        ("on[()]", item(TENSORS["on"])),
        ("slope[head]", item(TENSORS["slope"], head)),
        ("slope [ (head) ]", item(TENSORS["slope"], head)),
        ("wide[q_idx % 8, head]", item(TENSORS["wide"], operation("%", q, literal(8)), head)),
        (
            "q_doc[batch, q_idx] == kv_doc[batch, kv_idx] and q_idx >= kv_idx",
            operation(
                "and", operation("==", doc("q_doc", q), doc("kv_doc", k)), operation(">=", q, k)
            ),
        ),
        (
            "score + slope[head] * (kv_idx - q_idx)",
            operation("+", score, operation("*", item(TENSORS["slope"], head), operation("-", k, q))),
        ),
        ("\n  q_idx\n\t+\r\n kv_idx\v\f\n", operation("+", q, k)),
    ],
)  # fmt: skip
def test_trees_of_texts(text: str, tree: Node) -> None:
    assert parsed(text) == tree


@looped
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("q_idx >= 1 and qidx > 2", 'column 16 ("qidx"): no such name, did you mean q_idx'),
        ("q_idx\n >= kv_id", 'column 11 ("kv_id"): no such name, did you mean kv_idx'),
        ("q_idx == q_doc[batch]", 'column 10 ("q_doc[batch]"): q_doc is int32[batch, q_len], but has 1 indices here'),
        ("1 + q_doc", 'column 5 ("q_doc"): q_doc is int32[batch, q_len], but has 0 indices'),
        ("slop[head]", 'column 1 ("slop"): no such aux tensor, did you mean slope'),
        ("slope[score]", 'column 1 ("slope[score]"): an index of slope is float, expected int'),
        ("q_idx[1]", 'column 1 ("q_idx"): not an aux tensor'),
        ("slope[head][0]", 'column 1 ("slope[head]"): an index of'),
        ("slope(head)", 'column 1 ("slope"): an aux tensor, fp32[heads]: its indices go in square brackets'),
        ("q_idx(1)", 'column 1 ("q_idx"): a number, not a function'),
        ("tan(score)", 'column 1 ("tan"): no such function, did you mean tanh'),
        ("tanh", 'column 1 ("tanh"): tanh is a function'),
        ("exp(score)(1)", 'column 1 ("exp(score)"): a call of'),
        ("min(1)", 'column 1 ("min(1)"): min takes 2 operands, but got 1'),
        ("1 + where(1, 2, 3)", 'column 5 ("where(1, 2, 3)"): where takes a Boolean as its first argument'),
        ("q_idx and on", 'column 1 ("q_idx and on"): and takes Booleans'),
        ("(1 + q_idx // 0)", 'column 6 ("q_idx // 0"): // divides by zero'),
        ("q_idx << kv_idx", "column 1 (\"q_idx << kv_idx\"): << takes a number of bits from 0 to 62"),
        ("q_idx.real", 'column 1 ("q_idx.real"): an attribute is not allowed'),
        ("2 + (lambda: 1)", 'column 6 ("lambda"): a lambda is not allowed'),
        ("q_idx == 'x'", "column 10 (\"'\"): a string is not allowed"),
        ("(1, 2)", 'column 1 ("(1, 2)"): a tuple is not allowed'),
        ("1 < [2]", 'column 5 ("[2]"): a list is not allowed'),
        ("wide[0:1, 2]", 'column 6 ("0:1"): a slice is not allowed'),
        ("wide[*slope]", 'column 6 ("*slope"): a * before an argument is not allowed'),
        ("q_idx ** 2", 'column 7 ("**"): a power is not allowed'),
        ("1 + 1j", 'column 5 ("1j"): neither an integer nor a floating-point number'),
        ("q_idx + ...", 'column 9 ("..."): ... is not allowed'),
        ("None", 'column 1 ("None"): None is not valid'),
        ("q_idx && on", 'column 7 ("&&"): && is not allowed, write and'),
        ("on ? 1 : 2", 'column 4 ("?"): ? is not allowed, write: x if'),
        ("!on", 'column 1 ("!"): ! is not allowed, write not'),
        ("q_idx = 1", 'column 7 ("="): an assignment is not allowed; == compares'),
        ("min(1, key=2)", 'column 11 ("="): an assignment is not allowed'),
        ("q_idx is 1", 'column 7 ("is"): is is not allowed; == compares'),
        ("q_idx in on", 'column 7 ("in"): in is not valid'),
        ("  q_idx +", "column 10 (the end): "),
        ("  (q_idx", 'column 3 ("(q_idx"): '),
        ("1 ++ ) 2", 'column 6 (") 2"): unmatched'),
        ("9223372036854775808", 'column 1 ("9223372036854775808"): an integer has 64 bits'),
        ("1e39", 'column 1 ("1e39"): the largest float32'),
        ("1 - 1e999", 'column 5 ("1e999"): the largest float32'),
        ("1e-60", 'column 1 ("1e-60"): float32 rounds numbers below 1e-45 to 0'),
        ("q_idx + \x00", "column 9 (\"\\x00\"): expressions cannot have this character"),
        ("q_ïdx", 'column 3 ("ï"): expressions cannot have this character'),
        ("", "an expression is empty"),
        (" \n\t ", "an expression is empty"),
        ("1" * (MOST_TEXT + 1), f"has {MOST_TEXT + 1} characters, at most {MOST_TEXT} are allowed"),
        ("+".join(["(" + "+".join(["1"] * 50) + ")"] * 12), "has more than 1000 operators, names and numbers"),
        ("(" * 150 + "q_idx" + ")" * 150 + " + x", 'column 309 ("x"): no such name'),
        ("-" * MOST_DEPTH + "q_idx", "has more than 150 nested operators"),
        ("-" * 3000 + "q_idx", ""),
        (" or ".join(["on"] * 501), "has more than 150 nested operators"),
    ],
)  # fmt: skip
def test_what_is_refused_and_where(text: str, message: str) -> None:
    with pytest.raises(ExpressionError) as error:
        parsed(text)
    assert message in str(error.value)
    assert str(error.value).startswith(message) or not message.startswith("column")


def test_the_score_is_not_known_to_a_mask() -> None:
    with pytest.raises(ExpressionError, match=r'column 5 \("score"\): a mask cannot use the score'):
        parse_expression("1 < score", {}, score=False)
    with pytest.raises(ExpressionError) as error:
        parse_expression("1 < scor", {}, score=False)
    assert "score" not in str(error.value).split(":", 1)[1]


HOSTILE = [
    *("1); x = (2", "1) + (2", "q_idx # > 1", "q_idx; 1", "q_idx\\\n+1", "q_idx \\", "x := 1", "(x := 1)",
      "f'{q_idx}'"),
    *("'a' 'b'", '"""a"""', "b'x'", "rb'\\x'", 'f"{1}"', "t'{1}'", "`1`", "$1", "$(ls)", "@q_idx", "q_idx @ 1",
      "1 <> 2"),
    *("__import__('os')", "__import__", "__builtins__", "__debug__", "eval(1)", "open(1)", "q_idx.__class__", "().x"),
    *("(1).real", "1..real", "1.real", "[].append", "[x for x in 1]", "(x for x in 1)", "{1}", "{1: 2}", "{**x}", "[]"),
    *("()", "(1,)", "1,", "1, 2", "*q_idx", "min(*q_idx)", "min(**q_idx)", "min(x=1)", "min()", "max(1)", "abs()"),
    *("abs(1, 2)", "where(True, 1)", "int()", "bool(1, 2)", "exp", "lambda: 1", "lambda q_idx: q_idx", "yield",
      "await x"),
    *("async", "def f(): 1", "import os", "from os import x", "return 1", "pass", "del q_idx", "class A: 1", "if 1: 2"),
    *("None", "...", "NotImplemented", "Ellipsis", "True()", "True[0]", "1[0]", "1(2)", "(min)(1)(2)", "min[0]"),
    *("q_idx[batch]", "slope", "slope[]", "slope[:]", "slope[::2]", "slope[0][0]", "slope[0, 0]", "slope[...]"),
    *("slope[None]", "slope[True]", "slope[1.0]", "slope[-]", "slope[slope[0]]", "on[0]", "on[0, 0]", "slope.x[0]"),
    *("1 is 1", "1 in 2", "1 not in 2", "q_idx is not 1", "not", "not not", "1 <", "< 1", "1 2", "q_idx kv_idx",
      "1 if"),
    *("1 if 2 else 3", "1 if on", "if on else 1", "q_idx and 1", "not 1", "on + ", "on << on", "1 << -1", "1 << 63"),
    *("1 << 1.0", "1.0 & 1", "~1.0", "1.0 // 2", "1.5 % 2", "1 // 0", "1 % 0", "1 / 0", "1 / 0.0", "1 // False",
      "1 % -0"),
    *("10**400", str(10**400), "1" * 3999, "0x" + "f" * 3000, "1e999", "-1e999", "1e39", "nan", "NaN"),
    *("007", "0b2", "0o9", "0x", "1__0", "1_", "1e", "1e+", "1e_1", "0xg", "1if on else 2", "1or 2", "1L", "1u",
      "1.0f"),
    *("1.2.3", "1j", "int main", "return", "while", "nullptr", "sizeof(int)", "int32_t(1)", "a->b", "a::b",
      "std::min(1, 2)"),
    *("q_idx++", "--", "++", "!q_idx", "q_idx != != 1", "q_idx == = 1", "q_idx === 1", "q_idx >>= 1",
      "q_idx += 1", "&q_idx"),
    *("*p", "q_idx ? 1 : 2", "q_idx && 1", "q_idx || 1", "/* x */ 1", "1 // x", "1 // comment", "%s", "{{ 1 }}",
      "{% if %}"),
    *("${x}", "\x00", "q_idx\x00", "1 + \x00 2", "\ufeff1", "\u00a01", "q\u2000idx", "\u0661", "\uff51_idx",
      "q_idx\u2028+ 1", "é"),
    *("\ud800", "\U0001f600", "\x1b[31m", "\x7f", "\x1c1", "\x85", "q_idx\u200b", "\u22121", "1 ≤ 2", "“1”", "_",
      "__", "x" * 4000),
    *("(" * 2000, ")" * 2000, "(" * 100, "[" * 3000, "(" * 2000 + "1" + ")" * 1999, "(" * 250 + "1" + ")" * 250),
    *("slope[" * 600, "slope[" * 300 + "0" + "]" * 300, "min(" * 900, "min(1," * 300 + "1" + ")" * 300, "-" * 3999),
    *("-" * 3999 + "1", "~" * 2000 + "1", "not " * 900 + "on", "1+" * 1999 + "1", "1+" * 1999, "1<" * 1999 + "1"),
    *("on or " * 600 + "on", "1 if on else " * 300 + "1", "1 if on else (" * 250 + "1" + ")" * 250, "q_idx " * 600),
    *("1," * 1999, "min(" + "1," * 1900 + ")", "lambda:" * 500, "slope[0]" * 400, "slope" + "[0]" * 1000,
      "a" + ".b" * 1500),
    *("1<(" * 190 + "1" + "<1)" * 190 + "<1", "x" * 33, "q_idx.denominator", "score.real", "q_idx" * 700,
      " " * 4000, ""),
]  # fmt: skip


@looped
@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_texts_are_refused_on_one_bounded_line(text: str) -> None:
    with pytest.raises(ExpressionError) as error:
        parsed(text)
    assert_is_one_bounded_line(error.value)


def assert_is_one_bounded_line(error: ExpressionError) -> None:
    assert str(error).isprintable()
    assert 10 < len(str(error)) <= 400


@given(st.text(max_size=80) | st.text(alphabet="q_idxon 0123+-*/%<>=!&|^~()[].,:;'\"\\\n", max_size=40))
@example("1\n+\n1")
def test_any_text_is_a_tree_or_refused(text: str) -> None:
    try:
        node = parsed(text)
    except ExpressionError as error:
        assert_is_one_bounded_line(error)
    else:
        check_size(node)
        assert parsed(text_of(node)) == node


@pytest.mark.parametrize("text", [7, None, b"q_idx", ["q_idx"]])
def test_what_is_no_text(text: object) -> None:
    with pytest.raises(ExpressionError, match="an expression is text"):
        parse_expression(text, {}, score=True)  # type: ignore[arg-type]


def test_numbers_of_nodes_and_depths_up_to_the_limits() -> None:
    deep = parsed("-" * (MOST_DEPTH - 1) + "q_idx")
    wide = parsed("+".join(f"({'+'.join(['1'] * 50)})" for _ in range(10)))
    for node in (deep, wide):
        check_size(node)
        assert parsed(text_of(node)) == node


def test_the_deepest_trees_have_a_text_that_is_read() -> None:
    """Of operators that need parentheses, calls and indices, as deep as a tree may be."""
    table = Aux("t", "int32", (4,))
    for build in (
        lambda node: operation("-", one, node),
        lambda node: operation("==", node, one),
        lambda node: operation("abs", node),
        lambda node: operation("where", literal(True), one, node),
        lambda node: operation("neg", operation("+", node, one)),
        lambda node: item(table, operation("*", one, node)),
    ):
        node: Node = q
        while True:
            try:
                check_size(build(node))
            except ExpressionError:
                break
            node = build(node)
        assert parse_expression(text_of(node), {"t": table}, score=True) == node


@settings(max_examples=300, suppress_health_check=list(HealthCheck))
@given(trees())
@example(operation("neg", one))
@example(operation("neg", literal(-1)))
@example(operation("neg", literal(-0.0)))
@example(operation("-", one, literal(-1)))
@example(operation("~", operation("neg", one)))
def test_the_text_of_a_tree_has_that_tree(node: Node) -> None:
    check_size(node)
    text = text_of(node)
    if len(text) <= MOST_TEXT:
        assert parse_expression(text, AUX, score=True) == node
        assert text_of(parse_expression(text, AUX, score=True)) == text


@looped
@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        (" ( q_idx+kv_idx )*2", "(q_idx + kv_idx) * 2"),
        ("(q_idx*kv_idx)+2", "q_idx * kv_idx + 2"),
        ("q_idx-(kv_idx-2)", "q_idx - (kv_idx - 2)"),
        ("(q_idx-kv_idx)-2", "q_idx - kv_idx - 2"),
        ("1<q_idx<2", "1 < q_idx and q_idx < 2"),
        ("(1<q_idx)<2", "(1 < q_idx) < 2"),
        ("not(on and(not on))", "not (on and not on)"),
        ("(on or on) and on", "(on or on) and on"),
        ("on or (on or on)", "on or (on or on)"),
        ("1 if on else 2", "where(on, 1, 2)"),
        ("min(min(1,2),q_idx)", "min(1, 2, q_idx)"),
        ("min(1,min(2,q_idx))", "min(1, min(2, q_idx))"),
        ("wide[ (1),head ]", "wide[1, head]"),
        ("0x10 + 1_0", "16 + 10"),
        ("1e3 - - 1", "1000.0 - -1"),
        ("-(-(q_idx))", "--q_idx"),
        ("-(q_idx & 1)", "-(q_idx & 1)"),
        ("-+1", "-+1"),
        ("~(q_idx == 1) & on", "~(q_idx == 1) & on"),
        ("on == (not on)", "on == (not on)"),
        ("q_idx // (2 * 3) % 4", "q_idx // (2 * 3) % 4"),
    ],
)
def test_canonical_texts(text: str, canonical: str) -> None:
    assert text_of(parsed(text)) == canonical
    assert parsed(canonical) == parsed(text)


def test_declarations_of_aux_tensors() -> None:
    assert TENSORS["q_doc"] == Aux("q_doc", "int32", ("batch", "q_len"))
    assert TENSORS["on"] == Aux("on", "bool", ())
    assert TENSORS["wide"] == Aux("wide", "int64", (8, "heads"))
    assert parse_aux({"a": " bf16 [ 2147483647 ,1,heads, kv_len ] "}) == {
        "a": Aux("a", "bf16", (2**31 - 1, 1, "heads", "kv_len"))
    }
    assert parse_aux({name: str(aux) for name, aux in TENSORS.items()}) == TENSORS
    assert parse_aux({}) == {}


@looped
@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        *((name, "bool[]", "letters, digits") for name in ("", "1a", "a-b", "_a", "a__b", "é", "a b", "a" * 33,
          "a\n", 7)),
        *((name, "bool[]", "reserved in expressions") for name in ("q_idx", "score", "where", "min", "exp", "float")),
        *((name, "bool[]", "a Python keyword") for name in ("lambda", "None", "is", "match", "True", "if")),
        *((name, "bool[]", "CUDA C") for name in ("double", "template", "threadIdx", "kTile", "sqrtf", "cudaMalloc")),
        *(("a", text, "not a type with sizes") for text in ("", "int32", "int32[", "int32]", "[8]", "int32[[8]]",
          "int32[8]x")),
        *(("a", text, "not a type with sizes") for text in ("int32[8][8]", "int32(8)", "int32\n[8]",
          "bool[" * 999, 7, None)),
        ("a", "bool[" + "1, " * 100 + "1]", "not a type with sizes"),
        ("a", "int33[8]", "did you mean int32"),
        ("a", "uint8[8]", "not an element type"),
        ("a", "float[8]", "not an element type"),
        *(("a", f"int32[{size}]", "is not a size") for size in ("0", "-1", "08", "2147483648", "9" * 100, "1.0",
          "x", "q_idx")),
        *(("a", f"int32[{size}]", "is not a size") for size in ("8,", ",", ",8", "8,,8", "2*4", "batch heads", "٨",
          "8\n")),
        ("a", "int32[1, 2, 3, 4, 5]", "at most 4"),
    ],
)  # fmt: skip
def test_declarations_that_are_refused(name: str, text: str, message: str) -> None:
    with pytest.raises(ExpressionError, match=message) as error:
        parse_aux({name: text})
    assert_is_one_bounded_line(error.value)


def test_the_number_of_aux_tensors() -> None:
    assert len(parse_aux({f"a{number}": "bool[]" for number in range(MOST_AUX)})) == MOST_AUX
    with pytest.raises(ExpressionError, match="at most 8"):
        parse_aux({f"a{number}": "bool[]" for number in range(MOST_AUX + 1)})


def test_aux_tensors_that_are_not_used() -> None:
    mask, bias = parsed("q_doc[batch, wide[0, 0]] == 1 or on"), parsed("score + slope[head]")
    used = {name: TENSORS[name] for name in ("q_doc", "wide", "on", "slope")}
    check_used(used, mask, bias)
    check_used({}, mask)
    with pytest.raises(ExpressionError, match=r"^slope: declared"):
        check_used(used, mask)
    with pytest.raises(ExpressionError, match=r"^q_doc, wide, on: declared"):
        check_used(used, bias)


@pytest.mark.parametrize("value", [2**63, -(2**63) - 1, 1e39, float("inf"), float("nan"), -1e39, 1e-60])
def test_numbers_that_no_kernel_has(value: float) -> None:
    with pytest.raises(ExpressionError):
        literal(value)


@looped
@pytest.mark.parametrize("value", [0, 0.0, -0.0, True, 3.4e38, 1e-45, 2**63 - 1, -(2**63)])
def test_numbers_that_a_kernel_has(value: float) -> None:
    assert literal(value) == Literal(value)
