"""Launches of earlier products: a call with arguments like those of one before checks nothing and launches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from runtime.kernels.alike import Launches
from runtime.kernels.product_launch import ProductLaunch
from runtime.ops.bsr_calls import bound_launch, bound_sample
from runtime.ops.bsr_layout import by_rows, readable
from runtime.ops.modes import PLAIN
from runtime.prepare.bsr_matrix import BsrMatrix, parts_of, parts_of_prepared
from runtime.prepare.prepared import PreparedBsr
from runtime.receipts.mode import mode

Launch = Callable[[tuple[torch.Tensor, ...]], Any]
_launches: Launches[Launch] = Launches()
_prepared: WeakKeyDictionary[PreparedBsr, BsrMatrix] = WeakKeyDictionary()  # with detached values
_grad_enabled = torch.is_grad_enabled
_WORDS, _NUMBERS = frozenset({str, type(None)}), frozenset({int, float, type(None)})


class Place(NamedTuple):
    """Where the launch of a product is kept.

    Attributes:
        key: all that decides about the launch beside the tensors.
        tensors: row pointers, column numbers, the bias if there is one, values, what is prepared, b, and c if given.
        matrix: the sparse matrix of these tensors.
    """

    key: tuple[Any, ...]
    tensors: tuple[torch.Tensor, ...]
    matrix: BsrMatrix


def nothing(tensors: tuple[torch.Tensor, ...]) -> None:
    """The launch of calls that must be checked each time."""


def find_launch(
    a: Any, b: Any, bias: Any, c: Any, activation: Any, beta: Any, flags: tuple[bool, bool]
) -> tuple[Place | None, Launch | None]:
    """The launch of an earlier product with arguments like these.

    Args:
        a, b, bias, c, activation, beta: those of ``bsr_matmul``; tensors may have gradients.
        flags: ``transpose_a`` and ``arrange`` of that.

    Returns:
        The place for a launch, None for arguments that the checks of a call must name; the launch that is kept there.
    """
    if type(activation) not in _WORDS or type(beta) not in _NUMBERS:  # True and 1.0 are one key, 1.0 and 1 one factor
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
        added, shapes = (bias is None, c is None, activation, beta), (values.shape, b.shape)
        key = (columns, how, len(order), shapes, flags, added, _grad_enabled(), mode())
        return Place(key, tensors, matrix), _launches.find(key, tensors)
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return None, None


def _parts(a: Any) -> BsrMatrix:
    """Parts of a sparse matrix that is no ``BsrMatrix``; those of a prepared one are kept, less its values.

    Raises:
        TypeError: for what is none.
    """
    if type(a) is PreparedBsr:
        kept, values = _prepared.get(a), a.matrix.values()
        if kept is None or kept.values.data_ptr() != values.data_ptr() or kept.shape != a.matrix.shape:
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


def keep_launch(
    place: Place,
    b: torch.Tensor,
    *,
    bias: Any,
    c: Any,
    beta: float,
    activation: str,
    transpose_a: bool,
    arrange: bool,
    given: Any,
) -> None:
    """Keep the launch of a product that was computed just before.

    Args:
        place: where.
        b, bias, c, beta, activation, transpose_a, arrange, given: as ``runtime.ops.bsr_calls.multiply`` takes them.
    """
    launch: ProductLaunch | None = None
    if not arrange or (readable(b) is b and (c is None or by_rows(c) is c)):
        launch = bound_launch(
            place.matrix,
            place.tensors,
            b,
            bias=bias,
            c=c,
            beta=beta,
            activation=activation,
            transpose_a=transpose_a,
            given=given,
        )
    _launches.keep(place.key, place.tensors, launch or nothing)


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
        return Place(key, tensors, matrix), _launches.find(key, tensors)
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return None, None


def keep_sample(place: Place, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    """Keep the launch of a sampled product that was computed just before; ``out`` is what that returned."""
    launch = bound_sample(a, b, place.matrix, out, place.tensors)
    _launches.keep(place.key, place.tensors, launch or nothing)
