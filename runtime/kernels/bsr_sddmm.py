"""Calls of sampled products: the blocks of A @ B^T that a BSR pattern lists."""

from __future__ import annotations

from typing import Any

import torch

from codegen.problem import SddmmShape
from codegen.spec import BsrSddmmSpec
from runtime.driver.allocate import allocator, contiguous
from runtime.driver.context import entered, is_elsewhere
from runtime.driver.enqueue import enqueue
from runtime.driver.launch import Signature
from runtime.errors import ArgumentError
from runtime.kernels.arguments import (
    View,
    call_key,
    check_addresses,
    check_memory,
    check_sizes,
    check_strides,
    check_tensor,
    written,
)
from runtime.kernels.bound_call import BoundCall
from runtime.kernels.bsr_arguments import (
    INDEX_WORDS,
    check_indices,
    check_out_values,
    check_structure,
)
from runtime.kernels.bsr_scales import (
    NO_SCALES,
    Scales,
    by_row,
    check_scale_address,
    check_scale_values,
    check_scales,
    scale_strides,
    scale_tensors,
)
from runtime.kernels.product_launch import New, ProductLaunch
from runtime.prepare.matrix import check_layout

ARGUMENTS = {"c": "out"}  # by parameter, where these differ


class BsrSddmmKernel(BoundCall[BsrSddmmSpec]):
    """The stored blocks of C = A @ B^T.

    Attributes:
        compiled: source, plan, code and compiler log.
        spec: the spec.
    """

    _argument_names = ("a", "b", "pattern")

    def __call__(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        pattern: torch.Tensor,
        *,
        scale_a: torch.Tensor | None = None,
        scale_b: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        validate: bool = False,
    ) -> torch.Tensor:
        """Multiply where the pattern has blocks.

        Args:
            a: (M, K), the spec's dtype, row-major (last dimension contiguous), row stride a multiple of 16 bytes; if
                a_layout is column_major, a.mT is that.
            b: (N, K), same rules as a, with b_layout.
            pattern: (M, N), layout torch.sparse_bsr, blocks of the spec's shape; int32 or int64 indices. Its values are
                not read and may be of any type. Columns of a row may be unsorted and repeated.
            scale_a: of kernels in FP8, which need it: what a's codes are multiplied with, float32 on the device: one
                element, () or (1,); where the spec has scales of rows (M, K / 128 rounded up), one for each 128 columns
                of a row, those of neighboring rows side by side and others a multiple of 4 apart
                (``quantize_matrix`` makes them).
            scale_b: the same of b, with N for M.
            out: (stored blocks, block rows, block cols), the spec's dtype, or its ``output`` where a and b are FP8,
                contiguous: the values to write.
            validate: also check crow_indices and col_indices, and that scales are positive and finite. Costs kernels
                and a synchronization.

        Returns:
            C (M, N), torch.sparse_bsr: the pattern's own indices, and block (i, j) of A @ B^T at each of them. Its
            values are ``out`` if that was given. A column outside the matrix, up to 2^22 either way,
            gives a block of zeros.

        Raises:
            ArgumentError: naming the argument, before anything is launched.
        """
        if is_elsewhere(a):
            with entered(a.device.index):
                return self(a, b, pattern, scale_a=scale_a, scale_b=scale_b, out=out, validate=validate)
        scales = Scales(scale_a, scale_b)
        check_layout("pattern", pattern)
        values, crow, col = pattern.values(), pattern.crow_indices(), pattern.col_indices()
        key = (pattern.shape, call_key(values, crow, col, a, b, out, *scales))
        signature = self._bound(key)
        if signature is None:
            signature = self._signatures.keep(key, self._check(a, b, pattern, out, scales))
        if validate:
            check_indices("pattern", pattern)
            check_scale_values(scales)
        if out is None:
            out = allocator(a.device)(*contiguous(values.shape), self._output)
        else:
            written(out)
        if values.shape[0] > 0:
            addresses = {"a": a.data_ptr(), "b": b.data_ptr(), "c": out.data_ptr()}
            check_addresses(addresses, ARGUMENTS)
            check_scale_address(self.spec, scales)
            addresses |= {"crow_indices": crow.data_ptr(), "col_indices": col.data_ptr(), **scales.addresses}
            enqueue(self._loaded, signature, addresses, a.device)
        return torch.sparse_bsr_tensor(crow, col, out, size=pattern.shape, device=out.device, check_invariants=False)

    def _bound_launch(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        matrix: torch.Tensor,
        out: torch.Tensor,
        names: tuple[str, ...],
    ) -> ProductLaunch | None:
        """The launch of a call that was made just before, for ``runtime.ops``.

        Args:
            a: as of the call, as the next three; it had no scales.
            b: see there.
            matrix: the pattern.
            out: see there.
            names: parameters of the tensors that later calls pass, "" for those that it does not read; a and b last.

        Returns:
            The launch; None where later calls do more than launch: for a pattern without blocks.
        """
        values, crow, col = matrix.values(), matrix.crow_indices(), matrix.col_indices()
        signature = self._bound((matrix.shape, call_key(values, crow, col, a, b, out, *NO_SCALES)))
        if signature is None or values.shape[0] == 0:
            return None
        result = New(allocator(a.device), contiguous(values.shape), self._output)
        return ProductLaunch(self._loaded, signature, a.device, names, aligned=slice(-2, None), result=result)

    def _stored(self, name: str, tensor: torch.Tensor, layout: str) -> View:
        """Shape and strides of an operand in its tensor map, once its strides are checked."""
        by_columns = layout == "column_major"
        kept = tensor.mT if by_columns else tensor
        if by_columns and kept.shape[1] > 1 and kept.stride(1) != 1:
            found = f"has strides {tensor.stride()}, and {self.compiled.named.stem} reads it by columns"
            raise ArgumentError(name, f"{found}; pass a copy stored so, or use a spec with {name}_layout: row_major")
        check_strides(name, kept)
        return tuple(kept.shape), kept.stride()

    def _check(self, a: Any, b: Any, pattern: torch.Tensor, out: Any, scales: Scales = NO_SCALES) -> Signature:
        """Check a call of a new signature and prepare it."""
        check_tensor("a", a, self._dtype, 2)
        check_tensor("b", b, self._dtype, 2, a.device)
        check_structure("pattern", pattern, self.spec.block, a.device)
        (rows, columns), depth = pattern.shape, a.shape[1]
        check_sizes("a", a, "MK", (rows, None))
        check_sizes("b", b, "NK", (columns, depth))
        seen = {"a": self._stored("a", a, self.spec.a_layout), "b": self._stored("b", b, self.spec.b_layout)}
        shape = tuple(pattern.values().shape)
        lines = rows if by_row(self.spec) else shape[0]
        check_scales(self.spec, self.compiled.named.stem, scales, (lines, columns, depth), a.device)
        if out is not None:
            check_out_values(out, self._output, shape, a.device)
        args = self._plan.problem(SddmmShape(rows, columns, depth, shape[0]))
        known = {
            "index_words": INDEX_WORDS[pattern.crow_indices().dtype],
            "a_row_stride": a.stride(0),
            "b_row_stride": b.stride(0),
            **scale_strides(scales),
        }
        tensors = {
            **seen,
            "c": (shape, (shape[1] * shape[2], shape[2], 1)),
            **scale_tensors(self.spec, scales),
        }
        check_memory(a=a, b=b, out=out)
        return self._signature(a.device, args, self._plan.own(known), tensors)
