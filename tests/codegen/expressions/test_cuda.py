"""Expressions as CUDA, compiled by g++ for the host: what comes out is what a reference in Python says, bit for bit."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from drawn_expressions import AUX, trees
from expression_program import check
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from codegen.expressions.nodes import Literal, Node, Variable, item
from codegen.expressions.nodes import operation as op

Q, K, HEAD, KV_LEN, SCORE = (Variable(name) for name in ("q_idx", "kv_idx", "head", "kv_len", "score"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("g++") is None:
        pytest.skip("no g++ to compile the host program with")
    return tmp_path_factory.mktemp("expressions")


# Each example is a program, so that none is made smaller; the message names the tree.
SLOW = settings(max_examples=5, suppress_health_check=list(HealthCheck), phases=[Phase.generate])


@SLOW
@given(nodes=st.lists(trees(), min_size=25, max_size=60))
def test_drawn_trees_compute_what_they_say(folder: Path, nodes: list[Node]) -> None:
    check(nodes, folder)


def every_division() -> list[Node]:
    """// and % of both signs by both, of 32 and 64 bits, by numbers and by variables."""
    differences = [op("-", Q, K), op("*", op("-", Q, K), Literal(2**33 + 1)), Q, op("==", Q, K)]
    by = [*(Literal(number) for number in (1, 2, 5, 64, -1, -3, -8, 2**31, 2**40)), op("-", K, Literal(7)), KV_LEN]
    return [op(name, a, b) for name in ("//", "%") for a in differences for b in by]


def every_pair_of_operators() -> list[Node]:
    """Each operator within each, at each place: what parentheses are for."""
    near, far, hidden = op("<", Q, K), op(">", Q, Literal(20)), item(AUX[4], Q, K)
    of_truths = [op(name, near, far) for name in ("and", "or", "&", "|", "^", "==", "!=", "<=")]
    of_truths += [op("not", near), op("~", hidden), op("not", hidden), op("where", near, far, hidden)]
    numbers = [op(name, Q, K) for name in ("+", "-", "*", "&", "|", "^", "min", "max")]
    numbers += [op(name, Q) for name in ("~", "neg", "abs", "int")] + [Literal(-3), Literal(-(2**31))]
    numbers += [op(name, op("-", Q, K), Literal(2)) for name in ("<<", ">>", "//", "%")]
    numbers += [op("where", near, Q, K), op("where", near, far, K)]
    both = [
        op(name, *pair)
        for name in ("and", "or", "&", "|", "^", "==", "!=", "<", ">=")
        for one in of_truths
        for pair in ((one, hidden), (hidden, one), (one, of_truths[0]))
    ]
    both += [
        op(name, *pair)
        for name in ("+", "-", "*", "&", "|", "^", "<", "==", "max", "%", "//")
        for one in numbers
        for pair in ((one, HEAD), (HEAD, one), (one, numbers[1]))
    ]
    both += [op(name, one) for name in ("not", "~", "bool", "int") for one in of_truths]
    both += [op(name, one) for name in ("neg", "~", "abs", "bool", "float") for one in numbers]
    both += [op(name, one, Literal(3)) for name in ("<<", ">>", "//", "%") for one in (*numbers, *of_truths)]
    both += [op("where", one, *pair) for one in of_truths for pair in ((far, one), (one, far), (numbers[-2], Q))]
    return both


def test_division_rounds_down(recorded: Callable[..., None], folder: Path) -> None:
    assert check(every_division(), folder, recorded) > 600


def test_parentheses_are_where_they_are_needed(recorded: Callable[..., None], folder: Path) -> None:
    assert check(every_pair_of_operators(), folder, recorded) > 4000


def test_numbers_read_back_exactly(recorded: Callable[..., None], folder: Path) -> None:
    floats = [0.1, 1 / 3, -2.5, 1e-45, 3.4028234663852886e38, 1e39, -1e300, math.nan, 16777217.0, 1e-10, -0.0, 1e22]
    integers = [0, -1, 2**31 - 1, -(2**31), 2**31, 2**63 - 1, -(2**63), 2**62 + 2**38 + 1]
    mixed = [op("where", op("<", Q, K), Literal(number), SCORE) for number in integers]
    check([*map(Literal, (*floats, *integers, True, False)), *mixed], folder, recorded)
