"""What kernels are given, and what templates print, for the expressions of a spec."""

from __future__ import annotations

import re
import textwrap

from codegen.expressions.bounds import is_inside
from codegen.expressions.cuda import Printed, Statement, printed
from codegen.expressions.nodes import Aux, Item, Node, children
from codegen.expressions.text import text_of
from codegen.flags import AuxFlags, ExpressionFlags, MaskFlags
from codegen.plan import Param, i32, i64, pointer
from codegen.spec import AttentionSpec, BlockMaskSpec

ELEMENTS = {
    "int32": "int",
    "int64": "int64",
    "fp32": "float",
    "fp16": "unsigned short",
    "bf16": "unsigned short",
    "bool": "unsigned char",
}
"""What an element of an aux tensor is to a kernel."""
VALUES = {"int32": "int", "int64": "int64", "fp32": "float", "fp16": "float", "bf16": "float", "bool": "bool"}
"""What a kernel makes of it."""
_AXES = "ijkl"
LINE = 110  # letters of a line of a comment
# Both were found by trying masks: with them no kernel of tests/compile/test_expressions.py spills.
PAIR_LOAD_REGISTERS = 14  # of a value that is read for each pair
AUX_REGISTERS = 6  # of a tensor: its address and a stride


def aux_params(spec: AttentionSpec | BlockMaskSpec) -> list[Param]:
    """Return the kernel parameters of the aux tensors: address, strides, and sizes that an index is held to."""
    found: list[Param] = []
    for aux in spec.aux_tensors:
        name = f"aux_{aux.name}"
        found.append(pointer(name, ELEMENTS[aux.dtype], f"{aux.name}, {aux}"))
        each = "elements from one {} to the next (0: shared)"
        found += [i64(f"{name}_stride{axis}", each.format(_AXES[axis])) for axis in range(len(aux.dims))]
        clamped = _clamped(aux, spec)
        found += [i32(f"{name}_size{axis}", f"{_AXES[axis]} is less: an index is held to it") for axis in clamped]
    return found


def _clamped(aux: Aux, spec: AttentionSpec | BlockMaskSpec) -> tuple[int, ...]:
    items = [item for node in spec.expressions for item in _items(node) if item.aux == aux]
    return tuple(axis for axis in range(len(aux.dims)) if not all(is_inside(item, axis) for item in items))


def _items(node: Node) -> list[Item]:
    found, left = [], [node]
    while left:
        each = left.pop()
        found += [each] if isinstance(each, Item) else []
        left += children(each)
    return found


def mask_flags(spec: AttentionSpec | BlockMaskSpec) -> MaskFlags:
    """Return what templates ask of a mask that is an expression."""
    made = _expression_flags(spec.pattern.expression)
    return MaskFlags(
        mask_expression=made,
        mask_lines=tuple(textwrap.wrap(made.text, LINE)),
        aux=tuple(_aux_flags(aux) for aux in spec.aux_tensors),
    )


def _aux_flags(aux: Aux) -> AuxFlags:
    axes = _AXES[: len(aux.dims)]
    name = f"aux_{aux.name}"
    return AuxFlags(
        name=aux.name,
        declared=str(aux),
        dtype=aux.dtype,
        value=VALUES[aux.dtype],
        parameters="".join(f", int {axis}" for axis in axes),
        place="".join(f" + {axis} * p.{name}_stride{place}" for place, axis in enumerate(axes)),
    )


def _expression_flags(node: Node | None) -> ExpressionFlags:
    """Return an expression as templates print it; of none all is empty."""
    if node is None:
        return ExpressionFlags(text="", row=(), column=(), used_row=(), used_column=(), pair=(), result="", helpers=())
    made: Printed = printed(node)
    words = set(re.findall(r"\w+", " ".join([made.result, *(part.value for part in made.pair)])))
    used_row, used_column = (tuple(part for part in parts if part.name in words) for parts in (made.row, made.column))
    return ExpressionFlags(
        text=text_of(node),
        row=made.row,
        column=made.column,
        used_row=used_row,
        used_column=used_column,
        pair=made.pair,
        result=made.result,
        helpers=tuple(name for name in made.helpers if name != "kMinusInfinity"),  # which kernels have anyway
    )


def expression_registers(spec: AttentionSpec | BlockMaskSpec) -> int:
    """Return an allowance for what a thread keeps of a mask: parts of two queries, of a key, and of their pair.

    A load for each pair has its address in 64 bits, and the next ones are under way with it.
    """
    if spec.pattern.expression is None:
        return 0
    made = printed(spec.pattern.expression)
    kept = 2 * sum(map(_width, made.row)) + sum(map(_width, made.column + made.pair))
    kept += AUX_REGISTERS * len(made.reads)
    return kept + PAIR_LOAD_REGISTERS * sum("load_" in part.value for part in made.pair)


def _width(part: Statement) -> int:
    return 2 if part.ctype == "int64" else 1
