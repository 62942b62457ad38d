"""A mask over a whole block of queries and keys, as CUDA: interval arithmetic bounds whether it shows or hides pairs.

Parts that depend on the query only are evaluated at each query of a block, and parts that depend on the key only at
each key: ``Looked``. The statements combine their ranges, one operator each, with the functions of
templates/expressions/ranges.cuh.j2. Parts that intervals cannot bound, such as an element read per pair, may have any
value.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from codegen.expressions.bounds import bounds_of
from codegen.expressions.cuda import Printed, Statement, printed
from codegen.expressions.nodes import Item, Literal, Node, Operation, Type, Variable
from codegen.expressions.operators import VARIABLES
from codegen.expressions.parts import Part, Parts
from codegen.expressions.places import dependencies
from codegen.expressions.terms import number
from codegen.expressions.text import text_of

CTYPES: Mapping[Type, str] = {Type.INT: "Range", Type.FLOAT: "FloatRange", Type.BOOL: "Truth"}
"""C++ types of the range of a part over a block, the widest first."""
BYTES: Mapping[str, int] = {"Range": 16, "FloatRange": 8, "Truth": 4}
_VALUES: Mapping[Type, str] = {Type.INT: "int64", Type.FLOAT: "float", Type.BOOL: "bool"}
_PREFIX: Mapping[Type, str] = {Type.INT: "range_", Type.FLOAT: "float_range_", Type.BOOL: "truth_"}
_INDICES: Mapping[str, str] = {"q_idx": "queries", "kv_idx": "keys"}
_BY_ENDS = frozenset(("+", "-", "neg", "min", "max", "int"))
"""Operators that are exact and cheap on intervals of consecutive numbers, so that single values need no evaluation."""


@dataclass(frozen=True)
class Looked:
    """A part that is evaluated as a whole: at each query or key of a block, or once if it depends on neither.

    Attributes:
        name: name of its range over a block.
        ctype: C++ type of the range, in CTYPES.
        value: C++ type of one value.
        text: text of the part.
        printed: the part as CUDA.
    """

    name: str
    ctype: str
    value: str
    text: str
    printed: Printed


@dataclass(frozen=True)
class Ranges:
    """A mask over a block.

    Attributes:
        rows: parts evaluated at each query.
        columns: parts evaluated at each key.
        fixed: parts that depend on neither.
        statements: statements over these parts, ``queries`` and ``keys``, in order.
        result: value of the mask, a ``Truth``.
    """

    rows: tuple[Looked, ...]
    columns: tuple[Looked, ...]
    fixed: tuple[Looked, ...]
    statements: tuple[Statement, ...]
    result: str


def bytes_of(looked: tuple[Looked, ...]) -> int:
    """Bytes of the C++ struct with these ranges, the widest first."""
    alignment = 8 if any(each.ctype == "Range" for each in looked) else 4
    return -(-sum(BYTES[each.ctype] for each in looked) // alignment) * alignment


def list_sizes(mask: Node, batch: int, heads: int) -> tuple[int, int]:
    """Numbers of batches and heads with their own lists: 1 if the mask does not depend on the index."""
    parts = Parts()
    root = parts.add(mask)
    on = dependencies(parts.all)[root]
    return batch if "batch" in on else 1, heads if "head" in on else 1


def ranges_of(mask: Node) -> Ranges:
    """Ranges of a mask over a block."""
    return _Printer(mask).ranges()


class _Printer:
    def __init__(self, mask: Node) -> None:
        parts = Parts()
        self._root = parts.add(mask)
        self._parts = parts.all
        self._sides = [on & _INDICES.keys() for on in dependencies(self._parts)]
        self._needs_a_look = _which_need_a_look(self._parts)
        self._looked: dict[str, list[Looked]] = {"row": [], "column": [], "fixed": []}
        self._statements: list[Statement] = []
        self._names: dict[int, str] = {}

    def ranges(self) -> Ranges:
        for place in self._reached():
            self._names[place] = self._name_of(place)
        widest_first = [*CTYPES.values()].index
        rows, columns, fixed = (
            tuple(sorted(looked, key=lambda each: widest_first(each.ctype))) for looked in self._looked.values()
        )
        statements, result = self._statements, self._names[self._root]
        if statements and statements[-1].name == result:
            result = statements.pop().value
        return Ranges(rows, columns, fixed, tuple(statements), result)

    def _reached(self) -> list[int]:
        """Parts that need a name, operands first, without the inner parts of whole parts."""
        reached, left = set[int](), [self._root]
        while left:
            place = left.pop()
            if place not in reached:
                reached.add(place)
                left += () if self._is_whole(place) else self._parts[place].operands
        return sorted(reached)

    def _is_whole(self, place: int) -> bool:
        """Whether a part is evaluated as a whole.

        Floating-point operations are not: the compiler may fuse them with their users, which changes rounding.
        """
        node = self._parts[place].node
        if not isinstance(node, Operation):
            return True
        return node.type is not Type.FLOAT and len(self._sides[place]) < len(_INDICES) and self._needs_a_look[place]

    def _name_of(self, place: int) -> str:
        """Name of a part; adds its statement or its evaluation."""
        part, sides = self._parts[place], self._sides[place]
        node = part.node
        if isinstance(node, Literal):
            return _literal(node)
        if isinstance(node, Variable):
            return _INDICES.get(node.name) or f"range_of({VARIABLES[node.name]})"
        if not self._is_whole(place):
            return self._stated(node, self._operation(part))
        if len(sides) == len(_INDICES):
            return _anything(node)
        if sides:
            return self._look(node, "row" if "q_idx" in sides else "column", "{}s.{}")
        return self._stated(node, self._look(node, "fixed", f"{_PREFIX[node.type]}of({{}}_{{}}(p, batch, head))"))

    def _stated(self, node: Node, value: str) -> str:
        """Name of a new statement with this value."""
        name = f"part_{len(self._statements)}"
        self._statements.append(Statement(CTYPES[node.type], name, value))
        return name

    def _look(self, node: Node, side: str, use: str) -> str:
        looked = self._looked[side]
        taken = {*CTYPES.values(), *(each.name for each in looked)}  # a member cannot have the name of a type
        name = node.aux.name if isinstance(node, Item) else f"part_{len(looked)}"
        while name in taken:
            name += "_"
        looked.append(Looked(name, CTYPES[node.type], _VALUES[node.type], text_of(node), printed(node)))
        return use.format(side, name)

    def _operation(self, part: Part) -> str:
        node = part.node
        assert isinstance(node, Operation)
        types = [self._parts[operand].node.type for operand in part.operands]
        given = [*zip((self._names[operand] for operand in part.operands), types, strict=True)]
        if node.name == "where":
            (condition, _), *others = given
            return f"{_PREFIX[node.type]}where({', '.join([condition, *_all_as(node.type, others)])})"
        if node.name in ("int", "float", "bool"):
            return _as(node.type, *given[0])
        if node.name in _COMPARED:
            common = Type.FLOAT if Type.FLOAT in types else Type.INT
            return _COMPARED[node.name](_PREFIX[common], *_all_as(common, given))
        function = _FUNCTIONS[node.type].get(node.name)
        operands = ", ".join(_all_as(node.type, given))
        return f"{_PREFIX[node.type]}{function}({operands})" if function else _anything(node)


def _which_need_a_look(parts: list[Part]) -> list[bool]:
    """Whether each part has an operation that is not exact or not cheap on intervals."""
    found: list[bool] = []
    for part in parts:
        node = part.node
        here = isinstance(node, Item) or (isinstance(node, Operation) and node.name not in _BY_ENDS)
        found.append(here or any(found[operand] for operand in part.operands))
    return found


def _literal(node: Literal) -> str:
    if node.type is Type.BOOL:
        return "kYes" if node.value else "kNo"
    return f"{_PREFIX[node.type]}of({number(node.value).text})"


def _anything(node: Node) -> str:
    """Range of all values that a part may have, for any tensor contents."""
    if node.type is not Type.INT:
        return "kEither" if node.type is Type.BOOL else "every_float()"
    bounds = bounds_of(node)
    return f"Range{{{number(bounds.low, 'int64').text}, {number(bounds.high, 'int64').text}}}"


def _as(wanted: Type, name: str, has: Type) -> str:
    """Range converted to another type."""
    if has is wanted:
        return name
    if wanted is Type.BOOL:
        return f"truth_not({_equal(_PREFIX[has], name, f'{_PREFIX[has]}of(0)')})"
    name = f"range_of_truth({name})" if has is Type.BOOL else name
    if wanted is Type.FLOAT:
        return f"float_range_of_range({name})"
    return "every_integer()" if has is Type.FLOAT else name


def _all_as(wanted: Type, given: list[tuple[str, Type]]) -> list[str]:
    return [_as(wanted, *each) for each in given]


def _equal(prefix: str, a: str, b: str) -> str:
    return f"{prefix}equal({a}, {b})"


def _less(prefix: str, a: str, b: str) -> str:
    return f"{prefix}less({a}, {b})"


_COMPARED: Mapping[str, Callable[[str, str, str], str]] = {
    "==": _equal,
    "!=": lambda prefix, a, b: f"truth_not({_equal(prefix, a, b)})",
    "<": _less,
    ">": lambda prefix, a, b: _less(prefix, b, a),
    "<=": lambda prefix, a, b: f"truth_not({_less(prefix, b, a)})",
    ">=": lambda prefix, a, b: f"truth_not({_less(prefix, a, b)})",
}
_SHARED: Mapping[str, str] = {
    "+": "add",
    "-": "subtract",
    "*": "multiply",
    "neg": "negate",
    "abs": "abs",
    "min": "min",
    "max": "max",
}
_FUNCTIONS: Mapping[Type, Mapping[str, str]] = {
    Type.INT: {
        **_SHARED,
        "//": "floor_div",
        "%": "floor_mod",
        "<<": "shift_left",
        ">>": "shift_right",
        "&": "and",
        "|": "or",
        "^": "xor",
        "~": "not",
    },
    Type.FLOAT: _SHARED,
    Type.BOOL: {"&": "and", "and": "and", "|": "or", "or": "or", "^": "xor", "~": "not", "not": "not"},
}
"""Functions of the template, without the prefix of their type; operations without a function may have any value."""
