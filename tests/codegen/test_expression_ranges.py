"""Masks over blocks: what intervals tell is true of every pair, and they tell what they should."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from drawn_expressions import AUX, trees
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from range_program import outcomes

from codegen.expressions.bounds import bounds_of, divides_by_zero
from codegen.expressions.nodes import Item, Literal, Node, Operation, Type, Variable, children, item, operation

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
BY_NAME = {aux.name: aux for aux in AUX}
Q_DOC = item(BY_NAME["q_doc"], Variable("batch"), Variable("q_idx"))
KV_DOC = item(BY_NAME["kv_doc"], Variable("batch"), Variable("kv_idx"))
SLOPE = item(BY_NAME["slope"], Variable("kv_idx"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


def of_a_mask(node: Node) -> Node:
    """Return a tree without the score, which masks do not have."""
    if isinstance(node, Operation):
        return operation(node.name, *map(of_a_mask, node.operands))
    if isinstance(node, Item):
        return item(node.aux, *map(of_a_mask, node.indices))
    return SLOPE if node == Variable("score") else node


def has_a_value(node: Node) -> bool:
    """Return whether C++ has a value for all of a tree: nothing is divided by 0, the least integer by -1."""
    if isinstance(node, Operation) and node.name in ("//", "%") and -1 in bounds_of(node.operands[1]):
        return False
    return all(map(has_a_value, children(node)))


masks = trees(Type.BOOL, 4).map(of_a_mask).filter(lambda node: divides_by_zero(node) is None and has_a_value(node))


@settings(max_examples=2, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(masks, min_size=40, max_size=60))
def test_what_is_told_of_drawn_masks_is_true(folder: Path, drawn: list[Node]) -> None:
    for mask, (wrong, _, _) in zip(drawn, outcomes(drawn, (8, 16), folder), strict=True):
        assert not wrong, mask


INTEGERS = (Q_DOC, KV_DOC, operation("-", Variable("q_idx"), Variable("kv_idx")), Variable("kv_idx"))
POSITIVE = (Literal(3), operation("+", operation("abs", operation("%", Q_DOC, Literal(5))), Literal(1)))
NUMBERS = (SLOPE, operation("float", Q_DOC), operation("float", INTEGERS[2]))
BOUNDS = (-(2**62), -7, -1, 0, 3, 12, 2**31, 2**62)


def every_operator() -> list[Node]:
    """Return each operator of operands that neither side has alone, compared with numbers."""
    found: list[Node] = []
    for one in INTEGERS:
        for name in ("+", "-", "*", "&", "|", "^", "min", "max"):
            found += [operation(name, one, other) for other in INTEGERS]
        found += [operation(name, one, by) for name in ("//", "%") for by in (*POSITIVE, Literal(-3), Literal(64))]
        found += [operation(name, one, Literal(by)) for name in ("<<", ">>") for by in (0, 5, 40)]
        found += [operation(name, one) for name in ("neg", "~", "abs")]
    for number in NUMBERS:
        for name in ("+", "-", "*", "min", "max"):
            found += [operation(name, number, other) for other in NUMBERS]
        found += [operation(name, number) for name in ("neg", "abs")]
    return found


def compared(nodes: list[Node]) -> list[Node]:
    """Return comparisons of nodes with numbers, in turn; what asks for a pair keeps sides from being taken whole."""
    pairs = operation("==", Variable("q_idx"), Variable("kv_idx"))
    signs = ("<", "<=", ">", ">=", "==", "!=")
    return [
        operation(
            signs[number % len(signs)], operation("where", pairs, node, node), Literal(BOUNDS[number % len(BOUNDS)])
        )
        for number, node in enumerate(nodes)
    ]
