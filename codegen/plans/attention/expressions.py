"""Kernel parameters and template parameters for the expressions of a spec."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Literal

from codegen.aux_gradients import Read, sums_name
from codegen.errors import SpecError
from codegen.expressions.arithmetic import ONE
from codegen.expressions.bounds import is_inside
from codegen.expressions.cost import cost_of
from codegen.expressions.cuda import HELPERS, Printed, Statement, printed
from codegen.expressions.declared import meets
from codegen.expressions.kernel_form import kernel_form
from codegen.expressions.nodes import Aux, Item, Node, Variable, children, nodes_of
from codegen.expressions.text import text_of
from codegen.flags import AuxFlags, AuxSumFlags, ExpressionFlags, ExpressionsFlags, MaskFlags, PairFlags, ScoreFlags
from codegen.plan import Param, i32, i64, pointer
from codegen.score import Score
from codegen.spec import AttentionSpec, BlockMaskSpec

PARTS, KEYS = "attention/mask_parts", "attention/score_keys"
Side = Literal["row", "column", ""]
"""Of pairs: their queries, their keys, or neither."""
ELEMENTS = {
    "int32": "int",
    "int64": "int64",
    "fp32": "float",
    "fp16": "unsigned short",
    "bf16": "unsigned short",
    "bool": "unsigned char",
}
"""C++ type of the elements of an aux tensor in a kernel."""
VALUES = {"int32": "int", "int64": "int64", "fp32": "float", "fp16": "float", "bf16": "float", "bool": "bool"}
"""C++ type of the value after loading."""
_AXES = "ijkl"
LINE = 110  # characters per line of a comment
MOST_NODES_SHOWN = 200  # of a derivative, whose text repeats parts that its tree shares
# The first two were found by experiments with masks.
PAIR_LOAD_REGISTERS = 14  # per value that is read per pair
AUX_REGISTERS = 6  # per tensor: its address and a stride
SCORE_REGISTERS = 8  # most registers of a score in a forward kernel, where few other values of a pair are live


def aux_params(spec: AttentionSpec | BlockMaskSpec) -> list[Param]:
    """Kernel parameters of the aux tensors: addresses, strides, and sizes for clamped indices."""
    found: list[Param] = []
    names = [aux.name for aux in spec.aux_tensors]  # of the mask and of the score, not checked against each other yet
    for aux in spec.aux_tensors:
        if (other := meets(aux.name, names)) is not None:
            reason = f"collides with the stride or size parameters of {other}: rename one of them"
            raise SpecError(f"score.aux.{aux.name}", reason)
        name = f"aux_{aux.name}"
        found.append(pointer(name, ELEMENTS[aux.dtype], f"{aux.name}, {aux}"))
        each = "stride along {}, in elements (0: shared)"
        found += [i64(f"{name}_stride{axis}", each.format(_AXES[axis])) for axis in range(len(aux.dims))]
        clamped = _clamped(aux, spec)
        found += [i32(f"{name}_size{axis}", f"size along {_AXES[axis]}; indices are clamped to it") for axis in clamped]
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


def expressions_flags(
    spec: AttentionSpec | BlockMaskSpec, shared: Side = "", *, gradients: bool = False
) -> ExpressionsFlags:
    """Template parameters of the mask and the score; for gradients, also of the score's derivative.

    Args:
        spec: spec of an attention or of a block mask.
        shared: places of mask parts that the lanes of a warp may compute for each other.
        gradients: whether the kernel computes gradients.
    """
    mask = _expression_flags(spec.pattern.expression)
    score = slope = _expression_flags(None)
    if isinstance(spec, AttentionSpec) and spec.score is not None:
        score = _score_flags(spec.score, spec.pack_gqa)
        slope = _slope_flags(spec.score.slope, spec.score.slope_of_pair) if gradients else slope
    pairs = _expression_flags(spec.pattern.pair_expression, in_one_place=True)
    if isinstance(spec, AttentionSpec) and spec.layout != "padded":
        pairs = _of_one_sequence(pairs)
    helpers = {*mask.helpers, *score.helpers, *slope.helpers}
    return ExpressionsFlags(
        mask=MaskFlags(
            mask_expression=mask,
            mask_lines=_lines(mask),
            shares_row_parts=_shares(mask.row if shared == "row" else ()),
            shares_column_parts=_shares(mask.column if shared == "column" else ()),
        ),
        pairs=PairFlags(pairs, _lines(pairs)),
        score=ScoreFlags(score, _lines(score), slope, _lines(slope)),
        expression_helpers=tuple(name for name in HELPERS if name in helpers),
        aux=tuple(_aux_flags(aux) for aux in spec.aux_tensors),
    )


def _shares(parts: Sequence[Statement]) -> bool:
    """Whether the lanes of a warp compute parts for each other: a load is worth a shuffle, arithmetic is not.

    Measured on an H100, one call at a time: sharing the loads of document ids is 10% faster, sharing divisions is 4%
    slower.
    """
    return any("load_" in part.value for part in parts)


def aux_sum_flags(reads: Sequence[Read]) -> tuple[AuxSumFlags, ...]:
    """Template parameters of the elements whose gradients are summed."""
    found: list[AuxSumFlags] = []
    for number, read in enumerate(reads):
        slope = _slope_flags(read.slope, kernel_form(read.slope))
        name, element = sums_name(reads, number), text_of(read.item)
        found.append(AuxSumFlags(name, number, element, read.lines, slope, _lines(slope)))
    return tuple(found)


def with_helpers_of(found: ExpressionsFlags, sums: Sequence[AuxSumFlags]) -> ExpressionsFlags:
    """Expressions of a spec, with the helpers of derivatives added."""
    helpers = {*found.expression_helpers, *(name for each in sums for name in each.slope.helpers)}
    return replace(found, expression_helpers=tuple(name for name in HELPERS if name in helpers))


def _lines(expression: ExpressionFlags) -> tuple[str, ...]:
    return tuple(textwrap.wrap(expression.text, LINE))


def _score_flags(score: Score, pack_gqa: int) -> ExpressionFlags:
    """Score in kernel form, times log2(e); its text is that of the user."""
    made = _printed_flags(score.printed_log2(rows_have_heads=pack_gqa > 1))
    looks_up_keys = any(_depends_on_key(item) for item in _items(score.expression))
    return replace(made, text=text_of(score.expression), looks_up_keys=looks_up_keys)


def _slope_flags(slope: Node, as_computed: Node) -> ExpressionFlags:
    """Derivative of a score in kernel form; empty if it is 1."""
    if slope == ONE:
        return _expression_flags(None)
    short = nodes_of(slope) <= MOST_NODES_SHOWN
    return replace(_printed_flags(printed(as_computed)), text=text_of(slope) if short else "see its computation")


def _depends_on_key(node: Node) -> bool:
    return node == Variable("kv_idx") or any(map(_depends_on_key, children(node)))


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


def _expression_flags(node: Node | None, *, in_one_place: bool = False) -> ExpressionFlags:
    """Flags of an expression; empty for None."""
    if node is None:
        return ExpressionFlags(text="", row=(), column=(), used_row=(), used_column=(), pair=(), result="", helpers=())
    return replace(_printed_flags(_printed(node, in_one_place=in_one_place)), text=text_of(node))


def _of_one_sequence(flags: ExpressionFlags) -> ExpressionFlags:
    """An expression with the lengths of one packed sequence; the kernel's parameters have the totals."""

    def of_one(text: str) -> str:
        return text.replace("p.q_len", "seqlen.q_len()").replace("p.kv_len", "seqlen.kv_len()")

    parts = tuple(replace(part, value=of_one(part.value)) for part in flags.pair)
    return replace(flags, pair=parts, result=of_one(flags.result))


@lru_cache(maxsize=256)
def _printed(node: Node, *, in_one_place: bool = False) -> Printed:
    """Print an expression of a spec. Plans of many tiles print the same one."""
    return printed(node, in_one_place=in_one_place)


def _printed_flags(made: Printed) -> ExpressionFlags:
    """Flags of an expression, without its text."""
    words = set(re.findall(r"\w+", " ".join([made.result, *(part.value for part in made.pair)])))
    used_row, used_column = (tuple(part for part in parts if part.name in words) for parts in (made.row, made.column))
    return ExpressionFlags(
        text="",
        row=made.row,
        column=made.column,
        used_row=used_row,
        used_column=used_column,
        pair=made.pair,
        result=made.result,
        helpers=tuple(name for name in made.helpers if name != "kMinusInfinity"),  # every kernel has it
    )


def expressions_summary(spec: AttentionSpec) -> list[tuple[str, str]]:
    """Lines for ``explain``: the cost of expressions, and which tensor indices are clamped."""
    node = spec.pattern.expression
    lines = [] if node is None else [("mask", f"{cost_of(node)}; evaluated in partial blocks")]
    if spec.score is not None:
        lines.append(("score", f"{cost_of(spec.score.log2)}; {text_of(spec.score.expression)}"))
    for aux in spec.aux_tensors:
        held = ", ".join(_AXES[axis] for axis in _clamped(aux, spec))
        inside = f"{held} clamped to its size" if held else "always in range"
        index = f"; indices {', '.join(_AXES[: len(aux.dims)])}: {inside}" if aux.dims else ""
        lines.append((f"aux {aux.name}", f"{aux}{index}"))
    return lines


def expression_registers(spec: AttentionSpec | BlockMaskSpec, *, gradients: bool = False) -> int:
    """Registers to allow for a mask and a score; for gradients, also for the score's derivative."""
    of_mask = 0 if spec.pattern.expression is None else _kept_of(_printed(spec.pattern.expression))
    if isinstance(spec, BlockMaskSpec) or spec.score is None:
        return of_mask
    kept = _kept_of(spec.score.printed_log2(rows_have_heads=spec.pack_gqa > 1))
    if not gradients:
        return of_mask + min(kept, SCORE_REGISTERS)
    return of_mask + kept + (0 if spec.score.slope == ONE else _kept_of(printed(spec.score.slope_of_pair)))


def aux_slope_registers(reads: Sequence[Read]) -> int:
    """Registers to allow for derivatives with respect to elements of aux tensors, one at a time."""
    return max((_kept_of(printed(kernel_form(read.slope))) for read in reads if read.slope != ONE), default=0)


def _kept_of(made: Printed) -> int:
    """Registers to allow for an expression: parts of two queries, of a key, and of their pair.

    A load per pair has a 64-bit address, and the next loads are in flight with it.
    """
    kept = 2 * sum(map(_width, made.row)) + sum(map(_width, made.column + made.pair))
    kept += AUX_REGISTERS * len(made.reads)
    return kept + PAIR_LOAD_REGISTERS * sum("load_" in part.value for part in made.pair)


def _width(part: Statement) -> int:
    return 2 if part.ctype == "int64" else 1
