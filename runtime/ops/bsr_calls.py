"""Products with a block-sparse matrix on real tensors: the kernel of a call is remembered by what decides it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from codegen.errors import CodegenError
from codegen.library import NamedSpec
from codegen.plain import json_value
from codegen.select.choice import STRIDED_COLUMNS
from codegen.select.problem import rounded
from codegen.wording import shown
from runtime.checks import refuse_capture
from runtime.errors import ArgumentError
from runtime.kernel import load_kernel
from runtime.kernels.arguments import Signatures
from runtime.kernels.bsr_batch import BATCH_RANK
from runtime.kernels.bsr_preparation import Parts
from runtime.kernels.bsr_sddmm import BsrSddmmKernel
from runtime.kernels.bsr_spmm import ACTIVATIONS, BsrSpmmKernel
from runtime.kernels.product_launch import ProductLaunch
from runtime.log import logger
from runtime.ops.attention_calls import KERNELS_KEPT
from runtime.ops.attention_choice import DTYPES, arch_of
from runtime.ops.bsr_checks import check_added, check_matrix, check_operand, check_place
from runtime.ops.bsr_choice import Product, resolve, takes_order
from runtime.ops.bsr_layout import by_rows, is_by_columns, is_read_by_columns, readable, width_of
from runtime.prepare.bsr_matrix import BsrMatrix
from runtime.prepare.prepared import PreparedBsr
from runtime.prepare.transpose import TransposedIndex, transposed_index
from runtime.receipts.mode import is_on, mode


@dataclass(frozen=True, slots=True)
class Route:
    """How products of one kind are computed.

    Attributes:
        kernel: what computes them.
        fused: whether it adds bias and c and applies the activation.
        copied: whether the blocks of the transpose are copied for it first.
        how: of the matrix, what its kernel reads of ``order``; {} if that is nothing.
        transposed: whether it reads the index.
        prepares: whether it finds the order of the block rows of a matrix that brings none, and remembers it.
        strided: whether it reads b and c with any strides.
    """

    kernel: Any
    fused: bool
    copied: bool
    how: dict[str, Any]
    transposed: bool
    prepares: bool
    strided: bool


_routes = Signatures()


@lru_cache(maxsize=KERNELS_KEPT)
def read_how(text: str) -> dict[str, Any]:
    """Return the JSON of a ``BsrMatrix``, read.

    Raises:
        ArgumentError: for another text.
    """
    try:
        found = json_value(text)
    except CodegenError as error:
        raise ArgumentError("how", f"of a BsrMatrix {error}") from None
    if not isinstance(found, dict):
        raise ArgumentError("how", f"of a BsrMatrix is {shown(text)}, expected a mapping")
    return found


def multiply(
    a: BsrMatrix,
    b: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    c: torch.Tensor | None = None,
    beta: float = 1.0,
    activation: str = "",
    transpose_a: bool = False,
    arrange: bool = False,
    validate: bool = False,
    given: torch.Tensor | PreparedBsr | None = None,
) -> torch.Tensor:
    """Compute C = activation(A @ B + beta c + bias), or of A^T, as ``bsr_matmul`` describes it.

    Args:
        a: the matrix in its parts.
        b, bias, c, beta, activation, transpose_a, validate: as there.
        arrange: whether ``b`` is copied where a kernel cannot read it as it is stored; else it is refused.
        given: what the caller has of the matrix that kernels take; None: it is made of the parts.

    Raises:
        ArgumentError, SpecError: before anything is launched.
        DeviceError, ToolchainError, CompileError, CacheError, UnverifiedError: at the first call of a kind.
    """
    if arrange:
        check_operand(a, b, transpose_a=transpose_a)
        check_added(a, b, bias, c, transpose_a=transpose_a)
        b, c = arranged(a, b, c, bias=bias, activation=activation, transpose_a=transpose_a)
    route = _route_of(a, b, bias, c, activation, transpose_a=transpose_a)
    with torch.no_grad():
        operand = _operand(a, route, given)
        if route.fused:
            found: torch.Tensor = route.kernel._multiply_parts(operand, b, bias=bias, c=c, beta=beta, validate=validate)
            return found
        check_added(a, b, bias, c, transpose_a=transpose_a)
        return _finished(route.kernel._multiply_parts(operand, b, validate=validate), bias, c, beta, activation)


def arranged(
    a: BsrMatrix, b: torch.Tensor, c: torch.Tensor | None, *, bias: Any, activation: str, transpose_a: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """``b`` and ``c``, or copies of them that the kernel of a checked product can read.

    Raises:
        ArgumentError, DeviceError, ToolchainError, CompileError, CacheError, UnverifiedError: as ``multiply``.
    """
    narrow = b.dim() != BATCH_RANK and b.shape[1] <= STRIDED_COLUMNS and not transpose_a
    if narrow and _route_of(a, b, bias, c, activation, transpose_a=transpose_a).strided:
        return b, c
    return readable(b), None if c is None else by_rows(c)


def _route_of(a: BsrMatrix, b: Any, bias: Any, c: Any, activation: str, *, transpose_a: bool) -> Route:
    """How a product is computed: as earlier ones of its kind, or found and remembered, once its arguments are checked.

    Raises:
        ArgumentError, DeviceError, ToolchainError, CompileError, CacheError, UnverifiedError: as ``multiply``.
    """
    route = key = None
    try:
        by_columns = is_by_columns(b)
        key = (
            a.how,
            a.columns,
            len(a.order),
            a.values.shape,
            a.crow_indices.shape,
            a.crow_indices.device,
            a.col_indices.device,
            a.values.dtype,
            width_of(b, c),
            b.dtype,
            b.device,
            by_columns,
            activation,
            bias is not None,
            c is not None,
            transpose_a,
            mode(),
        )
        last, route = _routes.last
        if key != last:
            route = _routes.find(key)
    except (AttributeError, RuntimeError, TypeError, ValueError):
        pass  # an argument is of another type, which the checks name
    if route is None:
        check_matrix("a", a)
        check_operand(a, b, transpose_a=transpose_a)
        check_added(a, b, bias, c, transpose_a=transpose_a)
        check_place("b", b)
        product = product_of(a, b, bias=bias, c=c, activation=activation, transpose_a=transpose_a)
        route = _routes.keep(key, _route(product, a, b.device))
    found: Route = route
    return found


def bound_launch(
    a: BsrMatrix,
    tensors: tuple[torch.Tensor, ...],
    b: torch.Tensor,
    *,
    bias: Any,
    c: Any,
    beta: float,
    activation: str,
    transpose_a: bool,
    given: Any,
) -> ProductLaunch | None:
    """The launch of a product that was computed just before.

    Args:
        a, b, bias, c, beta, activation, transpose_a, given: as of ``multiply``.
        tensors: those that later calls pass, as ``BsrSpmmKernel._bound_launch`` has them.

    Returns:
        The launch; None where later calls do more than launch.
    """
    route = _route_of(a, b, bias, c, activation, transpose_a=transpose_a)
    prepares = isinstance(given, torch.Tensor) and route.prepares
    if route.copied or not route.fused or prepares or not isinstance(route.kernel, BsrSpmmKernel):
        return None
    parts = Parts(a, route.how, a.index if route.transposed else ())
    with torch.no_grad():
        return route.kernel._bound_launch(parts, tensors, b, bias=bias, c=c, beta=beta)


def sample(
    a: torch.Tensor, b: torch.Tensor, pattern: BsrMatrix, *, arrange: bool = False, validate: bool = False
) -> torch.Tensor:
    """Compute the values of the stored blocks of A @ B^T, as ``bsr_sddmm`` describes it; the arguments are its own.

    ``arrange`` copies operands that a kernel cannot read as they are stored.
    """
    if arrange:
        a, b = arranged_samples(a, b, pattern)
    for name, tensor in (("a", a), ("b", b)):
        check_operand(pattern, tensor, depth=False, name=name, matrix="pattern")
    kernel = _sampler_of(a, b, pattern)
    with torch.no_grad():
        out = torch.empty(pattern.values.shape, dtype=a.dtype, device=a.device)
        kernel(a, b, pattern.with_values(out).to_sparse(), out=out, validate=validate)
    return out


def arranged_samples(a: torch.Tensor, b: torch.Tensor, pattern: BsrMatrix) -> tuple[torch.Tensor, torch.Tensor]:
    """``a`` and ``b`` of a sampled product, or copies of them that a kernel can read.

    Raises:
        ArgumentError, UnverifiedError: as ``sample``.
    """
    for name, tensor in (("a", a), ("b", b)):
        check_operand(pattern, tensor, depth=False, name=name, matrix="pattern")
    columns = is_read_by_columns(a), is_read_by_columns(b)
    if True in columns:
        check_matrix("pattern", pattern)
        check_place("a", a)
        found = resolve(sampled_product(pattern, a, columns)).product
        columns = found.a_by_columns, found.by_columns
    return a if columns[0] else by_rows(a), b if columns[1] else by_rows(b)


def _sampler_of(a: torch.Tensor, b: torch.Tensor, pattern: BsrMatrix) -> Any:
    """The kernel of a sampled product: that of earlier ones of its kind, or found and remembered."""
    columns = is_by_columns(a), is_by_columns(b)
    key = (pattern.how, pattern.shape, pattern.values.shape, a.shape, a.dtype, a.device, columns, mode())
    last, kernel = _samplers.last
    if key != last:
        kernel = _samplers.find(key)
    if kernel is None:
        check_matrix("pattern", pattern)
        check_place("a", a)
        found = resolve(sampled_product(pattern, a, columns))
        kernel = _samplers.keep(key, _loaded(found.choice.named, a.device))
    return kernel


def bound_sample(
    a: torch.Tensor, b: torch.Tensor, pattern: BsrMatrix, out: torch.Tensor, tensors: tuple[torch.Tensor, ...]
) -> ProductLaunch | None:
    """The launch of a sampled product that was computed just before.

    Args:
        a, b, pattern: as of ``sample``.
        out: what that returned.
        tensors: those that later calls pass, ``a`` and ``b`` last, in either order.

    Returns:
        The launch; None where later calls do more than launch.
    """
    kernel = _sampler_of(a, b, pattern)
    if not isinstance(kernel, BsrSddmmKernel):
        return None
    with torch.no_grad():
        read = {
            id(pattern.crow_indices): "crow_indices",
            id(pattern.col_indices): "col_indices",
            id(a): "a",
            id(b): "b",
        }
        names = tuple(read.get(id(tensor), "") for tensor in tensors)
        return kernel._bound_launch(a, b, pattern.with_values(out).to_sparse(), out, names)


_samplers = Signatures()


def product_of(
    a: BsrMatrix,
    b: torch.Tensor,
    *,
    bias: Any = None,
    c: Any = None,
    activation: str = "",
    transpose_a: bool = False,
    arch: str | None = None,
) -> Product:
    """Return the class of a product.

    Args:
        a, b, bias, c, activation, transpose_a: those of the call.
        arch: architecture of the kernel, for tensors that are on no GPU; by default that of b's device.
    """
    how = read_how(a.how)
    kernel = how.get("kernel", "")
    if kernel and read_how(kernel).get("transpose_a", False) != transpose_a:
        kernel = ""  # it prepared the other of the two products
    return Product(
        op="bsr_spmm",
        arch=arch or arch_of(b.device),
        device_name=torch.cuda.get_device_name(b.device) if arch is None else None,
        dtype=DTYPES[a.values.dtype],
        block=(a.values.shape[1], a.values.shape[2]),
        rows=a.shape[0],
        columns=a.columns,
        width=rounded(width_of(b, c)),
        stored=rounded(a.values.shape[0]),
        evenness=how.get("evenness"),
        ordered=how.get("order") == "rows" and bool(a.order) and not kernel and not transpose_a,
        by_columns=is_by_columns(b),
        transposed=transpose_a,
        activation=activation,
        bias=bias is not None,
        accumulate=c is not None,
        kernel=kernel,
        verified_only=is_on(),
    )


def sampled_product(
    pattern: BsrMatrix, a: torch.Tensor, columns: tuple[bool, bool] = (False, False), *, arch: str | None = None
) -> Product:
    """Return the class of a sampled product.

    Args:
        pattern: where it is sampled.
        a: its first operand.
        columns: whether each operand is stored by columns.
        arch: as in ``product_of``.
    """
    return Product(
        op="bsr_sddmm",
        arch=arch or arch_of(a.device),
        device_name=torch.cuda.get_device_name(a.device) if arch is None else None,
        dtype=DTYPES[a.dtype],
        block=(pattern.values.shape[1], pattern.values.shape[2]),
        rows=pattern.shape[0],
        columns=pattern.columns,
        width=rounded(a.shape[-1]),
        stored=rounded(pattern.values.shape[0]),
        evenness=read_how(pattern.how).get("evenness"),
        by_columns=columns[1],
        a_by_columns=columns[0],
        verified_only=is_on(),
    )


def _route(product: Product, a: BsrMatrix, device: torch.device) -> Route:
    """Choose, compile and load the kernel of a product."""
    found = resolve(product)
    logger().debug("%s: %s: %s", found.choice.named.stem, found.choice.rule, found.choice.reason)
    ordered = product.kernel or (product.ordered and takes_order(found.choice))
    return Route(
        _loaded(found.choice.named, device),
        found.fused,
        found.copied,
        read_how(a.how) if ordered else {},
        found.product.transposed,
        getattr(found.choice.spec, "is_dynamic", False),
        getattr(found.choice.spec, "b_layout", "") == "strided",
    )


def _operand(
    a: BsrMatrix, route: Route, given: torch.Tensor | PreparedBsr | None
) -> torch.Tensor | PreparedBsr | Parts:
    """Return the matrix as the kernel takes it."""
    if route.copied:
        return _transposed(a)
    if isinstance(given, PreparedBsr) and route.how:
        return given
    if isinstance(given, torch.Tensor) and route.prepares:
        return given
    return Parts(a, route.how, a.index if route.transposed else ())


def _transposed(a: BsrMatrix) -> torch.Tensor:
    """Return A^T with its blocks copied, in the order of A's block columns."""
    starts, entries = TransposedIndex(*a.index) if a.index else transposed_index(a.to_sparse())
    values = a.values.mT.index_select(0, entries[:, 0])
    size = (a.columns, a.shape[0])
    return torch.sparse_bsr_tensor(
        starts, entries[:, 1].contiguous(), values, size=size, device=values.device, check_invariants=False
    )


def _finished(product: torch.Tensor, bias: Any, c: Any, beta: float, activation: str) -> torch.Tensor:
    """Return activation(product + beta c + bias), computed in float32, in the place of the product."""
    total = product.float()
    if c is not None and beta != 0:  # as in torch.addmm, what 0 is multiplied with is not read
        total += beta * c.float()
    if bias is not None:
        total += bias.float()[:, None]
    return product.copy_(ACTIVATIONS[activation or "none"](total))


@lru_cache(maxsize=KERNELS_KEPT)
def _loaded(named: NamedSpec, device: torch.device) -> BsrSpmmKernel | BsrSddmmKernel:
    """Compile and load a kernel for a device."""
    refuse_capture("b", device)
    kernel = load_kernel(named, device=device)
    assert isinstance(kernel, BsrSpmmKernel | BsrSddmmKernel)
    return kernel
