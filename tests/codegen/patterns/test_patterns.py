"""Patterns: what they say of themselves agrees with their definition and their templates."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from codegen import patterns
from codegen.errors import SpecError
from codegen.library import TEMPLATES, find_spec, shipped_specs
from codegen.patterns import PATTERNS, PatternBase
from codegen.spec import AttentionSpec

SHIPPED = [named.spec.pattern for named in shipped_specs() if isinstance(named.spec, AttentionSpec)]
EXAMPLES = {pattern.kind: pattern.example().model_dump() for pattern in reversed(SHIPPED)}  # the first of each kind


def example(kind: str, **changes: Any) -> PatternBase:
    return PATTERNS[kind].model_validate({**EXAMPLES[kind], **changes})


def rows(pattern: PatternBase, q_len: int, kv_len: int, value: int = 2) -> list[str]:
    """The visible pairs as text, one line a query, of a batch with this value."""
    values = pattern.values_of([value])
    return [
        "".join(".x"[bool(pattern.visible(q, k, q_len, kv_len, values))] for k in range(kv_len)) for q in range(q_len)
    ]


def test_every_pattern_has_a_module_a_template_and_a_shipped_spec() -> None:
    modules = {path.stem for path in Path(patterns.__file__).parent.glob("*.py")} - {"__init__", "base"}
    templates = {path.name.removesuffix(".cuh.j2") for path in (TEMPLATES / "attention" / "patterns").iterdir()}
    assert list(PATTERNS) == sorted(PATTERNS)
    assert set(PATTERNS) == modules == templates == set(EXAMPLES)


@pytest.mark.parametrize("kind", PATTERNS)
def test_template_exists_and_keeps_the_contract(kind: str) -> None:
    text = (TEMPLATES / "attention" / "patterns" / f"{kind}.cuh.j2").read_text()
    if "attention/lists.cuh.j2" in text:
        text += (TEMPLATES / "attention" / "lists.cuh.j2").read_text()
    if "attention/window.cuh.j2" in text:
        text += (TEMPLATES / "attention" / "window.cuh.j2").read_text()
    assert "struct KvBlockIterator" in text
    assert "KvBlockIterator(const Params& p, int batch, int head, int first_query)" in text
    assert "int at(int i)" in text
    pattern = example(kind)
    shown = "bool visible(" in text or '{% include "attention/pair_mask.cuh.j2" %}' in text
    assert shown == pattern.masks_pairs
    for tensor in pattern.index_tensors:
        assert f"p.{tensor.name}" in text
    for name in pattern.constants():
        assert re.search(rf"\b{name}\b", text)


@pytest.mark.parametrize("kind", PATTERNS)
def test_index_tensors(kind: str) -> None:
    pattern = example(kind)
    names = {tensor.name for tensor in pattern.index_tensors}
    lists = [tensor for tensor in pattern.index_tensors if not tensor.per_batch]
    assert bool(lists) == (pattern.fixed_block is not None)
    assert list(pattern.index_tensors[: len(lists)]) == lists
    for tensor in lists:
        assert tensor.dims[:3] == ("batch", "heads", "query_blocks")
        assert tensor.upper == "key_blocks" or tensor.upper in names
    for tensor in pattern.index_tensors[len(lists) :]:
        assert tensor.upper == "kv_len" and not tensor.optional
    assert all(tensor.doc for tensor in pattern.index_tensors)


@pytest.mark.parametrize("kind", PATTERNS)
def test_names_and_words(kind: str) -> None:
    pattern = example(kind)
    assert pattern.stem().isidentifier()
    assert pattern.describe()
    assert all(name.startswith("k") and comment for name, (_, comment) in pattern.constants().items())


@pytest.mark.parametrize("kind", PATTERNS)
def test_no_pair_outside_the_keys(kind: str) -> None:
    pattern = example(kind)
    values = pattern.values_of([7])
    assert not any(pattern.visible(q, k, 4, 4, values) for q in range(4) for k in (-1, 4, 9))


@pytest.mark.parametrize("kind", PATTERNS)
def test_only_patterns_that_mask_hide_pairs(kind: str) -> None:
    hidden = any("." in row for row in rows(example(kind), 8, 8))
    assert hidden == example(kind).masks_pairs


def test_causal_corners() -> None:
    assert rows(example("causal"), 3, 3) == ["x..", "xx.", "xxx"]
    assert rows(example("causal"), 2, 4) == ["xxx.", "xxxx"]
    assert rows(example("causal"), 4, 2) == ["..", "..", "x.", "xx"]
    assert rows(example("causal", align="top_left"), 2, 4) == ["x...", "xx.."]


def test_prefix() -> None:
    pattern = example("prefix_lm")
    assert rows(pattern, 4, 4, 0) == rows(example("causal"), 4, 4) == rows(pattern, 4, 4, 1)
    assert rows(pattern, 4, 4, 3) == ["xxx.", "xxx.", "xxx.", "xxxx"]
    assert rows(pattern, 2, 4, 4) == rows(pattern, 2, 4, 9) == ["xxxx", "xxxx"]
    assert rows(pattern, 4, 2, 0) == rows(pattern, 4, 2, -1) == ["..", "..", "x.", "xx"]  # rows without keys
    assert rows(pattern, 4, 2, 1) == ["x.", "x.", "x.", "xx"]


def test_window() -> None:
    assert rows(example("sliding_window", left=1, right=0), 4, 4) == ["x...", "xx..", ".xx.", "..xx"]
    assert rows(example("sliding_window", left=1, right=1), 2, 4) == [".xxx", "..xx"]
    assert rows(example("sliding_window", left=0, right=0), 3, 1) == [".", ".", "x"]


@pytest.mark.parametrize("kind", ["sliding_window", "sink_window"])
def test_numbers_that_a_call_decides(kind: str) -> None:
    pattern = example(kind, left=5, right=2)
    general = pattern.general()
    assert general.is_general and not pattern.is_general and general == PATTERNS[kind].model_validate({"kind": kind})
    assert pattern.numbers() == {"window": (5, 2), **({"sink_keys": 64} if kind == "sink_window" else {})}
    assert general.with_numbers(pattern.numbers()) == pattern and general.general() == general
    values = {number.param: getattr(pattern, number.field) for number in pattern.call_numbers}
    assert general.with_params(values) == pattern and pattern.with_params({}) is pattern
    assert list(general.number_params) == list(values) and not pattern.number_params
    assert general.example() == example(kind) and pattern.example() is pattern
    assert not general.constants() and general.window is None and general.seen_keys(700, 64) == (700.0, 700.0)
    assert {number.constant for number in pattern.call_numbers} == set(pattern.constants())
    assert general.stem() == kind.removeprefix("sliding_") and "i - left" in general.describe()


@pytest.mark.parametrize("kind", PATTERNS)
def test_other_patterns_leave_nothing_to_the_call(kind: str) -> None:
    pattern = example(kind)
    if not pattern.call_numbers:
        assert not pattern.is_general and pattern.general() == pattern and pattern.numbers() == {}


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"kind": "sliding_window", "left": 5}, "right is missing; give left, right, or omit all of them"),
        ({"kind": "sliding_window", "right": 5}, "left is missing; give left, right, or omit all of them"),
        ({"kind": "sink_window", "sink": 4}, "left is missing; give sink, left, right, or omit all of them"),
        (
            {"kind": "sink_window", "left": 4, "right": 4},
            "sink is missing; give sink, left, right, or omit all of them",
        ),
    ],
)
def test_some_numbers_without_the_others_are_refused(fields: dict[str, Any], says: str) -> None:
    spec = {"op": "attention", "arch": "sm_90a", "head_dim": 64, "pattern": fields}
    with pytest.raises(SpecError, match=rf"^pattern: is .*; {says} and pass them in the call$"):
        find_spec(spec)


def test_sinks_and_window() -> None:
    assert rows(example("sink_window", sink=1, left=1, right=0), 5, 5) == ["x....", "xx...", "xxx..", "x.xx.", "x..xx"]
    assert rows(example("sink_window", sink=2, left=0, right=1), 2, 5) == ["xx.xx", "xx..x"]
    assert rows(example("sink_window", sink=3, left=0, right=0), 3, 2) == ["..", "x.", "xx"]  # sinks stay causal


def strided_blocks(q_len: int, kv_len: int, **fields: Any) -> list[str]:
    """What the first query of each 64 sees of the first key of each 64."""
    pattern = example("strided", block=64, **fields)
    return [row[::64] for row in rows(pattern, q_len, kv_len)[::64]]


def test_stripes_and_band() -> None:
    causal = strided_blocks(384, 384, stride=3, local=1)
    assert causal == ["x.....", "xx....", "xxx...", "x.xx..", "x..xx.", "x..xxx"]
    both = strided_blocks(384, 384, stride=3, local=1, causal=False)
    assert both == ["xx.x..", "xxxx..", "xxxx..", "x.xxx.", "x..xxx", "x..xxx"]
    assert strided_blocks(64, 320, stride=2, local=0) == ["x.x.x"]
    assert strided_blocks(192, 64, stride=2, local=0) == [".", ".", "x"]
    assert strided_blocks(192, 64, stride=2, local=1, causal=False) == ["x", "x", "x"]


def test_strided_hides_the_future_within_a_block() -> None:
    pattern = example("strided", stride=2, local=0, block=64)
    assert rows(pattern, 3, 3) == ["x..", "xx.", "xxx"]
    assert rows(example("strided", stride=2, local=0, block=64, causal=False), 2, 2) == ["xx", "xx"]


def test_block_lists_mask() -> None:
    assert rows(example("block_lists"), 3, 3) == ["x..", "xx.", "xxx"]
    assert rows(example("block_lists", mask="none"), 2, 2) == ["xx", "xx"]
