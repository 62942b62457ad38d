"""The canonical text of a tree: one for each tree, and ``parse_expression`` makes the same tree of it.

Parentheses stand where they are needed; a condition is ``where(...)``, a chain of comparisons its pairs.
"""

from __future__ import annotations

from collections.abc import Mapping

from codegen.expressions.nodes import FUNCTIONS, Item, Literal, Node, Operation, Variable

_LEVELS = (
    ("or",),
    ("and",),
    ("not",),
    ("==", "!=", "<", "<=", ">", ">="),
    ("|",),
    ("^",),
    ("&",),
    ("<<", ">>"),
    ("+", "-"),
    ("*", "/", "//", "%"),
    ("neg", "~"),
)
_LEVEL: Mapping[str, int] = {name: level for level, names in enumerate(_LEVELS) for name in names}
_COMPARISON, _SIGN, _ATOM = _LEVEL["=="], _LEVEL["neg"], len(_LEVELS)
_PREFIX: Mapping[str, str] = {"not": "not ", "neg": "-", "~": "~"}


def text_of(node: Node) -> str:
    """Canonical text of a tree that ``check_size`` accepts, and whose numbers ``literal`` has checked."""
    return _text(node)[0]


def _text(node: Node) -> tuple[str, int]:
    """Text of a tree, and the precedence of its outermost operator."""
    match node:
        case Literal():
            text = node.name or repr(node.value)
            return text, _SIGN if text.startswith("-") else _ATOM
        case Variable():
            return node.name, _ATOM
        case Item():
            indices = ", ".join(text_of(index) for index in node.indices)
            return (f"{node.aux.name}[{indices}]" if indices else node.aux.name), _ATOM
    return _operation(node)


def _operation(node: Operation) -> tuple[str, int]:
    if node.name in FUNCTIONS:
        return f"{node.name}({', '.join(text_of(argument) for argument in _arguments(node))})", _ATOM
    level = _LEVEL[node.name]
    if node.name in _PREFIX:
        return _PREFIX[node.name] + _number_apart(node) + _held(node.operands[0], level), level
    left, right = node.operands
    # From the left, but a < b < c is another thing than (a < b) < c.
    return f"{_held(left, level + (level == _COMPARISON))} {node.name} {_held(right, level + 1)}", level


def _arguments(node: Operation) -> list[Node]:
    """Arguments of a call: min and max of more than two are one call."""
    arguments: list[Node] = list(node.operands)
    while node.name in ("min", "max") and isinstance(arguments[0], Operation) and arguments[0].name == node.name:
        arguments[:1] = arguments[0].operands
    return arguments


def _number_apart(node: Operation) -> str:
    """The plus that keeps the sign of a negated number from being a part of it, or "": ``-1`` is a number."""
    operand = node.operands[0]
    if node.name != "neg" or not isinstance(operand, Literal) or isinstance(operand.value, bool):
        return ""
    return "" if _text(operand)[1] == _SIGN or operand.name else "+"


def _held(node: Node, level: int) -> str:
    """Text of an operand, in parentheses if it holds together less tightly than needed."""
    text, own = _text(node)
    return text if own >= level else f"({text})"
