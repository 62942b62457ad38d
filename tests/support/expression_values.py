"""The value of an expression in plain Python, one element at a time: what kernels and torch are held to.

Integers wrap at 64 bits, ``//`` and ``%`` round down, floating-point numbers are rounded to float32 after each
operator, and an integer that meets one is rounded to it first. Both sides of ``and``, ``or`` and ``where`` are worked
out.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping

from codegen.expressions.nodes import Item, Literal, Node, Type, Variable, children

Value = bool | int | float


def value_of(
    node: Node, variables: Mapping[str, int | float], aux: Mapping[str, Callable[..., Value]] | None = None
) -> Value:
    """Return the value of an expression.

    Args:
        node: its tree.
        variables: values of those it uses.
        aux: by name what returns the element at given indices, which may lie outside: its end's is wanted then.

    Raises:
        ZeroDivisionError: where // or % divides by 0.
    """
    return _value(node, variables, aux or {}, {})


def _value(node, variables, aux, known):
    if id(node) not in known:
        known[id(node)] = _typed(_worked_out(node, variables, aux, known), node.type)
    return known[id(node)]


def _worked_out(node, variables, aux, known):
    if isinstance(node, Literal):
        return node.value
    if isinstance(node, Variable):
        return variables[node.name]
    operands = [_value(child, variables, aux, known) for child in children(node)]
    if isinstance(node, Item):
        return aux[node.aux.name](*operands)
    if node.name != "where" and Type.FLOAT in {child.type for child in children(node)}:
        operands = [single(float(operand)) for operand in operands]
    return (
        _TRUTHS[node.name](*operands)
        if node.type is Type.BOOL and node.name in _TRUTHS
        else _OPERATORS[node.name](*operands)
    )


def _typed(value: Value, which: Type) -> Value:
    if which is Type.FLOAT:
        return single(float(value))
    return bool(value) if which is Type.BOOL else wrapped(int(value))


def wrapped(value: int) -> int:
    """Return an integer as int64 has it."""
    return (value + 2**63) % 2**64 - 2**63


def single(value: float) -> float:
    """Return a number rounded to float32."""
    try:
        return struct.unpack("<f", struct.pack("<f", value))[0]
    except OverflowError:
        return math.copysign(math.inf, value)


def _divided(a: float, b: float) -> float:
    a, b = float(a), float(b)
    if b:
        return a / b
    return math.nan if a == 0 or math.isnan(a) else math.copysign(math.inf, a) * math.copysign(1, b)


def _either(choose: Callable[..., Value]) -> Callable[..., Value]:
    """Return min or max as torch has them: NaN if one is."""
    return lambda a, b: math.nan if a != a or b != b else choose(a, b)


def _exp(a: float) -> float:
    try:
        return math.exp(a)
    except OverflowError:
        return math.inf


def _log2(a: float) -> float:
    return math.log2(a) if a > 0 else a if math.isnan(a) else -math.inf if a == 0 else math.nan


def _int(a: Value) -> int:
    """Return a number rounded towards zero, the nearest int64 of one beyond, 0 of NaN: no one else's to rely on."""
    if math.isnan(a):
        return 0
    return int(max(min(a, 2**63 - 1), -(2**63)))


_TRUTHS = {"~": lambda a: not a}
_OPERATORS = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": _divided,
    "//": lambda a, b: a // b,
    "%": lambda a, b: a % b,
    "<<": lambda a, b: a << b,
    ">>": lambda a, b: a >> b,
    "&": lambda a, b: a & b,
    "|": lambda a, b: a | b,
    "^": lambda a, b: a ^ b,
    "~": lambda a: ~a,
    "neg": lambda a: -a,
    "==": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
    "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b,
    ">=": lambda a, b: a >= b,
    "and": lambda a, b: a and b,
    "or": lambda a, b: a or b,
    "not": lambda a: not a,
    "min": _either(min),
    "max": _either(max),
    "abs": abs,
    "where": lambda condition, one, other: one if condition else other,
    "exp": _exp,
    "tanh": math.tanh,
    "log2": _log2,
    "sqrt": lambda a: math.sqrt(a) if a >= 0 else math.nan,
    "int": _int,
    "float": float,
    "bool": bool,
}
