"""Evaluation of expressions by torch, the reference for kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from codegen.expressions.nodes import Item, Literal, Node, Operation, Type, Variable
from codegen.wording import alternatives, shown
from runtime.errors import ArgumentError
from runtime.expressions.order import operands_first

Values = Mapping[str, "torch.Tensor | int | float"]
_Function = Callable[..., torch.Tensor]


def evaluate(node: Node, values: Values, aux: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Evaluate an expression.

    Integers are int64, floating-point numbers float32, or float64 if the score is. Kernels may differ in two cases:
    integer division by zero and its remainder are 0 here (where() may guard a division, and both its sides are
    evaluated), and int() of a value outside int64 is torch's result.

    Args:
        node: the expression.
        values: values of its variables; tensors broadcast.
        aux: values of its aux tensors.

    Returns:
        bool, int64, float32 or float64, with the broadcast shape of the tensors; a scalar if none is used.

    Raises:
        ArgumentError: if a variable or an aux tensor is missing, or an aux tensor has another shape.
    """
    *_, (_, value) = each_value(node, values, aux)
    return value


def each_value(node: Node, values: Values, aux: Mapping[str, torch.Tensor]) -> Iterator[tuple[Node, torch.Tensor]]:
    """Yield each node of an expression once, with its value; the expression itself comes last."""
    given = _Given(values, aux)
    known: dict[int, torch.Tensor] = {}
    for each in operands_first(node):
        known[id(each)] = given.value(each, known)
        yield each, known[id(each)]


class _Given:
    """Values of variables and aux tensors, and dtypes of numbers."""

    def __init__(self, values: Values, aux: Mapping[str, torch.Tensor]) -> None:
        self.values, self.aux = values, aux
        tensors = [each for each in (*values.values(), *aux.values()) if isinstance(each, torch.Tensor)]
        self.device = tensors[0].device if tensors else torch.device("cpu")
        score = values.get("score", values.get("qk"))
        is_double = isinstance(score, torch.Tensor) and score.dtype == torch.float64
        self.dtypes = {
            Type.BOOL: torch.bool,
            Type.INT: torch.int64,
            Type.FLOAT: torch.float64 if is_double else torch.float32,
        }

    def value(self, node: Node, known: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """Evaluate a node from its operands' values."""
        if isinstance(node, Literal):
            return self.cast(node.value, node.type)
        if isinstance(node, Variable):
            return self.cast(_named("values", self.values, node.name), node.type)
        if isinstance(node, Item):
            return self.element(node, [known[id(index)] for index in node.indices])
        common = _common(node)
        return self.cast(
            _FUNCTIONS[node.name](*(self.cast(known[id(one)], common) for one in node.operands)), node.type
        )

    def cast(self, value: Any, to: Type) -> torch.Tensor:
        if to is Type.BOOL and isinstance(value, torch.Tensor):
            return value.to(self.device) != 0
        return torch.as_tensor(value, dtype=self.dtypes[to], device=self.device)

    def element(self, node: Item, indices: list[torch.Tensor]) -> torch.Tensor:
        table, aux = _named("aux", self.aux, node.aux.name), node.aux
        sizes = [(dim, size) for dim, size in zip(aux.dims, table.shape, strict=False) if isinstance(dim, int)]
        if table.ndim != len(aux.dims) or any(dim != size for dim, size in sizes) or 0 in table.shape:
            raise ArgumentError("aux", f"{aux.name} has the shape {shown(tuple(table.shape))}, expected {aux}")
        table = table.to(self.device)
        inside = [index.clamp(0, size - 1) for index, size in zip(indices, table.shape, strict=True)]
        return self.cast(table[tuple(inside)] if inside else table, node.type)


def _named(argument: str, given: Mapping[str, Any], name: str) -> Any:
    if name not in given:
        raise ArgumentError(argument, f"has no {name}, which the expression uses; {alternatives(name, given)}")
    return given[name]


def _common(node: Operation) -> Type:
    """Dtype of an operation's computation: the dtype of its result, or the common dtype of its operands."""
    types = {operand.type for operand in node.operands}
    if node.name == "where":  # a condition may have any type: nonzero is true
        return node.type
    if node.name in ("and", "or", "not") or (types == {Type.BOOL} and node.type is Type.BOOL):
        return Type.BOOL
    if node.name in ("int", "bool", "==", "!=", "<", "<=", ">", ">="):
        return Type.FLOAT if Type.FLOAT in types else Type.INT
    return node.type


def _divided(one: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    """``one // by``. Division by -1 negates instead, because some CPUs trap when they divide the least integer by
    -1."""
    quotient = one.floor_divide(by.where(~_is_special(by), 1))
    return quotient.where(by != -1, -one).where(by != 0, 0)


def _remainder(one: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    return one.remainder(by.where(~_is_special(by), 1))  # the remainder by 1 is 0, like that by -1


def _is_special(divisor: torch.Tensor) -> torch.Tensor:
    return (divisor == 0) | (divisor == -1)


def _same(value: torch.Tensor) -> torch.Tensor:
    return value  # its dtype is converted afterwards


_FUNCTIONS: Mapping[str, _Function] = {
    "+": torch.add,
    "-": torch.sub,
    "*": torch.mul,
    "/": torch.true_divide,
    "//": _divided,
    "%": _remainder,
    "<<": torch.bitwise_left_shift,
    ">>": torch.bitwise_right_shift,
    "&": torch.bitwise_and,
    "|": torch.bitwise_or,
    "^": torch.bitwise_xor,
    "~": torch.bitwise_not,
    "neg": torch.neg,
    "==": torch.eq,
    "!=": torch.ne,
    "<": torch.lt,
    "<=": torch.le,
    ">": torch.gt,
    ">=": torch.ge,
    "and": torch.logical_and,
    "or": torch.logical_or,
    "not": torch.logical_not,
    "min": torch.minimum,
    "max": torch.maximum,
    "abs": torch.abs,
    "where": lambda condition, one, other: torch.where(condition != 0, one, other),
    "exp": torch.exp,
    "tanh": torch.tanh,
    "log2": torch.log2,
    "exp2": torch.exp2,
    "inverse_of_1_plus_exp2": lambda one: 1 / (1 + torch.exp2(one)),
    "sqrt": torch.sqrt,
    "int": _same,
    "float": _same,
    "bool": _same,
}
