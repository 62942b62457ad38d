"""Quantization to FP8 on torch tensors. The first call compiles a kernel and caches it."""

from __future__ import annotations

import json
from typing import Any, Literal, NamedTuple

import torch

from codegen.dtypes import FP8
from codegen.fp8 import ROTARY_HEADS, ROTATED_HEADS, V_KEYS
from codegen.wording import shown
from runtime.checks import check_dense, check_word, refuse_capture
from runtime.errors import ArgumentError
from runtime.expressions.graphs import constant, json_text
from runtime.kernel import load_kernel
from runtime.kernels.arguments import TORCH_DTYPES, refuse_gradient
from runtime.kernels.quantize import Quantized, QuantizeKernel, Rotary, pair_of
from runtime.ops.attention_choice import DTYPES, arch_of
from runtime.ops.operators import NAMESPACE
from runtime.receipts.mode import KERNELS_KEPT, kept_by_mode

HEAD_DIMS = (64, 96, 128, 192, 256)
BLOCK_ROWS = (64, 128)
DEVICES = ("cuda", "meta")
COLUMNS = 128  # columns of a matrix that share a scale
BLOCKS = ((1, COLUMNS), (64, COLUMNS), (128, COLUMNS))
_RANKS = (2, 3)
_ROWS_AT_ONCE = 64  # rows per thread block, if each row has its own scale, or if rows are rotated and scales are given
Dtype = Literal["e4m3", "e5m2"]


class QuantizedMatrix(NamedTuple):
    """A matrix in FP8: value = code * scale of its block.

    Attributes:
        codes: FP8, the shape of the matrix.
        scales: float32 (..., blocks down, blocks across). The scales of one column of blocks are contiguous in memory,
            the layout that DeepGEMM takes on Hopper.
    """

    codes: torch.Tensor
    scales: torch.Tensor


def quantize_matrix(
    x: torch.Tensor, block: tuple[int, int] = (1, COLUMNS), *, dtype: Dtype = "e4m3"
) -> QuantizedMatrix:
    """Quantize a matrix, or a batch of matrices, with one scale per block.

    Args:
        x: (rows, columns), or (matrices, rows, columns), fp16 or bf16, on a GPU; columns a multiple of 128. The last
            dimension is contiguous, other strides are multiples of 8 elements.
        block: rows and columns that share a scale: (1, 128) for activations, (64, 128) or (128, 128) for weights.
        dtype: "e4m3", or "e5m2", which has more range and one mantissa bit less.

    Returns:
        Contiguous codes, and scales. :class:`~runtime.kernels.quantize.QuantizeKernel` documents the results for zeros,
        infinities and NaN.

    Raises:
        ArgumentError: naming the argument, before anything is launched.
        DeviceError: for a GPU without FP8.
    """
    check_dtype(dtype)
    check_floats("x", x)
    if x.dim() not in _RANKS or 0 in x.shape or x.shape[-1] % COLUMNS:
        expected = f"(rows, columns) or (matrices, rows, columns) with columns a multiple of {COLUMNS}, and no 0"
        raise ArgumentError("x", f"has shape {tuple(x.shape)}, expected {expected}")
    whole = isinstance(block, tuple | list) and all(type(size) is int for size in block)
    if not whole or tuple(block) not in BLOCKS:
        raise ArgumentError("block", f"is {shown(block)}, expected one of {', '.join(map(str, BLOCKS))}")
    rows = block[0]
    of_heads = x.unflatten(-1, (-1, COLUMNS)).transpose(-2, -3)  # columns that share a scale are a head
    codes = torch.empty(x.shape, dtype=TORCH_DTYPES[dtype], device=x.device)
    out = codes.unflatten(-1, (-1, COLUMNS)).transpose(-2, -3)
    flat = x.dim() == _RANKS[0]
    scales = quantize_rows(
        of_heads[None] if flat else of_heads, dtype=dtype, rows=rows, out=out[None] if flat else out
    ).scales
    return QuantizedMatrix(codes, (scales[0] if flat else scales).mT)


def quantize_rows(
    x: torch.Tensor,
    *,
    dtype: str,
    rows: int,
    mode: str = "none",
    mean: torch.Tensor | None = None,
    hadamard: bool = False,
    scales: torch.Tensor | None = None,
    rotary: Rotary | None = None,
    pairs: str = "none",
    out: torch.Tensor | None = None,
    out_scales: torch.Tensor | None = None,
) -> Quantized:
    """Quantize (batch, heads, length, head_dim) with one scale per ``rows`` rows, or with given scales, one per head.

    Args:
        x: the tensor.
        dtype: dtype of the codes.
        rows: rows that share a scale; with given scales, rows per thread block.
        mode: use of the mean, as in the spec's field ``mean``.
        mean: the tensor that is subtracted, or multiplied with.
        hadamard: rotate rows.
        scales: given scales, float32 (batch or 1, heads or 1, 1).
        rotary: (cos, sin) of the rotary embedding.
        pairs: pairing of rotated elements, as in the spec's field ``rotary``.
        out: output tensor of the codes.
        out_scales: output tensor of the scales.
    """
    at_once = rows == 1 or (scales is not None and rotary is not None)  # rows of a thread block are free to choose
    fields = {
        "scales": "given" if scales is not None else "row" if rows == 1 else "row_block",
        "codes": dtype,
        "tile": {"m": _ROWS_AT_ONCE if at_once else rows},
        "mean": mode,
        "hadamard": hadamard,
        "rotary": pairs,
    }
    return _quantized(x, fields, mean=mean, scales=scales, rotary=rotary, out=out, out_scales=out_scales)


def quantize_columns(
    x: torch.Tensor, *, dtype: str, scales: torch.Tensor | None = None, out: torch.Tensor | None = None
) -> Quantized:
    """Quantize (batch, heads, length, head_dim) with one scale per column of a head, and transpose."""
    return _quantized(x, {"scales": "channel", "codes": dtype}, scales=scales, out=out)


def check_dtype(dtype: Any) -> None:
    """Check the name of an FP8 dtype.

    Raises:
        ArgumentError: for another dtype.
    """
    check_word("dtype", dtype, FP8)


def check_floats(name: str, tensor: Any) -> None:
    """Check device, dtype and gradient of a tensor to quantize.

    Raises:
        ArgumentError: for the first thing that is wrong.
    """
    check_dense(name, tensor)
    if tensor.dtype not in DTYPES:
        raise ArgumentError(name, f"is {tensor.dtype}, expected {' or '.join(map(str, DTYPES))}")
    if tensor.device.type not in DEVICES:
        raise ArgumentError(name, f"is on {tensor.device}, expected a CUDA device")
    if torch._C._functorch.is_batchedtensor(tensor):
        raise ArgumentError(name, "is mapped by torch.vmap: pass the batch as a dimension, or call outside of it")
    refuse_gradient(name, tensor, "and FP8 has no backward: use bf16, or call under torch.no_grad()")


def check_head_dim(name: str, tensor: torch.Tensor, hadamard: bool) -> None:
    """Check that kernels support the head dimension.

    Raises:
        ArgumentError: with the supported head dimensions.
    """
    sizes = ROTATED_HEADS if hadamard else HEAD_DIMS
    if tensor.dim() != 4 or tensor.shape[3] not in sizes:
        which = " with hadamard" if hadamard else ""
        expected = f"(batch, heads, length, head_dim) with head_dim {', '.join(map(str, sizes))}{which}"
        raise ArgumentError(name, f"has shape {tuple(tensor.shape)}, expected {expected}")


def check_rotary(rotary: Any, x: torch.Tensor) -> Rotary:
    """Check that ``rotary`` is a pair of tensors and that the head dimension supports it. The kernel checks shapes.

    Raises:
        ArgumentError: with the expected value.
    """
    cosines, sines = pair_of(rotary)
    if x.shape[3] not in ROTARY_HEADS:
        sizes = ", ".join(map(str, ROTARY_HEADS))
        raise ArgumentError("rotary", f"is given for heads of {x.shape[3]}, expected heads of {sizes}, or None")
    for tensor in (cosines, sines):
        refuse_gradient("rotary", tensor, "and FP8 has no backward: detach it")
    return cosines, sines


def _quantized(
    x: torch.Tensor,
    fields: dict[str, Any],
    *,
    mean: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
    rotary: Rotary | None = None,
    out: torch.Tensor | None = None,
    out_scales: torch.Tensor | None = None,
) -> Quantized:
    """Call the operator; with output tensors from the caller, call the kernel directly."""
    spec = json_text({**fields, "dtype": DTYPES[x.dtype], "head_dim": constant(x.shape[3])})
    if out is not None or out_scales is not None:
        kernel = _kernel(x.device.index, spec)
        return kernel(x, mean=mean, scales=scales, rotary=rotary, out=out, out_scales=out_scales)
    cosines, sines = (None, None) if rotary is None else rotary
    codes, found, more = torch.ops.sparse_kernel_codegen.quantize(x, mean, scales, cosines, sines, spec=spec)
    mode = fields.get("mean", "none")
    return Quantized(
        codes,
        found if scales is None else scales,
        (more if mean is None else mean) if mode == "subtract" else None,
        more if mode == "product" else None,
    )


@kept_by_mode(KERNELS_KEPT)
def _kernel(index: int, spec: str) -> QuantizeKernel:
    device = torch.device("cuda", index)
    refuse_capture("x", device)
    kernel = load_kernel({"op": "quantize", "arch": arch_of(device), **json.loads(spec)}, device=device)
    assert isinstance(kernel, QuantizeKernel)
    return kernel


def _run(
    x: torch.Tensor,
    mean: torch.Tensor | None,
    scales: torch.Tensor | None,
    cosines: torch.Tensor | None = None,
    sines: torch.Tensor | None = None,
    *,
    spec: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute the operator: codes, scales, and the mean or its products. Results that the caller passed are empty."""
    with torch.no_grad():
        found = _kernel(x.device.index, spec)(
            x, mean=mean, scales=scales, rotary=None if cosines is None or sines is None else (cosines, sines)
        )
    nothing = x.new_empty(0, dtype=torch.float32)
    more = found.product if found.product is not None else found.mean if mean is None else None
    return found.codes, nothing if scales is not None else found.scales, nothing if more is None else more


def _fake(
    x: torch.Tensor,
    mean: torch.Tensor | None,
    scales: torch.Tensor | None,
    cosines: torch.Tensor | None = None,
    sines: torch.Tensor | None = None,
    *,
    spec: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tensors with the result's shapes and dtypes, without values."""
    fields = json.loads(spec)
    batch, heads, length, head_dim = x.shape
    by_columns, mode = fields["scales"] == "channel", fields.get("mean", "none")
    keys = (length + V_KEYS - 1) // V_KEYS * V_KEYS
    rows = 1 if fields["scales"] == "row" else 1 if by_columns else fields["tile"]["m"]
    codes = (batch, heads, head_dim, keys) if by_columns else (batch, heads, length, head_dim)
    of_rows = (batch, heads, head_dim) if by_columns else (batch, heads, (length + rows - 1) // rows)
    more = {"product": (batch, heads, length), "subtract": (batch, heads, head_dim)}.get(mode, (0,))
    return (
        x.new_empty(codes, dtype=TORCH_DTYPES[fields["codes"]]),
        x.new_empty(of_rows if scales is None else (0,), dtype=torch.float32),
        x.new_empty((0,) if mode == "subtract" and mean is not None else more, dtype=torch.float32),
    )


_library = torch.library.Library(NAMESPACE, "FRAGMENT")
_library.define(
    "quantize(Tensor x, Tensor? mean, Tensor? scales, Tensor? cosines=None, Tensor? sines=None, *, str spec) "
    "-> (Tensor, Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.impl("quantize", _run, "CompositeExplicitAutograd")
torch.library.register_fake(f"{NAMESPACE}::quantize", _fake, lib=_library)
