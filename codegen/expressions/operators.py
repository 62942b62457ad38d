"""Operators and functions of expressions as C++, for operands that are already C++.

The printed C++ keeps the semantics of expressions: operands are cast first if a result may need 64 bits, and division,
shifts and comparisons of Booleans behave as in Python.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from codegen.expressions.bounds import bounds_of, is_inside
from codegen.expressions.nodes import DTYPES, PATTERN_VARIABLES, Item, Literal, Node, Operation, Type, Variable
from codegen.expressions.terms import Binding, Term, binary, call, cast, choice, number, unary

VARIABLES: Mapping[str, str] = {
    "q_idx": "query",
    "kv_idx": "key",
    "batch": "batch",
    "head": "head",
    "q_len": "p.q_len",
    "kv_len": "p.kv_len",
    **{name: f"p.{name}" for name in ("scale_log2", *PATTERN_VARIABLES)},
    **{name: name for name in ("qk", "column", "first_key")},
    "column_of_pair": "column",
}
"""Names of variables in kernels, except for the score."""

_Print = Callable[[Operation, tuple[Term, ...]], Term]


def term_of(node: Node, operands: tuple[Term, ...], score: str) -> Term:
    """A node as C++."""
    if isinstance(node, Literal):
        return replace(number(node.value), text=node.name, binding=Binding.PRIMARY) if node.name else number(node.value)
    if isinstance(node, Variable):
        return Term(VARIABLES.get(node.name, score), "float" if node.type is Type.FLOAT else "int")
    if isinstance(node, Item):
        return _item(node, operands)
    if node.type is Type.FLOAT and node.name != "where":
        operands = tuple(cast(each, "float") if each.literal is not None else each for each in operands)
    return _PRINTED[node.name](node, operands)


def narrowed(node: Node, term: Term) -> Term:
    """Term with the type of its variable: 32 bits if the bounds of its node allow it."""
    return cast(term, "int") if term.ctype == "int64" and not _is_wide(node) else term


def _item(item: Item, indices: tuple[Term, ...]) -> Term:
    """Call of the load function of an element; indices that may be out of bounds are clamped."""
    arguments = [Term("p", "Params")]
    for axis, (size, index) in enumerate(zip(item.aux.dims, indices, strict=True)):
        if is_inside(item, axis):
            arguments.append(index)
            continue
        limit = str(size) if isinstance(size, int) else f"p.aux_{item.aux.name}_size{axis}"
        arguments.append(call("clamp_index", index, Term(limit, "int"), ctype="int"))
    return call(f"load_{item.aux.name}", *arguments, ctype=_of_element(item.aux.dtype))


def _of_element(dtype: str) -> str:
    if DTYPES[dtype] is Type.INT:
        return "int64" if dtype == "int64" else "int"
    return str(DTYPES[dtype])


def _is_never_negative(*nodes: Node) -> bool:
    return all(bounds_of(node).low >= 0 for node in nodes)


def _is_wide(node: Node) -> bool:
    """Whether an integer may exceed 32 bits for some values of its operands."""
    bounds = bounds_of(node)
    return bounds.low < -(2**31) or bounds.high >= 2**31


def _integers(*terms: Term) -> list[Term]:
    """Terms as integers of one type: C++ has no overloads for an int and an int64."""
    of_numbers = [cast(term, "int") if term.ctype == "bool" else term for term in terms]
    wide = any(term.ctype == "int64" for term in of_numbers)
    return [cast(term, "int64") for term in of_numbers] if wide else of_numbers


def _widened(node: Operation, terms: tuple[Term, ...]) -> list[Term]:
    """Operands with one cast to 64 bits if the result may need it: a literal, else the first operand."""
    integers = [cast(term, "int") if term.literal is not None and term.ctype == "bool" else term for term in terms]
    if not _is_wide(node) or any(term.ctype == "int64" for term in integers):
        return integers
    at = next((at for at, term in enumerate(integers) if term.literal is not None), 0)
    return [cast(term, "int64") if place == at else term for place, term in enumerate(integers)]


def _type_of(*terms: Term) -> str:
    types = {term.ctype for term in terms}
    return next((ctype for ctype in ("float", "int64", "int") if ctype in types), "int")


def _arithmetic(node: Operation, terms: tuple[Term, ...]) -> Term:
    """Sum, difference or product; a left shift arrives here as a product."""
    of = list(terms) if node.type is Type.FLOAT else _widened(node, terms)
    return binary("*" if node.name == "<<" else node.name, of[0], of[1], _type_of(*of))


def _quotient(node: Operation, terms: tuple[Term, ...]) -> Term:
    """Floating-point division; of two integers, the first is cast, and C++ converts the second."""
    a, b = terms if _type_of(*terms) == "float" else (cast(terms[0], "float"), terms[1])
    return binary("/", a, b, "float")


def _negative(node: Operation, terms: tuple[Term, ...]) -> Term:
    of = list(terms) if node.type is Type.FLOAT else _widened(node, terms)
    return unary("-", of[0], _type_of(*of))


def _absolute(node: Operation, terms: tuple[Term, ...]) -> Term:
    if node.type is Type.FLOAT:
        return call("fabsf", *terms, ctype="float")
    of = _integers(*_widened(node, terms))
    return call("abs", *of, ctype=_type_of(*of))


def _extreme(node: Operation, terms: tuple[Term, ...]) -> Term:
    if node.type is Type.FLOAT:
        return call(f"expression_{node.name}", *terms, ctype="float")
    of = _integers(*terms)
    return call(node.name, *of, ctype=_type_of(*of))


def _bits_of_power(term: Term) -> int | None:
    """Exponent of a power of two; None for anything else."""
    value = term.literal
    if isinstance(value, bool) or not isinstance(value, int) or value < 1 or value & (value - 1):
        return None
    return value.bit_length() - 1


def _floor(node: Operation, terms: tuple[Term, ...]) -> Term:
    """``//`` or ``%``: one instruction for a power of two; C++'s operator if operands are never negative."""
    bits = _bits_of_power(terms[1])
    if bits is not None:
        return _shifted(terms[0], bits) if node.name == "//" else _lowest(terms[0], bits)
    if _is_never_negative(*node.operands):
        a, b = (cast(term, "int") if term.ctype == "bool" else term for term in terms)
        return binary("/" if node.name == "//" else "%", a, b, _type_of(a, b))
    of = _integers(*_widened(node, terms))
    function = "floor_div" if node.name == "//" else "floor_mod"
    return call(function, *of, ctype=_type_of(*of))


def _shifted(term: Term, bits: int) -> Term:
    """Term shifted to the right, which rounds down; 32-bit shifts are limited to 31."""
    (of,) = _integers(term)
    by = number(bits if of.ctype == "int64" else min(bits, 31))
    return of if bits == 0 else binary(">>", of, by, of.ctype)


def _lowest(term: Term, bits: int) -> Term:
    (of,) = _integers(term)
    mask = number((1 << bits) - 1)
    return binary("&", of, mask, _type_of(of, mask))


def _shift(node: Operation, terms: tuple[Term, ...]) -> Term:
    """``<<`` or ``>>``; a value that may be negative is multiplied, as C++ before 20 cannot shift it to the left."""
    bits = terms[1].literal
    assert isinstance(bits, int)
    if node.name == ">>":
        return _shifted(terms[0], bits)
    if not _is_never_negative(node.operands[0]):
        return _arithmetic(node, (terms[0], number(1 << bits)))
    (value,) = _integers(*_widened(node, terms[:1]))
    value = cast(value, "int64") if bits > 31 else value  # only 0 has a 32-bit result
    return binary("<<", value, number(bits), value.ctype)


def _bitwise(node: Operation, terms: tuple[Term, ...]) -> Term:
    return binary(node.name, terms[0], terms[1], "bool" if node.type is Type.BOOL else _type_of(*terms))


def _inverted(node: Operation, terms: tuple[Term, ...]) -> Term:
    if node.type is Type.BOOL:
        return unary("!", terms[0], "bool")
    return unary("~", terms[0], terms[0].ctype)


def _compared(node: Operation, terms: tuple[Term, ...]) -> Term:
    """Comparison, of floats if an operand is a float; Booleans are compared as numbers, except for equality."""
    types = {term.ctype for term in terms}
    if types == {"bool"} and node.name in ("==", "!="):
        return binary(node.name, terms[0], terms[1], "bool")
    of = [cast(term, "int") if term.ctype == "bool" else term for term in terms]
    if "float" in types:
        of = [cast(term, "float") if term.literal is not None else term for term in of]
    return binary(node.name, of[0], of[1], "bool")


def _logical(node: Operation, terms: tuple[Term, ...]) -> Term:
    """``&`` or ``|`` for and, or: evaluating both operands costs a pair less than the branch of ``&&``."""
    return binary("&" if node.name == "and" else "|", terms[0], terms[1], "bool")


def _chosen(node: Operation, terms: tuple[Term, ...]) -> Term:
    """``where()``: a number and a Boolean give a number, a number and a float give a float."""
    condition, *of = terms
    if node.type is Type.FLOAT:
        of = [cast(term, "float") if term.literal is not None or term.ctype == "bool" else term for term in of]
    elif node.type is Type.INT:
        of = [cast(term, "int") if term.ctype == "bool" else term for term in of]
    return choice(condition, of[0], of[1], "bool" if node.type is Type.BOOL else _type_of(*of))


def _function(node: Operation, terms: tuple[Term, ...]) -> Term:
    return call(f"expression_{node.name}", *terms, ctype="float")


def _inverse_of_1_plus_exp2(node: Operation, terms: tuple[Term, ...]) -> Term:
    del node
    return call("rcp", binary("+", number(1.0), call("ex2", *terms, ctype="float"), "float"), ctype="float")


def _to_int(node: Operation, terms: tuple[Term, ...]) -> Term:
    del node
    if terms[0].ctype == "float":
        return call("to_int", *terms, ctype="int64")
    return cast(terms[0], "int") if terms[0].ctype == "bool" else terms[0]


def _to_float(node: Operation, terms: tuple[Term, ...]) -> Term:
    del node
    return cast(terms[0], "float")


def _to_bool(node: Operation, terms: tuple[Term, ...]) -> Term:
    del node
    if terms[0].ctype == "bool":
        return terms[0]
    return binary("!=", terms[0], number(0, "float" if terms[0].ctype == "float" else "int"), "bool")


_PRINTED: Mapping[str, _Print] = {
    **dict.fromkeys(("+", "-", "*"), _arithmetic),
    "/": _quotient,
    **dict.fromkeys(("//", "%"), _floor),
    **dict.fromkeys(("<<", ">>"), _shift),
    **dict.fromkeys(("&", "|", "^"), _bitwise),
    **dict.fromkeys(("~", "not"), _inverted),
    "neg": _negative,
    **dict.fromkeys(("==", "!=", "<", "<=", ">", ">="), _compared),
    **dict.fromkeys(("and", "or"), _logical),
    **dict.fromkeys(("min", "max"), _extreme),
    "abs": _absolute,
    "where": _chosen,
    **dict.fromkeys(("exp", "tanh", "log2", "sqrt"), _function),
    "exp2": lambda node, terms: call("ex2", *terms, ctype="float"),
    "inverse_of_1_plus_exp2": _inverse_of_1_plus_exp2,
    "int": _to_int,
    "float": _to_float,
    "bool": _to_bool,
}
