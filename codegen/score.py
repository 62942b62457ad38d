"""The transform of attention logits before the softmax: an expression of a spec."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import Any

from pydantic import Field, SerializerFunctionWrapHandler, ValidationInfo, field_validator, model_serializer

from codegen.expressions.arithmetic import as_float
from codegen.expressions.bounds import divides_by_zero
from codegen.expressions.cuda import Printed, printed
from codegen.expressions.derivative import derivative
from codegen.expressions.kernel_form import LOG2_E, kernel_form
from codegen.expressions.nodes import Aux, ExpressionError, Node, Type, Variable
from codegen.expressions.parse import check_used, parse_aux, parse_expression
from codegen.expressions.text import text_of
from codegen.patterns.base import SpecModel

Declared = tuple[tuple[str, str], ...]


class Score(SpecModel):
    """Transform of the logit of each visible pair, scale * q.k, in fp32.

    An expression over ``score``, ``q_idx``, ``kv_idx``, ``batch``, ``head``, ``q_len``, ``kv_len`` and the tensors that
    ``aux`` declares (docs/reference/expressions.md).
    """

    aux: dict[str, str] = Field(
        default={}, description="tensors of the expression, by name: fp32[heads], fp16[heads, 2047], ..."
    )
    value: str = Field(description="expression that replaces the logit in the softmax")

    def __hash__(self) -> int:
        return hash((self.value, *self.aux.items()))

    @field_validator("aux")
    @classmethod
    def _in_one_spelling(cls, aux: dict[str, str]) -> dict[str, str]:
        try:
            return {name: str(tensor) for name, tensor in sorted(parse_aux(aux).items())}
        except ExpressionError as error:
            raise ValueError(str(error)) from None

    @field_validator("value")
    @classmethod
    def _is_score(cls, value: str, info: ValidationInfo) -> str:
        aux = info.data.get("aux")  # missing if it is invalid itself
        return value if aux is None else _checked(value, tuple(aux.items()))

    @model_serializer(mode="wrap")
    def _without_unused(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Omit an empty ``aux``."""
        found: dict[str, Any] = serialize(self)
        if not self.aux:
            found.pop("aux", None)
        return found

    @property
    def expression(self) -> Node:
        """The value as a tree."""
        return _parsed(self.value, self._declared)[0]

    @property
    def aux_tensors(self) -> tuple[Aux, ...]:
        """Tensors of the expression, sorted by name."""
        return _parsed(self.value, self._declared)[1]

    @property
    def log2(self) -> Node:
        """log2(e) times the value, in kernel form, for 2^x."""
        return _forms(self.value, self._declared)[0]

    @property
    def slope(self) -> Node:
        """Derivative of the value with respect to the score, as a tree."""
        return _forms(self.value, self._declared)[1]

    @property
    def slope_of_pair(self) -> Node:
        """The derivative, in kernel form."""
        return _forms(self.value, self._declared)[2]

    @property
    def looks_up_pairs(self) -> bool:
        """Whether a tensor element is read per pair: loads in flight take registers."""
        return any("load_" in part.value for part in self.printed_log2().pair)

    def printed_log2(self, *, rows_have_heads: bool = False) -> Printed:
        """``log2`` as CUDA; with ``rows_have_heads``, adjacent rows belong to several heads."""
        return _printed(self.value, self._declared, rows_have_heads)

    def stem(self) -> str:
        """Short unique name of the expression."""
        return "score" + hashlib.sha256(f"{self.value} {self.aux}".encode()).hexdigest()[:6]

    @property
    def _declared(self) -> Declared:
        return tuple(self.aux.items())


@lru_cache(maxsize=256)
def _parsed(value: str, declared: Declared) -> tuple[Node, tuple[Aux, ...]]:
    """Tree of the expression, and the declared tensors."""
    aux = parse_aux(dict(declared))
    return parse_expression(value, aux, score=True), tuple(aux.values())


@lru_cache(maxsize=256)
def _forms(value: str, declared: Declared) -> tuple[Node, Node, Node]:
    node = as_float(_parsed(value, declared)[0])
    slope = derivative(node, Variable("score"))
    return kernel_form(node, LOG2_E), slope, kernel_form(slope)


@lru_cache(maxsize=256)
def _printed(value: str, declared: Declared, rows_have_heads: bool) -> Printed:
    return printed(_forms(value, declared)[0], rows_have_heads=rows_have_heads)


@lru_cache(maxsize=256)
def _checked(value: str, given: Declared) -> str:
    """Canonical text of an expression.

    Raises:
        ValueError: for an invalid or Boolean expression, or an unused tensor.
    """
    declared = parse_aux(dict(given))
    try:
        node = parse_expression(value, declared, score=True)
        check_used(declared, node)
    except ExpressionError as error:
        raise ValueError(f"{error}; expected an expression, such as score + bias[head, q_idx, kv_idx]") from None
    if node.type is Type.BOOL:
        raise ValueError(
            "its value is a Boolean; expected a number, such as where(condition, score, -inf), which hides pairs"
        )
    if (divisor := divides_by_zero(node)) is not None:
        raise ValueError(f"{text_of(divisor)} may divide by zero; divide by max(divisor, 1)")
    try:
        _forms(text_of(node), tuple((name, str(tensor)) for name, tensor in sorted(declared.items())))
    except RecursionError:  # a derivative is deeper than its expression
        raise ValueError("its derivative is nested too deeply: use fewer nested operators") from None
    return text_of(node)
