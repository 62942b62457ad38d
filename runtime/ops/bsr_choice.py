"""Which kernel computes a product with a block-sparse matrix: chosen by the class of its shapes, by codegen.select.

A class has everything that a spec says, the sizes of the matrix, and what differs from call to call rounded to the next
of 1, 2, 3, 4, 6, 8, 12, 16, 24, ...: the width of the dense operand (the depth of a sampled product) and the stored
blocks.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from codegen.errors import SpecError
from codegen.library import as_shipped, find_spec
from codegen.select import Choice, choose, parse_problem, planned
from codegen.select.problem import tuning_of
from codegen.select.shipped import Verified
from codegen.spec import BsrSpmmSpec
from runtime.errors import ArgumentError, UnverifiedError
from runtime.ops.attention_choice import CLASSES_KEPT
from runtime.receipts import permit

ACTIVATIONS = ("relu", "gelu", "silu")


@dataclass(frozen=True)
class Product:
    """A class of products that share a kernel.

    Attributes:
        op: ``bsr_spmm``, or ``bsr_sddmm``.
        arch: architecture of the device.
        device_name: as torch has it; None if there is no device.
        dtype: of inputs and outputs.
        block: rows and columns of a stored block.
        rows: of the sparse matrix.
        columns: of it.
        width: columns of the dense operand, rounded; of ``bsr_sddmm`` the depth.
        stored: blocks of the matrix, rounded.
        evenness: stored blocks of its longest block row over those of the mean one; None: not known.
        ordered: whether its block rows are given by length.
        by_columns: whether the dense operand is stored by columns; of ``bsr_sddmm`` the second one.
        a_by_columns: whether the first one of ``bsr_sddmm`` is.
        transposed: whether the matrix is.
        activation: "" for none.
        bias: whether one is added.
        accumulate: whether c is.
        kernel: spec of the kernel that prepared the matrix, as JSON; "": none did.
        verified_only: whether kernels without a receipt are refused.
    """

    op: str
    arch: str
    device_name: str | None
    dtype: str
    block: tuple[int, int]
    rows: int
    columns: int
    width: int
    stored: int
    evenness: float | None = None
    ordered: bool = False
    by_columns: bool = False
    a_by_columns: bool = False
    transposed: bool = False
    activation: str = ""
    bias: bool = False
    accumulate: bool = False
    kernel: str = ""
    verified_only: bool = False

    def fields(self) -> dict[str, Any]:
        """Fields of the spec that define the problem, without options that are off."""
        rows, cols = self.block
        found: dict[str, Any] = {"op": self.op, "arch": self.arch, "dtype": self.dtype}
        found["block"] = {"rows": rows, "cols": cols}
        if self.a_by_columns:
            found["a_layout"] = "column_major"
        if self.by_columns:
            found["b_layout"] = "column_major"
        if self.activation or self.bias:
            found["epilogue"] = {"activation": self.activation or "none", "bias": self.bias}
        if self.accumulate:
            found["accumulate"] = True
        if self.transposed:
            found["transpose_a"] = True
        return found

    def sizes(self) -> dict[str, Any]:
        """Known sizes, by name."""
        blocks = self.rows // self.block[0] * (self.columns // self.block[1])
        found: dict[str, Any] = {"density": min(1.0, self.stored / max(1, blocks))}
        if self.evenness is not None:
            found["evenness"] = self.evenness
        if self.op == "bsr_sddmm":
            return found | {"m": self.rows, "n": self.columns, "k": self.width}
        m, k = (self.columns, self.rows) if self.transposed else (self.rows, self.columns)
        # A kernel for A^T takes the index, which each product finds if it is not given.
        prepared = "rows" if self.ordered or self.transposed else "none"
        return found | {"m": m, "n": self.width, "k": k, "prepared": prepared}


@dataclass(frozen=True)
class Resolution:
    """How a product is computed.

    Attributes:
        product: what the kernel computes.
        choice: the kernel, and why it.
        fused: whether it adds bias and c and applies the activation; else torch does, in float32, to its result.
        copied: whether the blocks of the transpose are copied first, for a kernel that does not transpose.
    """

    product: Product
    choice: Choice
    fused: bool
    copied: bool

    def steps(self) -> list[str]:
        """Work beside the kernel, in words."""
        steps = ["each call copies the stored blocks, transposed: no kernel reads them so"] if self.copied else []
        return steps + ([] if self.fused else ["bias, c and activation follow in torch: no kernel has them"])


@lru_cache(maxsize=CLASSES_KEPT)
def resolve(product: Product) -> Resolution:
    """Choose the kernel of a product.

    Raises:
        ArgumentError: naming ``a``, if no kernel takes its blocks, or the one that prepared it does not compute this.
        UnverifiedError: with ``verified_only``, where no kernel with a receipt computes this.
    """
    first: SpecError | None = None
    refused: UnverifiedError | None = None
    for computed, fused, copied in _ways(product):
        try:
            return Resolution(computed, _chosen(computed), fused, copied)
        except SpecError as error:
            first = first or error
            last = error
        except UnverifiedError as error:
            refused = refused or error
    if refused is not None:
        raise refused
    if product.kernel and first is not None:
        stem = find_spec(json.loads(product.kernel)).stem
        raise ArgumentError("a", f"is prepared for {stem}, which does not compute this: {first}")
    rows, cols = product.block
    raise ArgumentError("a", f"has blocks of ({rows}, {cols}), for which {product.arch} has no kernel: {last}")


def _ways(product: Product) -> Iterator[tuple[Product, bool, bool]]:
    """Yield what a kernel may compute for a product, with ``fused`` and ``copied``, the best first."""
    bare = replace(product, activation="", bias=False, accumulate=False)
    yield product, True, False
    if product.kernel:  # what is prepared for a kernel is for no other
        return
    if bare != product:
        yield bare, False, False
    if product.op == "bsr_sddmm" and (product.a_by_columns or product.by_columns):  # for copies of the operands
        yield replace(product, a_by_columns=False, by_columns=False), True, False
    if product.transposed:
        plain: dict[str, Any] = {"block": product.block[::-1], "rows": product.columns, "columns": product.rows}
        plain |= {"transposed": False, "ordered": False, "evenness": None}
        yield replace(product, **plain), True, True
        if bare != product:
            yield replace(bare, **plain), False, True


def _chosen(product: Product) -> Choice:
    """Choose the kernel of a product as it is: no shipped kernel without a receipt where another one has one.

    Raises:
        SpecError: if there is none.
    """
    fields = product.fields()
    if product.kernel:
        prepared = find_spec(json.loads(product.kernel)).spec
        named = as_shipped(find_spec({**fields, **tuning_of(prepared)}))
        if product.verified_only:
            permit.check(named)
        return planned(Choice(named, "written", "the matrix is prepared for it"))
    problem = parse_problem({**fields, **product.sizes()})

    def choice(verified: Verified | None) -> Choice:
        return planned(choose(problem, device=product.device_name, verified=verified))

    if product.verified_only:
        return permit.chosen(choice)
    found = choice(None)
    if found.named.is_shipped and not permit.is_verified(found.named):
        with contextlib.suppress(UnverifiedError):  # then no other kernel has a receipt either
            return permit.chosen(choice)
    return found


def takes_order(choice: Choice) -> bool:
    """Whether a kernel reads an order of block rows."""
    spec = choice.spec
    return isinstance(spec, BsrSpmmSpec) and spec.is_dynamic
