"""explain_matmul: which kernels a call of bsr_matmul and its gradients take, and why."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from codegen.arch import ARCHS
from codegen.provenance import Provenance
from codegen.select import Choice
from codegen.select.problem import rounded
from runtime.checks import check_flag, check_word
from runtime.errors import ArgumentError
from runtime.ops.bsr import Activation, matrix_of
from runtime.ops.bsr_calls import product_of, sampled_product
from runtime.ops.bsr_checks import check_added, check_matrix, check_operand, check_options
from runtime.ops.bsr_choice import Product, Resolution, resolve
from runtime.ops.bsr_layout import is_by_columns
from runtime.receipts.permit import provenance


@dataclass(frozen=True)
class MatmulExplanation:
    """What a call takes, and why; as text, one line for each thing.

    Attributes:
        products: the kernels by result: ``C``, and the gradients ``dB`` and ``dA``.
        recomputed: whether the gradients compute the activation's argument once more.
    """

    products: dict[str, Resolution]
    recomputed: bool

    @property
    def provenance(self) -> dict[str, Provenance]:
        """Receipt and source of each kernel, by its result."""
        return {name: provenance(found.choice.named) for name, found in self.products.items()}

    @property
    def choice(self) -> Choice:
        """The kernel of the call itself: spec, rule and reason of ``codegen.select``."""
        return self.products["C"].choice

    def __str__(self) -> str:
        """Return all of it."""
        lines: list[str] = []
        vouched = self.provenance
        for name, found in self.products.items():
            product, choice = found.product, found.choice
            lines += [f"{name}: {choice.named.stem} ({product.arch}, {product.dtype})"]
            lines += [f"  {line}" for line in vouched[name].lines()]
            lines += [f"  rule: {choice.rule}: {choice.reason}", f"  class of shapes: {_sizes(product)}"]
            lines += [f"  {step}" for step in found.steps()]
            lines += [f"  dense product of a library: {choice.dense or 'no measured row near has a faster one'}"]
        if self.recomputed:
            lines.append("before dA and dB: A @ B + beta c + bias once more, as the activation kept nothing")
        return "\n".join(lines)


def explain_matmul(
    a: Any,
    b: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    activation: Activation | None = None,
    c: torch.Tensor | None = None,
    transpose_a: bool = False,
    gradients: bool = False,
    arch: str | None = None,
) -> MatmulExplanation:
    """Say which kernels ``bsr_matmul`` takes for a call, and why; nothing is compiled or launched.

    Args:
        a, b, bias, activation, c, transpose_a: those of the call.
        gradients: also say which ones compute the gradients of a and b, for a gradient of C that is stored as C is.
        arch: architecture of the kernels, for tensors that are on no GPU; by default that of b's device.

    Returns:
        The choices. ``str()`` of it has for each kernel its receipt or the nearest shipped kernel, the place of its
        source, the rule and the measured row, the class of shapes that share it, what is done beside it, and whether a
        library's dense product is faster in that row.

    Raises:
        ArgumentError, DeviceError: as the call would.
    """
    matrix, _ = matrix_of("a", a)
    check_flag("transpose_a", transpose_a)
    check_flag("gradients", gradients)
    if arch is not None:
        check_word("arch", arch, ARCHS)
    check_matrix("a", matrix)
    check_operand(matrix, b, transpose_a=transpose_a)
    check_added(matrix, b, bias, c, transpose_a=transpose_a)
    _, name = check_options(c, None, activation)
    if arch is None and not b.is_cuda:
        raise ArgumentError("arch", f"is missing: b is on {b.device}, and kernels are chosen for an architecture")
    product = product_of(matrix, b, bias=bias, c=c, activation=name, transpose_a=transpose_a, arch=arch)
    found = {"C": resolve(product)}
    if gradients:
        own = product_of(matrix, b, transpose_a=not transpose_a, arch=arch)
        found["dB"] = resolve(replace(own, by_columns=False))
        depth = b.shape[-1] * (b.shape[0] if b.dim() == 3 else 1)
        by_columns = b.dim() == 2 and is_by_columns(b)
        columns = by_columns and transpose_a, by_columns and not transpose_a
        sample = sampled_product(matrix, b, columns, arch=arch)
        found["dA"] = resolve(replace(sample, width=rounded(depth)))
    return MatmulExplanation(found, gradients and name not in ("", "relu"))


def _sizes(product: Product) -> str:
    """Sizes of a class of products, in words."""
    rows, cols = product.block
    width = "depth" if product.op == "bsr_sddmm" else "N"
    sizes = f"matrix {product.rows} x {product.columns}, blocks {rows} x {cols}, {product.stored} stored"
    return f"{sizes}, {width} {product.width}"
