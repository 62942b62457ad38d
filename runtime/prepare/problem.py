"""The problem of a product with a given matrix, by which codegen.select chooses a kernel."""

from __future__ import annotations

from typing import Any, Literal

import torch

from codegen.arch import ARCHS
from codegen.select import BsrProblem
from codegen.wording import shown
from runtime.checks import check_flag
from runtime.errors import ArgumentError
from runtime.prepare.matrix import check_layout, check_row_pointers

DTYPES = {torch.float16: "fp16", torch.bfloat16: "bf16"}
READ = ("block", "density", "evenness")
"""Fields that the matrix says, beside its two sizes."""


def bsr_problem(
    a: torch.Tensor,
    n: int | None = None,
    *,
    op: Literal["bsr_spmm", "bsr_sddmm", "bsr_spgemm"] = "bsr_spmm",
    **fields: Any,
) -> BsrProblem:
    """Read the problem of products with a sparse matrix, once for many calls: the row pointers are copied to the host.

    Sizes, block and type are those of the matrix. *Density* is the share of its blocks that is stored, *evenness* the
    stored blocks of its longest block row over those of the mean one. Give the result to ``load_kernel``, beside a
    partial spec or alone, or to ``codegen.select.choose``, which says why; ``problem.text()`` is what ``codegen explain
    --problem`` and ``codegen tune`` take.

    Args:
        a: (M, K), or (M, N) as the pattern of ``bsr_sddmm``: the matrix that is sparse, layout torch.sparse_bsr, on any
            device; fp16 or bf16, unless ``dtype`` is given.
        n: columns of B, if they are known.
        op: the product.
        fields: other fields of the problem, as ``k`` of ``bsr_sddmm``, ``transpose_a``, ``epilogue`` or ``prepared``.
            ``arch`` is by default that of the matrix' GPU; sm_90a for a matrix on the CPU. ``dtype`` is by default that
            of its values.

    Returns:
        The problem: sizes in elements, *density* from 0 to 1, *evenness* 1 or more.

    Raises:
        ArgumentError: for what is no such matrix; for a size that it says itself, or a type or GPU without kernels; in
            the capture of a CUDA graph.
        SpecError: for another field that is wrong.
    """
    check_layout("a", a)
    values = a.values()
    if a.dim() != 2 or 0 in a.shape:
        raise ArgumentError("a", f"has shape {tuple(a.shape)}, expected a matrix that is not empty")
    if not isinstance(op, str):
        raise ArgumentError("op", f"is {shown(op)}, expected the name of a product")
    transposed = fields.get("transpose_a", False)
    check_flag("transpose_a", transposed)
    down, across = _sizes(op, transposed)
    given = fields | ({} if n is None else {"n": n})
    for name in (*READ, down, across):
        if name in given:
            raise ArgumentError(name, "is given, but a says it: leave it out")
    check_row_pointers("a", a)
    block = {"rows": values.shape[1], "cols": values.shape[2]}
    known = {"op": op, "block": block, across: a.shape[1], **given}
    if "dtype" not in known:
        known["dtype"] = _dtype(values.dtype)
    if "arch" not in known and a.is_cuda:
        known["arch"] = _arch(a.device)
    return BsrProblem.of_lengths(a.crow_indices().diff().tolist(), **known)


def _sizes(op: str, transposed: bool) -> tuple[str, str]:
    """Names of the sizes of a product that are the rows and the columns of its sparse matrix."""
    if transposed:
        return "k", "m"
    return "m", "n" if op == "bsr_sddmm" else "k"


def _dtype(dtype: torch.dtype) -> str:
    if dtype not in DTYPES:
        reason = f"is {dtype}; kernels are for {' and '.join(map(str, DTYPES))}: convert it, or say dtype"
        raise ArgumentError("a", reason)
    return DTYPES[dtype]


def _arch(device: torch.device) -> str:
    """Return the architecture of a GPU."""
    have = torch.cuda.get_device_capability(device)
    found = [arch.name for arch in ARCHS.values() if arch.compute_capability == have]
    if not found:
        reason = f"is on an sm_{have[0]}{have[1]}, for which there are no kernels; say arch, one of {', '.join(ARCHS)}"
        raise ArgumentError("a", reason)
    return found[0]
