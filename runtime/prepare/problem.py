"""The problem of a product with a given matrix, for the choice of a kernel by codegen.select."""

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
"""Fields that the matrix determines, in addition to its two sizes."""


def bsr_problem(
    a: torch.Tensor,
    n: int | None = None,
    *,
    op: Literal["bsr_spmm", "bsr_sddmm", "bsr_spgemm"] = "bsr_spmm",
    **fields: Any,
) -> BsrProblem:
    """Read the problem of products with a sparse matrix, once for many calls. The row pointers are copied to the host.

    Sizes, block and dtype come from the matrix. *Density* is the share of its blocks that are stored, *evenness* the
    number of stored blocks of its longest block row divided by the mean. Pass the result to ``load_kernel``, alone or
    with a partial spec, or to ``codegen.select.choose``, which explains its choice; ``codegen explain --problem`` and
    ``codegen tune`` accept ``problem.text()``.

    Args:
        a: (M, K), or (M, N) as the pattern of ``bsr_sddmm``: the sparse matrix, layout torch.sparse_bsr, on any device;
            fp16 or bf16, unless ``dtype`` is given.
        n: columns of B, if known.
        op: the product.
        fields: other fields of the problem, such as ``k`` of ``bsr_sddmm``, ``transpose_a``, ``epilogue`` or
            ``prepared``. ``arch`` defaults to the matrix's GPU, or sm_90a for a matrix on the CPU. ``dtype`` defaults
            to the dtype of its values.

    Returns:
        The problem: sizes in elements, *density* from 0 to 1, *evenness* 1 or more.

    Raises:
        ArgumentError: if ``a`` is not such a matrix; for a size that the matrix determines; for a dtype or GPU without
            kernels; in a CUDA graph capture.
        SpecError: if another field is invalid.
    """
    check_layout("a", a)
    values = a.values()
    if a.dim() != 2 or 0 in a.shape:
        raise ArgumentError("a", f"has shape {tuple(a.shape)}, expected a nonempty matrix")
    if not isinstance(op, str):
        raise ArgumentError("op", f"is {shown(op)}, expected the name of a product")
    transposed = fields.get("transpose_a", False)
    check_flag("transpose_a", transposed)
    down, across = _sizes(op, transposed)
    given = fields | ({} if n is None else {"n": n})
    for name in (*READ, down, across):
        if name in given:
            raise ArgumentError(name, "is given, but a determines it: leave it out")
    check_row_pointers("a", a)
    block = {"rows": values.shape[1], "cols": values.shape[2]}
    known = {"op": op, "block": block, across: a.shape[1], **given}
    if "dtype" not in known:
        known["dtype"] = _dtype(values.dtype)
    if "arch" not in known and a.is_cuda:
        known["arch"] = _arch(a.device)
    return BsrProblem.of_lengths(a.crow_indices().diff().tolist(), **known)


def _sizes(op: str, transposed: bool) -> tuple[str, str]:
    """Names of the sizes that are the rows and the columns of a product's sparse matrix."""
    if transposed:
        return "k", "m"
    return "m", "n" if op == "bsr_sddmm" else "k"


def _dtype(dtype: torch.dtype) -> str:
    if dtype not in DTYPES:
        reason = f"is {dtype}; kernels support {' and '.join(map(str, DTYPES))}: convert it, or pass dtype"
        raise ArgumentError("a", reason)
    return DTYPES[dtype]


def _arch(device: torch.device) -> str:
    """Architecture of a GPU."""
    have = torch.cuda.get_device_capability(device)
    found = [arch.name for arch in ARCHS.values() if arch.compute_capability == have]
    if not found:
        reason = f"is on an sm_{have[0]}{have[1]}, which has no kernels; pass arch, one of {', '.join(ARCHS)}"
        raise ArgumentError("a", reason)
    return found[0]
