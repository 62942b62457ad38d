"""Calls of BSR x dense kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from codegen.spec import BsrSpmmSpec
from runtime.arguments import TORCH_DTYPES, check_address, check_shape, check_strides, check_tensor
from runtime.bsr import (
    INDEX_WORDS,
    SIGNATURES_KEPT,
    STORE,
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

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "none": lambda x: x,
    "relu": torch.relu,
    "gelu": torch.nn.functional.gelu,
    "silu": torch.nn.functional.silu,
}
"""What each activation of an epilogue is in torch."""


class BsrSpmmKernel:
    """C = A @ B with A in block-sparse rows, then the spec's epilogue.

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
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        *,
        bias: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        validate: bool = False,
    ) -> torch.Tensor:
        """Multiply.

        Args:
            a: (M, K), layout torch.sparse_bsr, blocks of the spec's shape, the spec's dtype; int32 or int64 indices.
                Columns of a row may be unsorted; a repeated column counts as often as it is listed.
            b: (K, N), row-major (last dimension contiguous), row stride a multiple of 16 bytes.
            bias: (M,), the spec's dtype, contiguous, one element for each row of C; if and only if the spec's epilogue
                has a bias. (For a linear layer with sparse weights, y^T = W x^T + bias, rows are output features.)
            out: (M, N) to write into, same rules as b.
            validate: also check crow_indices and col_indices. Costs kernels and a synchronisation.

        Returns:
            C (M, N): A @ B, then the spec's epilogue. Block rows without blocks are those of A @ B = 0.

        Raises:
            ArgumentError: naming the argument, before anything is launched.
        """
        check_layout("a", a)
        values, crow, col = a.values(), a.crow_indices(), a.col_indices()
        key = (a.shape, call_key(values, crow, col, b, bias, out))
        signature = self._signatures.get(key)
        if signature is None:
            signature = self._check(a, b, bias, out)
            if len(self._signatures) >= SIGNATURES_KEPT:
                self._signatures.clear()
            self._signatures[key] = signature
        if validate:
            check_indices("a", a)
        if out is None:
            out = self._empty(a.shape[0], b)
        if values.shape[0] == 0:
            return self._without_blocks(bias, out)
        addresses = {"a": values.data_ptr(), "b": b.data_ptr(), "c": out.data_ptr()}
        for name, address in addresses.items():
            check_address({"a": "a.values()", "c": "out"}.get(name, name), address)
        addresses |= {"crow_indices": crow.data_ptr(), "col_indices": col.data_ptr()}
        if bias is not None:
            addresses["bias"] = bias.data_ptr()
        with torch.cuda.device(b.device):
            self._loaded.launch(signature, addresses, torch.cuda.current_stream().cuda_stream)
        return out

    @staticmethod
    def _empty(rows: int, b: torch.Tensor) -> torch.Tensor:
        """Allocate C; rows are padded where N alone would break the alignment of 16-byte stores."""
        columns = b.shape[1]
        padded = -(-columns // STORE) * STORE
        return torch.empty((rows, padded), dtype=b.dtype, device=b.device)[:, :columns]

    def _without_blocks(self, bias: torch.Tensor | None, out: torch.Tensor) -> torch.Tensor:
        """Write what the epilogue makes of zeros."""
        if bias is None:
            return out.zero_()  # every activation keeps 0
        assert self.spec.epilogue is not None
        return out.copy_(ACTIVATIONS[self.spec.epilogue.activation](bias.float())[:, None])

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

    def _check(self, a: torch.Tensor, b: Any, bias: Any, out: Any) -> Signature:
        """Check a call of a new signature and prepare it."""
        check_tensor("b", b, self._dtype, 2)
        check_structure("a", a, self.spec.block, b.device)
        check_values("a", a, self._dtype)
        rows, depth = a.shape
        columns = b.shape[1]
        check_shape("b", b.shape, [("K", (depth,)), ("N", None)])
        check_strides("b", b)
        self._check_bias(bias, rows, b.device)
        stride = -(-columns // STORE) * STORE
        if out is not None:
            check_out(out, self._dtype, (rows, columns), b.device)
            stride = out.stride(0)
        block_rows, column_tiles = rows // self.spec.block.rows, -(-columns // self.spec.tile.n)
        if block_rows * column_tiles >= 2**31:
            raise ArgumentError("b", f"has shape {tuple(b.shape)}: more than 2^31 tiles")
        known: dict[str, int | float] = {
            "index_words": INDEX_WORDS[a.crow_indices().dtype],
            "block_rows": block_rows,
            "tiles": block_rows * column_tiles,
            "n": columns,
            "block_columns": depth // self.spec.block.cols,
            "b_row_stride": b.stride(0),
            "c_row_stride": stride,
        }
        # What a tensor map says is no parameter beside it.
        numbers = {param.name: known[param.name] for param in self.compiled.plan.params if param.name in known}
        values = a.values()
        tensors = {
            "a": (tuple(values.shape), values.stride()),
            "b": (tuple(b.shape), b.stride()),
            "c": ((rows, columns), (stride, 1)),
        }
        return self._loaded.signature(b.device.index, block_rows * column_tiles, numbers, tensors)
