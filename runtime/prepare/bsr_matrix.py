"""BsrMatrix: a block-sparse matrix as plain tensors, with prepared indices, for many calls and any width."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch.utils import _pytree as pytree

from codegen.wording import one_line
from runtime.checks import check_dense
from runtime.errors import ArgumentError
from runtime.prepare.matrix import check_layout, check_row_pointers
from runtime.prepare.prepared import PreparedBsr, RowOrder
from runtime.prepare.row_clusters import RowClusters
from runtime.prepare.row_split import RowSplit
from runtime.prepare.transpose import TransposedIndex, transposed_index

CLUSTER_TENSORS = 4
"""Number of tensors of row clusters, the most of any order; a fifth tensor holds the packed values."""
ORDERED_ROWS = 64
"""Least rows of a block for which kernels process block rows by length; that order serves products of any width."""


@dataclass(frozen=True, eq=False)
class BsrMatrix:
    """A block-sparse matrix as plain tensors, which ``torch.compile`` and autograd handle as such.

    ``prepare_bsr`` makes one. The prepared indices depend on the positions of the blocks, not on their values, and are
    trusted. The matrix is a pytree whose leaves are its tensors.

    Attributes:
        values: (stored blocks, rows, cols), float16 or bfloat16, contiguous.
        crow_indices: int32 or int64 (block rows + 1,): first block of each block row, and the number of blocks.
        col_indices: as crow_indices, (stored blocks,): block column of each block.
        columns: columns of the matrix.
        order: order of the block rows: int32 (block rows,), the rows by length; or the order that one kernel prepared;
            or () without an order.
        index: the blocks by block column, for products with the transpose: int32 (block columns + 1,), first block of
            each column, and (stored blocks, 2), position and block row of each block; or (), in which case each such
            product computes it.
        how: JSON: ``evenness``, stored blocks of the longest block row divided by the mean; the kind of ``order``; the
            spec of the kernel that prepared it, if one did.
    """

    values: torch.Tensor
    crow_indices: torch.Tensor
    col_indices: torch.Tensor
    columns: int
    order: tuple[torch.Tensor, ...] = ()
    index: tuple[torch.Tensor, ...] = ()
    how: str = "{}"

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return (self.crow_indices.shape[0] - 1) * self.values.shape[1], self.columns

    def __repr__(self) -> str:
        prepared = [name for name in ("order", "index") if getattr(self, name)]
        beside = f", with {' and '.join(prepared)}" if prepared else ""
        return f"<BSR matrix {self.shape}, {self.values.shape[0]} stored blocks{beside}>"

    def with_values(self, values: torch.Tensor) -> BsrMatrix:
        """Replace the values, for example by values of another dtype or by a gradient.

        Args:
            values: (stored blocks, rows, cols), the shape of the matrix's values.

        Returns:
            A matrix with these values, not copied, and with the same indices and prepared data. Packed values are
            dropped, because they belong to this matrix: each call then packs the new values.

        Raises:
            ArgumentError: if the values have another shape or are on another device.
        """
        check_dense("values", values)
        if values.shape != self.values.shape:
            raise ArgumentError("values", f"has shape {tuple(values.shape)}, expected {tuple(self.values.shape)}")
        if values.device != self.values.device:
            raise ArgumentError("values", f"is on {values.device}, but the matrix is on {self.values.device}")
        indices = self.crow_indices, self.col_indices, self.columns
        return BsrMatrix(values, *indices, self.order[:CLUSTER_TENSORS], self.index, self.how)

    def to_sparse(self) -> torch.Tensor:
        """Convert to a torch tensor with layout torch.sparse_bsr, which shares values and indices."""
        parts = self.crow_indices, self.col_indices, self.values
        try:
            return torch.sparse_bsr_tensor(*parts, size=self.shape, device=self.values.device, check_invariants=False)
        except (AttributeError, IndexError, OverflowError, RuntimeError, TypeError, ValueError) as error:
            raise ArgumentError("a", f"has inconsistent parts: {one_line(str(error))}") from None


def parts_of(a: torch.Tensor) -> BsrMatrix:
    """Parts of a torch.sparse_bsr tensor, without preparation; values keep their gradient."""
    return BsrMatrix(a.values(), a.crow_indices(), a.col_indices(), a.shape[1])


def parts_of_prepared(a: PreparedBsr) -> BsrMatrix:
    """Parts of a matrix that a kernel prepared; that kernel computes its products."""
    order, kind, numbers = a.row_order, "", []
    tensors: tuple[torch.Tensor, ...] = ()
    if isinstance(order, RowClusters):
        packed = () if a.packed is None else (a.packed,)
        kind, tensors = "clusters", (order.rounds, order.entries, order.starts, order.rows, *packed)
        numbers = [order.ring_columns, order.block_rows, order.block_columns, order.blocks]
    elif isinstance(order, RowSplit):
        kind, tensors, numbers = "split", (order.chunks, order.total), [order.limit]
    elif order is not None:
        kind, tensors = "rows", (order,)
    return BsrMatrix(
        a.matrix.values(),
        a.matrix.crow_indices(),
        a.matrix.col_indices(),
        a.matrix.shape[1],
        tensors,
        () if a.index is None else tuple(a.index),
        _how(a.kernel, kind, tuple(numbers)),
    )


@lru_cache
def _how(kernel: str, order: str, numbers: tuple[int, ...]) -> str:
    return json.dumps({"kernel": kernel, "order": order, "numbers": numbers})


def prepared_of(matrix: torch.Tensor, how: dict[str, Any], order: Any, index: Any) -> PreparedBsr:
    """Assemble a prepared matrix for a kernel.

    Args:
        matrix: layout torch.sparse_bsr.
        how: the parsed ``how`` of its ``BsrMatrix``.
        order: the ``order`` of its ``BsrMatrix``, or () if the kernel takes none.
        index: the ``index`` of its ``BsrMatrix``, or ().
    """
    rows, packed = row_order_of(how, order)
    transposed = TransposedIndex(*index) if index else None
    return PreparedBsr(matrix, rows, transposed, packed, kernel=how.get("kernel", ""))


def row_order_of(how: dict[str, Any], order: Any) -> tuple[RowOrder | None, torch.Tensor | None]:
    """Order of the block rows from a ``BsrMatrix``'s ``order``, and the packed values; None without an order."""
    kind, numbers = how.get("order", "") if order else "", how.get("numbers", ())
    packed = order[CLUSTER_TENSORS] if len(order) > CLUSTER_TENSORS else None
    if kind == "clusters":
        return RowClusters(*order[:CLUSTER_TENSORS], *numbers), packed
    if kind == "split":
        return RowSplit(*order, *numbers), packed
    return (order[0] if kind == "rows" else None), packed


def prepare_bsr(a: torch.Tensor) -> BsrMatrix:
    """Prepare a matrix for products of any width with it and with its transpose (synchronizes once).

    The result replaces ``a`` in ``bsr_matmul`` and ``bsr_sddmm``, also in compiled regions, which do not support sparse
    tensors. The choice of kernels takes the unevenness of the block rows into account. Kernels that need the order of
    the block rows, or the blocks by block column, do not compute it in each call. ``with_values`` replaces the values.

    Args:
        a: (M, K), layout torch.sparse_bsr; int32 or int64 indices. Its values may require a gradient.

    Returns:
        A :class:`BsrMatrix` that shares values and indices, with ``index`` and, for blocks of at least 64 rows,
        ``order``.

    Raises:
        ArgumentError: if ``a`` is not such a matrix, or its row pointers are not ascending.
    """
    check_layout("a", a)
    if a.dim() != 2:
        raise ArgumentError("a", f"has {a.dim()} dimensions {tuple(a.shape)}, expected 2")
    check_row_pointers("a", a)
    own = parts_of(a)
    # torch.compile does not support views of sparse tensors; .data is not a view.
    values = own.values if own.values.requires_grad else own.values.data
    parts = replace(own, values=values, crow_indices=own.crow_indices.data, col_indices=own.col_indices.data)
    lengths = parts.crow_indices.diff()
    stored, rows = parts.values.shape[0], max(1, lengths.shape[0])
    evenness = round(int(lengths.max()) * rows / stored, 2) if stored else 1.0
    by_length = lengths.argsort(descending=True).to(torch.int32)
    ordered = parts.values.shape[1] >= ORDERED_ROWS
    return replace(
        parts,
        order=(by_length,) if ordered else (),
        index=tuple(transposed_index(a.detach())),
        how=json.dumps({"evenness": evenness, "order": "rows" if ordered else ""}),
    )


_LEAVES = ("values", "crow_indices", "col_indices")


def _flatten(matrix: BsrMatrix) -> tuple[list[Any], tuple[Any, ...]]:
    leaves = [getattr(matrix, name) for name in _LEAVES]
    return [*leaves, *matrix.order, *matrix.index], (matrix.columns, len(matrix.order), matrix.how)


def _flatten_with_keys(matrix: BsrMatrix) -> tuple[list[tuple[Any, Any]], tuple[Any, ...]]:
    leaves, context = _flatten(matrix)
    return [(pytree.SequenceKey(i), leaf) for i, leaf in enumerate(leaves)], context


def _unflatten(leaves: Any, context: Any) -> BsrMatrix:
    values, crow, col, *rest = leaves
    columns, orders, how = context
    return BsrMatrix(values, crow, col, columns, tuple(rest[:orders]), tuple(rest[orders:]), how)


pytree.register_pytree_node(
    BsrMatrix,
    _flatten,
    _unflatten,
    serialized_type_name="runtime.BsrMatrix",
    to_dumpable_context=list,
    from_dumpable_context=tuple,
    flatten_with_keys_fn=_flatten_with_keys,
)
torch.serialization.add_safe_globals([BsrMatrix])  # exported programs contain example inputs
