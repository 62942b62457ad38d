"""Pieces of C++: text, precedence and type of an operator, name or number."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from enum import IntEnum

from codegen.expressions.nodes import ExpressionError
from codegen.wording import shown


class Binding(IntEnum):
    """Precedence of the outermost operator of a term in C++; higher binds tighter."""

    CHOICE = 2
    OR = 3
    AND = 4
    BITS_OR = 5
    BITS_XOR = 6
    BITS_AND = 7
    EQUALITY = 8
    ORDER = 9
    SHIFT = 11
    SUM = 12
    PRODUCT = 13
    UNARY = 14
    PRIMARY = 15


@dataclass(frozen=True)
class Term:
    """A piece of C++.

    Attributes:
        text: the piece.
        ctype: bool, int, int64 or float. A bool may be an int of 0 or 1 in C++.
        binding: precedence of its outermost operator.
        literal: its value, if it is a literal.
    """

    text: str
    ctype: str
    binding: Binding = Binding.PRIMARY
    literal: bool | int | float | None = None

    def within(self, least: Binding) -> str:
        """Text as an operand of at least this precedence, in parentheses if needed."""
        return self.text if self.binding >= least else f"({self.text})"


BINDINGS = {
    **{"||": Binding.OR, "&&": Binding.AND, "|": Binding.BITS_OR, "^": Binding.BITS_XOR, "&": Binding.BITS_AND},
    **dict.fromkeys(("==", "!="), Binding.EQUALITY),
    **dict.fromkeys(("<", "<=", ">", ">="), Binding.ORDER),
    **dict.fromkeys(("<<", ">>"), Binding.SHIFT),
    **dict.fromkeys(("+", "-"), Binding.SUM),
    **dict.fromkeys(("*", "/", "%"), Binding.PRODUCT),
}
# Operands of lower precedence get parentheses. gcc warns about some that C++ does not need: sums in shifts, && in
# ||, comparisons of comparisons, anything below a product in & ^ |.
_LEAST_OF_OPERANDS = {
    Binding.OR: Binding.BITS_OR,
    Binding.AND: Binding.BITS_OR,
    Binding.BITS_OR: Binding.PRODUCT,
    Binding.BITS_XOR: Binding.PRODUCT,
    Binding.BITS_AND: Binding.PRODUCT,
    Binding.EQUALITY: Binding.SHIFT,
    Binding.ORDER: Binding.SHIFT,
    Binding.SHIFT: Binding.PRODUCT,
    Binding.SUM: Binding.SUM,
    Binding.PRODUCT: Binding.PRODUCT,
}
_ASSOCIATIVE = (Binding.OR, Binding.AND, Binding.BITS_OR, Binding.BITS_XOR, Binding.BITS_AND)
_NO_NOT = (Binding.BITS_OR, Binding.BITS_XOR, Binding.BITS_AND, Binding.EQUALITY, Binding.ORDER)


def binary(operator: str, a: Term, b: Term, ctype: str) -> Term:
    """Binary operator, with the parentheses that C++ and gcc's warnings require."""
    binding = BINDINGS[operator]
    left, right = (_operand(binding, term, is_right=is_right) for term, is_right in ((a, False), (b, True)))
    return Term(f"{left} {operator} {right}", ctype, binding)


def _operand(binding: Binding, term: Term, *, is_right: bool) -> str:
    if binding in _NO_NOT and term.text.startswith("!") and term.binding is Binding.UNARY:
        return f"({term.text})"
    if term.binding is binding and binding in _ASSOCIATIVE:
        return term.text
    least = _LEAST_OF_OPERANDS[binding]
    if is_right and least is binding:
        least = Binding(binding + 1)
    return term.within(least)


def unary(operator: str, a: Term, ctype: str) -> Term:
    """Unary operator; two signs never touch."""
    return Term(operator + a.within(Binding.PRIMARY), ctype, Binding.UNARY)


def choice(condition: Term, one: Term, other: Term, ctype: str) -> Term:
    """Conditional operator."""
    at_least = Binding(Binding.CHOICE + 1)
    text = f"{condition.within(at_least)} ? {one.within(at_least)} : {other.within(Binding.CHOICE)}"
    return Term(text, ctype, Binding.CHOICE)


def call(function: str, *arguments: Term, ctype: str) -> Term:
    """Call of a function."""
    return Term(f"{function}({', '.join(argument.text for argument in arguments)})", ctype)


def number(value: bool | int | float, ctype: str = "") -> Term:
    """Number, of its own type or of ``ctype``.

    Raises:
        ExpressionError: for an integer of more than 64 bits.
    """
    if isinstance(value, float) or ctype == "float":
        return _floating(value)
    if isinstance(value, bool) and ctype in ("", "bool"):
        return Term("true" if value else "false", "bool", literal=value)
    return _integer(int(value), wide=ctype == "int64")


def _integer(value: int, *, wide: bool) -> Term:
    if not -(2**63) <= value < 2**63:
        raise ExpressionError(f"{shown(value)} is not an integer of 64 bits")
    wide = wide or not -(2**31) <= value < 2**31
    ctype, suffix = ("int64", "LL") if wide else ("int", "")
    if value in (-(2**63), -(2**31)):  # in C++ the negation of a number that overflows its type
        return Term(f"{value + 1}{suffix} - 1", ctype, Binding.SUM, value)
    return Term(f"{value}{suffix}", ctype, Binding.UNARY if value < 0 else Binding.PRIMARY, value)


def as_float32(value: float) -> float:
    """Nearest float32; integers of any size are rounded once."""
    if isinstance(value, int) and abs(value) >= 2**53:
        rest = abs(value).bit_length() - 53
        sticky = int(abs(value) & ((1 << rest) - 1) != 0)  # avoids double rounding at ties
        value = math.copysign(float((abs(value) >> rest | sticky) << rest), value)
    try:
        return float(struct.unpack("f", struct.pack("f", value))[0])
    except OverflowError:
        return math.copysign(math.inf, value)


def _floating(value: float) -> Term:
    exact = as_float32(value)
    if math.isnan(exact):
        return Term("kNan", "float", literal=exact)
    if math.isinf(exact):
        return Term("kInfinity" if exact > 0 else "kMinusInfinity", "float", literal=exact)
    texts = (f"{exact:.{digits}g}" for digits in range(1, 10))  # nine digits distinguish all of them
    text = next(repr(float(text)) for text in texts if as_float32(float(text)) == exact)
    return Term(f"{text}f", "float", Binding.UNARY if text.startswith("-") else Binding.PRIMARY, exact)


def cast(term: Term, ctype: str) -> Term:
    """Term converted to another type; a literal is rewritten."""
    if term.ctype == ctype:
        return term
    if term.literal is not None and ctype != "bool" and not (term.ctype == "float" and ctype != "float"):
        return number(term.literal, ctype)
    return Term(f"static_cast<{ctype}>({term.text})", ctype)
