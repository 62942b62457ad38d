"""FlexAttention's functions as trees: each function is called once, with symbols.

torch calls a mode before each of its functions, including lookups in captured tensors, so no operation is missed: an
operation without a counterpart in trees is refused with its line. (torch.fx intercepts only functions of an argument:
it would freeze the current value of ``window // 2`` or ``window.item()``, and drop a write. make_fx fails at
``table[q_idx]``.)
"""

from __future__ import annotations

import inspect
import numbers
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from codegen.errors import CodegenError
from codegen.expressions.nodes import Aux, ExpressionError, Node, Type, Variable, check_size, item, operation
from codegen.wording import one_line, shown
from runtime.errors import ArgumentError
from runtime.expressions.captured import Captured, from_the_start, settled
from runtime.expressions.functions import AS_GIVEN, FUNCTIONS, SOME, VALUES
from runtime.expressions.places import line_of_error, line_of_frame, line_of_function, refused, users_frames
from runtime.expressions.symbols import Symbol, literal, row, symbol

_INDICES = ("batch", "head", "q_idx", "kv_idx")
_COMPARISONS = {f"__{name}__": name for name in ("eq", "ne", "lt", "le", "gt", "ge")}
"""Names that torch 2.11 passes to a mode for operators; some later version passes the functions' names."""
_ABOUT = {"shape", "dtype", "device", "ndim", "layout", "is_cuda", "requires_grad", "itemsize"}
_ABOUT |= {"size", "dim", "numel", "stride", "is_floating_point", "__len__"}
"""Properties of a tensor that do not depend on its elements."""
_AUGMENTED = {"add", "sub", "mul", "div", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift"}
_TEXT = {"__repr__", "__str__", "__format__"}
_WORKS = {
    "__bool__": "tests a value for truth, but a kernel has one value for each query and key (if, while, and, or, not,"
    " in, min(), max() and a < b < c do): torch.where, &, |, ~, torch.minimum and torch.maximum work",
    "__index__": "needs a Python integer, but a kernel has one value for each query and key: a list of numbers works as"
    " a captured tensor, a loop over range() with a Python number",
    "__float__": "needs a Python float, but a kernel has one value for each query and key: x.float() works, and"
    " torch.exp for math.exp",
    "__int__": "needs a Python integer, but a kernel has one value for each query and key: x.long() works, and // to"
    " round down",
    "__setitem__": "writes in place: a tree has no memory; torch.where returns a new value",
    **dict.fromkeys(
        ("item", "tolist", "numpy", "__array__"),
        "reads a value now, although it may differ at the next call: a captured tensor without dims works directly",
    ),
    **dict.fromkeys(
        ("floor", "ceil", "round", "trunc", "fmod"), "rounds: // and % of integers round down, x.long() towards zero"
    ),
}


@dataclass(frozen=True)
class Traced:
    """A function as a tree.

    Attributes:
        node: the tree.
        aux: the aux tensors that it has, by name.
        tensors: the captured tensor of each; two may be the same.
    """

    node: Node
    aux: dict[str, Aux]
    tensors: dict[str, torch.Tensor]


def trace_mask(mask_mod: Callable[..., Any], sizes: Mapping[str, int] | None = None) -> Traced:
    """Trace a ``mask_mod(b, h, q_idx, kv_idx)``, which is True for visible pairs, to a tree.

    Python numbers and shapes are constants of the tree. Captured tensors become aux tensors. If only ``b``, ``h``,
    ``q_idx`` or ``kv_idx`` indexes a dim, the dim is batch, heads, q_len or kv_len; any other dim keeps its number. A
    negative index counts from the end, as in torch; an index out of range, which fails in torch, is clamped.

    Args:
        mask_mod: the function.
        sizes: batch, heads, q_len and kv_len, if known. Of a captured tensor that is longer, the aux tensor is a view
            of the part that the function indexes.

    Raises:
        ArgumentError: for an operation that trees do not support, with the line of the function.
    """
    node, mode = _traced("mask_mod", mask_mod, _INDICES)
    if node.type is not Type.BOOL:
        place = line_of_function(mask_mod)
        raise refused(
            "mask_mod", place, f"returns a value of type {node.type}, expected bool: compare it, for example x != 0"
        )
    return Traced(*settled(node, mode.captured.tensors, sizes or {}))


def trace_score(score_mod: Callable[..., Any], sizes: Mapping[str, int] | None = None) -> Traced:
    """Trace a ``score_mod(score, b, h, q_idx, kv_idx)`` to a tree; an integer result becomes a float.

    Args:
        score_mod: the function.
        sizes: as in ``trace_mask``.

    Raises:
        ArgumentError: for an operation that trees do not support, with the line of the function.
    """
    node, mode = _traced("score_mod", score_mod, ("score", *_INDICES))
    if node.type is Type.BOOL:
        place = line_of_function(score_mod)
        raise refused("score_mod", place, "returns a bool, expected a score: torch.where(mask, score, -math.inf)")
    node = node if node.type is Type.FLOAT else operation("float", node)
    return Traced(*settled(node, mode.captured.tensors, sizes or {}))


def _traced(argument: str, function: Any, names: tuple[str, ...]) -> tuple[Node, _Mode]:
    if not callable(function):
        raise ArgumentError(argument, f"is {shown(function)}, expected a function of {', '.join(names)}")
    mode = _Mode(argument)
    result = _call(argument, function, mode, names)
    try:
        if not isinstance(result, torch.Tensor | numbers.Real):
            raise ExpressionError(f"returns {shown(result)}, expected a value")
        node = mode.node(result)
        check_size(node)
    except ExpressionError as error:
        raise refused(argument, line_of_function(function), str(error)) from None
    return node, mode


def _call(argument: str, function: Callable[..., Any], mode: _Mode, names: tuple[str, ...]) -> Any:
    with _disable_current_modes():  # under FakeTensorMode they would be fake tensors, which already have a class
        symbols = [symbol(Variable(name)) for name in names]
    try:
        with _disable_current_modes(), torch._guards.tracing(torch._guards.TracingContext(_IN_A_KERNEL)), mode:  # type: ignore[arg-type, unused-ignore]
            return (_undisturbed() if "torch._dynamo" in sys.modules else _called)(function, symbols)
    except CodegenError:
        raise
    except Exception as error:  # a user's function may raise anything
        place = line_of_error(error) or line_of_function(function)
        what = f"raises {type(error).__name__}: {one_line(str(error), 500)}"
        raise refused(argument, place, f"{what} (called with {', '.join(names)})") from error


_IN_A_KERNEL = SimpleNamespace(in_kernel_invocation=True, shape_env=None)
"""The stance that functions wrapped by torch.compile read in this thread, so that tracing runs their original code.

``torch.compiler.set_stance`` is global to the process: of two tracing threads, one would leave it switched.
"""


def _called(function: Callable[..., Any], symbols: Sequence[Symbol]) -> Any:
    return function(*symbols)


@cache
def _undisturbed() -> Callable[..., Any]:
    """The same after an import of torch.compile, which must not compile any inner frames."""
    undisturbed: Callable[..., Any] = torch._dynamo.disable(_called)
    return undisturbed


class _Mode(TorchFunctionMode):  # type: ignore[misc, unused-ignore]
    """Mode that handles torch's functions while the user's function runs."""

    def __init__(self, argument: str) -> None:
        super().__init__()
        self.argument = argument
        self.captured = Captured()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = _name(func)
        if name in _ABOUT:
            return func(*args, **(kwargs or {}))
        if name in _TEXT:
            return "<a value of a kernel>"
        try:
            if name == "__getitem__":
                return self._element(args[0], args[1])
            return symbol(self._result(name, args, kwargs or {}))
        except ExpressionError as error:
            frame = next(users_frames(_call.__code__), None)
            raise refused(self.argument, line_of_frame(frame) if frame else "", str(error)) from None

    def _result(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Node:
        function = FUNCTIONS.get(_COMPARISONS.get(name, name))
        if function is None:
            raise ExpressionError(_unknown(name))
        if kwargs.get("inplace") is False:  # relu of torch.nn.functional has this parameter
            kwargs = {key: each for key, each in kwargs.items() if key != "inplace"}
        try:
            bound = inspect.signature(function).bind(*args, **kwargs)
        except TypeError as error:
            raise ExpressionError(f"calls {name} with arguments that kernels do not support: {error}") from None
        for parameter, value in bound.arguments.items():
            if parameter in VALUES and not isinstance(value, torch.Tensor | numbers.Real):
                raise ExpressionError(f"calls {name} with {shown(value)}, expected a number or a value")
        values = torch.Tensor if function in AS_GIVEN else torch.Tensor | numbers.Real
        positional = [self.node(each) if isinstance(each, values) else each for each in bound.args]
        return function(
            *positional,
            **{key: self.node(each) if isinstance(each, values) else each for key, each in bound.kwargs.items()},
        )

    def node(self, value: Any) -> Node:
        """Convert a value to a node of the tree.

        Raises:
            ExpressionError: for a tensor with dims.
        """
        if not isinstance(value, torch.Tensor):
            return literal(value)
        if isinstance(value, Symbol):
            node: Node | None = getattr(value, "node", None)
            if node is None:
                raise ExpressionError(f"computes with a row of shape {shown(tuple(value.shape))}: index all its dims")
            return node
        aux = self.captured.named(value, users_frames(_call.__code__))
        if aux.dims:
            raise ExpressionError(
                f"computes with {aux.name}, a tensor of shape {shown(aux.dims)}: index it first, or compute outside"
                " the function and capture the result"
            )
        return item(aux)

    def _element(self, of: torch.Tensor, index: Any) -> Symbol:
        tensor, before = (getattr(of, "row", None) or (None, ())) if isinstance(of, Symbol) else (of, ())
        if tensor is None:
            raise ExpressionError("indexes a value, which has no dims")
        aux = self.captured.named(tensor, users_frames(_call.__code__))
        new = index if isinstance(index, tuple) else (index,)
        if len(before) + len(new) > len(aux.dims):
            raise ExpressionError(f"has {len(before) + len(new)} indices of {aux.name}, which is {aux}")
        sizes = aux.dims[len(before) :]
        indices = (*before, *(self._index(aux, each, int(size)) for each, size in zip(new, sizes, strict=False)))
        return symbol(item(aux, *indices)) if len(indices) == len(aux.dims) else row(tensor, indices)

    def _index(self, aux: Aux, index: Any, size: int) -> Node:
        is_value = isinstance(index, torch.Tensor) and index.ndim == 0
        if not is_value and (isinstance(index, bool) or not isinstance(index, numbers.Integral)):
            what = f"a tensor of shape {tuple(index.shape)}" if isinstance(index, torch.Tensor) else shown(index)
            raise ExpressionError(f"indexes {aux.name} with {what}: expected one integer index for each dim of {aux}")
        node = self.node(index)
        check_size(node)
        return from_the_start(node, size)


def _name(func: Any) -> str:
    """Name of a function in torch, or of the attribute that a getter reads."""
    name = str(getattr(func, "__name__", func))
    if name in ("__get__", "__set__"):
        attribute = str(getattr(getattr(func, "__self__", None), "__name__", name))
        return attribute if name == "__get__" else f"{attribute}.__set__"
    if func is torch.Tensor.where:
        return "Tensor.where"
    return name.removeprefix("special_")


def _unknown(name: str) -> str:
    if name in _WORKS:
        return _WORKS[name] if name.startswith("__") else f"calls {name}, which {_WORKS[name]}"
    if _is_write(name):
        return f"calls {name}, which writes in place: a tree has no memory; use x = x + y instead of x += y"
    return f"calls {one_line(name)}, which kernels do not support; supported functions besides operators: {SOME}"


def _is_write(name: str) -> bool:
    """Whether a method writes in place, such as ``add_`` or ``__iadd__``, or sets an attribute."""
    is_augmented = name.startswith("__i") and name.removeprefix("__i").removesuffix("__") in _AUGMENTED
    return is_augmented or name.endswith(".__set__") or (name.endswith("_") and not name.endswith("__"))
