"""Nodes for torch's functions by name: ``torch.f(x)``, ``x.f()`` and operators alike.

Each function here has the supported parameters of torch's function; numbers arrive as literals, other values unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from codegen.expressions.nodes import ExpressionError, Literal, Node, Type, operation
from codegen.wording import shown
from runtime.expressions.symbols import literal

_TYPES = {torch.bool: Type.BOOL, torch.int32: Type.INT, torch.int64: Type.INT, torch.float32: Type.FLOAT}
_LN2, _ONE = Literal(math.log(2)), Literal(1.0)
_MOST_POWER = 64


def converted(node: Node, to: Type) -> Node:
    """Convert a value to another type; a literal stays a literal."""
    if node.type is to:
        return node
    if not isinstance(node, Literal) or (to is Type.INT and not math.isfinite(node.value)):
        return operation(to.value, node)
    return literal({Type.BOOL: bool, Type.INT: int, Type.FLOAT: float}[to](node.value))


def type_of(dtype: Any) -> Type:
    """Node type for a torch dtype.

    Raises:
        ExpressionError: for dtypes whose rounding kernels do not reproduce.
    """
    if dtype not in _TYPES:
        raise ExpressionError(f"converts a value to {shown(dtype)}; expected one of {', '.join(map(str, _TYPES))}")
    return _TYPES[dtype]


def _binary(name: str) -> Callable[[Node, Node], Node]:
    return lambda input, other: operation(name, input, other)


def _unary(name: str) -> Callable[[Node], Node]:
    return lambda input: operation(name, input)


def _reflected(function: Callable[..., Node]) -> Callable[[Node, Node], Node]:
    return lambda input, other: function(other, input)


def _of_truths(for_truths: str, name: str) -> Callable[[Node, Node], Node]:
    """Choose between torch's operator for booleans and the one for numbers."""
    return lambda input, other: operation(for_truths if input.type is other.type is Type.BOOL else name, input, other)


def _bits(name: str, neutral: bool) -> Callable[[Node, Node], Node]:
    """``&`` or ``|``, without the initial constants of and_masks and or_masks."""

    def function(input: Node, other: Node) -> Node:
        for one, rest in ((input, other), (other, input)):
            if one == Literal(neutral) and rest.type is Type.BOOL:
                return rest
        return operation(name, input, other)

    return function


def _logical(name: str) -> Callable[[Node, Node], Node]:
    return lambda input, other: operation(name, converted(input, Type.BOOL), converted(other, Type.BOOL))


def _divide(input: Node, other: Node, *, rounding_mode: str | None = None) -> Node:
    if rounding_mode not in (None, "floor"):
        raise ExpressionError(f"divides with rounding_mode {shown(rounding_mode)}, expected None or 'floor'")
    return operation("//" if rounding_mode else "/", input, other)


def _clamp(input: Node, min: Node | None = None, max: Node | None = None) -> Node:  # torch's names
    lower = input if min is None else operation("max", input, min)
    return lower if max is None else operation("min", lower, max)


def _exp2(input: Node) -> Node:
    return operation("exp", operation("*", input, _LN2))


def _reciprocal(input: Node) -> Node:
    return operation("/", _ONE, input)


def _power(input: Node, exponent: Node) -> Node:
    if isinstance(exponent, Literal):
        return _known_power(input, exponent.value)
    if not isinstance(input, Literal) or input.type is not Type.FLOAT or not 0 < input.value < math.inf:
        raise ExpressionError("raises to a variable power, whose base must be a positive float constant: 2.0 ** x")
    return _exp2(operation("*", exponent, Literal(math.log2(input.value)))) if input.value != 2 else _exp2(exponent)


def _known_power(base: Node, exponent: float) -> Node:
    if abs(exponent) == 0.5:
        root = operation("sqrt", base)
        return root if exponent > 0 else _reciprocal(root)
    if exponent != int(exponent) or abs(exponent) > _MOST_POWER:
        raise ExpressionError(f"raises to the power {shown(exponent)}, expected an integer to {_MOST_POWER}, or 0.5")
    if exponent < 0 and base.type is not Type.FLOAT:
        raise ExpressionError("raises an integer to a negative power; use x.float()")
    of_floats = Type.FLOAT in (base.type, literal(exponent).type)
    square = converted(base, Type.FLOAT if of_floats else Type.INT)
    result, left = None, int(abs(exponent))
    while left:
        if left % 2:
            result = square if result is None else _times(result, square)
        square, left = (_times(square, square) if left > 1 else square), left // 2
    if result is None:
        return literal(1.0 if of_floats else 1)
    return _reciprocal(result) if exponent < 0 else result


def _times(one: Node, other: Node) -> Node:
    return operation("*", one, other)


def _to(
    input: Node,
    *what: Any,
    dtype: Any = None,
    device: Any = None,
    non_blocking: Any = None,
    copy: Any = None,
    memory_format: Any = None,
) -> Node:
    """Convert to a dtype or to another value's dtype; devices and copy options are ignored.

    torch interprets an integer argument as a device, and other numbers as values of Python's types.
    """
    del device, non_blocking, copy, memory_format
    other = what[0] if what else None
    if isinstance(other, Node):
        return converted(input, other.type)
    if isinstance(other, bool | float):
        return converted(input, type_of(torch.bool if isinstance(other, bool) else torch.float64))
    for each in (*what[:2], dtype):
        if isinstance(each, torch.dtype):
            return converted(input, type_of(each))
    return input


def _type(input: Node, dtype: Any) -> Node:
    return converted(input, dtype.type if isinstance(dtype, Node) else type_of(dtype))


def _as_float(input: Node) -> Node:
    return converted(input, Type.FLOAT)


def _as_int(input: Node) -> Node:
    return converted(input, Type.INT)


def _as_bool(input: Node) -> Node:
    return converted(input, Type.BOOL)


def _same(input: Node, *args: Any, **options: Any) -> Node:
    del args, options
    return input


def _made(data: Any, dtype: Any = None, **options: Any) -> Node:
    """The constant of torch.tensor and similar functions."""
    del options
    if not isinstance(data, Node):
        raise ExpressionError("creates a tensor of several numbers; create it outside the function and capture it")
    return data if dtype is None else converted(data, type_of(dtype))


def _filled(size: Any, value: Any, dtype: Any, otherwise: Type) -> Node:
    if size not in ((), []):
        raise ExpressionError("creates a tensor with dims; expected a scalar of shape ()")
    return converted(value, otherwise if dtype is None else type_of(dtype))


def _new(value: float) -> Callable[..., Node]:
    def function(input: Node, size: Any = None, *, dtype: Any = None, **options: Any) -> Node:
        del options
        return _filled(size, literal(value), dtype, input.type)

    return function


def _sized(value: float) -> Callable[..., Node]:
    def function(size: Any = None, *, dtype: Any = None, **options: Any) -> Node:
        del options
        return _filled(size, literal(value), dtype, Type.FLOAT)

    return function


def _like(value: float) -> Callable[..., Node]:
    def function(input: Node, *, dtype: Any = None, **options: Any) -> Node:
        del options
        return _filled((), literal(value), dtype, input.type)

    return function


def _full(size: Any, fill_value: Node, *, dtype: Any = None, **options: Any) -> Node:
    del options
    return _filled(size, fill_value, dtype, fill_value.type)


def _new_full(input: Node, size: Any, fill_value: Node, *, dtype: Any = None, **options: Any) -> Node:
    del options
    return _filled(size, fill_value, dtype, input.type)


def _full_like(input: Node, fill_value: Node, *, dtype: Any = None, **options: Any) -> Node:
    del options
    return _filled((), fill_value, dtype, input.type)


def _where(condition: Node, input: Node, other: Node) -> Node:
    return operation("where", condition, input, other)


_ADD, _SUB, _MUL, _MOD = _of_truths("|", "+"), _binary("-"), _of_truths("&", "*"), _binary("%")
_AND, _OR, _FLOOR, _SHL, _SHR = _bits("&", True), _bits("|", False), _binary("//"), _binary("<<"), _binary(">>")
_SEVERAL: Mapping[Callable[..., Node], str] = {
    _ADD: "add",
    _SUB: "sub subtract",
    _MUL: "mul multiply",
    _divide: "div divide true_divide",
    _FLOOR: "floor_divide __floordiv__",
    _MOD: "remainder",
    _AND: "__and__ bitwise_and",
    _OR: "__or__ bitwise_or",
    _binary("^"): "__xor__ bitwise_xor",
    _SHL: "__lshift__ bitwise_left_shift",
    _SHR: "__rshift__ bitwise_right_shift",
    _reflected(_SUB): "__rsub__ rsub",
    _reflected(_divide): "__rdiv__ __rtruediv__",
    _reflected(_FLOOR): "__rfloordiv__",
    _reflected(_MOD): "__rmod__",
    _reflected(_SHL): "__rlshift__",
    _reflected(_SHR): "__rrshift__",
    _reflected(_power): "__rpow__",
    _power: "pow",
    _unary("~"): "__invert__ bitwise_not",
    _unary("neg"): "neg negative",
    _unary("abs"): "abs absolute",
    _binary("=="): "eq",
    _binary("!="): "ne not_equal",
    _binary("<"): "lt less",
    _binary("<="): "le less_equal",
    _binary(">"): "gt greater",
    _binary(">="): "ge greater_equal",
    _logical("and"): "logical_and",
    _logical("or"): "logical_or",
    _logical("!="): "logical_xor",
    lambda input: operation("not", converted(input, Type.BOOL)): "logical_not",
    _of_truths("&", "min"): "minimum min",
    _of_truths("|", "max"): "maximum max",
    _clamp: "clamp clip",
    lambda input, min: operation("max", input, min): "clamp_min",
    lambda input, max: operation("min", input, max): "clamp_max",
    _where: "where",
    lambda input, condition, other: _where(condition, input, other): "Tensor.where",
    lambda input, mask, value: _where(mask, converted(value, input.type), input): "masked_fill",
    _unary("exp"): "exp",
    _exp2: "exp2",
    _unary("tanh"): "tanh",
    _unary("log2"): "log2",
    lambda input: operation("*", operation("log2", input), _LN2): "log",
    _unary("sqrt"): "sqrt",
    lambda input: _reciprocal(operation("sqrt", input)): "rsqrt",
    _reciprocal: "reciprocal",
    lambda input: _times(input, input): "square",
    lambda input: _reciprocal(operation("+", _ONE, operation("exp", operation("neg", input)))): "sigmoid",
    lambda input: operation("max", input, converted(Literal(0), input.type)): "relu",
    _to: "to",
    _type: "type type_as",
    _as_float: "float",
    _as_int: "int long",
    _as_bool: "bool",
    _same: "clone contiguous cpu cuda detach positive",
    _made: "tensor as_tensor asarray scalar_tensor",
    _new(0): "new_zeros",
    _new(1): "new_ones",
    _new_full: "new_full",
    _sized(0): "zeros",
    _sized(1): "ones",
    _full: "full",
    _like(0): "zeros_like",
    _like(1): "ones_like",
    _full_like: "full_like",
}
FUNCTIONS: Mapping[str, Callable[..., Node]] = {
    name: function for function, names in _SEVERAL.items() for name in names.split()
}
"""Functions by the name that torch passes to a mode."""
AS_GIVEN = {_to}
"""Functions whose numbers are not values and arrive unchanged."""
VALUES = {"input", "other", "condition", "exponent", "mask", "value", "fill_value"}
"""Names of parameters that are numbers or tensors, for all functions."""
SOME = "where, abs, clamp, minimum, maximum, exp, exp2, log, log2, tanh, sigmoid, sqrt, rsqrt, masked_fill, logical_not"
"""Supported functions besides operators, for messages."""
