"""The typed tree of an expression, and its type rules.

Integers have 64 bits, like torch's; plans narrow them if their bounds allow it. Floating-point numbers are float32.
``//`` and ``%`` round down, like Python's. Trees do not depend on parentheses, spaces or the spelling of numbers.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from codegen.errors import CodegenError


class ExpressionError(CodegenError):
    """An expression is not valid. The message has no location; the reader of the text or of the function adds it."""


class Type(Enum):
    """Type of a value."""

    BOOL = "bool"
    INT = "int"
    FLOAT = "float"

    def __str__(self) -> str:
        return self.value


VARIABLES: Mapping[str, tuple[Type, str]] = {
    "q_idx": (Type.INT, "index of the query, from 0"),
    "kv_idx": (Type.INT, "index of the key, from 0"),
    "batch": (Type.INT, "index of the batch"),
    "head": (Type.INT, "index of the query head"),
    "q_len": (Type.INT, "queries per head"),
    "kv_len": (Type.INT, "keys per head"),
    "score": (Type.FLOAT, "scale * q.k, only in scores"),
}
"""Variables of expressions: type and meaning of each name."""

KERNEL_VARIABLES: Mapping[str, tuple[Type, str]] = {
    "qk": (Type.FLOAT, "q.k"),
    "scale_log2": (Type.FLOAT, "scale * log2(e)"),
    "first_key": (Type.INT, "index of a thread's first key of a step"),
    "column": (Type.FLOAT, "index of the key, relative to that key"),
    "column_of_pair": (Type.FLOAT, "the same, in per-pair statements"),
}
"""Internal variables of scores in ``kernel_form``; users cannot write them."""

PATTERN_VARIABLES: Mapping[str, tuple[Type, str]] = {
    "window_left": (Type.INT, "keys of the window before the query's own position"),
    "window_right": (Type.INT, "keys of the window after the query's own position"),
    "sink_keys": (Type.INT, "keys at the beginning that every later query sees"),
}
"""Internal variables for numbers of built-in patterns that the call sets; users cannot write them."""

INFINITY = "inf"
"""Name of infinity."""

DTYPES: Mapping[str, Type] = {
    "int32": Type.INT,
    "int64": Type.INT,
    "fp32": Type.FLOAT,
    "fp16": Type.FLOAT,
    "bf16": Type.FLOAT,
    "bool": Type.BOOL,
}
"""Element types of aux tensors, and the type of their values in expressions."""

SIZES: Mapping[str, str] = {
    "batch": "batch",
    "heads": "head",
    "q_len": "q_idx",
    "kv_len": "kv_idx",
}
"""Named sizes of aux tensors, and the variable that is always less than each."""

MOST_DIMS = 4


@dataclass(frozen=True)
class Aux:
    """An aux tensor: a kernel input from which expressions read values.

    Attributes:
        name: its name, an identifier.
        dtype: a key of DTYPES.
        dims: sizes: keys of SIZES, or numbers; empty for a tensor with one value. In a dimension with a named size, a
            tensor of size 1 is broadcast.
    """

    name: str
    dtype: str
    dims: tuple[str | int, ...]

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.dims))}]"


@dataclass(frozen=True)
class Literal:
    """A number or a Boolean.

    Attributes:
        value: the value.
        name: name of the constant in the source; "" if it is printed as a number.
    """

    value: bool | int | float
    name: str = ""

    @property
    def type(self) -> Type:
        """Type of the value."""
        return {bool: Type.BOOL, int: Type.INT, float: Type.FLOAT}[type(self.value)]

    def __eq__(self, other: object) -> bool:  # 1, 1.0 and True are equal in Python
        return isinstance(other, Literal) and (repr(other.value), other.name) == (repr(self.value), self.name)

    def __hash__(self) -> int:
        return hash((repr(self.value), self.name))


@dataclass(frozen=True)
class Variable:
    """A variable of VARIABLES, KERNEL_VARIABLES or PATTERN_VARIABLES."""

    name: str

    @property
    def type(self) -> Type:
        """Type of the value."""
        return (VARIABLES.get(self.name) or PATTERN_VARIABLES.get(self.name) or KERNEL_VARIABLES[self.name])[0]


@dataclass(frozen=True)
class Item:
    """An element of an aux tensor. Indices are clamped, so that kernels never read out of bounds."""

    aux: Aux
    indices: tuple[Node, ...]

    @property
    def type(self) -> Type:
        """Type of the element."""
        return DTYPES[self.aux.dtype]


@dataclass(frozen=True)
class Operation:
    """An operator or a function of OPERATIONS with operands; ``operation`` checks them."""

    name: str
    operands: tuple[Node, ...]
    type: Type = field(compare=False)


Node = Literal | Variable | Item | Operation
_Rule = Callable[..., Type]


def _numbers(*types: Type) -> Type:
    """Common type of numbers; Booleans count as 0 and 1."""
    return Type.FLOAT if Type.FLOAT in types else Type.INT


def _integers(*types: Type) -> Type:
    return _only("integers", {Type.INT, Type.BOOL}, types, Type.INT)


def _bits(*types: Type) -> Type:
    """Type of & | ^: Boolean for Booleans, integer for integers."""
    wanted = {Type.BOOL} if set(types) == {Type.BOOL} else {Type.INT, Type.BOOL}
    return _only("integers or Booleans", wanted, types, Type.BOOL if wanted == {Type.BOOL} else Type.INT)


def _truths(*types: Type) -> Type:
    return _only("Booleans (compare numbers: x != 0)", {Type.BOOL}, types, Type.BOOL)


def _floats(*types: Type) -> Type:
    del types
    return Type.FLOAT


def _compared(*types: Type) -> Type:
    del types
    return Type.BOOL


def _chosen(condition: Type, one: Type, other: Type) -> Type:
    """Type of where()."""
    _only("a Boolean as its first argument", {Type.BOOL}, (condition,), Type.BOOL)
    return one if one == other else _numbers(one, other)


def _only(wanted: str, allowed: set[Type], types: tuple[Type, ...], result: Type) -> Type:
    for which in types:
        if which not in allowed:
            raise ExpressionError(f"takes {wanted}, but got {', '.join(map(str, types))}")
    return result


OPERATIONS: Mapping[str, tuple[_Rule, int, int]] = {
    **dict.fromkeys(("+", "-", "*"), (_numbers, 2, 2)),
    "/": (_floats, 2, 2),
    **dict.fromkeys(("//", "%", "<<", ">>"), (_integers, 2, 2)),
    **dict.fromkeys(("&", "|", "^"), (_bits, 2, 2)),
    "~": (_bits, 1, 1),
    "neg": (_numbers, 1, 1),
    **dict.fromkeys(("==", "!=", "<", "<=", ">", ">="), (_compared, 2, 2)),
    **dict.fromkeys(("and", "or"), (_truths, 2, 2)),
    "not": (_truths, 1, 1),
    **dict.fromkeys(("min", "max"), (_numbers, 2, 2)),
    "abs": (_numbers, 1, 1),
    "where": (_chosen, 3, 3),
    **dict.fromkeys(("exp", "tanh", "log2", "sqrt"), (_floats, 1, 1)),
    "int": (lambda of: Type.INT, 1, 1),
    "float": (lambda of: Type.FLOAT, 1, 1),
    "bool": (lambda of: Type.BOOL, 1, 1),
}
"""Operators and functions by name: type rule, and least and largest number of operands.

``int`` rounds towards zero. ``-`` has two operands, ``neg`` one. ``min`` and ``max`` of more operands are nested.
"""
KERNEL_OPERATIONS: Mapping[str, tuple[_Rule, int, int]] = dict.fromkeys(
    ("exp2", "inverse_of_1_plus_exp2"), (_floats, 1, 1)
)
"""Internal operations of scores in ``kernel_form``; users cannot write them: 2^x, 1 / (1 + 2^x)."""
FUNCTIONS = ("min", "max", "abs", "where", "exp", "tanh", "log2", "sqrt", "int", "float", "bool")
"""Operations with call syntax."""


INT64 = (-(2**63), 2**63 - 1)
"""Smallest and largest integer."""


def literal(value: bool | int | float) -> Literal:
    """Literal of a number or a Boolean.

    Raises:
        ExpressionError: for integers beyond int64, and numbers that float32 rounds to infinity, NaN or 0.
    """
    if isinstance(value, float):
        _check_float(value)
    elif not INT64[0] <= value <= INT64[1]:
        raise ExpressionError("an integer has 64 bits: -2**63 to 2**63 - 1")
    return Literal(value)


def _check_float(value: float) -> None:
    try:
        (single,) = struct.unpack("<f", struct.pack("<f", value))
    except OverflowError:
        single = math.inf
    if not math.isfinite(single):
        raise ExpressionError("the largest float32 is 3.4e38")
    if value and not single:
        raise ExpressionError("float32 rounds numbers below 1e-45 to 0")


def operation(name: str, *operands: Node) -> Operation:
    """Checked operation of operands.

    Raises:
        ExpressionError: for incompatible types, a wrong number of operands, and a division by the literal 0.
    """
    rule, least, most = OPERATIONS.get(name) or KERNEL_OPERATIONS[name]
    if not least <= len(operands) <= most:
        raise ExpressionError(f"{name} takes {least} operand{'s' * (least > 1)}, but got {len(operands)}")
    if name in ("//", "%", "/") and isinstance(operands[1], Literal) and operands[1].value == 0:
        raise ExpressionError(f"{name} divides by zero")
    if name in ("<<", ">>"):
        by = operands[1]
        if not isinstance(by, Literal) or not 0 <= by.value <= 62:
            raise ExpressionError(f"{name} takes a number of bits from 0 to 62, written as a number")
    try:
        return Operation(name, operands, rule(*(operand.type for operand in operands)))
    except ExpressionError as error:
        raise ExpressionError(f"{name} {error}") from None


def item(aux: Aux, *indices: Node) -> Item:
    """Checked element of an aux tensor.

    Raises:
        ExpressionError: for a wrong number of indices, and for indices that are not integers.
    """
    if len(indices) != len(aux.dims):
        raise ExpressionError(f"{aux.name} is {aux}, but has {len(indices)} indices here")
    for index in indices:
        if index.type is not Type.INT:
            raise ExpressionError(f"an index of {aux.name} is {index.type}, expected int")
    return Item(aux, indices)


def children(node: Node) -> tuple[Node, ...]:
    """Operands of a node, or indices of an element."""
    if isinstance(node, Operation):
        return node.operands
    return node.indices if isinstance(node, Item) else ()


def nodes_of(root: Node) -> int:
    """Number of nodes of a tree; a part that occurs twice counts twice, but is visited once."""
    counts: dict[int, int] = {}

    def count(node: Node) -> int:
        if id(node) not in counts:
            counts[id(node)] = 1 + sum(map(count, children(node)))
        return counts[id(node)]

    return count(root)


MOST_NODES = 1000
"""Most nodes of an expression; a part that occurs twice counts twice."""
MOST_DEPTH = 150
"""Most nodes from the root to a leaf: readers of a tree may recurse, and Python's parser accepts 200 brackets."""


def check_size(node: Node) -> None:
    """Reject a tree of more than MOST_NODES nodes, or deeper than MOST_DEPTH.

    Raises:
        ExpressionError: names the limit.
    """
    total, left = 0, [(node, 1)]
    while left:
        each, depth = left.pop()
        total += 1
        if total > MOST_NODES:
            raise ExpressionError(f"has more than {MOST_NODES} operators, names and numbers")
        if depth > MOST_DEPTH:
            raise ExpressionError(f"has more than {MOST_DEPTH} nested operators")
        left += [(child, depth + 1) for child in children(each)]
