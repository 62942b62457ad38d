"""Other kernels for BSR products, called on the inputs of benchmarks/bsr.py.

A peer takes a problem and returns calls by label; each call returns C, dense. What cannot compute the problem raises.
Torch has no kernel for BSR x BSR or for a sampled product with a BSR pattern: their only peer is cuBLAS.
"""

from __future__ import annotations

import ctypes
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from harness import Fields, Peer

from codegen.library import find_spec
from codegen.spec import BsrSddmmSpec, BsrSpgemmSpec, BsrSpmmSpec
from runtime import load_kernel
from runtime.tools.bench.bsr_fp8 import DENSE as FP8_DENSE
from runtime.tools.bench.bsr_fp8 import EQUAL as FP8_EQUAL
from runtime.tools.bench.timing import Call, single_calls

DENSE = "cuBLAS, dense"
SLOW = ", accumulated in fp32"  # behind these: without use_fast_accum
TUNING_SECONDS = 20.0  # no further options are tried after that
# Of bsr_dense_addmm: columns of a tile, warps, stages; those that were fastest for blocks like these come first.
TRITON_OPTIONS = {
    "large": ((128, 8, 3), (128, 4, 3), (256, 8, 3), (128, 8, 2), (256, 8, 2), (64, 4, 3)),
    "small": ((128, 4, 4), (256, 4, 4), (128, 2, 4), (256, 8, 3), (64, 4, 4), (128, 4, 3)),
}


@dataclass(frozen=True)
class Problem:
    """Inputs of a row.

    Attributes:
        spec: our kernel's.
        a: (M, K): BSR, dense in a sampled product.
        b: (K, N): dense, in BSR x BSR BSR; in a sampled product (N, K), dense.
        pattern: of a sampled product, (M, N), BSR: the blocks that are computed; its values are not read.
        dense: what cuBLAS multiplies, (M, K) and (K, N), without zeros: a matrix that is mostly zeros draws less power,
            so that cuBLAS would run faster than on real data.
        packed: whether our kernel packs A beforehand.
        scales: arguments of a call in FP8, where a, b and dense are codes.
        equal: as dense, for a product with as many FLOPs as that of the stored blocks.
    """

    spec: BsrSpmmSpec | BsrSpgemmSpec | BsrSddmmSpec
    a: torch.Tensor
    b: torch.Tensor
    pattern: torch.Tensor | None
    dense: tuple[torch.Tensor, torch.Tensor]
    packed: bool = False
    scales: dict[str, torch.Tensor] = field(default_factory=dict)
    equal: tuple[torch.Tensor, torch.Tensor] | None = None


def only_spmm(problem: Problem) -> None:
    if not isinstance(problem.spec, BsrSpmmSpec):
        raise ValueError(f"does not compute {problem.spec.op}")


def cublas(problem: Problem) -> dict[str, Call]:
    """The dense product of the same shape."""
    a, b = problem.dense
    out = torch.empty((a.shape[0], b.shape[1]), device=a.device, dtype=a.dtype)
    return {DENSE: lambda: torch.mm(a, b, out=out)}


def scaled_mm(problem: Problem) -> dict[str, Call]:
    """Dense products in FP8, of the same shape and of as many FLOPs, with one scale of each operand."""
    scales = [torch.ones((), device=problem.b.device)] * 2
    calls: dict[str, Call] = {}
    for label, operands in ((FP8_EQUAL, problem.equal), (FP8_DENSE, problem.dense)):
        for behind, fast in (("", True), (SLOW, False)):
            if operands is None:
                raise ValueError("does not compute in FP8")
            calls[label + behind] = lambda operands=operands, fast=fast: torch._scaled_mm(  # type: ignore[misc]
                *operands, *scales, out_dtype=torch.bfloat16, use_fast_accum=fast
            )
    return calls


def torch_matmul(problem: Problem) -> dict[str, Call]:
    """What torch does for A @ B."""
    only_spmm(problem)
    return {"torch A @ B": lambda: problem.a @ problem.b}


def triton(problem: Problem) -> dict[str, Call]:
    """The faster of torch's bsr_dense_addmm with the options it has stored, and with the best of a short list."""
    only_spmm(problem)
    from torch.sparse._triton_ops import bsr_dense_addmm

    a, b = problem.a, problem.b
    columns, block = b.shape[1], problem.spec.block
    zeros, out = (torch.zeros((a.shape[0], columns), device=b.device, dtype=b.dtype) for _ in range(2))

    def with_options(options: Fields | None) -> Call:
        return lambda: bsr_dense_addmm(zeros, a, b, beta=0, alpha=1, out=out, meta=options)

    calls = {"Triton bsr_dense_addmm, its stored options": with_options(None)}
    begun = time.monotonic()
    for width, warps, stages in TRITON_OPTIONS["small" if block.rows < 64 else "large"]:
        if time.monotonic() - begun > TUNING_SECONDS:
            break
        options = {"SPLIT_N": columns // width, "GROUP_SIZE_ROW": 4, "num_stages": stages, "num_warps": warps}
        call = with_options(options)
        try:
            call()
            torch.cuda.synchronize()
        except Exception:  # too much shared memory, for one
            continue
        calls[f"Triton bsr_dense_addmm, {width} columns {warps} warps {stages} stages"] = call
    times = single_calls(calls, repeats=5, warm_up=2)
    best = min(times, key=lambda label: times[label])
    return {best: calls[best]}


def blocked_ell(problem: Problem) -> dict[str, Call]:
    """cuSPARSE's Blocked-ELL product, through the library that torch has loaded."""
    only_spmm(problem)
    block, values = problem.spec.block, problem.a.values()
    counts = problem.a.crow_indices().diff()
    length = int(counts[0])
    if block.rows != block.cols or bool((counts != length).any()):
        raise ValueError("takes square blocks, as many of them in each block row")
    # A block row is stored as one (rows, length * cols) matrix.
    ell_values = values.unflatten(0, (-1, length)).transpose(1, 2).contiguous()
    ell_columns = problem.a.col_indices().to(torch.int32)
    out = torch.empty((problem.a.shape[0], problem.b.shape[1]), device=values.device, dtype=values.dtype)
    sparse = CuSparse()
    return {"cuSPARSE Blocked-ELL": sparse.blocked_ell_product(ell_columns, ell_values, length, problem.b, out)}


def copied(problem: Problem) -> dict[str, Call]:
    """Our kernel for B stored by rows, and the copy of B that it needs where B is stored by columns."""
    spec = find_spec(f"h100_bsr_spmm_b{problem.spec.block.rows}").spec
    kernel: Any = load_kernel(spec)
    out = torch.empty((problem.a.shape[0], problem.b.shape[1]), device=problem.b.device, dtype=problem.b.dtype)
    return {"ours, B copied by rows": lambda: kernel(problem.a, problem.b.contiguous(), out=out)}


class CuSparse:
    """The few functions of cuSPARSE's generic interface that a Blocked-ELL product in fp16 needs."""

    HALF, FLOAT, INT32, COLUMN_MAJOR, ROW_MAJOR, BASE_ZERO, BLOCKED_ELL_ALGORITHM = 2, 0, 2, 1, 2, 0, 13

    def __init__(self) -> None:
        torch.cuda.current_blas_handle()  # loads the libraries
        loaded = [line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()]
        found = sorted({path for path in loaded if "libcusparse.so" in path})
        if sys.platform != "linux" or not found:
            raise OSError("torch has loaded no libcusparse")
        self.library = ctypes.CDLL(found[0])
        self.handle = ctypes.c_void_p()
        self.call("cusparseCreate", ctypes.byref(self.handle))

    def call(self, name: str, *arguments: object) -> None:
        status = getattr(self.library, name)(*arguments)
        if status:
            raise RuntimeError(f"{name} failed: status {status}")

    def dense(self, matrix: torch.Tensor) -> ctypes.c_void_p:
        """Describe an fp16 matrix stored by rows or by columns."""
        described = ctypes.c_void_p()
        order = self.ROW_MAJOR if matrix.stride(1) == 1 else self.COLUMN_MAJOR
        sizes = map(ctypes.c_int64, (*matrix.shape, max(matrix.stride())))
        address = ctypes.c_void_p(matrix.data_ptr())
        self.call("cusparseCreateDnMat", ctypes.byref(described), *sizes, address, self.HALF, order)
        return described

    def blocked_ell_product(
        self, columns: torch.Tensor, values: torch.Tensor, length: int, b: torch.Tensor, out: torch.Tensor
    ) -> Call:
        """Return out = A b, with A's ``length`` blocks a row in ``values`` (block rows, rows, length, cols)."""
        if b.dtype != torch.float16:
            raise ValueError(f"is written for torch.float16, not {b.dtype}")
        rows, a = values.shape[1], ctypes.c_void_p()
        sizes = map(ctypes.c_int64, (out.shape[0], b.shape[0], rows, length * values.shape[3]))
        addresses = (ctypes.c_void_p(columns.data_ptr()), ctypes.c_void_p(values.data_ptr()))
        types = (self.INT32, self.BASE_ZERO, self.HALF)
        self.call("cusparseCreateBlockedEll", ctypes.byref(a), *sizes, *addresses, *types)
        one, zero, size = ctypes.c_float(1), ctypes.c_float(0), ctypes.c_size_t()
        product = (
            *(self.handle, 0, 0, ctypes.byref(one), a, self.dense(b), ctypes.byref(zero), self.dense(out)),
            *(self.FLOAT, self.BLOCKED_ELL_ALGORITHM),
        )
        self.call("cusparseSpMM_bufferSize", *product, ctypes.byref(size))
        workspace = torch.empty(max(size.value, 16), dtype=torch.uint8, device=b.device)
        kept = (columns, values, one, zero, workspace)  # as long as the call

        def call() -> torch.Tensor:
            stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
            self.call("cusparseSetStream", self.handle, stream)
            self.call("cusparseSpMM", *product, ctypes.c_void_p(kept[-1].data_ptr()))
            return out

        return call


PEERS: dict[str, Peer] = {
    "cublas": Peer(cublas),
    "torch": Peer(torch_matmul),
    "triton": Peer(triton, ("triton",)),
    "blocked_ell": Peer(blocked_ell),
    "copied": Peer(copied),
    "scaled_mm": Peer(scaled_mm),
}
