"""Masks over blocks: what intervals tell is true of every pair, and they tell what they should."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from drawn_expressions import AUX, trees
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from range_program import operators, outcomes

from codegen.expressions.bounds import bounds_of, divides_by_zero
from codegen.expressions.declared import parse_aux
from codegen.expressions.nodes import Item, Node, Operation, Type, Variable, children, item, operation
from codegen.expressions.parse import parse_expression
from codegen.expressions.ranges import Ranges, bytes_of, list_sizes, ranges_of

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
BY_NAME = {aux.name: aux for aux in AUX}
SLOPE = item(BY_NAME["slope"], Variable("kv_idx"))


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


@settings(max_examples=3, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(masks, min_size=40, max_size=60))
def test_what_is_told_of_drawn_masks_is_true(tmp_path: Path, drawn: list[Node]) -> None:
    for mask, (wrong, _, _) in zip(drawn, outcomes(drawn, (8, 16), tmp_path), strict=True):
        assert not wrong, mask


def test_intervals_have_every_value_of_their_operators(recorded: Callable[..., None], tmp_path: Path) -> None:
    found = operators(tmp_path, recorded)
    assert len(found) > 30 and not {name: wrong for name, (wrong, _) in found.items() if wrong}


EXACT = (
    "q_idx >= kv_idx",
    "abs(q_idx - kv_idx) <= 7",
    "q_idx - kv_idx < 9 and q_idx >= kv_idx",
    "kv_idx < 5 or q_idx >= kv_idx",
    "q_idx // 8 == kv_idx // 8",
    "q_idx // 8 >= kv_idx // 16 and q_idx // 8 - kv_idx // 16 <= 1",
    "slope[head] < slope[1]",
    "q_doc[batch, 3] > 2 and q_idx >= kv_idx",
    "not hidden[0, kv_idx // 16] and q_idx * 2 >= kv_idx",
)
"""Masks of which intervals tell all that there is to tell."""


def test_masks_that_are_told_whole(recorded: Callable[..., None], tmp_path: Path) -> None:
    found = outcomes([parse_expression(text, BY_NAME, score=False) for text in EXACT], (8, 16), tmp_path, recorded)
    for text, (wrong, told, uniform) in zip(EXACT, found, strict=True):
        assert (wrong, told) == (0, uniform), text


def printed(text: str, **aux: str) -> Ranges:
    return ranges_of(parse_expression(text, parse_aux(aux), score=False))


def test_documents() -> None:
    text = "doc[batch, q_idx] == kv_doc[batch, kv_idx] and q_idx >= kv_idx"
    found = printed(text, doc="int32[batch, q_len]", kv_doc="int64[batch, kv_len]")
    assert [str(each) for each in found.statements] == [
        "const Truth part_0 = range_equal(rows.doc, columns.kv_doc);",
        "const Truth part_1 = truth_not(range_less(queries, keys));",
    ]
    assert found.result == "truth_and(part_0, part_1)"
    assert [each.text for each in (*found.rows, *found.columns)] == ["doc[batch, q_idx]", "kv_doc[batch, kv_idx]"]


def test_a_side_is_looked_at_as_a_whole() -> None:
    """Also through other lookups; floating-point operations are not, which the compiler may fuse with what follows."""
    found = printed(
        "start[doc[q_idx]] % 7 <= kv_idx and time[q_idx] * 2.0 < time[kv_idx]",
        doc="int32[q_len]",
        start="int32[9]",
        time="fp32[64]",
    )
    assert [(each.ctype, each.text) for each in found.rows] == [
        ("Range", "start[doc[q_idx]] % 7"),
        ("FloatRange", "time[q_idx]"),
    ]
    assert [each.text for each in found.columns] == ["time[kv_idx]"]
    assert bytes_of(found.rows) == 24 and bytes_of(found.columns) == 8


def test_what_pairs_look_up_may_be_anything() -> None:
    found = printed("seen[q_idx, kv_idx] or near[q_idx - kv_idx] > 3", seen="bool[q_len, kv_len]", near="int32[9]")
    assert not (found.rows or found.columns or found.fixed)
    assert found.result == "truth_or(kEither, part_0)"
    assert "Range{-2147483647LL - 1, 2147483647LL}" in str(found.statements[0])


@pytest.mark.parametrize(
    ("text", "sizes"),
    [("q_idx >= kv_idx", (1, 1)), ("x[batch, kv_idx]", (3, 1)), ("q_idx > head", (1, 4)), ("x[batch, head]", (3, 4))],
)
def test_lists_are_shared_by_batches_and_heads_that_a_mask_does_not_ask_for(text: str, sizes: tuple[int, int]) -> None:
    mask = parse_expression(text, parse_aux({"x": "bool[batch, 64]"}), score=False)
    assert list_sizes(mask, 3, 4) == sizes
