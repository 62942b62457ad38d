"""The order of block rows that BSR x dense kernels take which hand them out, cut them or gather them."""

from __future__ import annotations

from typing import Any

import torch

from codegen.plan import Plan
from codegen.preparation import RECORD_WORDS, GatheredLayout, RowCut, RowCutting, count_groups
from codegen.spec import BsrSpmmSpec
from runtime.arguments import TORCH_DTYPES, check_address, check_shape, check_tensor
from runtime.bsr import (
    check_indices,
    check_layout,
    check_prepared,
    check_row_pointers,
    check_structure,
    check_values,
)
from runtime.errors import ArgumentError
from runtime.launch import LoadedKernel
from runtime.row_chunks import RowChunks, cut_rows
from runtime.row_groups import RowGroups, covers, gather_rows

RowOrder = torch.Tensor | RowChunks | RowGroups
"""Block rows, longest first; such rows, the long ones cut; or groups of rows that have columns in common."""


class RowOrders:
    """Finds and checks the orders of block rows that one kernel takes, and says what it is given of them.

    Attributes:
        are_taken: whether the kernel takes one.
    """

    def __init__(self, plan: Plan, loaded: LoadedKernel) -> None:
        assert isinstance(plan.spec, BsrSpmmSpec)
        self._spec: BsrSpmmSpec = plan.spec
        self._stem = plan.stem
        self._loaded = loaded
        self._gathered = plan.gathered
        self._cluster = plan.cluster
        self._cutting = plan.row_cutting
        self._groups: RowGroups | None = None  # the last that were checked
        self.are_taken = plan.spec.balanced or plan.gathered is not None

    def find(self, a: torch.Tensor, columns: int | None) -> RowOrder:
        """Return the order for a matrix, as ``BsrSpmmKernel.row_order`` describes it."""
        if not self.are_taken:
            raise ArgumentError("row_order", f"is not an argument of {self._stem}: its spec is not balanced")
        check_layout("a", a)
        check_structure("a", a, self._spec.block, a.device)
        if columns is not None and (type(columns) is not int or columns < 1):
            shown = repr(columns) if isinstance(columns, int | float | str) else type(columns).__name__
            raise ArgumentError("columns", f"is {shown}, expected the columns of b, an int of at least 1")
        device, tiles = a.device.index, 0 if columns is None else -(-columns // self._spec.tile.n)
        sm_count = 0 if device is None else self._loaded.sm_count(device)
        if self._gathered is not None:
            size, ring = self._gathered.slots, self._gathered.ring_columns
            clusters, at_once = -(-tiles // self._cluster), sm_count // self._cluster
            groups = count_groups(self._block_rows(a), size, clusters, at_once)
            check_row_pointers("a", a)
            crow, col = a.crow_indices(), a.col_indices()
            return gather_rows(crow, col, self._block_columns(a), slots=size, groups=groups, ring_columns=ring)
        if self._cutting is not None:
            cut = self._cutting.cut(self._block_rows(a), a.values().shape[0], tiles, sm_count)
            return cut_rows(a.crow_indices(), cut, self._cutting.step)
        lengths: torch.Tensor = a.crow_indices().diff()
        return lengths.argsort(descending=True).to(torch.int32)

    def take(self, a: torch.Tensor, b: Any, row_order: Any, validate: bool) -> RowOrder | None:
        """Return the order of block rows that the kernel takes; None for kernels that take none."""
        if self._gathered is not None:
            return self._grouped(a, row_order, validate, self._gathered)
        if not self._spec.balanced:
            if row_order is not None:
                raise ArgumentError("row_order", f"is not an argument of {self._stem}: its spec is not balanced")
            return None
        if row_order is None:
            # What is wrong with b is told when it is checked.
            given = isinstance(b, torch.Tensor) and b.dim() in (2, 3) and b.shape[-1] > 0
            return self.find(a, b.shape[-1] if given else None)
        if self._cutting is not None:
            return self._chunked(a, row_order, validate, self._cutting)
        rows = a.shape[0] // self._spec.block.rows
        check_tensor("row_order", row_order, torch.int32, 1, a.device)
        assert isinstance(row_order, torch.Tensor)
        check_shape("row_order", row_order.shape, [("block rows", (rows,))])
        if not row_order.is_contiguous():
            raise ArgumentError("row_order", f"has stride {row_order.stride(0)}, expected a contiguous tensor")
        if validate and not torch.equal(
            row_order.sort().values, torch.arange(rows, device=a.device, dtype=torch.int32)
        ):
            raise ArgumentError("row_order", f"does not name each of the {rows} block rows once")
        return row_order

    @staticmethod
    def addresses(order: RowOrder | None) -> dict[str, int]:
        """Return what the kernel reads of the order of block rows."""
        if order is None:
            return {}
        if isinstance(order, RowGroups):
            parts = {"rounds": order.rounds, "entries": order.entries, "round_starts": order.starts}
            return {name: part.data_ptr() for name, part in (parts | {"slot_rows": order.rows}).items()}
        if isinstance(order, RowChunks):
            return {"chunks": order.chunks.data_ptr(), "chunk_count": order.total.data_ptr()}
        return {"row_order": order.data_ptr()}

    def packets(self, order: RowOrder | None, device: torch.device) -> torch.Tensor | None:
        """Allocate what A is packed to, if it is: memory of this call, which no other may pack to in between."""
        if self._gathered is None or not isinstance(order, RowGroups):
            return None
        return torch.empty(_packed_bytes(order, self._gathered), dtype=torch.uint8, device=device)

    def pack(self, a: torch.Tensor, row_order: Any) -> torch.Tensor:
        """Pack A, whose structure is checked, as ``BsrSpmmKernel.pack`` describes it."""
        if self._gathered is None:
            raise ArgumentError("a", f"is not packed for {self._stem}: its tiles do not gather block rows")
        check_values("a", a, TORCH_DTYPES[self._spec.dtype])
        check_address("a.values()", a.values().data_ptr())
        order = self._grouped(a, row_order, False, self._gathered)
        # Zeros, as packets may end with bytes that nothing is written to: the same A is the same bytes.
        packets = torch.zeros(_packed_bytes(order, self._gathered), dtype=torch.uint8, device=a.device)
        if packets.shape[0]:
            tensors = {"a": a.values(), "entries": order.entries, "packets": packets}
            addresses = {name: tensor.data_ptr() for name, tensor in tensors.items()}
            with torch.cuda.device(a.device):
                stream = torch.cuda.current_stream().cuda_stream
                self._loaded.launch_prologue(a.device.index, order.rounds.shape[0], addresses, stream)
        return packets

    def check_packed(self, a: torch.Tensor, order: RowOrder | None, packed: Any, validate: bool) -> None:
        """Check what a call is given of A packed beforehand, if it is.

        Raises:
            ArgumentError: if it is not what ``pack`` returns for this order, or, with ``validate``, for these values.
        """
        if packed is None:
            return
        if self._gathered is None or not isinstance(order, RowGroups):
            raise ArgumentError("packed", f"is not an argument of {self._stem}: its tiles do not gather block rows")
        if not isinstance(packed, torch.Tensor):
            raise ArgumentError("packed", f"is {type(packed).__name__}, expected what pack(a, row_order) returns")
        given = (packed.dtype, tuple(packed.shape), packed.device)
        wanted = (torch.uint8, (_packed_bytes(order, self._gathered),), a.device)
        if given != wanted:
            words, expected = (f"{kind} {shape} on {device}" for kind, shape, device in (given, wanted))
            raise ArgumentError("packed", f"is {words}, expected {expected}: it is not of this row_order")
        if not packed.is_contiguous():
            raise ArgumentError("packed", f"has strides {packed.stride()}, expected a contiguous tensor")
        check_address("packed", packed.data_ptr())
        if validate and not torch.equal(packed, self.pack(a, order)):
            raise ArgumentError("packed", "is not what pack(a, row_order) returns: A's values are others")

    def _block_rows(self, a: torch.Tensor) -> int:
        return int(a.shape[0]) // self._spec.block.rows

    def _block_columns(self, a: torch.Tensor) -> int:
        return int(a.shape[1]) // self._spec.block.cols

    def _chunked(self, a: torch.Tensor, row_order: Any, validate: bool, cutting: RowCutting) -> RowChunks:
        """Return the chunks that the kernel takes."""
        if not isinstance(row_order, RowChunks):
            raise ArgumentError("row_order", f"is {type(row_order).__name__}, expected what row_order(a) returns")
        step = cutting.step
        if type(row_order.limit) is not int or row_order.limit < 1 or row_order.limit % step:
            raise ArgumentError("row_order.limit", f"is {row_order.limit!r}, expected a positive multiple of {step}")
        cut = RowCut.at(row_order.limit, self._block_rows(a), a.values().shape[0])
        tensors = {"chunks": row_order.chunks, "total": row_order.total}
        check_prepared("row_order", tensors, ((cut.chunks, 4), (1,)), a.device)
        check_address("row_order.chunks", row_order.chunks.data_ptr())
        if validate:
            wanted = cut_rows(a.crow_indices(), cut, step)._asdict()
            if not all(torch.equal(tensor, wanted[name]) for name, tensor in tensors.items()):
                raise ArgumentError("row_order", "is not what row_order(a) returns: it is not of this matrix")
        return row_order

    def _grouped(self, a: torch.Tensor, row_order: Any, validate: bool, layout: GatheredLayout) -> RowGroups:
        """Return the groups of block rows that the kernel takes."""
        if row_order is None:
            raise ArgumentError(
                "row_order",
                f"is missing: {self._stem} takes what its row_order(a, columns) returns, which takes too long to "
                "be found anew by each call",
            )
        if not isinstance(row_order, RowGroups):
            raise ArgumentError("row_order", f"is {type(row_order).__name__}, expected what row_order(a) returns")
        if row_order is not self._groups:
            _check_groups(row_order, layout)
            self._groups = row_order
        if row_order.rounds.device != a.device:
            raise ArgumentError("row_order", f"is on {row_order.rounds.device}, a is on {a.device}")
        given = (row_order.block_rows, row_order.block_columns, row_order.blocks)
        wanted = (self._block_rows(a), self._block_columns(a), a.values().shape[0])
        if given != wanted:
            raise ArgumentError(
                "row_order",
                f"is of a matrix of {given[0]} x {given[1]} blocks of which {given[2]} are stored, a has {wanted[0]} x "
                f"{wanted[1]} of which {wanted[2]} are",
            )
        if validate:
            check_indices("a", a)
            if not covers(row_order, a.crow_indices(), a.col_indices()):
                raise ArgumentError("row_order", "is not what row_order(a) returns: it is not of this matrix")
        return row_order


def _check_groups(order: RowGroups, layout: GatheredLayout) -> None:
    """Check what can be said of groups of block rows by themselves."""
    size, ring = layout.slots, layout.ring_columns
    tensors = {name: getattr(order, name) for name in ("rounds", "entries", "starts", "rows")}
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor) or tensor.dim() == 0:
            raise ArgumentError(f"row_order.{name}", f"is {tensor!r}, expected a tensor with dimensions")
    rounds, groups = order.rounds.shape[0], order.rows.shape[0]
    shapes = ((rounds, RECORD_WORDS), (rounds, size, 2), (groups + 1,), (groups, size))
    check_prepared("row_order", tensors, shapes, order.rounds.device)
    if order.ring_columns != ring:
        raise ArgumentError(
            "row_order", f"is for a ring of {order.ring_columns} columns, that of this kernel has {ring}"
        )
    check_address("row_order.entries", order.entries.data_ptr())


def _packed_bytes(order: RowGroups, layout: GatheredLayout) -> int:
    return int(order.rounds.shape[0]) * layout.packet_bytes


def extent(row_order: RowOrder | None) -> tuple[int, ...] | None:
    """Return what of an order of block rows a signature depends on."""
    if isinstance(row_order, RowGroups):
        return (row_order.rows.shape[0], row_order.rounds.shape[0])
    return (row_order.limit,) if isinstance(row_order, RowChunks) else None
