"""Calls of BSR x dense kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from codegen.problem import LaunchArgs, SpmmShape
from codegen.spec import BsrSpmmSpec
from runtime.compile.compiler import Compiled
from runtime.driver.launch import LoadedKernel, Signature
from runtime.driver.workspace import reserve
from runtime.errors import ArgumentError
from runtime.kernels.arguments import (
    TORCH_DTYPES,
    check_address,
    check_number,
    check_output,
    check_overlap,
    check_shape,
    check_strides,
    check_tensor,
    used_strides,
)
from runtime.kernels.bsr_arguments import (
    INDEX_WORDS,
    SIGNATURES_KEPT,
    STORE,
    call_key,
    check_indices,
    check_layout,
    check_out,
    check_prepared,
    check_row_pointers,
    check_structure,
    check_values,
)
from runtime.kernels.bsr_preparation import RowOrder, RowOrders, extent
from runtime.prepare.row_clusters import RowGroups
from runtime.prepare.row_split import RowChunks

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "none": lambda x: x,
    "relu": torch.relu,
    "gelu": torch.nn.functional.gelu,
    "silu": torch.nn.functional.silu,
}
"""What each activation of an epilogue is in torch."""


ENTRY_BYTES = 8  # of a TransposedIndex, which kernels read as one


class TransposedIndex(NamedTuple):
    """The stored blocks of a BSR matrix in the order of its block columns.

    Attributes:
        column_starts: int32 (block columns + 1,): the first entry of each block column, and one more.
        entries: int32 (stored blocks, 2): a block's place among the values, and its block row.
    """

    column_starts: torch.Tensor
    entries: torch.Tensor


class _Options(NamedTuple):
    """What a call is given beside A and B, as ``BsrSpmmKernel.__call__`` describes it."""

    c: torch.Tensor | None
    beta: float
    bias: torch.Tensor | None
    row_order: RowOrder | None
    transposed: TransposedIndex | None
    packed: torch.Tensor | None
    prologue: bool  # whether the kernel that goes before is launched, if there is one
    out: torch.Tensor | None
    validate: bool


def _check_batch(b: torch.Tensor, c: Any, out: Any) -> None:
    """Check what is wrong with a batch, rather than with a matrix of it."""
    batch = b.shape[0]
    if batch == 0:
        raise ArgumentError("b", f"is empty: {tuple(b.shape)}")
    for name, tensor in (("c", c), ("out", out)):
        if tensor is not None and (not isinstance(tensor, torch.Tensor) or tensor.shape[:-2] != (batch,)):
            what = tuple(tensor.shape) if isinstance(tensor, torch.Tensor) else type(tensor).__name__
            raise ArgumentError(name, f"is {what}, expected (batch {batch}, M, N) as b has a batch dimension")
    for name, tensor in (("b", b), ("c", c), ("out", out)):
        if tensor is not None and batch > 1 and tensor.stride(0) % STORE:
            stride = f"has stride {tensor.stride(0)} from one matrix to the next"
            raise ArgumentError(name, f"{stride}; it must be a multiple of {STORE} elements")
    if out is not None:
        check_output("out", out)
    if c is not None and out is not None:
        check_overlap("c", c, "out", out)


class BsrSpmmKernel:
    """C = A @ B, or A^T @ B, with A in block-sparse rows, then the spec's epilogue.

    Attributes:
        compiled: source, plan, code and compiler log.
        spec: the spec.
    """

    def __init__(self, compiled: Compiled, loaded: LoadedKernel) -> None:
        self.compiled = compiled
        self._plan = compiled.plan
        assert isinstance(compiled.plan.spec, BsrSpmmSpec)
        self.spec: BsrSpmmSpec = compiled.plan.spec
        self._loaded = loaded
        self._dtype = TORCH_DTYPES[self.spec.dtype]
        self._orders = RowOrders(compiled.plan, loaded)
        self._signatures: dict[Any, tuple[Signature, LaunchArgs]] = {}

    def __repr__(self) -> str:
        return f"<bsr_spmm kernel {self.compiled.named.stem}(a, b) for {self.spec.arch}>"

    def __call__(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        *,
        c: torch.Tensor | None = None,
        beta: float = 1.0,
        bias: torch.Tensor | None = None,
        row_order: RowOrder | None = None,
        packed: torch.Tensor | None = None,
        index: TransposedIndex | None = None,
        out: torch.Tensor | None = None,
        validate: bool = False,
    ) -> torch.Tensor:
        """Multiply.

        Where the spec transposes A, B and C have the shapes that A^T needs: B (M, N), C (K, N), c, bias and out as C.

        Args:
            a: (M, K), layout torch.sparse_bsr, blocks of the spec's shape, the spec's dtype; int32 or int64 indices.
                Columns of a row may be unsorted; a repeated column counts as often as it is listed.
            b: (K, N), row-major (last dimension contiguous), row stride a multiple of 16 bytes; if b_layout is
                column_major, b.mT is that; with blocks of 16 and 32 rows each call then copies B by rows first, to
                device memory of its size. Or (batch, K, N): every entry is such a matrix and has a launch of its own;
                c and out then have a batch dimension too.
            c: (M, N), row-major, row stride a multiple of 16 bytes, what is added, if and only if the spec accumulates.
                May be ``out`` itself.
            beta: what c is multiplied with, as in torch.addmm: 0 leaves c unread.
            bias: (M,), the spec's dtype, contiguous, one element for each row of C; if and only if the spec's epilogue
                has a bias. (For a linear layer with sparse weights, y^T = W x^T + bias, rows are output features.)
            index: of specs that transpose A only: what ``transposed_index(a)`` returns. Without it, each call makes it
                anew, which takes a few small kernels. Its content is trusted.
            row_order: of balanced specs and of those that gather block rows (``tile.m`` 384) only: what
                ``row_order(a, b.shape[-1])`` returns. Its content is trusted: it must be that of this matrix;
                ``validate`` finds out. Specs that gather block rows need it; without ``packed``, each call packs A in
                its order, to device memory of A's size, or several times that where the rows of a group are of very
                different lengths.
                Balanced specs find it anew without it, which takes a few small kernels. In those, with blocks of 16 and
                32 rows, long block rows are divided between thread blocks, whose parts take a place in device memory of
                at most the bytes of C, or of 128 block rows in fp32 if these are more; and so are others where all
                tiles are fewer than half the SMs and that is faster, whose parts take two tiles for each SM, of a B as
                wide as they were cut for.
            packed: of specs that gather block rows only: what ``pack(a, row_order)`` returned, of this row_order. A's
                values are then those that it had when it was packed. Its content is trusted; ``validate`` finds out.
            out: (M, N) to write into, same rules as c.
            validate: also check crow_indices, col_indices, row_order and packed. Costs kernels and a synchronisation.

        Returns:
            C (M, N), or (batch, M, N): A @ B or A @ B + beta c, then the spec's epilogue. In block rows without blocks
            A @ B is 0.

        Raises:
            ArgumentError: naming the argument, before anything is launched.
        """
        check_layout("a", a)
        beta = check_number("beta", beta)
        if self.takes_row_order or self.spec.transpose_a:
            check_structure("a", a, self.spec.block, a.device)  # the order of its blocks is asked for
        row_order = self._orders.take(a, b, row_order, validate)
        index = self._transposed(a, index, validate)
        self._orders.check_packed(a, row_order, packed, validate)
        options = _Options(c, beta, bias, row_order, index, packed, packed is None, out, validate)
        if isinstance(b, torch.Tensor) and b.dim() == 3:
            return self._each(a, b, options)
        return self._one(a, b, options)

    @property
    def takes_row_order(self) -> bool:
        """Whether calls take a ``row_order``."""
        return self._orders.are_taken

    def row_order(self, a: torch.Tensor, columns: int | None = None) -> RowOrder:
        """Return the order of block rows of ``a``, on its device, that a kernel takes which has one, with any B.

        A balanced kernel takes the longest first. One that gathers block rows takes groups of those that have columns
        in common. Finding them takes the CPU a while (two cores 3 s for 512 block rows of 16 blocks, 0.5 s of 128, 16 s
        for 2048 of 64) and synchronises; it depends on the places of the blocks only, not on their values.

        Args:
            a: (M, K), layout torch.sparse_bsr, blocks of the spec's shape.
            columns: of B. With blocks of 16 and 32 rows, and tiles for half of the SMs at most, other rows than long
                ones are then cut too, if that is faster. Without it, sums do not depend on how wide B is. Groups are
                made so large that all SMs have about as many tiles; without it, as large as they can be.

        Returns:
            int32 (block rows,); with blocks of 16 and 32 rows a RowChunks, whose long rows are cut; a RowGroups for a
            kernel that gathers them.

        Raises:
            ArgumentError: naming the argument.
        """
        return self._orders.find(a, columns)

    def pack(self, a: torch.Tensor, row_order: RowGroups) -> torch.Tensor:
        """Return the stored blocks of ``a`` in the order in which a kernel that gathers block rows takes them.

        Where A's values stay what they are, as those of weights, a call that is given this need not do it. It does not
        follow later changes of the values.

        Args:
            a: (M, K), layout torch.sparse_bsr, as calls take it.
            row_order: what ``row_order(a, ...)`` returned.

        Returns:
            uint8 (bytes,), on its device: A's size, or several times that where the rows of a group are of very
            different lengths.

        Raises:
            ArgumentError: naming the argument, before anything is launched.
        """
        check_layout("a", a)
        check_structure("a", a, self.spec.block, a.device)
        return self._orders.pack(a, row_order)

    @staticmethod
    def transposed_index(a: torch.Tensor) -> TransposedIndex:
        """Return the stored blocks of ``a`` in the order of its block columns, on its device."""
        check_layout("a", a)
        crow, col = a.crow_indices(), a.col_indices()
        block_columns = a.shape[1] // a.values().shape[2]
        numbers = torch.arange(crow.shape[0] - 1, device=a.device)
        rows = numbers.repeat_interleave(crow.diff(), output_size=col.shape[0])
        order = col.argsort(stable=True)
        # A column out of range comes before the first one or behind the last.
        wanted = torch.arange(block_columns + 1, device=a.device, dtype=col.dtype)
        starts = torch.searchsorted(col[order], wanted, out_int32=True)
        return TransposedIndex(starts, torch.stack([order, rows[order]], 1).to(torch.int32))

    def _transposed(self, a: torch.Tensor, index: Any, validate: bool) -> TransposedIndex | None:
        """Return the index that the kernel takes; None for kernels that take none."""
        if not self.spec.transpose_a:
            if index is not None:
                stem = self.compiled.named.stem
                raise ArgumentError("index", f"is not an argument of {stem}: its spec does not transpose A")
            return None
        if index is None:
            if validate:  # before its row pointers say how much is written where
                check_row_pointers("a", a)
            return self.transposed_index(a)
        if not isinstance(index, TransposedIndex):
            raise ArgumentError("index", f"is {type(index).__name__}, expected what transposed_index(a) returns")
        shapes = ((a.shape[1] // self.spec.block.cols + 1,), (a.values().shape[0], 2))
        check_prepared("index", index._asdict(), shapes, a.device)
        check_address("index.entries", index.entries.data_ptr(), ENTRY_BYTES)
        return index

    def _rows(self, a: torch.Tensor) -> int:
        """Return the rows of C."""
        return a.shape[1] if self.spec.transpose_a else a.shape[0]

    def _one(
        self, a: torch.Tensor, b: torch.Tensor, options: _Options, own_out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Multiply with one matrix; ``own_out`` is what ``_empty`` returned, to be written if there is no ``out``."""
        c, beta, bias, row_order, index, packets, prologue, out, validate = options
        values, crow, col = a.values(), a.crow_indices(), a.col_indices()
        key = (a.shape, call_key(values, crow, col, b, c, bias, out), beta, extent(row_order))
        found = self._signatures.get(key)
        if found is None:
            found = self._check(a, b, c=c, beta=beta, bias=bias, out=out, row_order=row_order)
            if len(self._signatures) >= SIGNATURES_KEPT:
                self._signatures.clear()
            self._signatures[key] = found
        signature, args = found
        if validate:
            check_indices("a", a)
        if out is None:
            out = self._empty(self._rows(a), b) if own_out is None else own_out
        addresses = {"a": values.data_ptr(), "b": b.data_ptr(), "c": out.data_ptr()}
        if c is not None:
            check_overlap("c", c, "out", out)
            addresses["c_in"] = c.data_ptr()
        for name, address in addresses.items():
            check_address({"a": "a.values()", "c": "out", "c_in": "c"}.get(name, name), address)
        if values.shape[0] == 0:
            return self._without_blocks(c, beta, bias, out)
        by_rows = b  # what the product reads
        if args.copy_stride is not None:
            by_rows = torch.empty((b.shape[0], args.copy_stride), dtype=b.dtype, device=b.device)
        addresses |= {"b": by_rows.data_ptr(), "b_groups": by_rows.data_ptr(), "b_columns": b.data_ptr()}
        addresses |= {"crow_indices": crow.data_ptr(), "col_indices": col.data_ptr()}
        if bias is not None:
            addresses["bias"] = bias.data_ptr()
        with torch.cuda.device(b.device):
            stream = torch.cuda.current_stream().cuda_stream
            if index is not None:
                addresses |= {name: tensor.data_ptr() for name, tensor in index._asdict().items()}
            if packets is None:
                packets = self._orders.packets(row_order, b.device)
            if packets is not None:
                addresses["packets"] = packets.data_ptr()
            addresses |= self._orders.addresses(row_order)
            more, held = reserve(b.device, stream, args)
            addresses |= more
            self._loaded.launch(signature, addresses, stream, prologue=prologue)
            del held  # not before: what is given back could be handed out again
        return out

    def _each(self, a: torch.Tensor, b: torch.Tensor, options: _Options) -> torch.Tensor:
        """Multiply with each matrix of a batch. What is wrong with a matrix is told by its own call."""
        _check_batch(b, options.c, options.out)
        batch, c, out = b.shape[0], options.c, options.out
        written = out
        if written is None:
            written = self._empty(batch * self._rows(a), b[0]).unflatten(0, (batch, self._rows(a)))
        gathers = isinstance(options.row_order, RowGroups)
        if gathers and options.packed is None:  # the first matrix' launch packs A for all
            options = options._replace(packed=self._orders.packets(options.row_order, b.device))
        for i in range(batch):
            one = options._replace(
                prologue=options.prologue and not (gathers and i > 0),
                c=None if c is None else c[i],
                out=None if out is None else out[i],
                validate=options.validate and i == 0,
            )
            self._one(a, b[i], one, written[i])
        return written

    @staticmethod
    def _empty(rows: int, b: torch.Tensor) -> torch.Tensor:
        """Allocate C; rows are padded where N alone would break the alignment of 16-byte stores."""
        columns = b.shape[1]
        padded = -(-columns // STORE) * STORE
        return torch.empty((rows, padded), dtype=b.dtype, device=b.device)[:, :columns]

    def _without_blocks(
        self, c: torch.Tensor | None, beta: float, bias: torch.Tensor | None, out: torch.Tensor
    ) -> torch.Tensor:
        """Write what the epilogue makes of A @ B = 0."""
        if bias is None and (c is None or beta == 0):
            return out.zero_()  # every activation keeps 0
        total = torch.zeros((), dtype=torch.float32, device=out.device)
        if c is not None and beta != 0:
            total = total + beta * c.float()
        if bias is not None:
            total = total + bias.float()[:, None]
        if self.spec.epilogue is not None:
            total = ACTIVATIONS[self.spec.epilogue.activation](total)
        return out.copy_(total)

    def _check_added(
        self, c: Any, beta: float, shape: tuple[int, int], device: torch.device
    ) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
        """Check what is added to A @ B; return shape and strides of c, if it is."""
        if not self.spec.accumulate:
            for name, given in (("c", c is not None), ("beta", beta != 1)):
                if given:
                    raise ArgumentError(
                        name, f"is not an argument of {self.compiled.named.stem}: its spec does not accumulate"
                    )
            return {}
        if c is None:
            raise ArgumentError("c", f"is missing: {self.compiled.named.stem} computes A @ B + beta c")
        check_tensor("c", c, self._dtype, 2, device)
        check_shape("c", c.shape, [("M", (shape[0],)), ("N", (shape[1],))])
        check_strides("c", c)
        return {"c_in": (tuple(c.shape), c.stride())}

    def _check_bias(self, bias: Any, rows: int, device: torch.device) -> None:
        wanted = self.spec.epilogue is not None and self.spec.epilogue.bias
        if not wanted and bias is not None:
            raise ArgumentError("bias", f"is not an argument of {self.compiled.named.stem}: its epilogue has no bias")
        if not wanted:
            return
        if bias is None:
            raise ArgumentError(
                "bias", f"is missing: the epilogue of {self.compiled.named.stem} adds a bias (M {rows},)"
            )
        check_tensor("bias", bias, self._dtype, 1, device)
        check_shape("bias", bias.shape, [("M", (rows,))])
        if not bias.is_contiguous():
            raise ArgumentError("bias", f"has stride {bias.stride(0)}, expected a contiguous tensor")

    def _check_layout(self, b: torch.Tensor, by_columns: bool) -> None:
        """Check that the rows of B, or its columns, are contiguous and begin where copies may."""
        wanted, other = ("column_major", "row_major") if by_columns else ("row_major", "column_major")
        kept = b.mT if by_columns else b
        if kept.shape[1] > 1 and kept.stride(1) != 1 and kept.stride(0) == 1:
            raise ArgumentError(
                "b",
                f"has strides {b.stride()}: it is {other}, and {self.compiled.named.stem} is for b_layout {wanted}; "
                f"pass a copy stored so, or use a spec with b_layout: {other}",
            )
        check_strides("b", kept)

    def _check(
        self, a: torch.Tensor, b: Any, *, c: Any, beta: float, bias: Any, out: Any, row_order: Any = None
    ) -> tuple[Signature, LaunchArgs]:
        """Check a call of a new signature and prepare it; return what its launch needs of memory too."""
        check_tensor("b", b, self._dtype, 2)
        check_structure("a", a, self.spec.block, b.device)
        check_values("a", a, self._dtype)
        rows, depth = a.shape[::-1] if self.spec.transpose_a else a.shape
        columns = b.shape[1]
        check_shape("b", b.shape, [("M" if self.spec.transpose_a else "K", (depth,)), ("N", None)])
        by_columns = self.spec.b_layout == "column_major"
        self._check_layout(b, by_columns)
        added = self._check_added(c, beta, (rows, columns), b.device)
        self._check_bias(bias, rows, b.device)
        stride = -(-columns // STORE) * STORE
        if out is not None:
            check_out(out, self._dtype, (rows, columns), b.device)
            stride = out.stride(0)
        values = a.values()
        shape = SpmmShape(rows, depth, columns, values.shape[0], b.stride(0))
        if isinstance(row_order, RowChunks):
            shape = replace(shape, chunk_blocks=row_order.limit)
        elif isinstance(row_order, RowGroups):
            shape = replace(shape, groups=row_order.rows.shape[0], rounds=row_order.rounds.shape[0])
        args = self._plan.problem(shape)
        if args.tiles // self._plan.cluster >= 2**31:
            raise ArgumentError("b", f"has shape {tuple(b.shape)}: more than 2^31 tiles")
        known: dict[str, int | float] = {
            "index_words": INDEX_WORDS[a.crow_indices().dtype],
            "b_row_stride": used_strides(b)[0],
            "b_column_stride": used_strides(b)[1],
            "c_row_stride": stride,
            "beta": beta,
        }
        numbers = {**args.numbers, **self._plan.own(known)}
        tensors = {
            **added,
            **self._b_tensors(b, args.copy_stride),
            "a": (tuple(values.shape), values.stride()),
            "c": ((rows, columns), (stride, 1)),
        }
        signature = self._loaded.signature(
            b.device.index, args.tiles, numbers, tensors, prologue_grid=args.prologue_grid
        )
        return signature, args

    def _b_tensors(
        self, b: torch.Tensor, copy_stride: int | None
    ) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
        """Return the shapes and strides in which tensor maps see B, or the copy of it that is made by rows."""
        by_columns: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
            "b_columns": (tuple(b.mT.shape), b.mT.stride())
        }
        if self.spec.b_layout == "column_major" and copy_stride is None:
            return {"b": by_columns["b_columns"]}
        depth, columns = b.shape
        row = b.stride(0) if copy_stride is None else copy_stride
        by_rows = {**by_columns, "b": ((depth, columns), (row, 1))}
        groups = self._plan.tensor_maps.get("b_groups_map")
        if groups is not None:  # B's columns in groups; the last one may reach beyond B
            width = groups.box[0]
            by_rows["b_groups"] = ((-(-columns // width), depth, width), (width, row, 1))
        return by_rows
