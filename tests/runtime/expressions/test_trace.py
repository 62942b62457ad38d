"""Masks and scores as users of FlexAttention write them become trees that are worth what the functions return."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from known_functions import BATCH, HEADS, LENGTH, MASKS, SCORES, causal, draw, prefix, window  # noqa: E402
from torch.nn.attention.flex_attention import and_masks, noop_mask, or_masks  # noqa: E402

from codegen.expressions.nodes import Aux, Item, Literal, Variable, children, item, operation  # noqa: E402
from runtime.expressions.evaluate import evaluate  # noqa: E402
from runtime.expressions.functions import FUNCTIONS  # noqa: E402
from runtime.expressions.trace import Traced, trace_mask, trace_score  # noqa: E402

NAMES = ("batch", "head", "q_idx", "kv_idx")
Q, KV = Variable("q_idx"), Variable("kv_idx")


def points(count: int = 150) -> list[tuple[Any, ...]]:
    """Random b, h, q_idx and kv_idx, each without dims, as FlexAttention gives them."""
    generator = torch.Generator().manual_seed(count)
    columns = [torch.randint(most, (count,), generator=generator) for most in (BATCH, HEADS, LENGTH, LENGTH)]
    return [tuple(row) for row in torch.stack(columns, 1)]


def by_the_tree(traced: Traced, places: list[tuple[Any, ...]], score: Any = None) -> Any:
    values = {name: torch.stack(column) for name, column in zip(NAMES, zip(*places, strict=True), strict=True)}
    values |= {} if score is None else {"score": score}
    return evaluate(traced.node, values, traced.tensors).expand(len(places))


def lookups(traced: Traced) -> list[Item]:
    def inner(node: Any) -> list[Item]:
        return [node] * isinstance(node, Item) + [one for child in children(node) for one in inner(child)]

    return inner(traced.node)


@pytest.mark.parametrize("name", MASKS)
def test_masks(name: str) -> None:
    traced = trace_mask(MASKS[name])
    found, wanted = by_the_tree(traced, points()), [bool(MASKS[name](*place)) for place in points()]
    assert found.dtype == torch.bool and found.tolist() == wanted
    assert name == "noop" or len(set(wanted)) == 2, "else it tells nothing"
    assert {one.aux.name: one.aux for one in lookups(traced)} == traced.aux and set(traced.tensors) == set(traced.aux)


@pytest.mark.parametrize("name", SCORES)
def test_scores(name: str) -> None:
    score = draw(150) * 4
    wanted = torch.stack([SCORES[name](one, *place) for one, place in zip(score, points(), strict=True)])
    found = by_the_tree(trace_score(SCORES[name]), points(), score)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, wanted.float(), rtol=2e-6, atol=1e-6)


def test_trees_are_those_that_one_would_write() -> None:
    near = operation("<=", operation("abs", operation("-", Q, KV)), Literal(5))
    is_causal = operation(">=", Q, KV)
    assert trace_mask(and_masks(causal, window(5))).node == operation("&", is_causal, near)
    assert trace_mask(or_masks(window(5), causal)).node == operation("|", near, is_causal)
    assert trace_mask(noop_mask) == Traced(Literal(True), {}, {})


def test_a_comparison_by_whichever_name_torch_tells() -> None:
    """Torch 2.11 calls what ``q_idx == kv_idx`` asks ``__eq__``, 2.13 ``eq``."""

    def asked(name: str) -> Any:
        def function(one: Any, other: Any) -> Any:
            return torch.overrides.handle_torch_function(function, (one, other), one, other)

        function.__name__ = name
        return function

    for name, operator in {"eq": "==", "ne": "!=", "lt": "<", "ge": ">="}.items():
        for told in (name, f"__{name}__"):
            compare = asked(told)
            traced = trace_mask(lambda b, h, q_idx, kv_idx, compare=compare: compare(q_idx, kv_idx))
            assert traced.node == operation(operator, Q, KV)


def test_what_one_variable_indexes_has_its_size() -> None:
    documents = trace_mask(MASKS["documents"])
    assert {name: str(aux) for name, aux in documents.aux.items()} == {
        "ids_q": "int32[batch, q_len]",
        "ids_kv": "int32[batch, kv_len]",
    }
    assert documents.tensors["ids_q"] is documents.tensors["ids_kv"]
    aux = trace_score(SCORES["transformer_xl"]).aux
    assert [str(one) for one in aux.values()] == ["fp32[batch, heads, kv_len]", "fp32[batch, heads, q_len, 120]"]
    assert [str(one) for one in trace_mask(MASKS["jagged"]).aux.values()] == ["int64[3]", "int64[batch, 1]"]


def test_of_tensors_longer_than_known_sizes_the_part_that_is_indexed_is_taken() -> None:
    sizes = {"batch": BATCH, "heads": HEADS, "q_len": 16, "kv_len": LENGTH}
    traced = trace_mask(MASKS["documents"], sizes)
    assert [str(one) for one in traced.aux.values()] == ["int32[batch, q_len]", "int32[batch, kv_len]"]
    of_queries, of_keys = traced.tensors.values()
    assert of_queries.shape == (BATCH, 16) and of_queries._base is of_keys and of_keys.shape == (BATCH, LENGTH)
    shorter = trace_mask(MASKS["documents"], {**sizes, "q_len": LENGTH + 1})
    assert [str(one) for one in shorter.aux.values()] == [f"int32[batch, {LENGTH}]"]
    one_for_all = torch.zeros(1, dtype=torch.int64)
    assert trace_mask(lambda b, h, q_idx, kv_idx: one_for_all[h] == 0, sizes).aux["one_for_all"].dims == ("heads",)


def test_captured_numbers_stay_and_tensors_do_not() -> None:
    width = torch.tensor(3)
    traced = trace_mask(lambda b, h, q_idx, kv_idx: q_idx - kv_idx <= width // 2)
    assert traced.node.operands[1] == operation("//", item(Aux("width", "int64", ())), Literal(2))
    assert traced.tensors["width"] is width
    values = {"q_idx": 5, "kv_idx": 2}
    assert not evaluate(traced.node, values, traced.tensors)
    assert evaluate(traced.node, values, {"width": torch.tensor(6)})


def test_names_of_captured_tensors() -> None:
    bits = torch.ones(HEADS, dtype=torch.bool)

    def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any, held: Any = None) -> Any:
        return held[h]

    held = {"list": [bits], "keys": {"per_head": bits}, "an object": SimpleNamespace(mask_of=bits)}
    found = {
        what: list(trace_mask(lambda b, h, q_idx, kv_idx, one=one: _first(one)[h]).aux) for what, one in held.items()
    }
    assert found == {"list": ["one0"], "keys": ["per_head"], "an object": ["mask_of"]}
    for taken in ("score", "int32", "größe", "_bits", "a__b", "aux7"):
        made = eval(f"lambda {taken}: lambda b, h, q_idx, kv_idx: {taken}[h]")(bits)
        assert list(trace_mask(made).aux) == ["aux0"]
    two = and_masks(prefix(torch.tensor([1, 2])), prefix(torch.tensor([3, 4])))
    assert list(trace_mask(two).aux) == ["lengths", "lengths2"]
    assert list(trace_mask(functools.partial(mask, held=bits)).aux) == ["held"]


def _first(held: Any) -> Any:
    return next(iter(held)) if isinstance(held, list) else next(iter(getattr(held, "__dict__", held).values()))


def test_a_negative_index_is_corrected_only_where_there_may_be_one() -> None:
    table = torch.ones(HEADS, dtype=torch.bool)
    for index in (
        lambda q, k: q % 4,
        lambda q, k: (q - k).clamp(min=0),
        lambda q, k: (q - k).abs() // 20 + (q > k) * 1,
    ):
        mask = trace_mask(lambda b, h, q_idx, kv_idx, index=index: table[index(q_idx, kv_idx)])
        assert mask.node.indices[0].name != "where"
    assert trace_mask(lambda b, h, q_idx, kv_idx: table[q_idx - kv_idx]).node.indices[0].name == "where"
    assert trace_mask(lambda b, h, q_idx, kv_idx: table[-1]).node.indices == (Literal(HEADS - 1),)


def test_a_compiled_function_runs_as_it_is_written() -> None:
    inner = torch.compile(causal, backend="eager")
    for compiled in (inner, and_masks(inner)):
        assert trace_mask(compiled).node == operation(">=", Q, KV)


def test_a_score_that_is_an_integer_becomes_a_float() -> None:
    assert trace_score(lambda score, b, h, q_idx, kv_idx: q_idx).node == operation("float", Q)


def test_each_function_is_known_to_torch() -> None:
    """Else its name is one that no call has."""
    homes = (torch, torch.Tensor, torch.nn.functional)
    assert not [name for name in FUNCTIONS if "." not in name and not any(hasattr(home, name) for home in homes)]
