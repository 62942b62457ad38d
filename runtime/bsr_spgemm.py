"""Calls of BSR x BSR kernels."""

from __future__ import annotations

from typing import Any

import torch

from codegen.spec import BsrSpgemmSpec
from runtime.arguments import TORCH_DTYPES, check_address
from runtime.bsr import (
    INDEX_WORDS,
    SIGNATURES_KEPT,
    call_key,
    check_indices,
    check_layout,
    check_out,
    check_structure,
    check_values,
)
from runtime.compiler import Compiled
from runtime.errors import ArgumentError
from runtime.launch import LoadedKernel, Signature


class BsrSpgemmKernel:
    """C = A @ B with A and B in block-sparse rows, C dense.

    Attributes:
        compiled: source, plan, code and compiler log.
        spec: the spec.
    """

    def __init__(self, compiled: Compiled, loaded: LoadedKernel) -> None:
        self.compiled = compiled
        assert isinstance(compiled.plan.spec, BsrSpgemmSpec)
        self.spec: BsrSpgemmSpec = compiled.plan.spec
        self._loaded = loaded
        self._dtype = TORCH_DTYPES[self.spec.dtype]
        run_tiles = {constant.name: constant.value for constant in compiled.plan.constants}["kRunTiles"]
        self._run_columns = self.spec.block.cols * run_tiles
        self._signatures: dict[Any, Signature] = {}

    def __repr__(self) -> str:
        return f"<bsr_spgemm kernel {self.compiled.named.stem}(a, b) for {self.spec.arch}>"

    def __call__(
        self, a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor | None = None, validate: bool = False
    ) -> torch.Tensor:
        """Multiply.

        Args:
            a: (M, K), layout torch.sparse_bsr, blocks of the spec's shape, the spec's dtype; int32 or int64 indices.
                Columns of a row may be unsorted; a repeated column counts as often as it is listed.
            b: (K, N), the same, but the columns of a row must rise, each listed once, as torch makes them. If they do
                not, blocks are left out or taken for others; ``validate`` finds out.
            out: (M, N) dense, row-major, row stride a multiple of 16 bytes, to write into.
            validate: also check the indices of both. Costs kernels and a synchronisation.

        Returns:
            C (M, N), dense, 0 where no blocks meet.

        Raises:
            ArgumentError: naming the argument, before anything is launched.
        """
        check_layout("a", a)
        check_layout("b", b)
        indices = {"a_crow_indices": a.crow_indices(), "a_col_indices": a.col_indices()}
        indices |= {"b_crow_indices": b.crow_indices(), "b_col_indices": b.col_indices()}
        a_values, b_values = a.values(), b.values()
        key = (a.shape, b.shape, call_key(a_values, b_values, *indices.values(), out))
        signature = self._signatures.get(key)
        if signature is None:
            signature = self._check(a, b, out)
            if len(self._signatures) >= SIGNATURES_KEPT:
                self._signatures.clear()
            self._signatures[key] = signature
        if validate:
            check_indices("a", a)
            check_indices("b", b, rising=True)
        if out is None:
            out = torch.empty((a.shape[0], b.shape[1]), dtype=a_values.dtype, device=a_values.device)
        if a_values.shape[0] == 0 or b_values.shape[0] == 0:
            return out.zero_()
        addresses = {"a": a_values.data_ptr(), "b": b_values.data_ptr(), "c": out.data_ptr()}
        for name, address in addresses.items():
            check_address({"a": "a.values()", "b": "b.values()", "c": "out"}[name], address)
        addresses |= {name: tensor.data_ptr() for name, tensor in indices.items()}
        with torch.cuda.device(a_values.device):
            self._loaded.launch(signature, addresses, torch.cuda.current_stream().cuda_stream)
        return out

    def _check(self, a: torch.Tensor, b: torch.Tensor, out: Any) -> Signature:
        """Check a call of a new signature and prepare it."""
        if a.device.type != "cuda":
            raise ArgumentError("a", f"is on {a.device}, expected a CUDA device")
        for name, matrix in (("a", a), ("b", b)):
            check_structure(name, matrix, self.spec.block, a.device)
            check_values(name, matrix, self._dtype)
        (rows, depth), columns = a.shape, b.shape[1]
        if b.shape[0] != depth:
            raise ArgumentError("b", f"has shape {tuple(b.shape)}, expected (K {depth}, N)")
        stride = columns
        if out is not None:
            check_out(out, self._dtype, (rows, columns), a.device)
            stride = out.stride(0)
        block = self.spec.block
        row_runs = -(-columns // self._run_columns)
        runs = rows // block.rows * row_runs
        if runs >= 2**31:
            raise ArgumentError("b", f"has shape {tuple(b.shape)}: more than 2^31 runs of tiles")
        known: dict[str, int | float] = {
            "a_index_words": INDEX_WORDS[a.crow_indices().dtype],
            "b_index_words": INDEX_WORDS[b.crow_indices().dtype],
            "inner_blocks": depth // block.cols,
            "column_blocks": columns // block.cols,
            "row_runs": row_runs,
            "runs": runs,
            "c_row_stride": stride,
        }
        # A kernel takes some of these: what a tensor map says is no parameter beside it.
        numbers = {param.name: known[param.name] for param in self.compiled.plan.params if param.name in known}
        tensors = {
            "a": (tuple(a.values().shape), a.values().stride()),
            "b": (tuple(b.values().shape), b.values().stride()),
            "c": ((rows, columns), (stride, 1)),
        }
        return self._loaded.signature(a.device.index, int(runs), numbers, tensors)
