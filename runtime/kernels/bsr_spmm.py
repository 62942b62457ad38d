"""Calls of BSR x dense kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from codegen.problem import SpmmShape
from codegen.spec import BsrSpmmSpec
from runtime.compile.compiler import Compiled
from runtime.driver.allocate import allocator
from runtime.driver.context import entered, is_elsewhere
from runtime.driver.enqueue import enqueue
from runtime.driver.launch import LoadedKernel, Signature
from runtime.driver.workspace import Memory
from runtime.errors import ArgumentError
from runtime.kernels.arguments import (
    TMA_ALIGNMENT,
    View,
    call_key,
    check_address,
    check_memory,
    check_number,
    check_output,
    check_overlap,
    check_shape,
    check_sizes,
    check_strides,
    check_tensor,
    remember,
    used_strides,
    written,
)
from runtime.kernels.bound_call import BoundCall
from runtime.kernels.bsr_arguments import (
    INDEX_WORDS,
    STORE,
    check_indices,
    check_out,
    check_structure,
    check_values,
)
from runtime.kernels.bsr_batch import BATCH_RANK, beside, column_step, copied, matrices_at_once, scales_beside
from runtime.kernels.bsr_preparation import BsrPreparation, Operand, Parts
from runtime.kernels.bsr_scales import (
    NO_SCALES,
    SCALE_DEPTH,
    Scales,
    check_scale_address,
    check_scale_values,
    check_scales,
    scale_strides,
    scale_tensors,
)
from runtime.kernels.product_launch import New, ProductLaunch
from runtime.prepare.prepared import Effort, PreparedBsr
from runtime.prepare.row_clusters import RowClusters
from runtime.prepare.row_split import RowSplit

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "none": lambda x: x,
    "relu": torch.relu,
    "gelu": torch.nn.functional.gelu,
    "silu": torch.nn.functional.silu,
}
"""What each activation of an epilogue is in torch."""


class _Checked(NamedTuple):
    """What the checks of a call found.

    Attributes:
        signature: of the call.
        memory: what the launch needs beside its arguments.
        shape: of C.
        copy_stride: elements from one row to the next of the copy of B that is made by rows; None without one.
    """

    signature: Signature
    memory: Memory
    shape: tuple[int, int]
    copy_stride: int | None


def _check_batch(b: torch.Tensor, c: Any, out: Any) -> None:
    """Check the batch dimension, which the checks of a matrix do not cover."""
    batch = b.shape[0]
    if batch == 0:
        raise ArgumentError("b", f"is empty: {tuple(b.shape)}")
    for name, tensor in (("c", c), ("out", out)):
        if tensor is not None and (not isinstance(tensor, torch.Tensor) or tensor.shape[:-2] != (batch,)):
            what = tuple(tensor.shape) if isinstance(tensor, torch.Tensor) else type(tensor).__name__
            raise ArgumentError(name, f"is {what}, expected (batch {batch}, M, N) as b has a batch dimension")
    for name, tensor in (("b", b), ("c", c), ("out", out)):
        if tensor is None or batch == 1:
            continue
        step = TMA_ALIGNMENT // tensor.element_size()
        if tensor.stride(0) % step:
            stride = f"has stride {tensor.stride(0)} from one matrix to the next"
            raise ArgumentError(name, f"{stride}; it must be a multiple of {step} elements")
    if out is not None:
        check_output("out", out)
    if c is not None and out is not None:
        check_overlap("c", c, "out", out)


class BsrSpmmKernel(BoundCall[BsrSpmmSpec]):
    """C = A @ B, or A^T @ B, with A in block-sparse rows, then the spec's epilogue.

    Attributes:
        compiled: source, plan, code and compiler log.
        spec: the spec.
    """

    _argument_names = ("a", "b")

    def __init__(self, compiled: Compiled, loaded: LoadedKernel) -> None:
        super().__init__(compiled, loaded)
        self._preparation = BsrPreparation(compiled.plan, loaded)
        self._batches: dict[Any, None] = {}  # those that were checked
        self._strided = self.spec.b_layout == "strided"

    def __call__(
        self,
        a: torch.Tensor | PreparedBsr,
        b: torch.Tensor,
        *,
        c: torch.Tensor | None = None,
        beta: float = 1.0,
        bias: torch.Tensor | None = None,
        scale_a: torch.Tensor | None = None,
        scale_b: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        validate: bool = False,
    ) -> torch.Tensor:
        """Multiply.

        Where the spec transposes A, B and C have the shapes that A^T needs: B (M, N), C (K, N), c, bias and out as C.

        Args:
            a: (M, K), layout torch.sparse_bsr, blocks of the spec's shape, the spec's dtype; int32 or int64 indices.
                Columns of a row may be unsorted; a repeated column counts as often as it is listed. Or what
                ``prepare`` made of such a matrix. Specs with ``transpose_a`` or a dynamic scheduler prepare others
                themselves, by a few small kernels: in each call, or, if that is no more than an order of block rows
                (blocks of 64 rows and more), in the first one on a stream and when torch has written to the matrix;
                those that gather block rows (``tile.m`` 384) take prepared ones only. With a dynamic scheduler and
                blocks of 16 and 32 rows, split rows take device memory for partial sums: for long block rows at most
                the bytes of C, or of 128 block rows in fp32 if these are more; for others, where all tiles are fewer
                than half the SMs, two tiles for each SM, of a B as wide as they were split for.
            b: (K, N), row-major (last dimension contiguous), row stride a multiple of 16 bytes; if b_layout is
                column_major, b.mT is that; with blocks of 16 and 32 rows each call then copies B by rows first, to
                device memory of its size. If b_layout is strided, b, c and out have any strides. Or (batch, K, N):
                every entry is such a matrix; c and out then have a batch dimension too. A launch multiplies with many
                of them, as columns of one matrix. Where they do not lie side by side (strides (N, batch N, 1) or (N K,
                1, K), N a multiple of 16 bytes) they are copied, 256 MiB for a launch at most; matrices of more than 8
                MiB are not copied, and have a launch each.
            c: (M, N), row-major, row stride a multiple of 16 bytes, what is added, if and only if the spec accumulates.
                May be ``out`` itself.
            beta: what c is multiplied with, as in torch.addmm: 0 leaves c unread.
            bias: (M,), the spec's dtype, contiguous, one element for each row of C; if and only if the spec's epilogue
                has a bias. (For a linear layer with sparse weights, y^T = W x^T + bias, rows are output features.)
            scale_a: of kernels in FP8, which need it: what A's codes are multiplied with, float32 on the device. One
                element, () or (1,); where the spec has scales of blocks (stored blocks,), contiguous.
            scale_b: the same of B: one element; where the spec has scales of blocks (N, K / 128), one for each 128 rows
                of a column, those of neighboring columns side by side, the next rows' at a multiple of 4 elements
                (``scale.mT.contiguous().mT``); with a batch dimension where b has one.
            out: (M, N) to write into, same rules as c; the spec's ``output`` where A and B are FP8.
            validate: also check crow_indices and col_indices, that what was prepared is still that of ``a``, and that
                scales are positive and finite. Costs kernels and a synchronization.

        Returns:
            C (M, N), or (batch, M, N), whose matrices lie side by side: A @ B or A @ B + beta c, then the spec's
            epilogue. In block rows without blocks A @ B is 0.

        Raises:
            ArgumentError: naming the argument, before anything is launched.
        """
        if is_elsewhere(b):
            with entered(b.device.index):
                return self(
                    a, b, c=c, beta=beta, bias=bias, scale_a=scale_a, scale_b=scale_b, out=out, validate=validate
                )
        beta = check_number("beta", beta)
        scales = Scales(scale_a, scale_b)
        operand = self._preparation.take(a, b, validate)
        if isinstance(b, torch.Tensor) and b.dim() == 3:
            return self._each(operand, b, c=c, beta=beta, bias=bias, scales=scales, out=out, validate=validate)
        packets = operand.packed
        return self._one(
            operand,
            b,
            c=c,
            beta=beta,
            bias=bias,
            scales=scales,
            out=out,
            validate=validate,
            packets=packets,
            prologue=packets is None,
        )

    _multiply_parts: Callable[..., torch.Tensor] = __call__
    """The same call, for ``runtime.ops``, whose ``a`` may also be ``Parts``: an alias, as a wrapper takes 0.6 us."""

    def prepare(
        self,
        a: torch.Tensor | PreparedBsr,
        columns: int | None = None,
        *,
        pack: bool = False,
        effort: Effort = "fast",
    ) -> PreparedBsr:
        """Make the index structures of a sparse matrix that this kernel reads, once for many calls.

        With ``scheduler: dynamic`` these are the block rows in order of their length, with blocks of 16 and 32 rows
        long ones split along K; with ``transpose_a`` the index by block column; for gathered block rows clusters of
        rows with common columns. Others have none. They depend on the places of the blocks, not on their values: see
        ``PreparedBsr.with_values``. The result's ``problem`` has the density and evenness of the matrix.

        Args:
            a: (M, K), layout torch.sparse_bsr, blocks of the spec's shape. Or what this method returned: then its
                values are packed again, or no longer, and all else stays.
            columns: of B, of all matrices of a batch together. The result is right for any B, and fastest for one as
                wide as that. With blocks of 16 and 32 rows, and tiles for half of the SMs at most, other rows than long
                ones are then cut too, if that is faster; without it, sums do not depend on how wide B is. Clusters are
                made so large that all SMs have about as many tiles; without it, as large as they can be.
            pack: of kernels that gather block rows: also copy A's values in the order in which they are read, which
                otherwise each call does, to device memory of A's size, or several times that where rows of a cluster
                are of very different lengths. Only for constant values, such as
                weights: later changes do not reach the copy.
            effort: of the search for clusters, which runs on the CPU and synchronizes. "best" lets clusters exchange
                rows by simulated annealing, which takes 2 to 25 s of CPU: for 512 block rows of 16 of 512 random blocks
                each has 202 columns, not 211, and a call takes 185.9 us, not 190.8
                (docs/notebook/ladder-bsr.md, step 58). "fast" does without. Other kernels search nothing.

        Returns:
            What calls of this kernel take instead of ``a``.

        Raises:
            ArgumentError: naming the argument, before anything is launched.
        """
        matrix = a.matrix if isinstance(a, PreparedBsr) else a
        if is_elsewhere(matrix):
            with entered(matrix.device.index):
                return self._preparation.prepare(a, columns, pack, effort)
        return self._preparation.prepare(a, columns, pack, effort)

    def _one(
        self,
        a: Operand,
        b: torch.Tensor,
        *,
        c: torch.Tensor | None,
        beta: float,
        bias: torch.Tensor | None,
        scales: Scales,
        out: torch.Tensor | None,
        validate: bool,
        packets: torch.Tensor | None,
        prologue: bool,
        own_out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Multiply with one matrix.

        Args:
            a: the sparse operand.
            b: as ``__call__`` describes it, as the next six.
            c: see there.
            beta: see there.
            bias: see there.
            scales: see there.
            out: see there.
            validate: see there.
            packets: what A is packed to, or was; None: this launch has memory of its own for that.
            prologue: whether the kernel that goes before is launched, if there is one.
            own_out: columns of the result of a batch, to be written if there is no ``out``.
        """
        stride = None if own_out is None else own_out.stride(0)
        key = (a.key, beta, stride, call_key(b, c, bias, out, *scales))
        found = self._bound(key)
        if found is None:
            checked = self._check(
                a.matrix,
                b,
                c=c,
                beta=beta,
                bias=bias,
                out=out,
                scales=scales,
                row_order=a.row_order,
                own_stride=stride,
            )
            found = self._signatures.keep(key, checked)
        if validate:
            check_indices("a", a.matrix)
            check_scale_values(scales)
        own = self._empty(found.shape, b) if out is None and own_out is None else own_out
        out = own if out is None else written(out)
        assert out is not None
        at_a, at_b, at_out, at_c = a.addresses["a"], b.data_ptr(), out.data_ptr(), 0
        if c is not None:
            check_overlap("c", c, "out", out)
            at_c = c.data_ptr()
        if (at_a if self._strided else at_a | at_b | at_out | at_c) % TMA_ALIGNMENT:
            for name, address in (("a.values()", at_a), ("b", at_b), ("out", at_out), ("c", at_c)):
                check_address(name, address)
        check_scale_address(self.spec, scales)
        if a.values_shape[0] == 0:
            return self._without_blocks(c, beta, bias, out)
        by_rows, at_rows = None, at_b  # what the product reads
        if found.copy_stride is not None:
            by_rows = torch.empty((b.shape[0], found.copy_stride), dtype=b.dtype, device=b.device)
            at_rows = by_rows.data_ptr()
        places = {"b": at_rows, "b_groups": at_rows, "b_columns": at_b, "c": at_out, "c_in": at_c}
        addresses = a.addresses | places | scales.addresses
        if bias is not None:
            addresses["bias"] = bias.data_ptr()
        if packets is None:
            packets = self._preparation.packets(a)
        if packets is not None:
            addresses["packets"] = packets.data_ptr()
        enqueue(self._loaded, found.signature, addresses, b.device, found.memory, prologue=prologue)
        return out

    def _bound_launch(
        self, a: Parts, tensors: tuple[torch.Tensor, ...], b: torch.Tensor, *, bias: Any, c: Any, beta: float
    ) -> ProductLaunch | None:
        """The launch of a call that was made just before, for ``runtime.ops``.

        Args:
            a: the sparse operand of that call.
            tensors: those that later calls pass: row pointers, column numbers, the bias if there is one, all others.
            b: (K, N), as of the call, as the next three.
            bias: see there.
            c: see there.
            beta: see there.

        Returns:
            The launch; None where later calls do more than launch: for a batch, for a matrix without blocks, and for
            one whose values are packed in each call.
        """
        parts: dict[str, torch.Tensor | None] = {**a.read(), "b": b, "bias": bias, "c_in": c}
        packs = self._plan.gathered is not None and "packets" not in parts
        if packs or b.dim() == BATCH_RANK or a.matrix.values.shape[0] == 0:
            return None
        operand = self._preparation.take(a, b, False)
        checked = self._bound((operand.key, beta, None, call_key(b, c, bias, None, *NO_SCALES)))
        names = {id(part): name for name, part in parts.items() if part is not None}
        if checked is None or not names.keys() <= set(map(id, tensors)) or not self._reads(names.values(), checked):
            return None
        (rows, columns), allocate = checked.shape, allocator(b.device)
        padded = -(-columns // STORE) * STORE
        stride, copy = checked.copy_stride, None
        if stride is not None:
            copy = New(allocate, ((b.shape[0], stride), (stride, 1)), b.dtype)
        return ProductLaunch(
            self._loaded,
            checked.signature,
            b.device,
            tuple(names.get(id(tensor), "") for tensor in tensors),
            aligned=slice(2 if bias is None else 3, (-1 if c is None else -2) if self._strided else None),
            result=New(
                allocate,
                ((rows, padded), (padded, 1)),
                self._output,
                None if padded == columns else ((rows, columns), (padded, 1)),
            ),
            memory=checked.memory,
            copy=copy,
            prologue=self._plan.gathered is None,
        )

    def _reads(self, names: Iterable[str], checked: _Checked) -> bool:
        """Whether the kernel reads no tensors but these and what a launch makes; else each call prepares some."""
        memory = checked.memory
        made = {"c", "b_groups", "b_columns", *memory.unused}
        made |= {name for name, _ in (*memory.counter_places, *memory.scratch_places)}
        read = {
            param.name.removesuffix("_map") for param in self._plan.params if param.type in ("pointer", "tensor_map")
        }
        return read <= {*names, *made}

    def _each(
        self,
        a: Operand,
        b: torch.Tensor,
        *,
        c: torch.Tensor | None,
        beta: float,
        bias: torch.Tensor | None,
        scales: Scales,
        out: torch.Tensor | None,
        validate: bool,
    ) -> torch.Tensor:
        """Multiply with each matrix of a batch: with several in a launch, as columns of one, unless they are large."""
        key = (a.key, beta, call_key(b, c, bias, out, *scales))
        if key[-1] is None or key not in self._batches:
            self._check_batch(a, b, c=c, beta=beta, bias=bias, scales=scales, out=out)
            remember(self._batches, key, None)
        if validate:
            check_indices("a", a.matrix)
            check_scale_values(scales)
        batch, rows, step = b.shape[0], a.shape[1 if self.spec.transpose_a else 0], column_step(b)
        at_once = matrices_at_once(b, c, out, self._preparation.widest(a))
        whole: Any = None
        if out is None:
            whole = allocator(b.device)((rows, batch * step), (batch * step, 1), self._output)
        packets = self._preparation.packets(a)  # the first launch packs A for all
        for i in range(0, batch, at_once):
            end = min(batch, i + at_once)
            part = slice(i, end)
            operands = self._operands(b, c, out, scales=scales, part=part, step=step) if at_once > 1 else None
            if operands is None:
                operands = (b[i], None if c is None else c[i], None if out is None else out[i], scales.of_matrix(i))
            wide, added, into, of_columns = operands
            own = None if whole is None else whole[:, i * step : end * step][:, : wide.shape[1]]
            found = self._one(
                a,
                wide,
                c=added,
                beta=beta,
                bias=bias,
                scales=of_columns,
                out=into,
                validate=False,
                packets=packets,
                prologue=a.packed is None and (packets is None or i == 0),
                own_out=own,
            )
            if out is not None and into is None:
                out[part].copy_(found.unflatten(1, (-1, step))[..., : b.shape[2]].transpose(0, 1))
        # In place, as what is no view may be written to behind a custom function of autograd.
        return out if out is not None else whole.as_strided_((batch, rows, b.shape[2]), (step, batch * step, 1))

    def _operands(
        self, b: torch.Tensor, c: Any, out: Any, *, scales: Scales, part: slice, step: int
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, Scales]:
        """Return some matrices of a batch as columns of one: of b, c and out, which is None if it must be copied to."""
        by_columns = self.spec.b_layout == "column_major"
        wide = beside(b[part])
        if wide is None:
            wide = copied(b[part], step, by_columns=by_columns)
        added = None if c is None else beside(c[part])
        if c is not None and added is None:
            added = copied(c[part], step)
        into = None if out is None else beside(out[part], exact=True)
        if scales.b is not None and scales.b.dim() == BATCH_RANK:
            scales = Scales(scales.a, scales_beside(scales.b[part], step))
        return wide, added, into, scales

    def _check_batch(
        self, a: Operand, b: torch.Tensor, *, c: Any, beta: float, bias: Any, scales: Scales, out: Any
    ) -> None:
        """Check a batch, and its first matrix as one that is alone."""
        _check_batch(b, c, out)
        first = {name: None if t is None else t[0] for name, t in (("c", c), ("out", out))}
        self._check_arguments(a.matrix, b[0], **first, beta=beta, bias=bias, scales=scales.of_matrix(0))
        if scales.b is not None and scales.b.dim() == BATCH_RANK and scales.b.shape[0] != b.shape[0]:
            reason = f"has shape {tuple(scales.b.shape)}, expected (batch {b.shape[0]}, N, K / {SCALE_DEPTH})"
            raise ArgumentError("scale_b", reason)

    def _empty(self, shape: tuple[int, int], b: torch.Tensor) -> torch.Tensor:
        """Allocate C; rows are padded where N alone would break the alignment of 16-byte stores."""
        rows, columns = shape
        padded = -(-columns // STORE) * STORE
        written = allocator(b.device)((rows, padded), (padded, 1), self._output)
        # In place, as what is no view may be written to behind a custom function of autograd.
        return written if padded == columns else written.as_strided_((rows, columns), (padded, 1))

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

    def _check_added(self, c: Any, beta: float, shape: tuple[int, int], device: torch.device) -> dict[str, View]:
        """Check c, which is added to A @ B; return its shape and strides, if there is one."""
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
        check_sizes("c", c, "MN", shape)
        if not self._strided:
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

    def _check_arguments(
        self, a: torch.Tensor, b: Any, *, c: Any, beta: float, bias: Any, out: Any, scales: Scales
    ) -> tuple[int, int, dict[str, View]]:
        """Check the arguments of a call; return the rows of C, those of B, and what tensor maps see of c."""
        check_tensor("b", b, self._dtype, 2)
        check_structure("a", a, self.spec.block, b.device)
        check_values("a", a, self._dtype)
        rows, depth = a.shape[::-1] if self.spec.transpose_a else a.shape
        columns = b.shape[1]
        check_shape("b", b.shape, [("M" if self.spec.transpose_a else "K", (depth,)), ("N", None)])
        if not self._strided:
            self._check_layout(b, self.spec.b_layout == "column_major")
        added = self._check_added(c, beta, (rows, columns), b.device)
        self._check_bias(bias, rows, b.device)
        blocks = a.values().shape[0]
        check_scales(self.spec, self.compiled.named.stem, scales, (blocks, columns, depth), b.device)
        if out is not None:
            check_out(out, self._output, (rows, columns), b.device, strided=self._strided)
        return rows, depth, added

    def _check(
        self,
        a: torch.Tensor,
        b: Any,
        *,
        c: Any,
        beta: float,
        bias: Any,
        out: Any,
        scales: Scales = NO_SCALES,
        row_order: Any = None,
        own_stride: int | None = None,
    ) -> _Checked:
        """Check a call of a new signature and prepare it; ``own_stride`` is that of the rows of ``own_out``."""
        rows, depth, added = self._check_arguments(a, b, c=c, beta=beta, bias=bias, out=out, scales=scales)
        columns = b.shape[1]
        strides = (own_stride or -(-columns // STORE) * STORE, 1) if out is None else out.stride()
        values = a.values()
        shape = SpmmShape(rows, depth, columns, values.shape[0], b.stride(0))
        if isinstance(row_order, RowSplit):
            shape = replace(shape, chunk_blocks=row_order.limit)
        elif isinstance(row_order, RowClusters):
            shape = replace(shape, groups=row_order.rows.shape[0], rounds=row_order.rounds.shape[0])
        args = self._plan.problem(shape, self._loaded.slots(b.device.index))
        if args.tiles // self._plan.cluster >= 2**31:
            raise ArgumentError("b", f"has shape {tuple(b.shape)}: more than 2^31 tiles")
        known: dict[str, int | float] = {
            "index_words": INDEX_WORDS[a.crow_indices().dtype],
            "b_row_stride": used_strides(b)[0],
            "b_column_stride": used_strides(b)[1],
            "c_row_stride": strides[0],
            "c_column_stride": strides[1],
            **({} if c is None else dict(zip(("c_in_row_stride", "c_in_column_stride"), c.stride(), strict=True))),
            "beta": beta,
            **scale_strides(scales),
        }
        tensors = {
            **added,
            **scale_tensors(self.spec, scales),
            **self._b_tensors(b, args.copy_stride),
            "a": (tuple(values.shape), values.stride()),
            "c": ((rows, columns), (strides[0], 1)),
        }
        check_memory(b=b, c=c, bias=bias, out=out)
        signature = self._signature(b.device, args, self._plan.own(known), tensors)
        return _Checked(signature, Memory.of(args), (rows, columns), args.copy_stride)

    def _b_tensors(self, b: torch.Tensor, copy_stride: int | None) -> dict[str, View]:
        """Shapes and strides of B, or of its copy by rows, in tensor maps."""
        by_columns: dict[str, View] = {"b_columns": (tuple(b.mT.shape), b.mT.stride())}
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
