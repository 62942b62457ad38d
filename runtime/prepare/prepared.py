"""Prepared operands, the results of a kernel's ``prepare``."""

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
"""Block rows, longest first; the same with long rows split along K; or clusters of rows with common columns."""


@dataclass(frozen=True, eq=False)
class PreparedBsr:
    """A BSR matrix that a kernel has prepared: calls of that kernel take it instead of the matrix.

    The prepared data depends on the positions of the blocks; ``packed`` also depends on their values. Both are trusted:
    a call with ``validate`` detects later changes of the matrix. While this object exists, a kernel keeps the matrix's
    tensors and the results of their checks between calls.

    Attributes:
        matrix: (M, K), the matrix itself, layout torch.sparse_bsr.
        row_order: order, parts or clusters in which the kernel processes its block rows; None for their own order.
        index: its blocks by block column, for kernels that transpose it.
        packed: uint8 (bytes,): a copy of its values in the layout of kernels that gather block rows.
        said: fields of its problem that the kernel determines, and the columns of B.
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
        """Its problem, with the density and evenness of the matrix, which the first access reads and calls never read.

        The problem describes the computation and its sizes: ``codegen.select.choose(a.problem)`` chooses the fastest
        kernel for it.
        """
        prepared = "rows" if self.packed is None else "packed"
        return bsr_problem(self.matrix, **{**self.said, "prepared": prepared})

    def __repr__(self) -> str:
        kind = f", {ORDERS[type(self.row_order)]}" if self.row_order is not None else ""
        parts = kind + (", transposed index" if self.index else "") + (", packed" if self.packed is not None else "")
        return f"<prepared BSR matrix {tuple(self.matrix.shape)}, {self.matrix.values().shape[0]} stored blocks{parts}>"

    def with_values(self, values: torch.Tensor) -> PreparedBsr:
        """Replace the values. They are not packed: a kernel that needs packed values packs them in each call.

        Args:
            values: (stored blocks, rows, cols), the shape of the matrix's values.

        Returns:
            A new object with the same prepared indices.

        Raises:
            ArgumentError: if the values have another shape or are on another device.
        """
        stored = self.matrix.values()
        check_dense("values", values)
        if values.shape != stored.shape:
            raise ArgumentError("values", f"has shape {tuple(values.shape)}, expected {tuple(stored.shape)}")
        if values.device != stored.device:
            raise ArgumentError("values", f"is on {values.device}, but the matrix is on {stored.device}")
        indices = self.matrix.crow_indices(), self.matrix.col_indices()
        matrix = torch.sparse_bsr_tensor(
            *indices, values, size=self.matrix.shape, device=values.device, check_invariants=False
        )
        return replace(self, matrix=matrix, packed=None)


@dataclass(frozen=True, eq=False)
class PreparedLists:
    """Lists of KV blocks that a kernel has prepared: calls of that kernel take them instead of ``kv_indices``.

    Attributes:
        kv_indices: int32 (batch, heads, query blocks, k), the lists.
        query_order: int32 (batch, heads, query blocks), the argument of that name: the query blocks of a tile are
            consecutive; None for kernels that do not take it.
    """

    kv_indices: torch.Tensor
    query_order: torch.Tensor | None = None


ORDERS: dict[type, str] = {
    type(None): "no order of block rows",
    torch.Tensor: "block rows by length",
    RowSplit: "split block rows",
    RowClusters: "row clusters",
}
"""Descriptions of the orders of block rows."""


Effort = Literal["fast", "best"]
"""Effort of the search for row clusters."""
EFFORTS: tuple[Effort, ...] = ("fast", "best")
