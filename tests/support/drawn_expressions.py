"""Trees of expressions that are drawn, and a reference that evaluates them: in float32 as kernels do, or in float64."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from codegen.expressions.nodes import Aux, Item, Literal, Node, Operation, Type, Variable, item, operation
from codegen.expressions.parts import Parts

Value = bool | int | float
SIZES = {"batch": 2, "heads": 3, "q_len": 40, "kv_len": 50}
AUX = (
    Aux("q_doc", "int32", ("batch", "q_len")),
    Aux("kv_doc", "int64", ("batch", "kv_len")),
    Aux("slope", "fp32", ("heads",)),
    Aux("bias", "bf16", ("heads", 7)),
    Aux("hidden", "bool", ("q_len", "kv_len")),
    Aux("shift", "int32", ()),
)
ONE_FOR_ALL = {("q_doc", 0), ("hidden", 0)}
"""Axes along which a tensor has one element for all."""


class NoValueError(Exception):
    """C++ does not say what comes of this: a division by zero, an integer beyond 64 bits."""


def float32(value: float) -> float:
    """Round to float32; an integer once, however many digits it has."""
    if isinstance(value, int) and abs(value) >= 2**24:
        unit = 1 << (abs(value).bit_length() - 24)
        below, rest = divmod(abs(value), unit)
        below += rest * 2 > unit or (rest * 2 == unit and below % 2)
        value = math.copysign(below * unit, value)
    try:
        return float(struct.unpack("f", struct.pack("f", value))[0])
    except OverflowError:
        return math.copysign(math.inf, value)


def stored_size(aux: Aux, axis: int) -> int:
    """Return how many elements a tensor has along an axis."""
    size = aux.dims[axis]
    return 1 if (aux.name, axis) in ONE_FOR_ALL else size if isinstance(size, int) else SIZES[size]


def elements(aux: Aux) -> list[Value]:
    """Return the values of a tensor, the last index fastest; some are as large as they can be."""
    count = math.prod(stored_size(aux, axis) for axis in range(len(aux.dims)))
    if aux.dtype == "bool":
        return [i * i % 3 == 1 for i in range(count)]
    if aux.dtype in ("int32", "int64"):
        bits = 31 if aux.dtype == "int32" else 63
        extreme: list[Value] = [-(2**bits), 2**bits - 1, 2 ** (bits - 5), -(2 ** (bits - 9)) - 1]
        return [extreme[i // 11 % 4] if i % 11 == 7 else i * i * 31 % 23 - 9 for i in range(count)]
    return [float(i * i * 7 % 13 - 6) / 8 for i in range(count)]


@dataclass(frozen=True)
class Arithmetic:
    """How numbers are rounded."""

    rounded: Callable[[float], float]


KERNEL = Arithmetic(float32)
EXACT = Arithmetic(float)


def value_of(root: Node, variables: Mapping[str, Value], arithmetic: Arithmetic = KERNEL, **items: Any) -> Value:
    """Evaluate a tree.

    Args:
        root: the tree.
        variables: values of all variables; for a size its name in SIZES is not needed.
        arithmetic: of floats.
        items: values of aux tensors, by name, instead of their elements.

    Raises:
        NoValueError: where C++ has no value.
    """
    parts = Parts()
    place = parts.add(root)
    found: list[Value] = []
    for part in parts.all:
        of = [found[operand] for operand in part.operands]
        node = part.node
        if isinstance(node, Literal):
            value: Value = arithmetic.rounded(node.value) if node.type is Type.FLOAT else node.value
        elif isinstance(node, Variable):
            value = variables[node.name]
        elif isinstance(node, Item):
            value = items[node.aux.name] if node.aux.name in items else _element(node.aux, of)
        else:
            value = _result(node, of, arithmetic)
        found.append(value)
    return found[place]


def _element(aux: Aux, indices: Sequence[Value]) -> Value:
    place = 0
    for axis, index in enumerate(indices):
        size = stored_size(aux, axis)
        place = place * size + max(0, min(int(index), size - 1))
    return elements(aux)[place]


def _result(node: Operation, of: Sequence[Value], arithmetic: Arithmetic) -> Value:
    if node.type is Type.FLOAT or any(operand.type is Type.FLOAT for operand in node.operands):
        is_condition = [node.name == "where" and i == 0 for i in range(len(of))]
        of = [x if keep else arithmetic.rounded(x) for x, keep in zip(of, is_condition, strict=True)]
    if node.type is Type.FLOAT:
        try:
            return arithmetic.rounded(FLOATS[node.name](*of))
        except OverflowError:
            return math.inf
    try:
        value = (BOOLS if node.type is Type.BOOL else INTS)[node.name](*of)
    except ZeroDivisionError:
        raise NoValueError from None
    if node.name == "%" and of[1] == -1 and of[0] in (-(2**31), -(2**63)):  # overflows to C++, 0 to a GPU
        raise NoValueError
    if not -(2**63) <= value < 2**63:
        raise NoValueError
    return bool(value) if node.type is Type.BOOL else int(value)


def _divided(a: float, b: float) -> float:
    if b:
        return a / b
    return math.nan if a == 0 or math.isnan(a) else math.copysign(math.inf, a) * math.copysign(1, b)


def _to_int(a: float) -> int:
    if math.isnan(a):
        return -(2**63)
    return max(-(2**63), min(2**63 - 1, int(a))) if math.isfinite(a) else (2**63 - 1 if a > 0 else -(2**63))


def _log2(a: float) -> float:
    return -math.inf if a == 0 else math.log2(a) if a > 0 else math.nan


def _extreme(of: Callable[[float, float], float]) -> Callable[[float, float], float]:
    return lambda a, b: math.nan if math.isnan(a) or math.isnan(b) else of(a, b)


SHARED: dict[str, Callable[..., Any]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "neg": lambda a: -a,
    "abs": abs,
    "where": lambda c, a, b: a if c else b,
}
FLOATS: dict[str, Callable[..., Any]] = {
    **SHARED,
    "/": _divided,
    "min": _extreme(min),
    "max": _extreme(max),
    "exp": math.exp,
    "tanh": math.tanh,
    "log2": _log2,
    "sqrt": lambda a: math.sqrt(a) if a >= 0 else math.nan,
    "float": lambda a: a,
    "exp2": lambda a: 2.0**a,
    "inverse_of_1_plus_exp2": lambda a: 1 / (1 + 2.0**a) if a < 1000 else 0.0,
}
INTS: dict[str, Callable[..., Any]] = {
    **SHARED,
    "//": lambda a, b: a // b,
    "%": lambda a, b: a % b,
    "<<": lambda a, b: a << b,
    ">>": lambda a, b: a >> b,
    "&": lambda a, b: a & b,
    "|": lambda a, b: a | b,
    "^": lambda a, b: a ^ b,
    "~": lambda a: ~a,
    "min": min,
    "max": max,
    "int": _to_int,
}
BOOLS: dict[str, Callable[..., Any]] = {
    "&": lambda a, b: a & b,
    "|": lambda a, b: a | b,
    "^": lambda a, b: a ^ b,
    "~": lambda a: not a,
    "not": lambda a: not a,
    "==": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
    "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b,
    ">=": lambda a, b: a >= b,
    "and": lambda a, b: a and b,
    "or": lambda a, b: a or b,
    "where": SHARED["where"],
    "bool": lambda a: a != 0,
}

_INT_LITERALS = st.integers(-9, 9) | st.sampled_from([64, 48, 2**31 - 1, -(2**31), 2**31, 2**40 + 3, 1 << 33])
_DIVISORS = st.sampled_from([1, 2, 3, 7, 8, 64, -1, -5, -8, 2**31, 2**34, 2**31 - 1])
_FLOAT_LITERALS = st.sampled_from([0.0, 1.0, -1.0, 0.5, 2.0, 0.1, -3.25, 1e-7, 50.0]) | st.floats(width=32)


@st.composite
def trees(draw: st.DrawFn, of: Type | None = None, depth: int = 4) -> Node:
    """Draw a tree of a type, or of any."""
    of = of or draw(st.sampled_from([Type.BOOL, Type.BOOL, Type.INT, Type.FLOAT]))
    if depth == 0 or not draw(st.integers(0, 7)):
        return draw(_leaves(of, depth))
    return draw({Type.BOOL: _truths, Type.INT: _integers, Type.FLOAT: _floats}[of](depth - 1))


@st.composite
def _leaves(draw: st.DrawFn, of: Type, depth: int) -> Node:
    literals = {Type.BOOL: st.booleans(), Type.INT: _INT_LITERALS, Type.FLOAT: _FLOAT_LITERALS}[of]
    kind = draw(st.integers(0, 5))
    if kind == 0:
        return Literal(draw(literals))
    if kind == 1 or of is Type.BOOL:
        aux = draw(st.sampled_from([aux for aux in AUX if Item(aux, ()).type is of]))
        return item(aux, *(draw(_indices(size, depth)) for size in aux.dims))
    if of is Type.FLOAT:
        return Variable("score")
    return Variable(draw(st.sampled_from(["q_idx", "q_idx", "kv_idx", "kv_idx", "batch", "head", "q_len", "kv_len"])))


def _indices(size: str | int, depth: int) -> st.SearchStrategy[Node]:
    own = {"batch": "batch", "heads": "head", "q_len": "q_idx", "kv_len": "kv_idx"}
    usual: st.SearchStrategy[Node] = st.just(Variable(own[size])) if isinstance(size, str) else st.just(Literal(3))
    return usual | trees(Type.INT, min(depth, 1))


@st.composite
def _truths(draw: st.DrawFn, depth: int) -> Node:
    name = draw(st.sampled_from(["==", "!=", "<", "<=", ">", ">=", "and", "or", "not", "&", "|", "^", "~", "bool"]))
    if name == "bool":
        return operation(name, draw(trees(None, depth)))
    if name in ("not", "~"):
        return operation(name, draw(trees(Type.BOOL, depth)))
    if name in ("and", "or", "&", "|", "^"):
        return operation(name, draw(trees(Type.BOOL, depth)), draw(trees(Type.BOOL, depth)))
    return operation(name, draw(trees(None, depth)), draw(trees(None, depth)))


@st.composite
def _integers(draw: st.DrawFn, depth: int) -> Node:
    names = ["+", "-", "*", "//", "%", "//", "%", "<<", ">>", "&", "|", "^", "~", "neg", "min", "max", "abs"]
    name = draw(st.sampled_from([*names, "where", "int"]))
    some = st.sampled_from([Type.INT, Type.INT, Type.INT, Type.BOOL]).flatmap(lambda of: trees(of, depth))
    whole = trees(Type.INT, depth)
    if name in ("<<", ">>"):
        return operation(name, draw(some), Literal(draw(st.sampled_from([0, 1, 3, 31, 32, 40, 62]))))
    if name in ("//", "%"):
        return operation(name, draw(some), draw(_DIVISORS.map(Literal) | whole.filter(lambda n: n != Literal(0))))
    if name == "where":
        return operation(name, draw(trees(Type.BOOL, depth)), draw(some), draw(whole))
    if name == "int":
        return operation(name, draw(trees(None, depth)))
    if name == "~":
        return operation(name, draw(whole))
    return operation(name, draw(some)) if name in ("neg", "abs") else operation(name, draw(some), draw(whole))


@st.composite
def _floats(draw: st.DrawFn, depth: int) -> Node:
    names = ["+", "-", "*", "/", "neg", "min", "max", "abs", "where", "exp", "tanh", "log2", "sqrt", "float"]
    name, floating = draw(st.sampled_from(names)), trees(Type.FLOAT, depth)
    if name in ("exp", "tanh", "log2", "sqrt", "float"):
        return operation(name, draw(trees(None, depth)))
    if name in ("neg", "abs"):
        return operation(name, draw(floating))
    operands = [draw(floating), draw(trees(None, depth))]
    if draw(st.booleans()):
        operands.reverse()
    if name == "/" and isinstance(operands[1], Literal) and operands[1].value == 0:  # which is refused
        operands[1] = Literal(3.0)
    return operation(name, draw(trees(Type.BOOL, depth)), *operands) if name == "where" else operation(name, *operands)
