"""Masks of partial blocks where queries, or keys, lie elsewhere than in the whole sequence: by tables of positions."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from codegen.expressions.nodes import Aux, Item, Literal, Node, Operation, Variable, children
from codegen.expressions.parse import parse_expression
from codegen.expressions.text import text_of
from codegen.patterns.block_lists import NAMED_MASKS, expression_of
from runtime.expressions.captured import settled
from runtime.expressions.dtypes import NAMES, TORCH_DTYPES
from runtime.expressions.order import operands_first
from runtime.ops.aux_tensors import apart
from runtime.ops.block_sizes import Tensors

Q_AT, KV_AT = "q_at", "kv_at"
"""Tables of positions: int32, of each query and of each key of a call."""


class Masked(NamedTuple):
    """A pattern whose mask is about positions in the whole sequence.

    Attributes:
        spec_json: the pattern.
        tensors: its index tensors.
    """

    spec_json: str
    tensors: Tensors


def has_positions(spec_json: str) -> bool:
    """Return whether a mask asks where a query or a key is."""
    return json.loads(spec_json).get("mask", "none") not in ("none", "bits")


def asks_for_heads(spec_json: str) -> bool:
    """Return whether a mask tells heads apart."""
    spec = json.loads(spec_json)
    if spec.get("mask", "none") in NAMED_MASKS:
        return False
    node = expression_of(spec["mask"], spec.get("aux", {}))
    return any(isinstance(each, Variable) and each.name == "head" for each in operands_first(node))


def masked(
    spec_json: str, tensors: Tensors, lengths: tuple[int, int], q_at: torch.Tensor, kv_at: torch.Tensor
) -> Masked:
    """Return a pattern over other places of the same queries and keys.

    Args:
        spec_json: the pattern.
        tensors: its index tensors, and those of its expression.
        lengths: queries and keys of the whole sequence.
        q_at: int32 (queries,), where each query of the call is in it.
        kv_at: int32 (keys,), where each key is.
    """
    indices, aux = apart(spec_json, tensors)
    shapes = tuple((name, NAMES[tensor.dtype], tuple(tensor.shape)) for name, tensor in aux.items())
    text, declared, sources = _rewritten(spec_json, lengths, shapes)
    spec: dict[str, Any] = {**json.loads(spec_json), "mask": text, "aux": dict(declared)}
    given = {**aux, Q_AT: q_at, KV_AT: kv_at}
    if len(indices) == 4 and indices[3] is None:
        indices = indices[:2]  # as BlockLists leaves full lists out beside an expression
    if not declared:
        spec.pop("aux")
    return Masked(json.dumps(spec), (*indices, *(given[source] for source in sources)))


@lru_cache(maxsize=256)
def _rewritten(
    spec_json: str, lengths: tuple[int, int], shapes: tuple[tuple[str, str, tuple[int, ...]], ...]
) -> tuple[str, tuple[tuple[str, str], ...], tuple[str, ...]]:
    """Return the mask with tables in place of positions, its tensors as a spec declares them, and what each is."""
    spec = json.loads(spec_json)
    if spec["mask"] == "causal":
        node = parse_expression("kv_idx <= q_idx + kv_len - q_len", {}, score=False)
    else:
        node = expression_of(spec["mask"], spec.get("aux", {}))
    given = {name: Aux(name, dtype, shape) for name, dtype, shape in shapes}
    tables = {Q_AT: Aux(Q_AT, "int32", ("q_len",)), KV_AT: Aux(KV_AT, "int32", ("kv_len",))}
    values: dict[str, Node] = {
        "q_idx": Item(tables[Q_AT], (Variable("q_idx"),)),
        "kv_idx": Item(tables[KV_AT], (Variable("kv_idx"),)),
        "q_len": Literal(lengths[0]),
        "kv_len": Literal(lengths[1]),
    }
    rebuilt: dict[int, Node] = {}
    for each in operands_first(node):
        parts = tuple(rebuilt[id(child)] for child in children(each))
        if isinstance(each, Operation):
            rebuilt[id(each)] = Operation(each.name, parts, each.type)
        elif isinstance(each, Item):
            rebuilt[id(each)] = Item(given[each.aux.name], parts)
        else:
            rebuilt[id(each)] = values.get(each.name, each) if isinstance(each, Variable) else each
    meta = {name: torch.empty(shape, dtype=TORCH_DTYPES[dtype], device="meta") for name, dtype, shape in shapes}
    meta |= {name: torch.empty((2,), dtype=torch.int32, device="meta") for name in tables}
    found, declared, tensors = settled(rebuilt[id(node)], meta, {})
    names = tuple(sorted(declared))
    sources = tuple(next(key for key, value in meta.items() if value is tensors[name]) for name in names)
    return text_of(found), tuple((name, str(declared[name])) for name in names), sources
