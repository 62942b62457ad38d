"""Calls of kernels with inputs that stay, in many shapes, and their first results: what launches are compared with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from codegen.spec import AttentionSpec, BsrSpmmSpec
from runtime.kernels.arguments import SIGNATURES_KEPT, TORCH_DTYPES
from runtime.verify import attention, bsr_spmm

SHAPES = SIGNATURES_KEPT * 3 // 2  # more than a kernel remembers
MATRICES = 4  # of each product; shapes differ in the columns of B
HOPPER = (
    "h100_dense",
    "h100_topk32",
    "h100_block_lists",
    "h100_topk32_b64_self_ordered",  # a kernel that finds an order goes before it
    "h100_bsr_spmm_b64",
    "h100_bsr_spmm_b64_balanced",  # dynamic; orders of block rows by stream
    "h100_bsr_spmm_b16_balanced",  # dynamic; rows that are cut, with partial sums in scratch memory
    "h100_bsr_spmm_b16_few_columns",
    "h100_bsr_spmm_b16_n16",
)
ADA = ("l4_dense", "l4_topk32", "l4_block_lists_d256", "l4_bsr_spmm_b64", "l4_bsr_spmm_b16")
Call = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class Shape:
    """A call of a kernel with inputs that stay.

    Attributes:
        name: of the kernel and the shape.
        call: returns the result; takes ``out``.
        expected: the first result.
        inputs: the tensors that a graph may be given other values of.
    """

    name: str
    call: Call
    expected: torch.Tensor
    inputs: tuple[torch.Tensor, ...]


def attention_shape(kernel: Any, number: int, device: torch.device) -> tuple[Call, tuple[torch.Tensor, ...]]:
    """Return a call of an attention kernel, and its q, k and v."""
    case = attention.Case(
        f"launches_{number}",
        heads=(1, 2, 3)[number % 3] * kernel.spec.pack_gqa,
        kv_heads=(1, 2, 3)[number % 3],
        q_len=33 + 8 * number,
        kv_len=100 + 12 * number,
        lists="padded",
    )
    inputs = attention.make_inputs(kernel.spec, case, device)
    q, k, v = (tensor.contiguous() for tensor in (inputs.q, inputs.k, inputs.v))
    more = {**({} if inputs.sink is None else {"sink": inputs.sink}), **inputs.options()}

    def call(out: torch.Tensor | None = None) -> torch.Tensor:
        result: torch.Tensor = kernel(q, k, v, *inputs.indices, out=out, **more).out
        return result

    return call, (q, k, v)


def products(kernel: Any, device: torch.device) -> list[tuple[Call, tuple[torch.Tensor, ...]]]:
    """Return calls of a BSR x dense kernel with a few matrices and B of SHAPES widths, and their B."""
    plan = kernel.compiled.plan
    cuts = plan.row_cutting is not None
    given: list[tuple[Any, int]] = []
    for number in range(MATRICES):
        case = bsr_spmm.Case(
            f"launches_{number}",
            block_rows=20 + 3 * number,
            block_columns=300 if cuts else 12 + number,
            row_counts="few_long" if cuts else "random",
        )
        a = bsr_spmm.make_inputs(plan, case, device).a
        given.append((kernel.prepare(a) if cuts else a, a.shape[1]))

    def shape(number: int) -> tuple[Call, tuple[torch.Tensor, ...]]:
        a, depth = given[number % MATRICES]
        b = torch.randn(depth, 8 * (number + 1), device=device).to(TORCH_DTYPES[kernel.spec.dtype])

        def call(out: torch.Tensor | None = None) -> torch.Tensor:
            result: torch.Tensor = kernel(a, b, out=out)
            return result

        return call, (b,)

    return [shape(number) for number in range(SHAPES)]


def shapes_of(kernel: Any, device: torch.device) -> list[Shape]:
    """Return SHAPES calls of a kernel, and their first results."""
    if isinstance(kernel.spec, AttentionSpec):
        calls = [attention_shape(kernel, number, device) for number in range(SHAPES)]
    else:
        assert isinstance(kernel.spec, BsrSpmmSpec)
        calls = products(kernel, device)
    stem = kernel.compiled.named.stem
    return [
        Shape(f"{stem}, shape {number}", call, call().clone(), inputs) for number, (call, inputs) in enumerate(calls)
    ]
