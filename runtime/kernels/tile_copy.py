"""Calls of tile copy kernels."""

from __future__ import annotations

from typing import Any

import torch

from codegen.problem import CopyShape
from codegen.spec import TileCopySpec
from runtime.driver.allocate import allocator, contiguous
from runtime.driver.context import entered, is_elsewhere
from runtime.driver.enqueue import enqueue
from runtime.driver.launch import Signature
from runtime.errors import ArgumentError
from runtime.kernels.arguments import (
    call_key,
    check_addresses,
    check_memory,
    check_output,
    check_sizes,
    check_strides,
    check_tensor,
    used_strides,
    written,
)
from runtime.kernels.bound_call import BoundCall

CHUNK = 8  # columns of one 16-byte load or store
ARGUMENTS = {"in": "x"}  # by parameter, if the names differ
MOST_TILES = 2**30  # the kernel's counter runs a few rounds of thread blocks past the last tile


class TileCopyKernel(BoundCall[TileCopySpec]):
    """Kernel for out = x, tile by tile through shared memory: a microbenchmark of tile loads.

    Attributes:
        compiled: source, plan, code and compiler log.
        spec: the spec.
    """

    _argument_names = ("x",)

    def __call__(self, x: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        """Copy.

        Args:
            x: (rows, columns), the spec's dtype, row-major (last dimension contiguous), columns and row stride
                multiples of 8.
            out: (rows, columns) to write into, same rules as x; it must not overlap x.

        Returns:
            The copy.

        Raises:
            ArgumentError: naming the argument, before anything is launched.
        """
        if is_elsewhere(x):
            with entered(x.device.index):
                return self(x, out=out)
        key = call_key(x, out)
        signature = self._bound(key)
        if signature is None:
            signature = self._signatures.keep(key, self._check(x, out))
        if out is None:
            out = allocator(x.device)(*contiguous(x.shape), self._dtype)
        else:
            written(out)
        addresses = {"in": x.data_ptr(), "out": out.data_ptr()}
        check_addresses(addresses, ARGUMENTS)
        enqueue(self._loaded, signature, addresses, x.device)
        return out

    def _check(self, x: Any, out: Any) -> Signature:
        """Check a call of a new signature and prepare it."""
        check_tensor("x", x, self._dtype, 2)
        rows, columns = x.shape
        if columns % CHUNK:
            raise ArgumentError("x", f"has {columns} columns, expected a multiple of {CHUNK} (16-byte chunks)")
        check_strides("x", x)
        stride = columns
        if out is not None:
            check_tensor("out", out, self._dtype, 2, x.device)
            check_sizes("out", out, ("rows", "columns"), x.shape)
            check_strides("out", out)
            check_output("out", out)
            stride = out.stride(0)
        args = self._plan.problem(CopyShape(rows, columns))
        if args.tiles >= MOST_TILES:
            raise ArgumentError("x", f"has shape {tuple(x.shape)}: expected fewer than {MOST_TILES} tiles")
        strides = self._plan.own({"in_row_stride": used_strides(x)[0], "out_row_stride": stride})
        tensors = {"in": (tuple(x.shape), x.stride())}
        check_memory(x=x, out=out)
        return self._signature(x.device, args, strides, tensors)
