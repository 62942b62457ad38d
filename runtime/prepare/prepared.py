"""Prepared operands, as ``prepare`` of a kernel returns them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, TypeAlias

import torch

from codegen.select import BsrProblem
from runtime.checks import check_dense
from runtime.errors import ArgumentError
from runtime.prepare.problem import bsr_problem
from runtime.prepare.row_clusters import RowClusters
from runtime.prepare.row_split import RowSplit
from runtime.prepare.transpose import TransposedIndex

RowOrder: TypeAlias = torch.Tensor | RowSplit | RowClusters
"""Block rows, longest first; such rows, long ones split along K; or clusters of rows with common columns."""


@dataclass(frozen=True, eq=False)
class PreparedBsr:
    """A BSR matrix that a kernel has prepared: calls of that kernel take it in place of the matrix.

    What is prepared follows from the places of the blocks, ``packed`` from their values too. Both are trusted: a call
    with ``validate`` finds out whether the matrix has changed since. Between calls a kernel keeps the tensors of the
    matrix, and what it checked of them, as long as this object is there.

    Attributes:
        matrix: (M, K), the matrix itself, layout torch.sparse_bsr.
        row_order: in which order, parts or clusters the kernel takes its block rows; None if in their own.
        index: its blocks in the order of the block columns, for kernels that transpose it.
        packed: uint8 (bytes,): its values as a kernel reads them that gathers block rows, a copy.
        said: fields of its problem that the kernel says, and the columns of B.
        kernel: spec of the kernel that prepared it, as JSON.
    """

    matrix: torch.Tensor
    row_order: RowOrder | None = None
    index: TransposedIndex | None = None
    packed: torch.Tensor | None = None
    said: dict[str, Any] = field(default_factory=dict, repr=False)
    kernel: str = field(default="", repr=False)

    @cached_property
    def problem(self) -> BsrProblem:
        """Its problem, with the density and evenness of the matrix: read at the first look, and never in a call.

        It says what the kernel computes, in which sizes: ``codegen.select.choose(a.problem)`` tells which kernel is
        fastest for it.
        """
        prepared = "rows" if self.packed is None else "packed"
        return bsr_problem(self.matrix, **{**self.said, "prepared": prepared})

    def __repr__(self) -> str:
        kind = f", {ORDERS[type(self.row_order)]}" if self.row_order is not None else ""
        parts = kind + (", transposed index" if self.index else "") + (", packed" if self.packed is not None else "")
        return f"<prepared BSR matrix {tuple(self.matrix.shape)}, {self.matrix.values().shape[0]} stored blocks{parts}>"

    def with_values(self, values: torch.Tensor) -> PreparedBsr:
        """The same matrix with other values, not packed: a kernel that needs packed ones packs them in each call.

        Args:
            values: (stored blocks, rows, cols), as those of the matrix.

        Returns:
            A new object, with what was prepared of the places of the blocks; this one stays as it is.

        Raises:
            ArgumentError: if they have another shape or are on another device.
        """
        stored = self.matrix.values()
        check_dense("values", values)
        if values.shape != stored.shape:
            raise ArgumentError("values", f"has shape {tuple(values.shape)}, expected {tuple(stored.shape)}")
        if values.device != stored.device:
            raise ArgumentError("values", f"is on {values.device}, the matrix is on {stored.device}")
        indices = self.matrix.crow_indices(), self.matrix.col_indices()
        matrix = torch.sparse_bsr_tensor(
            *indices, values, size=self.matrix.shape, device=values.device, check_invariants=False
        )
        return replace(self, matrix=matrix, packed=None)


@dataclass(frozen=True, eq=False)
class PreparedLists:
    """Lists of key blocks that a kernel has prepared: calls of that kernel take them in place of ``kv_indices``.

    Attributes:
        kv_indices: int32 (batch, heads, query blocks, k), the lists.
        query_order: int32 (batch, heads, query blocks), the argument of that name: query blocks that form a tile follow
            each other; None for kernels that do not take it.
    """

    kv_indices: torch.Tensor
    query_order: torch.Tensor | None = None


ORDERS: dict[type, str] = {
    type(None): "no order of block rows",
    torch.Tensor: "block rows by length",
    RowSplit: "cut block rows",
    RowClusters: "row clusters",
}
"""What each kind of an order of block rows is in words."""


Effort = Literal["fast", "best"]
"""How hard to look for row clusters."""
EFFORTS: tuple[Effort, ...] = ("fast", "best")
