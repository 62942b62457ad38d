"""Captured tensors of a function: their names and the lookups in them."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from types import FrameType, ModuleType
from typing import Any

import torch

from codegen.expressions.declared import MOST_NAME, meets, wrong_name
from codegen.expressions.nodes import (
    DTYPES,
    MOST_DIMS,
    SIZES,
    Aux,
    ExpressionError,
    Item,
    Literal,
    Node,
    Operation,
    Type,
    Variable,
    children,
    item,
)
from codegen.wording import shown
from runtime.expressions.dtypes import NAMES
from runtime.expressions.order import operands_first

_SIZE_OF = {variable: size for size, variable in SIZES.items()}
_SHORT = {"q_idx": "q", "kv_idx": "kv"}
_Dims = tuple[str | int, ...]
_TAKEN = {*SIZES, *DTYPES}
_MOST_OF_NAME = MOST_NAME - 2  # a number may be appended


class Captured:
    """The captured tensors, in the order of their first use."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}

    def named(self, tensor: torch.Tensor, frames: Iterable[FrameType]) -> Aux:
        """Get the aux tensor of a captured tensor, with the numbers of its shape as dims.

        Raises:
            ExpressionError: if kernels do not support lookups in the tensor.
        """
        for name, known in self.tensors.items():
            if known is tensor:
                return self._aux(name)
        found = next((name for frame in frames for name in _names_of(tensor, frame)), "")
        if tensor.dtype not in NAMES:
            known_ones = ", ".join(map(str, NAMES))
            raise ExpressionError(f"captures a tensor of {tensor.dtype}{_called(found)}, expected one of {known_ones}")
        if tensor.is_nested:
            raise ExpressionError(f"captures a nested tensor{_called(found)}, expected a dense one")
        if tensor.ndim > MOST_DIMS or tensor.numel() == 0 or tensor.layout != torch.strided:
            what = f"the shape {shown(tuple(tensor.shape))} and the layout {tensor.layout}"
            raise ExpressionError(
                f"captures a tensor{_called(found)} of {what}; expected a dense one,"
                f" at most {MOST_DIMS} dims, none of size 0"
            )
        name = self._free(found)
        self.tensors[name] = tensor
        return self._aux(name)

    def _aux(self, name: str) -> Aux:
        tensor = self.tensors[name]
        return Aux(name, NAMES[tensor.dtype], tuple(tensor.shape))

    def _free(self, wanted: str) -> str:
        """An unused name: the wanted one, the wanted one with a number, or aux with a number."""
        if wanted and _is_free(wanted, self.tensors):
            return wanted
        number = 2 if wanted else 0
        while not _is_free(f"{wanted or 'aux'}{number}", self.tensors):
            number += 1
        return f"{wanted or 'aux'}{number}"


def _is_free(name: str, taken: Collection[str]) -> bool:
    """Whether a name is unused and does not collide with stride or size names of other tensors in a source."""
    return name not in taken and meets(name, taken) is None and all(meets(other, {name}) is None for other in taken)


def _called(name: str) -> str:
    return f" ({name})" if name else ""


def _names_of(tensor: torch.Tensor, frame: FrameType) -> Iterator[str]:
    """Yield the names of a tensor inside a function: captured names first, then local ones."""
    code, local = frame.f_code, frame.f_locals
    places = [(name, local) for name in code.co_freevars]
    places += [(name, frame.f_globals) for name in code.co_names]
    places += [(name, local) for name in (*code.co_varnames, *code.co_cellvars)]
    for name, values in places:
        for inner, value in _values(name, values.get(name)):
            if value is tensor and _is_name(inner):
                yield inner


def _values(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield a value and its named parts: attributes, a module's parameters and buffers, keys, elements."""
    yield name, value
    if isinstance(value, list | tuple):
        yield from ((f"{name}{number}", each) for number, each in enumerate(value))
    held = [] if isinstance(value, ModuleType | torch.Tensor | type) else [value, getattr(value, "__dict__", None)]
    held += [getattr(value, each, None) for each in ("_parameters", "_buffers")] if len(held) > 1 else []
    for each in held:
        if isinstance(each, dict):
            yield from ((inner, one) for inner, one in each.items() if isinstance(inner, str))


def _is_name(name: str) -> bool:
    taken = name in _TAKEN or re.fullmatch(r"aux\d*", name)
    return not taken and not wrong_name(name) and len(name) <= _MOST_OF_NAME


def from_the_start(index: Node, size: int) -> Node:
    """Convert torch's index to an expression's index: a negative one counts from the end.

    Raises:
        ExpressionError: if a constant index is out of range.
    """
    if isinstance(index, Literal):
        if not -size <= index.value < size:
            raise ExpressionError(f"has the index {index.value} in a dim of {size}")
        return Literal(int(index.value) % size)
    if index.type is not Type.INT or _is_never_negative(index):
        return index
    at_end = Operation("+", (index, Literal(size)), Type.INT)
    return Operation("where", (Operation("<", (index, Literal(0)), Type.BOOL), at_end, index), Type.INT)


_AS_THEIR_OPERANDS = {"+", "*", "//", "min", "|", "^", "<<", ">>", "int", "float"}
"""Operations whose result is nonnegative for nonnegative operands."""


def _is_never_negative(node: Node) -> bool:
    known: dict[int, bool] = {}
    for each in operands_first(node):
        operands = [known[id(one)] for one in children(each)]
        if isinstance(each, Operation):
            known[id(each)] = each.type is Type.BOOL or _makes_no_negative(each.name, operands)
        elif isinstance(each, Literal):
            known[id(each)] = each.value >= 0
        else:
            known[id(each)] = each.type is Type.BOOL or (isinstance(each, Variable) and each.name != "score")
    return known[id(node)]


def _makes_no_negative(name: str, operands: list[bool]) -> bool:
    """Whether a result is certainly nonnegative, given which operands are."""
    if name in ("max", "&"):
        return any(operands)
    if name in ("%", "where"):
        return all(operands[1:])
    return name == "abs" or (name in _AS_THEIR_OPERANDS and all(operands))


def settled(
    node: Node, tensors: Mapping[str, torch.Tensor], sizes: Mapping[str, int]
) -> tuple[Node, dict[str, Aux], dict[str, torch.Tensor]]:
    """Infer the dims of a tree's aux tensors from all of their indices.

    A dim is one of SIZES if only that variable indexes it. A tensor that both queries and keys index gets two aux
    tensors: two names for one tensor. Where a tensor is longer than a known size, its aux tensor is a view of the part
    that the variable indexes.

    Args:
        node: the tree.
        tensors: the captured tensors by name.
        sizes: known values of SIZES. A dim that is shorter than that value and not 1 remains a number.

    Returns:
        The tree, its aux tensors, and the captured tensor of each.
    """
    uses: dict[str, list[Item]] = {}
    for each in operands_first(node):
        if isinstance(each, Item):
            uses.setdefault(each.aux.name, []).append(each)
    keys = {id(one): (name, _dims(one, items, sizes)) for name, items in uses.items() for one in items}
    found = _apart(list(dict.fromkeys(keys.values())), tensors)
    rebuilt: dict[int, Node] = {}
    for each in operands_first(node):
        parts = tuple(rebuilt[id(one)] for one in children(each))
        if isinstance(each, Operation):
            rebuilt[id(each)] = Operation(each.name, parts, each.type)
        else:
            rebuilt[id(each)] = item(found[keys[id(each)]], *parts) if isinstance(each, Item) else each
    by_name = {aux.name: _indexed(tensors[name], aux.dims, sizes) for (name, _), aux in found.items()}
    return rebuilt[id(node)], {aux.name: aux for aux in found.values()}, by_name


def _dims(one: Item, uses: list[Item], sizes: Mapping[str, int]) -> _Dims:
    """Dims that a lookup implies, given all lookups in its tensor."""
    places = range(len(one.indices))
    is_named = [all(_size(use, at, sizes) for use in uses) for at in places]
    return tuple(_size(one, at, sizes) if is_named[at] else one.aux.dims[at] for at in places)


def _size(one: Item, at: int, sizes: Mapping[str, int]) -> str:
    """Name of the size that bounds an index, or "" if the index is not exactly one variable of SIZES."""
    index, has = one.indices[at], one.aux.dims[at]
    name = _SIZE_OF.get(index.name, "") if isinstance(index, Variable) else ""
    return name if name not in sizes or has == 1 or int(has) >= sizes[name] else ""


def _indexed(tensor: torch.Tensor, dims: _Dims, sizes: Mapping[str, int]) -> torch.Tensor:
    """The part of a tensor that indices of its named dims reach; the tensor itself if that is all of it."""
    for axis, dim in enumerate(dims):
        size = sizes.get(dim) if isinstance(dim, str) else None
        if size is not None and tensor.shape[axis] > size:
            tensor = tensor.narrow(axis, 0, size)
    return tensor


def _apart(keys: list[tuple[str, _Dims]], tensors: Mapping[str, torch.Tensor]) -> dict[tuple[str, _Dims], Aux]:
    """One aux tensor for each tensor and its dims; names of several for one tensor show the differences."""
    apart: dict[tuple[str, _Dims], Aux] = {}
    taken = set(tensors)
    for name, dims in keys:
        others = [other for whose, other in keys if whose == name]
        differ = [SIZES[str(dim)] for at, dim in enumerate(dims) if len({other[at] for other in others}) > 1]
        new = _joined(name, [_SHORT.get(variable, variable) for variable in differ])
        number = 1
        while differ and not _is_free(new, taken):
            number += 1
            new = _joined(name, [*(_SHORT.get(variable, variable) for variable in differ), f"x{number}"])
        taken.add(new)
        apart[name, dims] = Aux(new, NAMES[tensors[name].dtype], dims)
    return apart


def _joined(name: str, parts: Sequence[str]) -> str:
    """A name with appended parts; a long name is truncated."""
    behind = "".join(f"_{part}" for part in parts)
    return name[: MOST_NAME - len(behind)].rstrip("_") + behind if behind else name
