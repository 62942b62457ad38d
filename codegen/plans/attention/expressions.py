"""What kernels are given, and what templates print, for the expressions of a spec."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from dataclasses import replace
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
"""What an element of an aux tensor is to a kernel."""
VALUES = {"int32": "int", "int64": "int64", "fp32": "float", "fp16": "float", "bf16": "float", "bool": "bool"}
"""What a kernel makes of it."""
_AXES = "ijkl"
LINE = 110  # letters of a line of a comment
MOST_NODES_SHOWN = 200  # of a derivative, whose text would repeat what its tree shares
# Both were found by trying masks.
PAIR_LOAD_REGISTERS = 14  # of a value that is read for each pair
AUX_REGISTERS = 6  # of a tensor: its address and a stride
SCORE_REGISTERS = 8  # of a score in a forward kernel, at most: it is worked out beside few other values of a pair


def aux_params(spec: AttentionSpec | BlockMaskSpec) -> list[Param]:
    """Return the kernel parameters of the aux tensors: address, strides, and sizes that an index is held to."""
    found: list[Param] = []
    names = [aux.name for aux in spec.aux_tensors]  # those of a mask and of a score, which have not met before
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
    """Template parameters of the mask and the score; for gradients, of the score's derivative too.

    Args:
        spec: of the attention, or of the lists of a mask.
        shared: which parts of a mask the lanes of a warp may work out for each other: a thread has many of a step.
        gradients: whether they are of gradients.
    """
    mask = _expression_flags(spec.pattern.expression)
    score = slope = _expression_flags(None)
    if isinstance(spec, AttentionSpec) and spec.score is not None:
        score = _score_flags(spec.score, spec.pack_gqa)
        slope = _slope_flags(spec.score.slope, spec.score.slope_of_pair) if gradients else slope
    pairs = _expression_flags(spec.pattern.pair_expression, in_one_place=True)
    if isinstance(spec, AttentionSpec) and spec.layout == "varlen":
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
    """Whether lanes of a warp work parts out for each other. Loads are worth a shuffle, arithmetic is not.

    Measured on an H100, one call at a time: shared loads of documents are 10% faster, shared divisions 4% slower.
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
    """Return the expressions of a spec with the helpers that derivatives need too."""
    helpers = {*found.expression_helpers, *(name for each in sums for name in each.slope.helpers)}
    return replace(found, expression_helpers=tuple(name for name in HELPERS if name in helpers))


def _lines(expression: ExpressionFlags) -> tuple[str, ...]:
    return tuple(textwrap.wrap(expression.text, LINE))


def _score_flags(score: Score, pack_gqa: int) -> ExpressionFlags:
    """Return a score as a kernel computes it, times log2(e); its text is the user's."""
    made = _printed_flags(score.log2, rows_have_heads=pack_gqa > 1)
    looks_up_keys = any(_depends_on_key(item) for item in _items(score.expression))
    return replace(made, text=text_of(score.expression), looks_up_keys=looks_up_keys)


def _slope_flags(slope: Node, as_computed: Node) -> ExpressionFlags:
    """Return a derivative of a score as a kernel computes it; empty if it is 1."""
    if slope == ONE:
        return _expression_flags(None)
    short = nodes_of(slope) <= MOST_NODES_SHOWN
    return replace(_printed_flags(as_computed), text=text_of(slope) if short else "see its computation")


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
    """Return an expression as templates print it; of none all is empty."""
    if node is None:
        return ExpressionFlags(text="", row=(), column=(), used_row=(), used_column=(), pair=(), result="", helpers=())
    return replace(_printed_flags(node, in_one_place=in_one_place), text=text_of(node))


def _of_one_sequence(flags: ExpressionFlags) -> ExpressionFlags:
    """An expression whose lengths are those of one packed sequence: the kernel's parameters are of all together."""

    def of_one(text: str) -> str:
        return text.replace("p.q_len", "seqlen.q_len()").replace("p.kv_len", "seqlen.kv_len()")

    parts = tuple(replace(part, value=of_one(part.value)) for part in flags.pair)
    return replace(flags, pair=parts, result=of_one(flags.result))


def _printed_flags(node: Node, *, rows_have_heads: bool = False, in_one_place: bool = False) -> ExpressionFlags:
    """Return an expression as templates print it, without a text."""
    made: Printed = printed(node, rows_have_heads=rows_have_heads, in_one_place=in_one_place)
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
        helpers=tuple(name for name in made.helpers if name != "kMinusInfinity"),  # which kernels have anyway
    )


def expressions_summary(spec: AttentionSpec) -> list[tuple[str, str]]:
    """Return lines for ``explain``: what expressions cost, and which indices of tensors are held to sizes."""
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
    """Allowance of registers for a mask and a score; for gradients, for the score's derivative too."""
    of_mask = 0 if spec.pattern.expression is None else _kept_of(printed(spec.pattern.expression))
    if isinstance(spec, BlockMaskSpec) or spec.score is None:
        return of_mask
    kept = _kept_of(printed(spec.score.log2, rows_have_heads=spec.pack_gqa > 1))
    if not gradients:
        return of_mask + min(kept, SCORE_REGISTERS)
    return of_mask + kept + (0 if spec.score.slope == ONE else _kept_of(printed(spec.score.slope_of_pair)))


def aux_slope_registers(reads: Sequence[Read]) -> int:
    """Allowance of registers for derivatives by elements of aux tensors, one at a time."""
    return max((_kept_of(printed(kernel_form(read.slope))) for read in reads if read.slope != ONE), default=0)


def _kept_of(made: Printed) -> int:
    """Allowance of registers for an expression: for parts of two queries, of a key, and of their pair.

    A load for each pair has its address in 64 bits, and the next ones are under way with it.
    """
    kept = 2 * sum(map(_width, made.row)) + sum(map(_width, made.column + made.pair))
    kept += AUX_REGISTERS * len(made.reads)
    return kept + PAIR_LOAD_REGISTERS * sum("load_" in part.value for part in made.pair)


def _width(part: Statement) -> int:
    return 2 if part.ctype == "int64" else 1
