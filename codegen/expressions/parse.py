"""Parses the text of an expression into its tree.

Python's parser reads the text, and each of its nodes is converted, from a list of allowed nodes. Nothing is evaluated.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import reduce
from types import MappingProxyType
from typing import Any

from codegen.expressions import nodes
from codegen.expressions.declared import check_used, parse_aux
from codegen.expressions.nodes import Aux, ExpressionError, Node, Type, Variable
from codegen.expressions.scan import at, spaced
from codegen.wording import alternatives

__all__ = ["check_used", "parse_aux", "parse_expression"]

_BINARY: Mapping[type[ast.operator], str] = {
    ast.Add: "+",
    ast.Sub: "-",
    ast.Mult: "*",
    ast.Div: "/",
    ast.FloorDiv: "//",
    ast.Mod: "%",
    ast.LShift: "<<",
    ast.RShift: ">>",
    ast.BitAnd: "&",
    ast.BitOr: "|",
    ast.BitXor: "^",
}
_UNARY: Mapping[type[ast.unaryop], str] = {ast.USub: "neg", ast.Invert: "~", ast.Not: "not"}
_COMPARED: Mapping[type[ast.cmpop], str] = {
    ast.Eq: "==",
    ast.NotEq: "!=",
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
}
_REFUSED: Mapping[type[ast.expr], str] = {
    ast.Attribute: "an attribute",
    ast.Tuple: "a tuple",
    ast.List: "a list",
    ast.Slice: "a slice",
    ast.Starred: "a * before an argument",
}
_DEEPEST = 2 * nodes.MOST_DEPTH + 2  # several indices are a tuple, and a sign is a separate node in Python


def parse_expression(
    text: str,
    aux: Mapping[str, Aux],
    *,
    score: bool,
    constants: Mapping[str, int] = MappingProxyType({}),
    parameters: Collection[str] = (),
) -> Node:
    """Read an expression.

    Args:
        text: the expression in Python's syntax; any white space counts as a space.
        aux: the aux tensors that it may read, by name.
        score: whether it may use the score.
        constants: named constants of the source.
        parameters: names of PATTERN_VARIABLES that it may use.

    Raises:
        ExpressionError: for an invalid expression; one line with the column and the offending text.
    """
    line = spaced(text)
    before = len(line) - len(line.lstrip())
    root = _parsed(line, before)
    variables = [*(name for name in nodes.VARIABLES if score or name != "score"), *parameters]
    reader = _Reader(line, before, aux, variables, constants)
    try:
        _check_depth(root)
        node = reader.read(root)
        nodes.check_size(node)
    except RecursionError:  # the caller is already deep in the stack
        raise at(line, before, len(line), "nested too deeply") from None
    except ExpressionError as error:
        raise error if isinstance(error, _PlacedError) else at(line, before, len(line), str(error)) from None
    return node


class _PlacedError(ExpressionError):
    """An error with a location."""


def _parsed(line: str, before: int) -> ast.expr:
    """Python's syntax tree of a text, without surrounding spaces."""
    try:
        return ast.parse(line.strip(), mode="eval").body
    except SyntaxError as error:
        offset = error.offset or len(line.strip()) + 1  # 0 if something is missing at the end
        start, length = before + offset - 1, (error.end_offset or 0) - offset
        raise at(line, start, start + length if length > 0 else len(line), error.msg) from None
    except (RecursionError, MemoryError, ValueError):  # depends on the Python version
        raise at(line, before, len(line), "nested too deeply") from None


def _check_depth(root: ast.expr) -> None:
    left: list[tuple[ast.AST, int]] = [(root, 1)]
    while left:
        node, depth = left.pop()
        if depth > _DEEPEST:
            raise ExpressionError(f"has more than {nodes.MOST_DEPTH} nested operators")
        left += [(child, depth + 1) for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr)]


class _Reader:
    """Converts Python's nodes.

    Args:
        line: the whole text.
        before: leading spaces, which Python's parser did not see.
        aux: the aux tensors by name.
        variables: allowed variables.
        constants: named constants.
    """

    def __init__(
        self,
        line: str,
        before: int,
        aux: Mapping[str, Aux],
        variables: Sequence[str],
        constants: Mapping[str, int],
    ) -> None:
        self._line = line
        self._before = before
        self._aux = aux
        self._constants = constants
        self._ways: Mapping[type[ast.expr], Callable[[Any], Node]] = {
            ast.Constant: self._constant,
            ast.Name: self._name,
            ast.UnaryOp: self._unary,
            ast.BinOp: self._binary,
            ast.BoolOp: self._truth,
            ast.Compare: self._comparison,
            ast.IfExp: self._choice,
            ast.Call: self._call,
            ast.Subscript: self._item,
        }
        self._variables = variables

    def read(self, node: ast.expr) -> Node:
        """Tree of a node."""
        way = self._ways.get(type(node))
        if way is None:
            raise self._refused(node, _REFUSED.get(type(node), f"the Python construct {type(node).__name__}"))
        return way(node)

    def _constant(self, node: ast.Constant) -> Node:
        return self._literal(node, node.value)

    def _literal(self, node: ast.expr, value: object) -> Node:
        if not isinstance(value, (bool, int, float)):
            kind = "..." if value is ... else f"a {type(value).__name__}"
            raise self._refused(node, kind)
        return self._put(node, nodes.literal, value)

    def _name(self, node: ast.Name) -> Node:
        if node.id in self._variables:
            return Variable(node.id)
        if node.id == nodes.INFINITY:
            return nodes.Literal(math.inf)
        if node.id in self._constants:
            return nodes.Literal(self._constants[node.id], node.id)
        if node.id in self._aux:
            return self._put(node, nodes.item, self._aux[node.id])
        if node.id in nodes.FUNCTIONS:
            raise self._error(node, f"{node.id} is a function and takes arguments")
        if node.id in nodes.VARIABLES:
            raise self._error(node, "a mask cannot use the score, only a score expression can")
        raise self._error(node, f"no such name, {alternatives(node.id, [*self._variables, *self._aux])}")

    def _unary(self, node: ast.UnaryOp) -> Node:
        sign = isinstance(node.op, ast.USub)
        if sign and isinstance(node.operand, ast.Constant) and type(node.operand.value) in (int, float):
            return self._literal(node, -node.operand.value)  # type: ignore[operator]  # int or float
        if sign and isinstance(node.operand, ast.Name) and node.operand.id == nodes.INFINITY:
            return nodes.Literal(-math.inf)
        operand = self.read(node.operand)
        if isinstance(node.op, ast.UAdd):
            return self._operation(node, "int", operand) if operand.type is Type.BOOL else operand
        return self._operation(node, self._known(node, _UNARY, node.op), operand)

    def _binary(self, node: ast.BinOp) -> Node:
        name = self._known(node, _BINARY, node.op)
        return self._operation(node, name, self.read(node.left), self.read(node.right))

    def _truth(self, node: ast.BoolOp) -> Node:
        name = "and" if isinstance(node.op, ast.And) else "or"
        return self._folded(node, name, [self.read(value) for value in node.values])

    def _choice(self, node: ast.IfExp) -> Node:
        return self._operation(node, "where", *(self.read(each) for each in (node.test, node.body, node.orelse)))

    def _known(self, node: ast.expr, names: Mapping[Any, str], operator: ast.AST) -> str:
        """Name of an operator in OPERATIONS."""
        if type(operator) not in names:
            raise self._refused(node, f"the operator {type(operator).__name__}")
        return names[type(operator)]

    def _comparison(self, node: ast.Compare) -> Node:
        operands = [self.read(each) for each in (node.left, *node.comparators)]
        parts = [
            self._operation(node, self._known(node, _COMPARED, operator), left, right)
            for operator, left, right in zip(node.ops, operands, operands[1:], strict=False)
        ]
        return self._folded(node, "and", parts)

    def _call(self, node: ast.Call) -> Node:
        function = node.func
        if not isinstance(function, ast.Name):
            raise self._refused(function, f"a call of {_REFUSED.get(type(function), 'something other than a name')}")
        if function.id not in nodes.FUNCTIONS:
            raise self._error(function, self._no_function(function.id))
        operands = [self.read(argument) for argument in node.args]
        if function.id in ("min", "max") and len(operands) > 2:
            return self._folded(node, function.id, operands)
        return self._operation(node, function.id, *operands)

    def _no_function(self, name: str) -> str:
        if name in self._aux:
            return f"an aux tensor, {self._aux[name]}: its indices go in square brackets"
        if name in nodes.VARIABLES:
            return "a number, not a function"
        return f"no such function, {alternatives(name, nodes.FUNCTIONS)}"

    def _item(self, node: ast.Subscript) -> Node:
        tensor = node.value
        if not isinstance(tensor, ast.Name):
            raise self._refused(
                tensor, f"an index of {_REFUSED.get(type(tensor), 'something other than an aux tensor')}"
            )
        if tensor.id in nodes.VARIABLES or tensor.id in nodes.FUNCTIONS:
            raise self._error(tensor, "not an aux tensor, so it has no elements")
        if tensor.id not in self._aux:
            raise self._error(tensor, f"no such aux tensor{self._nearest_aux(tensor.id)}")
        index = node.slice
        indices = [self.read(each) for each in (index.elts if isinstance(index, ast.Tuple) else [index])]
        return self._put(node, nodes.item, self._aux[tensor.id], *indices)

    def _nearest_aux(self, name: str) -> str:
        return f", {alternatives(name, self._aux)}" if self._aux else ", none are declared"

    def _folded(self, node: ast.expr, name: str, operands: list[Node]) -> Node:
        """Left fold of a binary operator over several operands."""
        return reduce(lambda left, right: self._operation(node, name, left, right), operands)

    def _operation(self, node: ast.expr, name: str, *operands: Node) -> Node:
        return self._put(node, nodes.operation, name, *operands)

    def _put(self, node: ast.expr, build: Callable[..., Node], *parts: object) -> Node:
        """Build a node; an error gets the location in the text."""
        try:
            return build(*parts)
        except ExpressionError as error:
            raise self._error(node, str(error)) from None

    def _refused(self, node: ast.expr, what: str) -> _PlacedError:
        return self._error(node, f"{what} is not allowed")

    def _error(self, node: ast.expr, reason: str) -> _PlacedError:
        start = self._before + node.col_offset
        end = self._before + (node.end_col_offset or node.col_offset)
        return _PlacedError(str(at(self._line, start, end, reason)))
