"""Declarations of the aux tensors of a spec, such as ``q_doc: "int32[batch, q_len]"``."""

from __future__ import annotations

import keyword
import re
from collections.abc import Collection, Mapping

from codegen.expressions.nodes import (
    DTYPES,
    FUNCTIONS,
    INFINITY,
    MOST_DIMS,
    SIZES,
    VARIABLES,
    Aux,
    ExpressionError,
    Item,
    Node,
    children,
)
from codegen.names import CPP_WORDS, RESERVED
from codegen.wording import alternatives, one_line, shown

MOST_AUX = 8
"""Most aux tensors per kernel."""
MOST_NAME = 32
MOST_SIZE = 2**31 - 1
_MOST_TEXT = 200
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
_DECLARED = re.compile(r" *([A-Za-z0-9_]+) *\[([^\[\]]*)\] *")
_NUMBER = re.compile(r"[1-9][0-9]{0,9}")
_OF_ANOTHER = re.compile(r"(\w+)_(?:stride|size)[0-9]")
_SOFT_WORDS = frozenset(("case", "match", "type"))  # of the latest Python, so that specs do not depend on the version
LOADED = frozenset(("prefix_len",))
"""Names that attention kernels load by a function named like that of an aux tensor: load_prefix_len."""


def parse_aux(declared: Mapping[str, str]) -> dict[str, Aux]:
    """Aux tensors by name, parsed from their declarations.

    Raises:
        ExpressionError: for an invalid declaration; one line with the name, the value and what is allowed.
    """
    if len(declared) > MOST_AUX:
        raise ExpressionError(f"{len(declared)} aux tensors, at most {MOST_AUX} are allowed")
    for name in declared:
        if (other := meets(name, declared)) is not None:
            raise ExpressionError(f"{name} collides with the stride or size parameters of {other}: rename one of them")
    return {name: _parsed(name, text) for name, text in declared.items()}


def check_used(aux: Mapping[str, Aux], *expressions: Node) -> None:
    """Reject aux tensors that no expression reads.

    Raises:
        ExpressionError: names them.
    """
    used, seen, left = set(), set(), list(expressions)
    while left:
        node = left.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        left += children(node)
        if isinstance(node, Item):
            used.add(node.aux.name)
    if unused := [name for name in aux if name not in used]:
        raise ExpressionError(f"{', '.join(unused)}: declared, but no expression uses it")


def meets(name: str, others: Collection[str]) -> str | None:
    """Aux tensor whose stride or size parameters collide with another tensor's name in a source, or None."""
    found = _OF_ANOTHER.fullmatch(name) if isinstance(name, str) else None
    return found[1] if found and found[1] in others else None


def _parsed(name: str, text: str) -> Aux:
    """One parsed declaration."""
    if reason := wrong_name(name):
        raise ExpressionError(f"{shown(name)} cannot be the name of an aux tensor: {reason}")
    try:
        return _typed(name, text)
    except ExpressionError as error:
        raise ExpressionError(f"{name}: {error}") from None


def wrong_name(name: str) -> str:
    """Reason why a name is not legal for an aux tensor; empty if it is."""
    if not isinstance(name, str) or not _NAME.fullmatch(name) or len(name) > MOST_NAME or "__" in name:
        return f"a name has at most {MOST_NAME} ASCII letters, digits and single _, and starts with a letter"
    if name in VARIABLES or name in FUNCTIONS or name == INFINITY:
        return "it is reserved in expressions"
    if keyword.iskeyword(name) or name in _SOFT_WORDS:
        return "it is a Python keyword"
    if name in CPP_WORDS or name in LOADED or RESERVED.fullmatch(name):
        return "it is reserved in CUDA C++ or in the source"
    return ""


def _typed(name: str, text: str) -> Aux:
    parts = _DECLARED.fullmatch(text) if isinstance(text, str) and len(text) <= _MOST_TEXT else None
    if parts is None:
        raise ExpressionError(f"{shown(text)} is not a type with sizes, such as int32[batch, q_len] or fp32[]")
    dtype, sizes = parts.groups()
    if dtype not in DTYPES:
        raise ExpressionError(f"{shown(dtype)} is not an element type; {alternatives(dtype, DTYPES)}")
    dims = tuple(_size(size.strip(" ")) for size in sizes.split(",")) if sizes.strip(" ") else ()
    if len(dims) > MOST_DIMS:
        raise ExpressionError(f"has {len(dims)} sizes, at most {MOST_DIMS} are allowed")
    return Aux(name, dtype, dims)


def _size(text: str) -> str | int:
    if text in SIZES:
        return text
    if _NUMBER.fullmatch(text) and int(text) <= MOST_SIZE:
        return int(text)
    raise ExpressionError(
        f'"{one_line(text)}" is not a size; expected {", ".join(SIZES)}, or a number from 1 to 2**31 - 1'
    )
