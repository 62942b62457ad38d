"""Users' masks and scores in the form of specs: a text, declarations of its tensors, and the tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch

from codegen.expressions.nodes import MOST_DIMS, Aux, ExpressionError, check_size
from codegen.expressions.parse import parse_aux, parse_expression
from codegen.expressions.text import text_of
from codegen.wording import shown
from runtime.errors import ArgumentError
from runtime.expressions.captured import settled
from runtime.expressions.dtypes import NAMES, TORCH_DTYPES
from runtime.expressions.graphs import constant, constant_in_graphs
from runtime.expressions.trace import Traced, trace_mask, trace_score


@dataclass(frozen=True)
class Expression:
    """A mask or a score in the form of a spec.

    Attributes:
        text: the expression in canonical spelling.
        declared: declarations of its tensors, sorted by name: "int32[batch, q_len]".
        tensors: the tensors, sorted by name.
    """

    text: str
    declared: dict[str, str]
    tensors: dict[str, torch.Tensor]


def mask_of(
    mask: str | Callable[..., Any],
    aux: Mapping[str, torch.Tensor] | None,
    sizes: Mapping[str, int] | None = None,
) -> Expression:
    """Make an expression from a text with its tensors, or from a FlexAttention function.

    Args:
        mask: an expression (docs/reference/expressions.md), or ``mask_mod(b, h, q_idx, kv_idx)``.
        aux: the tensors that a text names; a function captures its own.
        sizes: batch, heads, q_len and kv_len, if they are known: tensors of a function may be longer.

    Raises:
        ArgumentError: naming ``mask`` or ``aux``.
    """
    if isinstance(mask, str):
        return _of_text("mask", mask, aux)
    return _of_function("mask", partial(trace_mask, sizes=sizes), mask, aux)


def score_of(
    score: str | Callable[..., Any],
    aux: Mapping[str, torch.Tensor] | None,
    sizes: Mapping[str, int] | None = None,
) -> Expression:
    """``mask_of`` for a score.

    Args:
        score: an expression, or ``score_mod(score, b, h, q_idx, kv_idx)``.
        aux: the tensors that a text names; a function captures its own.
        sizes: as in ``mask_of``.

    Raises:
        ArgumentError: naming ``score`` or ``aux``.
    """
    if isinstance(score, str):
        return _of_text("score", score, aux)
    return _of_function("score", partial(trace_score, sizes=sizes), score, aux)


def _of_function(
    what: str, trace: Callable[[Any], Traced], function: Any, aux: Mapping[str, torch.Tensor] | None
) -> Expression:
    if aux:
        raise ArgumentError("aux", f"is given, but {what} is a function, which captures its own tensors")
    traced = trace(function)
    return _made(traced.node, traced.aux, traced.tensors)


def _of_text(what: str, text: str, aux: Mapping[str, torch.Tensor] | None) -> Expression:
    tensors = {} if aux is None else dict(aux)
    if torch.compiler.is_dynamo_compiling():
        found, declared, sources = _read_in_a_graph(what, text, tensors)
        return Expression(found, declared, {name: tensors[source] for name, source in sources.items()})
    try:
        found, declared, sources = _read(what, text, tuple(_declared(*each) for each in tensors.items()))
    except ExpressionError as error:
        raise ArgumentError(what, f"is {shown(text)}: {error}") from None
    return Expression(found, dict(declared), {name: tensors[source] for name, source in sources.items()})


def _read_in_a_graph(
    what: str, text: str, tensors: Mapping[str, torch.Tensor]
) -> tuple[str, dict[str, str], dict[str, str]]:
    """``_read`` while torch.compile traces, generic in all sizes that do not affect the result."""
    names = {name: NAMES[tensor.dtype] for name, tensor in tensors.items()}
    dims = {name: [_ANY - i for i in range(tensor.dim())] for name, tensor in tensors.items()}
    kept = _kept(what, text, names, dims).split()
    sizes = {
        name: [constant(tensor.shape[i]) if f"{name}.{i}" in kept else _ANY - i for i in range(tensor.dim())]
        for name, tensor in tensors.items()
    }
    found, *lines = _read_constants(what, text, names, sizes).split("\n")
    each = [line.split("\t") for line in lines]
    return found, {name: of for name, of, _ in each}, {name: source for name, _, source in each}


_ANY = 999_999_937
"""Base of placeholders for sizes; no user's text contains such numbers."""


@constant_in_graphs
def _read_constants(what: str, text: str, names: dict[str, str], dims: dict[str, list[int]]) -> str:
    """``_read`` for tensors of these dtypes and sizes; the result is lines, because torch.compile passes only texts.

    Raises:
        ArgumentError: if the text is invalid.
    """
    given = tuple(Aux(name, names[name], tuple(dims[name])) for name in names)
    try:
        found, declared, sources = _read(what, text, given)
    except ExpressionError as error:
        raise ArgumentError(what, f"is {shown(text)}: {error}") from None
    return "\n".join([found, *(f"{name}\t{of}\t{sources[name]}" for name, of in declared.items())])


@constant_in_graphs
def _kept(what: str, text: str, names: dict[str, str], dims: dict[str, list[int]]) -> str:
    """Tensors and dimensions whose sizes appear in the result of ``_read``: "name.0 name.1"."""
    found, *lines = _read_constants(what, text, names, dims).split("\n")
    places = [(name, i) for name, sizes in dims.items() for i in range(len(sizes))]
    of = {name: "".join(line for line in lines if line.endswith(f"\t{name}")) for name in names}
    return " ".join(f"{name}.{i}" for name, i in places if str(dims[name][i]) in f"{of[name]} {found}")


class _Named(NamedTuple):
    """Placeholder of a tensor while a text is parsed."""

    source: str
    dtype: torch.dtype


@lru_cache(maxsize=256)  # a text is parsed once per shape of its tensors, because parsing is too slow for every call
def _read(what: str, text: str, given: tuple[Aux, ...]) -> tuple[str, dict[str, str], dict[str, str]]:
    """The text in canonical spelling, its tensors' declarations, and the given tensor of each declaration."""
    parse_aux({each.name: str(each) for each in given})
    node = parse_expression(text, {each.name: each for each in given}, score=what == "score")
    check_size(node)
    in_place: dict[str, Any] = {each.name: _Named(each.name, TORCH_DTYPES[each.dtype]) for each in given}
    tree, declared, sources = settled(node, in_place, {})
    found = _made(tree, declared, sources)
    named: Any = found.tensors
    return found.text, found.declared, {name: each.source for name, each in named.items()}


def _declared(name: str, tensor: Any) -> Aux:
    """Declaration of a tensor with the numbers of its shape as sizes."""
    where = f"aux[{name!r}]"
    if not isinstance(tensor, torch.Tensor):
        raise ArgumentError(where, f"is {type(tensor).__name__}, expected a torch.Tensor")
    if tensor.dtype not in NAMES:
        raise ArgumentError(where, f"is {tensor.dtype}, expected one of {', '.join(map(str, NAMES))}")
    if tensor.dim() > MOST_DIMS or tensor.numel() == 0:
        shape = tuple(tensor.shape)
        raise ArgumentError(where, f"has shape {shape}, expected at most {MOST_DIMS} dimensions, none of size 0")
    return Aux(name, NAMES[tensor.dtype], tuple(tensor.shape))


def _made(node: Any, aux: Mapping[str, Aux], tensors: Mapping[str, torch.Tensor]) -> Expression:
    declared = {name: str(aux[name]) for name in sorted(aux)}
    return Expression(text_of(node), declared, {name: tensors[name] for name in declared})
