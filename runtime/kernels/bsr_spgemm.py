"""Calls of BSR x BSR kernels."""

from __future__ import annotations

from typing import Any

import torch

from codegen.problem import SpgemmShape
from codegen.spec import BsrSpgemmSpec
from runtime.compile.compiler import Compiled
from runtime.driver.allocate import allocator, contiguous
from runtime.driver.context import entered, is_elsewhere
from runtime.driver.enqueue import enqueue
from runtime.driver.launch import LoadedKernel, Signature
from runtime.driver.workspace import Memory
from runtime.errors import ArgumentError
from runtime.kernels.arguments import View, call_key, check_addresses, check_memory, check_sizes, written
from runtime.kernels.bound_call import BoundCall
from runtime.kernels.bsr_arguments import (
    INDEX_WORDS,
    check_indices,
    check_on_gpu,
    check_out,
    check_out_values,
    check_structure,
    check_values,
)
from runtime.prepare.matrix import check_layout

ARGUMENTS = {"a": "a.values()", "b": "b.values()", "c": "out"}  # by parameter
MOST_RUNS = 2**29  # a step that carries the number of its tile has two more bits; twice as many tickets are an int


class BsrSpgemmKernel(BoundCall[BsrSpgemmSpec]):
    """C = A @ B with A and B in block-sparse rows, C dense, or in block-sparse rows on a given pattern.

    Attributes:
        compiled: source, plan, code and compiler log.
        spec: the spec.
    """

    def __init__(self, compiled: Compiled, loaded: LoadedKernel) -> None:
        super().__init__(compiled, loaded)
        self._argument_names = ("a", "b") if self.spec.output == "dense" else ("a", "b", "pattern")

    def __call__(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        pattern: torch.Tensor | None = None,
        *,
        out: torch.Tensor | None = None,
        validate: bool = False,
    ) -> torch.Tensor:
        """Multiply.

        Args:
            a: (M, K), layout torch.sparse_bsr, blocks of the spec's shape, the spec's dtype; int32 or int64 indices.
                Columns of a row may be unsorted; a repeated column counts as often as it is listed.
            b: (K, N), the same, but the columns of a row must rise, each listed once, as torch makes them. If they do
                not, blocks are left out or taken for others; ``validate`` finds out.
            pattern: (M, N), layout torch.sparse_bsr, blocks of the spec's shape, if and only if the spec's output is
                bsr: the blocks of C that are computed. Its values are not read and may be of any type. Columns of a
                row may be unsorted and repeated.
            out: what to write into. A dense C: (M, N), row-major, row stride a multiple of 16 bytes. Values of a C in
                BSR: (stored blocks, rows, cols), contiguous. The spec's dtype.
            validate: also check the indices of all. Costs kernels and a synchronization.

        Returns:
            C (M, N): dense; or torch.sparse_bsr with the pattern's own indices, and with ``out`` as its values if it
            was given. Blocks without products, and blocks whose column is outside the matrix, are zeros.

        Raises:
            ArgumentError: naming the argument, before anything is launched.
        """
        if is_elsewhere(a):
            with entered(a.device.index):
                return self(a, b, pattern, out=out, validate=validate)
        check_layout("a", a)
        check_layout("b", b)
        self._check_pattern_given(pattern)
        matrices = {"a": a, "b": b} if pattern is None else {"a": a, "b": b, "c": pattern}
        values = {name: matrix.values() for name, matrix in matrices.items()}
        indices = {f"{name}_crow_indices": matrix.crow_indices() for name, matrix in matrices.items()}
        indices |= {f"{name}_col_indices": matrix.col_indices() for name, matrix in matrices.items()}
        shapes = tuple(matrix.shape for matrix in matrices.values())
        key = (shapes, call_key(*values.values(), *indices.values(), out))
        found = self._bound(key)
        if found is None:
            found = self._signatures.keep(key, self._check(a, b, pattern, out))
        signature, memory = found
        if validate:
            check_indices("a", a)
            check_indices("b", b, rising=True)
            if pattern is not None:
                check_indices("pattern", pattern)
        if out is None:
            shape = (a.shape[0], b.shape[1]) if pattern is None else values["c"].shape
            out = allocator(values["a"].device)(*contiguous(shape), self._dtype)
        else:
            written(out)
        if values["a"].shape[0] == 0 or values["b"].shape[0] == 0:
            out.zero_()
        elif out.shape[0] > 0:
            addresses = {"a": values["a"].data_ptr(), "b": values["b"].data_ptr(), "c": out.data_ptr()}
            check_addresses(addresses, ARGUMENTS)
            addresses |= {name: tensor.data_ptr() for name, tensor in indices.items()}
            enqueue(self._loaded, signature, addresses, out.device, memory)
        if pattern is None:
            return out
        return torch.sparse_bsr_tensor(
            indices["c_crow_indices"],
            indices["c_col_indices"],
            out,
            size=pattern.shape,
            device=out.device,
            check_invariants=False,
        )

    def _check_pattern_given(self, pattern: Any) -> None:
        """Check that there is a pattern if the kernel takes one."""
        stem = self.compiled.named.stem
        if self.spec.output == "dense":
            if pattern is not None:
                raise ArgumentError("pattern", f"is not an argument of {stem}: the output of its spec is dense")
        elif pattern is None:
            raise ArgumentError("pattern", f"is missing: {stem} computes the blocks of A @ B that it lists")
        else:
            check_layout("pattern", pattern)

    def _check(
        self, a: torch.Tensor, b: torch.Tensor, pattern: torch.Tensor | None, out: Any
    ) -> tuple[Signature, Memory]:
        """Check a call of a new signature and prepare it; the second result is the memory of its launch."""
        block = self.spec.block
        check_on_gpu("a", a)
        for name, matrix in (("a", a), ("b", b)):
            check_structure(name, matrix, block, a.device)
            check_values(name, matrix, self._dtype)
        (rows, depth), columns = a.shape, b.shape[1]
        if b.shape[0] != depth:
            raise ArgumentError("b", f"has shape {tuple(b.shape)}, expected (K {depth}, N)")
        known = {
            "a_index_words": INDEX_WORDS[a.crow_indices().dtype],
            "b_index_words": INDEX_WORDS[b.crow_indices().dtype],
        }
        problem = SpgemmShape(rows, depth, columns)
        if pattern is None:
            c = self._check_dense(b, rows, out)
            known["c_row_stride"] = c[1][0]
        else:
            check_structure("pattern", pattern, block, a.device)
            check_sizes("pattern", pattern, "MN", (rows, columns))
            shape = tuple(pattern.values().shape)
            if out is not None:
                check_out_values(out, self._dtype, shape, a.device)
            known["c_index_words"] = INDEX_WORDS[pattern.crow_indices().dtype]
            problem = SpgemmShape(rows, depth, columns, shape[0])
            c = (shape, (shape[1] * shape[2], shape[2], 1))
        args = self._plan.problem(problem)
        if pattern is None and args.tiles >= MOST_RUNS:
            what = "tiles" if self.spec.is_dynamic else "runs of tiles"
            raise ArgumentError("b", f"has shape {tuple(b.shape)}: with {rows} rows of a 2^29 {what} or more")
        tensors = {
            "a": (tuple(a.values().shape), a.values().stride()),
            "b": (tuple(b.values().shape), b.values().stride()),
            "c": c,
        }
        read = (a, b) if pattern is None else (a, b, pattern)
        check_memory(**{f"{name}.values()": m.values() for name, m in zip("abc", read, strict=False)}, out=out)
        return self._signature(a.device, args, self._plan.own(known), tensors), Memory.of(args)

    def _check_dense(self, b: torch.Tensor, rows: int, out: Any) -> View:
        """Check a dense result; return its shape and strides."""
        stride = columns = b.shape[1]
        if out is not None:
            check_out(out, self._dtype, (rows, columns), b.device)
            stride = out.stride(0)
        return (rows, columns), (stride, 1)
