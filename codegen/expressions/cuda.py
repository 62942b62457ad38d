"""Prints an expression as readable CUDA, split into parts per query, per key and per pair."""

from __future__ import annotations

import re
from dataclasses import dataclass

from codegen.expressions.nodes import Aux, Item, Node, Operation
from codegen.expressions.operators import VARIABLES, narrowed, term_of
from codegen.expressions.parts import Parts
from codegen.expressions.places import Place, dependencies, place_of, uses_of
from codegen.expressions.terms import Term

HELPERS = (
    *("floor_div", "floor_mod", "clamp_index", "to_int"),
    *(f"expression_{name}" for name in ("exp", "log2", "sqrt", "tanh", "min", "max")),
    *("kInfinity", "kMinusInfinity", "kNan"),
)
"""Functions and constants that printed expressions may use, from templates/expressions/helpers.cuh.j2."""
MOST_COLUMNS = 100
"""Most columns of a statement, if names have ordinary lengths."""
_MOST_OF_VALUE = MOST_COLUMNS - len("const int64 column_10 = ;")
_SHORTEST_NAMED = 12


@dataclass(frozen=True)
class Statement:
    """A named value.

    Attributes:
        ctype: bool, int, int64 or float.
        name: the name.
        value: the value.
    """

    ctype: str
    name: str
    value: str

    def __str__(self) -> str:
        return f"const {self.ctype} {self.name} = {self.value};"


@dataclass(frozen=True)
class Printed:
    """An expression as CUDA.

    Attributes:
        row: statements that depend on the query only, or do not depend on the key.
        column: statements that depend on the key only, or do not depend on the query; they do not use ``row``.
        pair: the other statements, evaluated per pair; they use ``row`` and ``column``.
        result: the value; may be a name.
        helpers: entries of HELPERS that the statements use.
        reads: aux tensors that are read, in the order of first use.
    """

    row: tuple[Statement, ...]
    column: tuple[Statement, ...]
    pair: tuple[Statement, ...]
    result: str
    helpers: tuple[str, ...]
    reads: tuple[Aux, ...]


def printed(node: Node, *, score: str = "score", rows_have_heads: bool = False, in_one_place: bool = False) -> Printed:
    """Print an expression.

    Args:
        node: the expression.
        score: text of the score: a name, or another text that needs no parentheses.
        rows_have_heads: whether adjacent rows belong to several heads.
        in_one_place: whether all statements are evaluated per pair, so that ``row`` and ``column`` are empty.

    Raises:
        ExpressionError: for an integer of more than 64 bits.
    """
    return _Printer(node, score, rows_have_heads, in_one_place).printed()


class _Printer:
    def __init__(self, node: Node, score: str, rows_have_heads: bool, in_one_place: bool) -> None:
        parts = Parts()
        self._root = parts.add(node)
        self._parts = parts.all
        self._score = score
        self._depends = dependencies(self._parts, rows_have_heads=rows_have_heads)
        if in_one_place:
            self._depends = [on | {"q_idx", "kv_idx"} if on else on for on in self._depends]
        self._uses = uses_of(self._parts, self._root, self._depends)
        self._terms: dict[tuple[int, Place], Term] = {}
        self._statements: dict[Place, list[Statement]] = {place: [] for place in Place}
        self._taken = {*re.findall(r"\w+", " ".join((*VARIABLES.values(), score)))}

    def printed(self) -> Printed:
        for use in self._uses.used:
            self._terms[use] = self._fitting(*use)
            if use in self._uses.named:
                self._name(*use)
        result = self._terms[self._root, place_of(self._root, self._depends, Place.PAIR)].text
        row, column, pair = (tuple(self._statements[place]) for place in Place)
        words = set(re.findall(r"\w+", " ".join([result, *(each.value for each in row + column + pair)])))
        reads = dict.fromkeys(part.node.aux for part in self._parts if isinstance(part.node, Item))
        return Printed(row, column, pair, result, tuple(name for name in HELPERS if name in words), tuple(reads))

    def _fitting(self, part: int, place: Place) -> Term:
        """Term that fits one line: while it is too long, its longest operand gets a name."""
        operands = [(operand, place_of(operand, self._depends, place)) for operand in self._parts[part].operands]
        while True:
            term = term_of(self._parts[part].node, tuple(self._terms[use] for use in operands), self._score)
            longest = max(operands, key=lambda use: len(self._terms[use].text), default=None)
            if len(term.text) <= _MOST_OF_VALUE or longest is None or not self._may_be_named(*longest):
                return term
            self._name(*longest)

    def _may_be_named(self, part: int, place: Place) -> bool:
        term = self._terms[part, place]
        is_operation = isinstance(self._parts[part].node, Operation)
        return is_operation and not term.text.isidentifier() and len(term.text) >= _SHORTEST_NAMED

    def _name(self, part: int, place: Place) -> None:
        """Add a statement for a term and replace the term by its name; equal texts (x, x // 1) share a statement."""
        node = self._parts[part].node
        term = narrowed(node, self._terms[part, place])
        name = next((each.name for each in self._statements[place] if each.value == term.text), None)
        if name is None:
            name = self._new_name(node, place)
            self._statements[place].append(Statement(term.ctype, name, term.text))
        self._terms[part, place] = Term(name, term.ctype)

    def _new_name(self, node: Node, place: Place) -> str:
        """Unused name for a value: derived from the tensor that it is read from, or numbered."""
        stem = f"{node.aux.name}_of_{place.value}" if isinstance(node, Item) else place.value
        number = 0
        name = stem if isinstance(node, Item) else f"{stem}_0"
        while name in self._taken:
            number += 1
            name = f"{stem}_{number}"
        self._taken.add(name)
        return name
