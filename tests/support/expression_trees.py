"""Random trees of expressions, and random values for them, drawn by hypothesis."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import strategies as st

from codegen.expressions.nodes import DTYPES, VARIABLES, Aux, Literal, Node, Type, Variable, item, literal, operation

AUX = {
    aux.name: aux
    for aux in (
        Aux("doc", "int32", ("batch", "q_len")),
        Aux("wide", "int64", ("kv_len",)),
        Aux("keep", "bool", (8, "heads")),
        Aux("slope", "fp32", ("heads",)),
        Aux("half_one", "fp16", ()),
        Aux("limit", "int32", ()),
    )
}
_MOST = 2**31 - 1
_EDGES = [0, 1, -1, 2, 3, -3, 7, 8, 100, 2**15, -(2**31), _MOST, _MOST - 1, 2**31, 2**32, -(2**63), 2**63 - 1]
integers = st.sampled_from(_EDGES) | st.integers(-20, 20) | st.integers(-(2**63), 2**63 - 1)
floats = st.floats(width=32, allow_nan=False, allow_infinity=False)
_LITERALS = {Type.INT: integers, Type.FLOAT: floats, Type.BOOL: st.booleans()}
_ANY = list(Type)
_WHOLE = [Type.INT, Type.BOOL]
_INTEGER = ("+", "-", "*", "//", "%", "<<", ">>", "&", "|", "^", "~", "neg", "min", "max", "abs", "where", "int")
_TRUTH = ("==", "!=", "<", "<=", ">", ">=", "and", "or", "not", "&", "|", "^", "~", "bool", "where")
_FLOAT = ("+", "-", "*", "/", "neg", "min", "max", "abs", "where", "exp", "tanh", "log2", "sqrt", "float")
_OPERATORS = {Type.INT: _INTEGER, Type.BOOL: _TRUTH, Type.FLOAT: _FLOAT}


@st.composite
def trees(draw: st.DrawFn, which: Type | None = None, depth: int = 4, whole: bool = False) -> Node:
    """Draw a tree.

    Args:
        draw: hypothesis' own.
        which: its type, or any.
        depth: operators in each other, at most.
        whole: whether it has integers and truth values alone.
    """
    return _tree(draw, which or draw(st.sampled_from(_WHOLE if whole else _ANY)), depth, whole)


def _tree(draw: st.DrawFn, which: Type, depth: int, whole: bool) -> Node:
    if depth == 0 or draw(st.integers(0, 5)) == 0:
        return _leaf(draw, which, depth, whole)
    name = draw(st.sampled_from(_OPERATORS[which]))
    if name in ("<<", ">>"):
        return operation(name, _tree(draw, Type.INT, depth - 1, whole), literal(draw(st.integers(0, 62))))
    operands = [_tree(draw, each, depth - 1, whole) for each in _types(draw, name, which, whole)]
    if name in ("//", "%", "/") and isinstance(operands[1], Literal) and operands[1].value == 0:
        operands[1] = literal(3)  # the only operands of these types that are refused
    return operation(name, *operands)


def _leaf(draw: st.DrawFn, which: Type, depth: int, whole: bool) -> Node:
    variables = [name for name, (own, _) in VARIABLES.items() if own is which]
    tensors = [aux for aux in AUX.values() if DTYPES[aux.dtype] is which and (depth or not aux.dims)]
    kind = draw(st.sampled_from(["literal"] + ["variable"] * bool(variables) * 2 + ["item"] * bool(tensors)))
    if kind == "variable":
        return Variable(draw(st.sampled_from(variables)))
    if kind == "item":
        aux = draw(st.sampled_from(tensors))
        return item(aux, *(_tree(draw, Type.INT, depth - 1, whole) for _ in aux.dims))
    return literal(draw(_LITERALS[which]))


def _types(draw: st.DrawFn, name: str, which: Type, whole: bool) -> list[Type]:
    """Draw the types of an operator's operands such that it makes the wanted one."""
    some = _WHOLE if whole else _ANY
    if name == "where":
        return [Type.BOOL, *_mixed(draw, which, 2)]
    if name in ("and", "or"):
        return [Type.BOOL, Type.BOOL]
    if name in ("==", "!=", "<", "<=", ">", ">="):
        return [draw(st.sampled_from(some)), draw(st.sampled_from(some))]
    if name in ("int", "float", "bool"):
        return [draw(st.sampled_from(some))]
    if name in ("exp", "tanh", "log2", "sqrt"):
        return [draw(st.sampled_from(_ANY))]
    if name == "not" or (which is Type.BOOL and name == "~"):
        return [Type.BOOL]
    if name in ("neg", "abs", "~"):
        return [which]
    return _mixed(draw, which, 2)


def _mixed(draw: st.DrawFn, which: Type, count: int) -> list[Type]:
    """Draw types that are the wanted one together."""
    below = {Type.BOOL: [Type.BOOL], Type.INT: _WHOLE, Type.FLOAT: _ANY}[which]
    return draw(st.permutations([which, *(draw(st.sampled_from(below)) for _ in range(count - 1))]))


_INT32 = st.sampled_from([0, 1, -1, 7, -(2**31), _MOST]) | st.integers(-(2**31), _MOST)
_index = st.sampled_from([0, 1, 2, 63, 2**30 - 1]) | st.integers(0, 300) | st.integers(0, 2**30 - 1)


@st.composite
def values(draw: st.DrawFn) -> tuple[dict[str, int | float], dict[str, Callable[..., int | float]]]:
    """Draw values of the variables and elements of the aux tensors."""
    variables: dict[str, int | float] = {name: draw(_index) for name in ("q_idx", "kv_idx", "batch", "head")}
    variables |= {"q_len": draw(_index) + 1, "kv_len": draw(_index) + 1, "score": draw(floats)}
    return variables, {name: _elements(draw, aux) for name, aux in AUX.items()}


def _elements(draw: st.DrawFn, aux: Aux) -> Callable[..., int | float]:
    drawn = _INT32 if aux.dtype == "int32" else _LITERALS[DTYPES[aux.dtype]]
    some = draw(st.lists(drawn, min_size=1, max_size=4))
    return lambda *indices: some[sum(indices) % len(some)]
