"""What BSR x dense kernels prepare of their sparse matrix: found, checked, and handed over to a launch."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from codegen.plan import Plan
from codegen.preparation import RECORD_WORDS, GatheredLayout, RowCut, count_groups
from codegen.select.problem import said_by
from codegen.spec import BsrSpmmSpec
from codegen.wording import shown
from runtime.driver.enqueue import enqueue_prologue
from runtime.driver.launch import LoadedKernel
from runtime.errors import ArgumentError
from runtime.kernels.arguments import (
    MAX_EXTENT,
    TMA_ALIGNMENT,
    TORCH_DTYPES,
    call_key,
    check_address,
    check_shape,
    check_tensor,
    remember,
)
from runtime.kernels.bsr_arguments import (
    check_indices,
    check_prepared,
    check_structure,
    check_values,
)
from runtime.kernels.bsr_batch import BATCH_RANK, COPIED_BYTES, column_step, matrices_at_once
from runtime.kernels.bsr_orders import OrderMemory
from runtime.prepare.bsr_matrix import BsrMatrix, prepared_of, row_order_of
from runtime.prepare.matrix import check_layout, check_row_pointers
from runtime.prepare.prepared import EFFORTS, ORDERS, Effort, PreparedBsr, RowOrder
from runtime.prepare.row_clusters import RowClusters, cluster_rows, covers
from runtime.prepare.row_split import RowSplit, split_rows
from runtime.prepare.transpose import TransposedIndex, transposed_index

INDEX_ENTRY_BYTES = 8  # of a TransposedIndex, which kernels read as one
OTHER_KERNEL = "is prepared for another kernel"
CHANGED = "is not what prepare(a) returns: a has other indices now"


class Parts(NamedTuple):
    """A ``BsrMatrix`` as a kernel takes it, with no sparse tensor made of it.

    Attributes:
        matrix: the matrix.
        how: its JSON, read; {} if the kernel reads no order.
        transposed: its index, or () if the kernel reads none.
    """

    matrix: BsrMatrix
    how: dict[str, Any]
    transposed: tuple[torch.Tensor, ...]

    @property
    def order(self) -> tuple[torch.Tensor, ...]:
        """The tensors of the order that the kernel reads, or ()."""
        return self.matrix.order if self.how else ()

    def read(self) -> dict[str, torch.Tensor]:
        """All tensors that a kernel reads of the matrix, by parameter."""
        rows, packed = row_order_of(self.how, self.order)
        found = _parts(rows, TransposedIndex(*self.transposed) if self.transposed else None)
        found |= {} if packed is None else {"packets": packed}
        own = self.matrix
        return {**found, "a": own.values, "crow_indices": own.crow_indices, "col_indices": own.col_indices}

    def assembled(self) -> torch.Tensor | PreparedBsr:
        """The matrix as callers have it: layout torch.sparse_bsr, with what is prepared of it."""
        sparse = self.matrix.to_sparse()
        return prepared_of(sparse, self.how, self.order, self.transposed) if self.how or self.transposed else sparse


@dataclass(slots=True, eq=False)
class Operand:
    """The sparse operand of a call: its tensors, each fetched once, because torch makes a new tensor each time.

    Attributes:
        made: the matrix, layout torch.sparse_bsr; None if nothing has needed one yet.
        shape: (M, K).
        row_order: of its ``PreparedBsr``.
        packed: of its ``PreparedBsr``.
        values: of the matrix, as the next two.
        crow: row pointers.
        col: column numbers.
        addresses: of all that the kernel reads of them and of what was prepared, by parameter.
        key: all that the checks of a call look at, less the addresses.
        values_shape: of the values, when they were fetched.
    """

    made: torch.Tensor | None
    shape: tuple[int, ...]
    row_order: RowOrder | None
    packed: torch.Tensor | None
    values: torch.Tensor
    crow: torch.Tensor
    col: torch.Tensor
    addresses: dict[str, int]
    key: Any
    values_shape: torch.Size

    @classmethod
    def of(
        cls,
        matrix: torch.Tensor,
        row_order: RowOrder | None = None,
        index: TransposedIndex | None = None,
        packed: torch.Tensor | None = None,
    ) -> Operand:
        """Fetch the tensors of a matrix of layout torch.sparse_bsr and of what was prepared of it."""
        values, crow, col = matrix.values(), matrix.crow_indices(), matrix.col_indices()
        addresses = {"a": values.data_ptr(), "crow_indices": crow.data_ptr(), "col_indices": col.data_ptr()}
        key = (matrix.shape, call_key(values, crow, col), None)
        operand = cls(matrix, matrix.shape, None, packed, values, crow, col, addresses, key, values.shape)
        if row_order is not None or index is not None:
            operand.add(row_order, index)
        return operand

    @property
    def matrix(self) -> torch.Tensor:
        """The matrix, layout torch.sparse_bsr."""
        if self.made is None:
            self.made = BsrMatrix(self.values, self.crow, self.col, self.shape[1]).to_sparse()
        return self.made

    def add(self, row_order: RowOrder | None = None, index: TransposedIndex | None = None) -> None:
        """Add what was prepared of the matrix."""
        self.row_order = row_order
        self.addresses |= {name: part.data_ptr() for name, part in _parts(row_order, index).items()}
        self.key = (*self.key[:2], extent(row_order))

    def may_be_kept(self) -> bool:
        """Whether a later call may use this: with a gradient every call must be checked."""
        return not (self.matrix.requires_grad and torch.is_grad_enabled())

    def is_current(self) -> bool:
        """Whether the matrix still has the same tensors.

        They may have been written since, which changes nothing here; but ``resize_as_sparse_`` makes others of them.
        """
        values, shape = self.matrix.values(), self.values_shape
        address = values.data_ptr()
        same = address != 0 and address == self.addresses["a"] and values.shape == shape
        return same and self.matrix.shape == self.key[0] and self.may_be_kept()


class BsrPreparation:
    """Prepares the matrices of one kernel, checks prepared ones, and says what a launch is given of them."""

    def __init__(self, plan: Plan, loaded: LoadedKernel) -> None:
        assert isinstance(plan.spec, BsrSpmmSpec)
        self._spec: BsrSpmmSpec = plan.spec
        self._stem = plan.stem
        # The matrix says the block.
        self._said = {name: value for name, value in said_by(plan.spec).items() if name != "block"}
        self._loaded = loaded
        self._gathered = plan.gathered
        self._cluster = plan.cluster
        self._cutting = plan.row_cutting
        self._orders = OrderMemory()
        self._structures: dict[Any, None] = {}  # those of matrices that were checked
        self._operands: WeakKeyDictionary[PreparedBsr, Operand] = WeakKeyDictionary()
        self._parts: dict[Any, Any] = {}  # keys of operands made of parts that were checked
        self._is_prepared = plan.spec.is_dynamic or plan.spec.transpose_a  # by each call, if the caller has not
        self._takes: type = type(None)  # of the order of block rows
        if plan.gathered is not None:
            self._takes = RowClusters
        elif plan.spec.is_dynamic:
            self._takes = torch.Tensor if plan.row_cutting is None else RowSplit

    def prepare(self, a: Any, columns: int | None, pack: bool, effort: Effort) -> PreparedBsr:
        """Prepare a matrix, as ``BsrSpmmKernel.prepare`` describes it."""
        if effort not in EFFORTS:
            raise ArgumentError("effort", f"is {shown(effort)}; allowed: {', '.join(EFFORTS)}")
        if columns is not None and (type(columns) is not int or columns < 1):
            given = shown(columns) if isinstance(columns, int | float | str) else type(columns).__name__
            raise ArgumentError("columns", f"is {given}, expected the columns of b, an int of at least 1")
        if pack and self._gathered is None:
            raise ArgumentError("pack", f"is True, but {self._stem} reads a where it is: its tiles gather no rows")
        if isinstance(a, PreparedBsr):
            if columns is not None:
                reason = "but a is prepared: what follows from the places of its blocks stays as it is"
                raise ArgumentError("columns", f"is {shown(columns)}, {reason}")
            prepared = replace(self._check(a, False), packed=None)
        else:
            check_layout("a", a)
            check_structure("a", a, self._spec.block, a.device)
            index = transposed_index(a) if self._spec.transpose_a else None
            said = {**self._said, "n": columns}
            order = self._find_order(a, columns, effort)
            prepared = PreparedBsr(a, order, index, said=said, kernel=self._spec.canonical_json())
        return replace(prepared, packed=self._pack(prepared)) if pack else prepared

    def take(self, a: Any, b: Any, validate: bool) -> Operand:
        """Return the operand ``a`` of a call: checked if it is prepared, or prepared now where that is quick."""
        if type(a) is Parts:
            return self._take_parts(a, b, validate)
        if isinstance(a, PreparedBsr):
            return self._take_prepared(a, validate)
        check_layout("a", a)
        if self._gathered is not None:
            raise ArgumentError(
                "a",
                f"is not prepared: {self._stem} takes what its prepare(a, columns) returns, which takes too long to be "
                "found by each call",
            )
        operand = Operand.of(a)
        if not self._is_prepared:
            return operand
        if self._spec.transpose_a:
            self._check_once(operand)
            if validate:  # before its row pointers say how much is written where
                check_row_pointers("a", a)
            operand.add(index=transposed_index(a))
        elif self._cutting is None:
            operand.add(self._remembered_order(operand, validate))
        else:
            self._check_once(operand)
            operand.add(self._find_order(a, _columns_of(b), "fast"))
        return operand

    def _take_parts(self, a: Parts, b: Any, validate: bool) -> Operand:
        """Return the operand of a matrix in its parts; those like parts that were checked are not checked again."""
        matrix, how = a.matrix, a.how
        values, crow, col = matrix.values, matrix.crow_indices, matrix.col_indices
        order = a.order
        key = (matrix.columns, matrix.how if how else "", call_key(values, crow, col, *order, *a.transposed))
        known = None if validate else self._parts.get(key)
        if known is not None:
            rows, packed = row_order_of(how, order)
            index = TransposedIndex(*a.transposed) if a.transposed else None
            addresses = {name: part.data_ptr() for name, part in _parts(rows, index).items()}
            places = (*addresses.values(), 0 if packed is None else packed.data_ptr())
            if not any(place % TMA_ALIGNMENT for place in places):  # of others the checks tell
                addresses |= {"a": values.data_ptr(), "crow_indices": crow.data_ptr(), "col_indices": col.data_ptr()}
                shape = known[0]
                return Operand(None, shape, rows, packed, values, crow, col, addresses, known, values.shape)
        operand = self.take(a.assembled(), b, validate)
        if key[-1] is not None and (how or a.transposed or not self._is_prepared):
            remember(self._parts, key, operand.key)
        return operand

    def widest(self, a: Operand) -> int:
        """Return the columns of a launch for a batch, at most: partial sums of cut block rows take memory for each."""
        if self._cutting is None or not isinstance(a.row_order, RowSplit):
            return MAX_EXTENT
        cut = RowCut.at(a.row_order.limit, self._block_rows(a), a.values_shape[0])
        _, of_tile = self._cutting.workspace(cut, 1)
        return int(max(1, COPIED_BYTES // max(1, of_tile)) * self._spec.tile.n)

    def _check_once(self, a: Operand) -> None:
        """Check the structure of a raw matrix, unless that of one like it was checked before."""
        if a.key not in self._structures:
            check_structure("a", a.matrix, self._spec.block, a.matrix.device)
            remember(self._structures, a.key, None)

    def _remembered_order(self, a: Operand, validate: bool) -> RowOrder | None:
        """Return the block rows of a raw matrix by length, as an earlier call found them unless it is to be checked."""
        place = self._orders.place(a.matrix)
        order = None if place is None or validate else self._orders.find(a.matrix, a.key, place)
        if order is not None:
            return order
        self._check_once(a)
        found = self._find_order(a.matrix, None, "fast")
        if place is not None:
            assert isinstance(found, torch.Tensor)
            self._orders.keep(a.matrix, a.key, place, found)
        return found

    def _take_prepared(self, a: PreparedBsr, validate: bool) -> Operand:
        """Return the operand of a prepared matrix, checked now unless an earlier call has done it."""
        kept = self._operands.get(a)
        if kept is not None and not validate and kept.is_current():
            return kept
        self._check(a, validate)
        operand = Operand.of(a.matrix, a.row_order, a.index, a.packed)
        if operand.may_be_kept():
            self._operands[a] = operand
        return operand

    def packets(self, a: Operand) -> torch.Tensor | None:
        """Allocate what A is packed to, if it is: memory of this call, which no other may pack to in between."""
        if self._gathered is None or not isinstance(a.row_order, RowClusters) or a.packed is not None:
            return a.packed
        size = _packed_bytes(a.row_order, self._gathered)
        return torch.empty(size, dtype=torch.uint8, device=a.values.device)

    def _find_order(self, a: torch.Tensor, columns: int | None, effort: Effort) -> RowOrder | None:
        """Return the order of the block rows of a matrix; None for kernels that take none."""
        if self._gathered is None and not self._spec.is_dynamic:
            return None
        device, tiles = a.device.index, 0 if columns is None else -(-columns // self._spec.tile.n)
        sm_count = 0 if device is None else self._loaded.sm_count(device)
        if self._gathered is not None:
            size, ring = self._gathered.slots, self._gathered.ring_columns
            thread_block_clusters, at_once = -(-tiles // self._cluster), sm_count // self._cluster
            groups = count_groups(self._block_rows(a), size, thread_block_clusters, at_once)
            check_row_pointers("a", a)
            return cluster_rows(
                a.crow_indices(),
                a.col_indices(),
                self._block_columns(a),
                slots=size,
                groups=groups,
                ring_columns=ring,
                anneal=effort == "best",
            )
        if self._cutting is not None:
            cut = self._cutting.cut(self._block_rows(a), a.values().shape[0], tiles, sm_count)
            return split_rows(a.crow_indices(), cut, self._cutting.step)
        lengths: torch.Tensor = a.crow_indices().diff()
        return lengths.argsort(descending=True).to(torch.int32)

    def _pack(self, a: PreparedBsr) -> torch.Tensor:
        """Return the values of a matrix, whose structure is checked, in the order of its row clusters."""
        clusters, values = a.row_order, a.matrix.values()
        assert self._gathered is not None and isinstance(clusters, RowClusters)
        check_values("a", a.matrix, TORCH_DTYPES[self._spec.dtype])
        check_address("a.values()", values.data_ptr())
        # Zeros, as packets may end with bytes that nothing is written to: the same A is the same bytes.
        packets = torch.zeros(_packed_bytes(clusters, self._gathered), dtype=torch.uint8, device=values.device)
        if packets.shape[0]:
            tensors = {"a": values, "entries": clusters.entries, "packets": packets}
            addresses = {name: tensor.data_ptr() for name, tensor in tensors.items()}
            enqueue_prologue(self._loaded, values.device, clusters.rounds.shape[0], addresses)
        return packets

    def _check(self, a: PreparedBsr, validate: bool) -> PreparedBsr:
        """Check a prepared matrix.

        Raises:
            ArgumentError: if another kernel prepared it, or if a part of it cannot be read; with ``validate`` also if
                the matrix has changed.
        """
        matrix, order = a.matrix, a.row_order
        check_layout("a", matrix)
        check_structure("a", matrix, self._spec.block, matrix.device)
        if type(order) is not self._takes:
            has = ORDERS.get(type(order), type(order).__name__)
            raise ArgumentError("a", f"{OTHER_KERNEL}: it has {has}, {self._stem} takes {ORDERS[self._takes]}")
        if (a.index is not None) != self._spec.transpose_a:
            has, takes = ("no", "one") if a.index is None else ("a", "none")
            raise ArgumentError("a", f"{OTHER_KERNEL}: it has {has} transposed index, {self._stem} takes {takes}")
        if isinstance(order, RowClusters):
            self._check_clusters(matrix, order, validate)
        elif isinstance(order, RowSplit):
            self._check_split(matrix, order, validate)
        elif order is not None:
            self._check_rows(matrix, order, validate)
        if a.index is not None:
            self._check_index(matrix, a.index, validate)
        if a.packed is not None:
            self._check_packed(a, a.packed, validate)
        return a

    def _check_rows(self, a: torch.Tensor, order: torch.Tensor, validate: bool) -> None:
        """Check block rows in an order."""
        rows = self._block_rows(a)
        check_tensor("a.row_order", order, torch.int32, 1, a.device)
        check_shape("a.row_order", order.shape, [("block rows", (rows,))])
        if not order.is_contiguous():
            raise ArgumentError("a.row_order", f"has stride {order.stride(0)}, expected a contiguous tensor")
        if validate and not torch.equal(order.sort().values, torch.arange(rows, device=a.device, dtype=torch.int32)):
            raise ArgumentError("a.row_order", f"does not name each of the {rows} block rows once")

    def _check_split(self, a: torch.Tensor, split: RowSplit, validate: bool) -> None:
        """Check the split of long block rows."""
        assert self._cutting is not None
        step = self._cutting.step
        if type(split.limit) is not int or split.limit < 1 or split.limit % step:
            raise ArgumentError("a.row_order.limit", f"is {shown(split.limit)}, expected a positive multiple of {step}")
        cut = RowCut.at(split.limit, self._block_rows(a), a.values().shape[0])
        tensors = {"chunks": split.chunks, "total": split.total}
        check_prepared("a.row_order", tensors, ((cut.chunks, 4), (1,)), a.device)
        check_address("a.row_order.chunks", split.chunks.data_ptr())
        if validate:
            wanted = split_rows(a.crow_indices(), cut, step)._asdict()
            if not all(torch.equal(tensor, wanted[name]) for name, tensor in tensors.items()):
                raise ArgumentError("a.row_order", CHANGED)

    def _check_clusters(self, a: torch.Tensor, clusters: RowClusters, validate: bool) -> None:
        """Check block rows in clusters."""
        assert self._gathered is not None
        _check_parts(clusters, self._gathered)
        if clusters.rounds.device != a.device:
            raise ArgumentError("a.row_order", f"is on {clusters.rounds.device}, a is on {a.device}")
        given = (clusters.block_rows, clusters.block_columns, clusters.blocks)
        wanted = (self._block_rows(a), self._block_columns(a), a.values().shape[0])
        if given != wanted:
            raise ArgumentError(
                "a.row_order",
                f"is of a matrix of {given[0]} x {given[1]} blocks, {given[2]} of them stored; a has {wanted[0]} x "
                f"{wanted[1]}, {wanted[2]} of them stored",
            )
        if validate:
            check_indices("a", a)
            if not covers(clusters, a.crow_indices(), a.col_indices()):
                raise ArgumentError("a.row_order", CHANGED)

    def _check_index(self, a: torch.Tensor, index: TransposedIndex, validate: bool) -> None:
        """Check blocks in the order of the block columns."""
        if not isinstance(index, TransposedIndex):
            raise ArgumentError("a.index", f"is {type(index).__name__}, expected a TransposedIndex")
        shapes = ((self._block_columns(a) + 1,), (a.values().shape[0], 2))
        check_prepared("a.index", index._asdict(), shapes, a.device)
        check_address("a.index.entries", index.entries.data_ptr(), INDEX_ENTRY_BYTES)
        if validate:
            check_row_pointers("a", a)
            if not all(map(torch.equal, index, transposed_index(a))):
                raise ArgumentError("a.index", CHANGED)

    def _check_packed(self, a: PreparedBsr, packed: torch.Tensor, validate: bool) -> None:
        """Check values that were packed beforehand."""
        if self._gathered is None or not isinstance(a.row_order, RowClusters):
            raise ArgumentError("a", f"{OTHER_KERNEL}: it is packed, {self._stem} takes what is not")
        if not isinstance(packed, torch.Tensor):
            raise ArgumentError("a.packed", f"is {type(packed).__name__}, expected a torch.Tensor")
        packer = json.loads(a.kernel or "{}").get("dtype")  # packed bytes do not tell of what type they are
        if packer != self._spec.dtype:
            what = "an unknown type" if packer is None else packer
            reason = (
                f"is of {what}, {self._stem} takes {self._spec.dtype}: pack the values by its prepare(a, pack=True)"
            )
            raise ArgumentError("a.packed", reason)
        given = (packed.dtype, tuple(packed.shape), packed.device)
        wanted = (torch.uint8, (_packed_bytes(a.row_order, self._gathered),), a.matrix.device)
        if given != wanted:
            words, expected = (f"{kind} {shape} on {device}" for kind, shape, device in (given, wanted))
            raise ArgumentError("a.packed", f"is {words}, expected {expected}")
        if not packed.is_contiguous():
            raise ArgumentError("a.packed", f"has strides {packed.stride()}, expected a contiguous tensor")
        check_address("a.packed", packed.data_ptr())
        if validate and not torch.equal(packed, self._pack(a)):
            raise ArgumentError("a.packed", "is not what prepare(a, pack=True) returns: a has other values now")

    def _block_rows(self, a: torch.Tensor | Operand) -> int:
        return int(a.shape[0]) // self._spec.block.rows

    def _block_columns(self, a: torch.Tensor) -> int:
        return int(a.shape[1]) // self._spec.block.cols


def _columns_of(b: Any) -> int | None:
    """Columns of a launch; None for a value that is no operand, which the checks of the call refuse."""
    if not isinstance(b, torch.Tensor) or b.dim() not in (2, BATCH_RANK) or b.numel() == 0:
        return None
    return int(b.shape[1]) if b.dim() != BATCH_RANK else matrices_at_once(b) * column_step(b)


def _parts(row_order: RowOrder | None, index: TransposedIndex | None) -> dict[str, torch.Tensor]:
    """Prepared tensors that a kernel reads, by parameter."""
    parts: dict[str, torch.Tensor] = {} if index is None else index._asdict()
    if isinstance(row_order, RowClusters):
        parts |= {"rounds": row_order.rounds, "entries": row_order.entries}
        parts |= {"round_starts": row_order.starts, "slot_rows": row_order.rows}
    elif isinstance(row_order, RowSplit):
        parts |= {"chunks": row_order.chunks, "chunk_count": row_order.total}
    elif row_order is not None:
        parts["row_order"] = row_order
    return parts


def _check_parts(clusters: RowClusters, layout: GatheredLayout) -> None:
    """Check what can be said of row clusters by themselves."""
    size, ring = layout.slots, layout.ring_columns
    tensors = {name: getattr(clusters, name) for name in ("rounds", "entries", "starts", "rows")}
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor) or tensor.dim() == 0:
            raise ArgumentError(f"a.row_order.{name}", f"is {tensor!r}, expected a tensor with dimensions")
    rounds, groups = clusters.rounds.shape[0], clusters.rows.shape[0]
    shapes = ((rounds, RECORD_WORDS), (rounds, size, 2), (groups + 1,), (groups, size))
    check_prepared("a.row_order", tensors, shapes, clusters.rounds.device)
    if clusters.ring_columns != ring:
        raise ArgumentError(
            "a.row_order", f"is for a ring of {clusters.ring_columns} columns, that of this kernel has {ring}"
        )
    check_address("a.row_order.entries", clusters.entries.data_ptr())


def _packed_bytes(clusters: RowClusters, layout: GatheredLayout) -> int:
    return int(clusters.rounds.shape[0]) * layout.packet_bytes


def extent(row_order: RowOrder | None) -> tuple[int, ...] | None:
    """Properties of an order of block rows that select a signature."""
    if isinstance(row_order, RowClusters):
        return (row_order.rows.shape[0], row_order.rounds.shape[0])
    return (row_order.limit,) if isinstance(row_order, RowSplit) else None
