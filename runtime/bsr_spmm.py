"""Calls of BSR x dense kernels."""

from __future__ import annotations

from typing import Any

import torch

from codegen.spec import BsrSpmmSpec
from runtime.arguments import TORCH_DTYPES, check_address, check_output, check_shape, check_strides, check_tensor
from runtime.compiler import Compiled
from runtime.errors import ArgumentError
from runtime.launch import LoadedKernel, Signature

_SIGNATURES_KEPT = 64
_STORE = 8  # columns of one 16-byte store, the least that the kernels write
_INDEX_WORDS = {torch.int32: 1, torch.int64: 2}


class BsrSpmmKernel:
    """C = A @ B with A in block-sparse rows.

    Attributes:
        compiled: source, plan, code and compiler log.
        spec: the spec.
    """

    def __init__(self, compiled: Compiled, loaded: LoadedKernel) -> None:
        self.compiled = compiled
        assert isinstance(compiled.plan.spec, BsrSpmmSpec)
        self.spec: BsrSpmmSpec = compiled.plan.spec
        self._loaded = loaded
        self._dtype = TORCH_DTYPES[self.spec.dtype]
        self._signatures: dict[Any, Signature] = {}

    def __repr__(self) -> str:
        return f"<bsr_spmm kernel {self.compiled.named.stem}(a, b) for {self.spec.arch}>"

    def __call__(
        self, a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor | None = None, validate: bool = False
    ) -> torch.Tensor:
        """Multiply.

        Args:
            a: (M, K), layout torch.sparse_bsr, blocks of the spec's shape, the spec's dtype; int32 or int64 indices.
                Columns of a row may be unsorted; a repeated column counts as often as it is listed.
            b: (K, N), row-major (last dimension contiguous), row stride a multiple of 16 bytes.
            out: (M, N) to write into, same rules as b.
            validate: also check crow_indices and col_indices. Costs kernels and a synchronisation.

        Returns:
            C (M, N). Block rows without blocks are 0.

        Raises:
            ArgumentError: naming the argument, before anything is launched.
        """
        if not isinstance(a, torch.Tensor) or a.layout != torch.sparse_bsr:
            what = a.layout if isinstance(a, torch.Tensor) else type(a).__name__
            raise ArgumentError("a", f"is {what}, expected a torch.sparse_bsr tensor (a.to_sparse_bsr(block))")
        values, crow, col = a.values(), a.crow_indices(), a.col_indices()
        try:
            key: Any = (
                a.shape,
                torch.is_grad_enabled(),
                *(
                    None if t is None else (t.shape, t.stride(), t.dtype, t.device, t.requires_grad)
                    for t in (values, crow, col, b, out)
                ),
            )
        except (AttributeError, RuntimeError):
            key = None
        signature = self._signatures.get(key)
        if signature is None:
            signature = self._check(a, b, out)
            if len(self._signatures) >= _SIGNATURES_KEPT:
                self._signatures.clear()
            self._signatures[key] = signature
        if validate:
            self._check_values(a, crow, col)
        if out is None:
            out = self._empty(a.shape[0], b)
        if values.shape[0] == 0:
            return out.zero_()
        addresses = {"a": values.data_ptr(), "b": b.data_ptr(), "c": out.data_ptr()}
        for name, address in addresses.items():
            check_address({"a": "a.values()", "c": "out"}.get(name, name), address)
        addresses |= {"crow_indices": crow.data_ptr(), "col_indices": col.data_ptr()}
        with torch.cuda.device(b.device):
            self._loaded.launch(signature, addresses, torch.cuda.current_stream().cuda_stream)
        return out

    @staticmethod
    def _empty(rows: int, b: torch.Tensor) -> torch.Tensor:
        """Allocate C; rows are padded where N alone would break the alignment of 16-byte stores."""
        columns = b.shape[1]
        padded = -(-columns // _STORE) * _STORE
        return torch.empty((rows, padded), dtype=b.dtype, device=b.device)[:, :columns]

    def _check(self, a: torch.Tensor, b: Any, out: Any) -> Signature:
        """Check a call of a new signature and prepare it."""
        check_tensor("b", b, self._dtype, 2)
        self._check_a(a, b)
        rows, depth = a.shape
        columns = b.shape[1]
        check_shape("b", b.shape, [("K", (depth,)), ("N", None)])
        check_strides("b", b)
        stride = -(-columns // _STORE) * _STORE
        if out is not None:
            self._check_out(out, b, rows)
            stride = out.stride(0)
        block_rows, column_tiles = rows // self.spec.block.rows, -(-columns // self.spec.tile.n)
        if block_rows * column_tiles >= 2**31:
            raise ArgumentError("b", f"has shape {tuple(b.shape)}: more than 2^31 tiles")
        numbers: dict[str, int | float] = {
            "index_words": _INDEX_WORDS[a.crow_indices().dtype],
            "block_rows": block_rows,
            "tiles": block_rows * column_tiles,
        }
        if not self.compiled.plan.tensor_maps:
            block_columns = depth // self.spec.block.cols
            numbers |= {
                "n": columns,
                "block_columns": block_columns,
                "b_row_stride": b.stride(0),
                "c_row_stride": stride,
            }
        values = a.values()
        tensors = {
            "a": (tuple(values.shape), values.stride()),
            "b": (tuple(b.shape), b.stride()),
            "c": ((rows, columns), (stride, 1)),
        }
        return self._loaded.signature(b.device.index, block_rows * column_tiles, numbers, tensors)

    def _check_a(self, a: torch.Tensor, b: torch.Tensor) -> None:
        block, values = self.spec.block, a.values()
        if a.dim() != 2:
            raise ArgumentError("a", f"has {a.dim()} dimensions {tuple(a.shape)}, expected 2")
        if a.device != b.device:
            raise ArgumentError("a", f"is on {a.device}, b is on {b.device}")
        if values.dtype != self._dtype:
            raise ArgumentError("a", f"is {values.dtype}, this kernel takes {self._dtype}")
        if a.requires_grad and torch.is_grad_enabled():
            reason = "requires a gradient, but this kernel has no backward; call it under torch.no_grad()"
            raise ArgumentError("a", reason)
        if tuple(values.shape[1:]) != (block.rows, block.cols):
            reason = f"has blocks of {tuple(values.shape[1:])}, this kernel takes ({block.rows}, {block.cols})"
            raise ArgumentError("a", reason)
        if a.shape[0] == 0 or a.shape[1] == 0:
            raise ArgumentError("a", f"is empty: {tuple(a.shape)}")
        parts = {"values": values, "crow_indices": a.crow_indices(), "col_indices": a.col_indices()}
        for name, part in parts.items():
            if not part.is_contiguous():
                raise ArgumentError(f"a.{name}()", f"has strides {part.stride()}, expected a contiguous tensor")

    def _check_out(self, out: Any, b: torch.Tensor, rows: int) -> None:
        columns = b.shape[1]
        check_tensor("out", out, self._dtype, 2, b.device)
        check_shape("out", out.shape, [("M", (rows,)), ("N", (columns,))])
        check_strides("out", out)
        check_output("out", out)
        if columns % _STORE:
            raise ArgumentError(
                "out",
                f"has {columns} columns; results are stored {_STORE} at a time, so N must be a multiple of {_STORE} "
                "to leave what lies beside out alone (without out, padded rows are allocated)",
            )

    @staticmethod
    def _check_values(a: torch.Tensor, crow: torch.Tensor, col: torch.Tensor) -> None:
        """Check the row pointers and column numbers (synchronises)."""
        nnz = col.shape[0]
        if int(crow[0]) != 0 or int(crow[-1]) != nnz or bool((crow.diff() < 0).any()):
            raise ArgumentError("a.crow_indices()", f"must rise from 0 to the number of stored blocks, {nnz}")
        block_columns = a.shape[1] // a.values().shape[2]
        if nnz and (int(col.min()) < 0 or int(col.max()) >= block_columns):
            raise ArgumentError(
                "a.col_indices()",
                f"ranges from {int(col.min())} to {int(col.max())}, allowed: 0 to {block_columns - 1}",
            )
