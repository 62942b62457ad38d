"""Launches of earlier products: a call with arguments like those of one before checks nothing and launches."""

from __future__ import annotations

from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from runtime.kernels.launches import Launch, Launches
from runtime.kernels.product_launch import ProductLaunch
from runtime.ops.bsr_calls import arranged, arranged_samples, bound_launch, bound_sample, multiply, sample
from runtime.ops.modes import PLAIN
from runtime.prepare.bsr_matrix import BsrMatrix, parts_of, parts_of_prepared
from runtime.prepare.prepared import PreparedBsr
from runtime.receipts.mode import mode

launches = Launches()
"""Those of products, of sampled ones and of layers."""
_prepared: WeakKeyDictionary[PreparedBsr, BsrMatrix] = WeakKeyDictionary()  # with detached values
_grad_enabled = torch.is_grad_enabled
_OPTIONS = ("activation", "beta", "transpose_a", "arrange")
_WORDS, _NUMBERS = frozenset({str, type(None)}), frozenset({int, float, type(None)})


class Place(NamedTuple):
    """Where the launch of a product is kept.

    Attributes:
        key: all that decides about the launch beside the tensors.
        tensors: row pointers, column numbers, the bias if there is one, values, what is prepared, b, and c if given.
        matrix: the ``BsrMatrix`` of these tensors; None where a launch was found by others.
    """

    key: tuple[Any, ...]
    tensors: tuple[torch.Tensor, ...]
    matrix: Any


def find_launch(a: Any, b: Any, bias: Any, c: Any, options: tuple[Any, ...]) -> tuple[Place | None, Launch | None]:
    """The launch of an earlier product with arguments like these.

    Args:
        a, b, bias, c: those of ``bsr_matmul``; tensors may have gradients.
        options: its ``activation`` and ``beta``, as they are given, and ``transpose_a`` and ``arrange``, both bool.

    Returns:
        The place for a launch, None for arguments that the checks of a call must name; the launch that is kept there.
    """
    if not (type(options[0]) in _WORDS and type(options[1]) in _NUMBERS):  # True, which is refused, equals 1.0
        return None, None
    try:
        matrix = a if type(a) is BsrMatrix else _parts(a)
        columns, how, order, index, values = matrix.columns, matrix.how, matrix.order, matrix.index, matrix.values
        if not (type(columns) is int and type(how) is str and type(order) is type(index) is tuple):
            return None, None
        if bias is None:
            tensors = (matrix.crow_indices, matrix.col_indices, values, *order, *index, b)
        else:
            tensors = (matrix.crow_indices, matrix.col_indices, bias, values, *order, *index, b)
        if c is not None:
            tensors = (*tensors, c)
        given = len(order), bias is None, c is None
        key = (columns, how, given, values.shape, b.shape, options, _grad_enabled(), mode())
        return Place(key, tensors, matrix), launches.find(key, tensors)
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return None, None


def _parts(a: Any) -> BsrMatrix:
    """Parts of a sparse matrix that is no ``BsrMatrix``; those of a prepared one are kept, less its values.

    Raises:
        TypeError: for what is none.
    """
    if type(a) is PreparedBsr:
        kept, values = _prepared.get(a), a.matrix.values()
        same = kept is not None and kept.values.shape == values.shape and kept.shape == a.matrix.shape
        if kept is None or not same or kept.values.data_ptr() != values.data_ptr():
            found = parts_of_prepared(a)
            _prepared[a] = BsrMatrix(
                found.values.detach(),
                found.crow_indices.detach(),
                found.col_indices.detach(),
                *(found.columns, found.order, found.index, found.how),
            )
            return found
        return BsrMatrix(values, kept.crow_indices, kept.col_indices, kept.columns, kept.order, kept.index, kept.how)
    if type(a) in PLAIN and a.layout is torch.sparse_bsr:
        return parts_of(a)
    raise TypeError


def bound_product(
    place: Place, b: torch.Tensor, *, bias: Any, c: Any, activation: str, transpose_a: bool, arrange: bool, **more: Any
) -> ProductLaunch | None:
    """The launch of a product that was computed just before.

    Args:
        place: where it is to be kept.
        b, bias, c, activation, transpose_a, arrange, more: as ``runtime.ops.bsr_calls.multiply`` takes them.

    Returns:
        The launch; None where later calls do more than launch: if an operand was copied, say.
    """
    arguments: dict[str, Any] = {"bias": bias, "activation": activation, "transpose_a": transpose_a}
    if arrange:
        own_b, own_c = arranged(place.matrix, b, c, **arguments)
        if own_b is not b or own_c is not c:
            return None
    return bound_launch(place.matrix, place.tensors, b, c=c, **arguments, **more)


def keep_launch(place: Place, b: torch.Tensor, **arguments: Any) -> None:
    """Keep the launch of a product that was computed just before; the arguments are those of ``bound_product``."""
    launches.keep(place.key, place.tensors, bound_product(place, b, **arguments))


def product(
    a: BsrMatrix, b: torch.Tensor, *, bias: Any, c: Any, validate: bool = False, **options: Any
) -> torch.Tensor:
    """The product that ``multiply`` of ``runtime.ops.bsr_calls`` computes, by an earlier one's launch if it can."""
    place = launch = None
    if not validate:
        place, launch = find_launch(a, b, bias, c, tuple(options[name] for name in _OPTIONS))
        if launch is not None and place is not None:
            found: torch.Tensor | None = launch(place.tensors)
            if found is not None:
                return found
    found = multiply(a, b, bias=bias, c=c, validate=validate, **options)
    if place is not None and launch is None:
        keep_launch(place, b, bias=bias, c=c, given=None, **options)
    return found


def find_sample(a: Any, b: Any, pattern: Any) -> tuple[Place | None, Launch | None]:
    """The launch of an earlier sampled product with arguments like these, those of ``bsr_sddmm``.

    Returns:
        As ``find_launch``; the values of the pattern, which are not read, may lie anywhere.
    """
    try:
        matrix = pattern if type(pattern) is BsrMatrix else _parts(pattern)
        columns, how, order, index, values = matrix.columns, matrix.how, matrix.order, matrix.index, matrix.values
        if not (type(columns) is int and type(how) is str and type(order) is type(index) is tuple):
            return None, None
        tensors = (matrix.crow_indices, matrix.col_indices, values, *order, *index, a, b)
        key = ("sample", columns, how, len(order), values.shape, a.shape, b.shape, _grad_enabled(), mode())
        return Place(key, tensors, matrix), launches.find(key, tensors)
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return None, None


def keep_sample(place: Place, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    """Keep the launch of a sampled product that was computed just before; ``out`` is what that returned."""
    launch = bound_sample(a, b, place.matrix, out, place.tensors)
    launches.keep(place.key, place.tensors, launch)


def sampled(a: torch.Tensor, b: torch.Tensor, pattern: BsrMatrix, *, arrange: bool, validate: bool) -> torch.Tensor:
    """The values that ``sample`` of ``runtime.ops.bsr_calls`` computes, by the launch of an earlier call if it can."""
    place = launch = None
    if arrange:
        a, b = arranged_samples(a, b, pattern)
    if not validate:
        place, launch = find_sample(a, b, pattern)
        if launch is not None and place is not None:
            found: torch.Tensor | None = launch(place.tensors)
            if found is not None:
                return found
    found = sample(a, b, pattern, validate=validate)
    if place is not None and launch is None:
        keep_sample(place, a, b, found)
    return found


def find_linear(layer: Any, places: tuple[str, ...], x: Any) -> tuple[Place | None, Launch | None]:
    """The launch of an earlier call of a ``BlockSparseLinear`` like this one, for an input like this.

    Args:
        layer: the layer; of its parameters and buffers nothing is known.
        places: names of the buffers that say where the blocks are, row pointers and column numbers first.
        x: the input.

    Returns:
        As ``find_launch``.
    """
    parameters, buffers = layer._parameters, layer._buffers
    try:
        # Other modules may put a tensor in the place of a parameter (pruning, parametrizations).
        values, bias = parameters.get("values"), parameters.get("bias")
        values = layer.values if values is None else values
        bias = layer.bias if bias is None else bias
        added = () if bias is None else (bias,)
        crow, col, *prepared = [buffers[name] for name in places]
        tensors = (crow, col, *added, values, *prepared, x)
        key = (
            "linear",
            layer.in_features,
            layer._how,
            layer._orders,
            bias is None,
            values.shape,
            x.shape,
            _grad_enabled(),
            mode(),
        )
        launch = launches.find(key, tensors)
        if launch is not None:
            return Place(key, tensors, None), launch
        order, index = tuple(prepared[: layer._orders]), tuple(prepared[layer._orders :])
        return Place(key, tensors, BsrMatrix(values, crow, col, layer.in_features, order, index, layer._how)), None
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError):
        return None, None
