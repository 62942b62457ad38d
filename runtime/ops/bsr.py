"""bsr_matmul and bsr_sddmm: products with block-sparse matrices in one call, with gradients."""

from __future__ import annotations

from typing import Any, Literal, overload

import torch

from runtime.checks import check_dense, check_flag
from runtime.errors import ArgumentError
from runtime.ops.attention_checks import refuse_transformed
from runtime.ops.bsr_autograd import keep_matmul, matmul_with_gradients
from runtime.ops.bsr_calls import multiply, sample
from runtime.ops.bsr_checks import check_options, check_parts
from runtime.ops.bsr_launches import find_launch, find_sample, keep_launch, keep_sample
from runtime.ops.bsr_operator import matmul, sddmm
from runtime.ops.modes import PLAIN, any_autocast, autocast, is_unwatched, is_watched
from runtime.prepare.bsr_matrix import CLUSTER_TENSORS, BsrMatrix, parts_of, parts_of_prepared
from runtime.prepare.prepared import PreparedBsr

Activation = Literal["relu", "gelu", "silu"]
_MAPPED = "pass a batch of b as a dimension, (batch, K, N)"


def bsr_matmul(
    a: torch.Tensor | PreparedBsr | BsrMatrix,
    b: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    activation: Activation | None = None,
    c: torch.Tensor | None = None,
    beta: float | None = None,
    transpose_a: bool = False,
    arrange: bool = False,
    validate: bool = False,
) -> torch.Tensor:
    """Compute activation(A @ B + beta c + bias), A block-sparse, in float32, rounded once where a kernel has all of it.

    The kernel is chosen by ``codegen.select``, compiled at the first call of its class of shapes (seconds, once: the
    cache keeps it) and remembered; ``explain_matmul`` says which one it is, and why. A call runs on torch's
    current stream, does not synchronize and can be captured in a CUDA graph after a first call outside of it. Under
    ``torch.compile``, ``torch.export`` and dispatch modes it is the operator ``sparse_kernel_codegen::bsr_matmul``;
    compiled regions take a ``BsrMatrix``, as torch.compile takes no sparse tensors. Under ``torch.autocast`` the values
    of a, b, bias and c are cast to its type.

    Gradients are those of ``a.values()`` (blocks that are not stored have none), ``b``, ``bias`` and ``c``, by more
    products with the same kernels. ReLU keeps the result for that; GELU and SiLU keep nothing, and compute their
    argument once more. A gradient of a gradient is refused.

    Args:
        a: (M, K), layout torch.sparse_bsr, float16 or bfloat16, on a GPU, blocks of 16, 32, 64 or 128 rows; or what
            ``prepare_bsr`` made of it, for many calls; or what ``prepare`` of a kernel made of it, which then
            computes the product.
        b: (K, N), or (batch, K, N), a's type. Up to 8 columns may have any strides, unless ``transpose_a`` is set. Of
            more, rows or columns are contiguous, other strides multiples of 8 elements. Columns are copied by rows
            where blocks have 16 or 32 rows, unless the kernel of few columns is chosen. A launch multiplies with many
            matrices of a batch: those that do not lie side by side are copied, if they have 8 MiB at most; larger ones
            have a launch each. Nothing else is copied.
        bias: (M,), contiguous, one element for each row of C.
        activation: of each element: ``relu``, ``gelu`` (by erf) or ``silu``.
        c: as the result, what is added. Up to 8 columns may have any strides, as those of b; of more, rows are
            contiguous, other strides multiples of 8 elements.
        beta: what c is multiplied with, 1 by default; with 0 c is not read. It has no gradient.
        transpose_a: compute with A^T: b is then (M, N), the result (K, N), bias (K,).
        arrange: copy b and c if kernels cannot read their layout, instead of raising an error.
        validate: also check the values of indices, and that what was prepared is still of ``a``. Synchronizes.

    Returns:
        (M, N), or (batch, M, N), in b's type; rows are padded to a multiple of 8 elements, N'. Matrices of a batch lie
        side by side, with strides (N', batch N', 1), as another product takes them without a copy.

    Raises:
        ArgumentError: naming the argument, its value and the allowed values, before anything is launched.
        DeviceError: for a device that no kernels are written for.
        ToolchainError, CompileError, CacheError: where a kernel cannot be built, at the first call.
    """
    place = launch = None
    traced = torch.compiler.is_dynamo_compiling()
    if not traced and validate is False and type(transpose_a) is type(arrange) is bool and is_unwatched():
        place, launch = find_launch(a, b, bias, c, (activation, beta, transpose_a, arrange))
        if launch is not None and place is not None:
            product: torch.Tensor | None = launch(place.tensors)
            if product is not None:
                return product
    matrix, given = matrix_of("a", a)
    number, name = check_options(c, beta, activation)
    check_flag("transpose_a", transpose_a)
    check_flag("arrange", arrange)
    check_flag("validate", validate)
    options: dict[str, Any] = {"beta": number, "activation": name, "transpose_a": transpose_a, "arrange": arrange}
    if traced or any_autocast():
        values, b, bias, c = autocast(matrix.values, b, bias, c)
        if values is not matrix.values:
            matrix, given = matrix.with_values(values), None
    if not traced and _is_direct((matrix.values, b, bias, c), (*matrix.order, *matrix.index), "a, b, bias and c"):
        product = multiply(matrix, b, bias=bias, c=c, given=given, validate=validate, **options)
        if place is not None and launch is None:
            keep_launch(place, b, bias=bias, c=c, given=given, **options)
        return product
    options["validate"] = validate
    _check_dense_tensors(b=b, bias=bias, c=c)
    plain = not (traced or matrix.values.is_meta) and _is_plain(matrix.values, b, bias, c, *matrix.order, *matrix.index)
    if not plain:
        return matmul(matrix, b, bias=bias, c=c, **options)
    product = matmul_with_gradients(matrix, b, bias=bias, c=c, **options)
    if place is not None and launch is None:
        del options["validate"]
        keep_matmul(place, b, bias=bias, c=c, **options)
    return product


@overload
def bsr_sddmm(
    a: torch.Tensor, b: torch.Tensor, pattern: torch.Tensor | PreparedBsr, *, validate: bool = ...
) -> torch.Tensor: ...


@overload
def bsr_sddmm(a: torch.Tensor, b: torch.Tensor, pattern: BsrMatrix, *, validate: bool = ...) -> BsrMatrix: ...


def bsr_sddmm(
    a: torch.Tensor, b: torch.Tensor, pattern: torch.Tensor | PreparedBsr | BsrMatrix, *, validate: bool = False
) -> torch.Tensor | BsrMatrix:
    """Compute the blocks of A @ B^T that a pattern stores, in float32, rounded once; with gradients of a and b.

    Kernels are chosen, compiled and remembered as those of ``bsr_matmul``. The operator is
    ``sparse_kernel_codegen::bsr_sddmm``.

    Args:
        a: (M, K), float16 or bfloat16, on a GPU; rows contiguous, row stride a multiple of 8 elements. On Hopper, with
            blocks of 64 and 128 rows, columns may be contiguous instead.
        b: (N, K), same rules as a.
        pattern: (M, N), as ``a`` of ``bsr_matmul``; its values are not read, and have no gradient.
        validate: also check the values of indices. Synchronizes.

    Returns:
        (M, N), with the indices of the pattern and new values in a's type: torch.sparse_bsr, or a ``BsrMatrix`` if the
        pattern is one.

    Raises:
        ArgumentError, DeviceError, ToolchainError, CompileError, CacheError: as ``bsr_matmul``.
    """
    place = launch = None
    traced = torch.compiler.is_dynamo_compiling()
    if not traced and validate is False and is_unwatched():
        place, launch = find_sample(a, b, pattern)
        if launch is not None and place is not None:
            found = launch(place.tensors)
            if found is not None:
                return _sampled(place.matrix, found, pattern)
    matrix, _ = matrix_of("pattern", pattern)
    check_flag("validate", validate)
    if traced or any_autocast():
        a, b = autocast(a, b)
    if not traced and _is_direct((a, b), (*matrix.order, *matrix.index), "a and b"):
        values = sample(a, b, matrix, validate=validate)
        if place is not None and launch is None:
            keep_sample(place, a, b, values)
    else:
        for argument, tensor in (("a", a), ("b", b)):
            check_dense(argument, tensor)
        values = sddmm(a, b, matrix, validate=validate)
    return _sampled(matrix, values, pattern)


def _sampled(matrix: BsrMatrix, values: torch.Tensor, pattern: Any) -> torch.Tensor | BsrMatrix:
    """A matrix with new values, which fit it, in the form of the pattern."""
    indices = matrix.crow_indices, matrix.col_indices, matrix.columns
    found = BsrMatrix(values, *indices, matrix.order[:CLUSTER_TENSORS], matrix.index, matrix.how)
    return found if isinstance(pattern, BsrMatrix) else found.to_sparse()


def matrix_of(name: str, a: Any) -> tuple[BsrMatrix, torch.Tensor | PreparedBsr | None]:
    """Parts of a sparse matrix, and the caller's form of it if kernels take that; None otherwise.

    Raises:
        ArgumentError: for what is none.
    """
    if isinstance(a, BsrMatrix):
        check_parts(name, a)
        return a, None
    if isinstance(a, PreparedBsr):
        return parts_of_prepared(a), a
    if isinstance(a, torch.Tensor) and a.layout == torch.sparse_bsr:
        if a.dim() != 2:
            raise ArgumentError(name, f"has {a.dim()} dimensions {tuple(a.shape)}, expected 2")
        return parts_of(a), a
    what = a.layout if isinstance(a, torch.Tensor) else type(a).__name__
    expected = f"a torch.sparse_bsr tensor ({name}.to_sparse_bsr(block)), or what prepare_bsr made of one"
    raise ArgumentError(name, f"is {what}, expected {expected}")


def _check_dense_tensors(**tensors: Any) -> None:
    """Check that arguments are dense: torch's operators refuse nested and sparse ones in their own words.

    Raises:
        ArgumentError: naming the first that is not.
    """
    for name, tensor in tensors.items():
        if tensor is not None:
            check_dense(name, tensor)


def _is_plain(*tensors: Any) -> bool:
    """Whether no mode, transform, tracer and no subclass takes part in a call; gradients may."""
    return not is_watched() and PLAIN.issuperset(map(type, tensors))


def _is_direct(tensors: tuple[Any, ...], others: tuple[Any, ...], names: str) -> bool:
    """Whether a call needs no dispatcher: it has no mode, transform, tracer, subclass or gradient.

    Args:
        tensors: those that may have a gradient, or None.
        others: those that have none.
        names: of the arguments.

    Raises:
        ArgumentError: for a tensor under ``torch.vmap`` or ``torch.func.grad``, and for a DTensor.
    """
    if not _is_plain(*tensors, *others):
        refuse_transformed((*tensors, *others), names, _MAPPED)
        if any(isinstance(t, torch.Tensor) and torch._C._functorch.is_gradtrackingtensor(t) for t in tensors):
            reason = "one of them is differentiated by torch.func: call backward, or torch.autograd.grad"
            raise ArgumentError(names, reason)
        # What is no tensor at all the checks of a call name.
        return any(t is not None and not hasattr(type(t), "__torch_function__") for t in tensors)
    return not (torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors))
