"""The canonical text of a tree, which ``parse_expression`` parses to the same tree.

It has parentheses only if needed; a condition is ``where(...)``, and a chain of comparisons becomes pairs.
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
    """Canonical text of a tree; ``check_size`` and ``literal`` must have accepted it."""
    return _text(node)[0]


def _text(node: Node) -> tuple[str, int]:
    """Text of a tree and precedence of its outermost operator."""
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
    # Left-associative, except that a < b < c differs from (a < b) < c.
    return f"{_held(left, level + (level == _COMPARISON))} {node.name} {_held(right, level + 1)}", level


def _arguments(node: Operation) -> list[Node]:
    """Arguments of a call; nested min and max become one call."""
    arguments: list[Node] = list(node.operands)
    while node.name in ("min", "max") and isinstance(arguments[0], Operation) and arguments[0].name == node.name:
        arguments[:1] = arguments[0].operands
    return arguments


def _number_apart(node: Operation) -> str:
    """A plus sign that separates the minus of a negated literal, as ``-1`` would be a literal; else ""."""
    operand = node.operands[0]
    if node.name != "neg" or not isinstance(operand, Literal) or isinstance(operand.value, bool):
        return ""
    return "" if _text(operand)[1] == _SIGN or operand.name else "+"


def _held(node: Node, level: int) -> str:
    """Text of an operand, in parentheses if its precedence is too low."""
    text, own = _text(node)
    return text if own >= level else f"({text})"
