"""Masks of partial blocks for reordered queries or keys, by tables of their positions in the whole sequence."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch

from codegen.expressions.nodes import Aux, Item, Literal, Node, Operation, Variable, children
from codegen.expressions.text import text_of
from codegen.patterns.block_lists import BlockLists
from codegen.scored_pattern import ScoredPattern
from runtime.expressions.captured import settled
from runtime.expressions.dtypes import NAMES, TORCH_DTYPES
from runtime.expressions.order import operands_first
from runtime.ops.block_sizes import Tensors
from runtime.patterns import split_tensors

Q_AT, KV_AT = "q_at", "kv_at"
"""Names of the position tables, int32, one entry per query and per key of a call."""


class Masked(NamedTuple):
    """A pattern whose mask refers to positions in the whole sequence.

    Attributes:
        scored: the pattern.
        tensors: its index tensors.
    """

    scored: ScoredPattern
    tensors: Tensors


def has_positions(scored: ScoredPattern) -> bool:
    """Whether the mask of partial blocks depends on the positions of queries or keys."""
    return isinstance(scored.pattern, BlockLists) and scored.pattern.mask not in ("none", "bits")


def asks_for_heads(scored: ScoredPattern) -> bool:
    """Whether the mask of partial blocks depends on the head."""
    node = scored.pattern.expression
    if node is None:
        return False
    return any(isinstance(each, Variable) and each.name == "head" for each in operands_first(node))


def masked(
    scored: ScoredPattern, tensors: Tensors, lengths: tuple[int, int], q_at: torch.Tensor, kv_at: torch.Tensor
) -> Masked:
    """The same pattern over reordered queries and keys.

    Args:
        scored: the pattern.
        tensors: its index tensors and its expression's tensors.
        lengths: queries and keys of the whole sequence.
        q_at: int32 (queries,), position of each query of the call in the whole sequence.
        kv_at: int32 (keys,), position of each key.
    """
    indices, aux = split_tensors(scored, tensors)
    shapes = tuple((name, NAMES[tensor.dtype], tuple(tensor.shape)) for name, tensor in aux.items())
    by_tables, sources = _by_tables(scored, lengths, shapes)
    given = {**aux, Q_AT: q_at, KV_AT: kv_at}
    if len(indices) == 4 and indices[3] is None:
        indices = indices[:2]  # BlockLists omits full lists beside an expression
    return Masked(by_tables, (*indices, *(given[source] for source in sources)))


@lru_cache(maxsize=256)
def _by_tables(
    scored: ScoredPattern, lengths: tuple[int, int], shapes: tuple[tuple[str, str, tuple[int, ...]], ...]
) -> tuple[ScoredPattern, tuple[str, ...]]:
    """The pattern with table lookups instead of positions in its mask, and the source of each of the mask's tensors."""
    node = scored.pattern.expression or scored.pattern.pair_expression
    assert node is not None
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
    aux = {name: str(declared[name]) for name in names}
    return scored.with_pattern(mask=text_of(found), aux=aux), sources
