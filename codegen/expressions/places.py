"""Where each part of an expression is computed: once per query, once per key, or once per pair.

Dependencies determine the place of a part. A part that depends on neither index is computed at the place of its users:
statements of a key do not use those of a query, as a kernel may have them in another loop.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from codegen.expressions.nodes import Item, Literal, Operation, Variable
from codegen.expressions.parts import Part


class Place(Enum):
    """Place of a statement; the value is used in names."""

    ROW = "row"
    COLUMN = "column"
    PAIR = "pair"


_NAMED_FROM = 2
"""Least cost of a named part of a row or a column; a single sum or comparison is inlined into its user."""
_ALSO: Mapping[str, set[str]] = {"qk": {"score"}, "column": {"kv_idx"}, "column_of_pair": {"kv_idx", "q_idx"}}
"""Dependencies of internal variables on the variables of users."""
_CHEAP = frozenset(("+", "-", "neg", "==", "!=", "<", "<=", ">", ">=", "and", "or", "not", "&", "|", "^", "~", "bool"))
_Use = tuple[int, Place]


@dataclass
class Uses:
    """Computed parts with their places, and the named parts among them.

    Attributes:
        used: pairs of a part's position and its place, in the order of computation.
        named: the pairs whose part has a name.
    """

    used: list[_Use]
    named: set[_Use]


def place_of(part: int, depends: list[frozenset[str]], of_user: Place) -> Place:
    """Place where a part is computed, given the place of its user."""
    on = depends[part]
    if "score" in on or {"q_idx", "kv_idx"} <= on:
        return Place.PAIR
    if "q_idx" in on:
        return Place.ROW
    if "kv_idx" in on:
        return Place.COLUMN
    return of_user if of_user is not Place.PAIR or not on else Place.ROW


def dependencies(parts: list[Part], *, rows_have_heads: bool = False) -> list[frozenset[str]]:
    """Names on which each part depends: variables, and ``""`` for a read of a tensor; empty for a constant.

    Args:
        parts: the parts.
        rows_have_heads: whether adjacent rows belong to several heads; the head of a row is then known with its query.
    """
    also = {**_ALSO, "head": {"q_idx"}} if rows_have_heads else _ALSO
    found: list[frozenset[str]] = []
    for part in parts:
        on = frozenset[str]().union(*(found[operand] for operand in part.operands))
        if isinstance(part.node, Variable):
            on |= {part.node.name} | also.get(part.node.name, set())
        found.append(on | {""} if isinstance(part.node, Item) else on)
    return found


def _costs(parts: list[Part], depends: list[frozenset[str]]) -> list[int]:
    """Approximate instructions of each part, if its tensor reads have names."""
    costs: list[int] = []
    for part, on in zip(parts, depends, strict=True):
        if not on or not isinstance(part.node, Operation):
            costs.append(0)
        else:
            own = 1 if part.node.name in _CHEAP else _NAMED_FROM
            costs.append(own + sum(costs[operand] for operand in part.operands))
    return costs


def uses_of(parts: list[Part], root: int, depends: list[frozenset[str]] | None = None) -> Uses:
    """Places of the computations for a root part that is used per pair.

    Args:
        parts: the parts.
        root: position of the root.
        depends: dependencies of the parts; by default, those of ``dependencies``.
    """
    depends = dependencies(parts) if depends is None else depends
    costs = _costs(parts, depends)
    first = root, place_of(root, depends, Place.PAIR)
    times: dict[_Use, int] = {first: 1}
    crossing = {first} if first[1] is not Place.PAIR else set()
    for part in range(root, -1, -1):
        for place in Place:
            if (part, place) not in times:
                continue
            for operand in parts[part].operands:
                use = operand, place_of(operand, depends, place)
                times[use] = times.get(use, 0) + 1
                if use[1] is not place:
                    crossing.add(use)

    def has_name(use: _Use) -> bool:
        node = parts[use[0]].node
        if isinstance(node, Literal | Variable) or not depends[use[0]]:
            return False
        is_worth_it = use in crossing and costs[use[0]] >= _NAMED_FROM
        return isinstance(node, Item) or is_worth_it or times[use] > 1

    used = sorted(times, key=lambda use: use[0])
    return Uses(used, {use for use in used if has_name(use)})
