"""Kernels that compute products with block-sparse matrices by the definition, on any device, in place of ours."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from codegen.library import NamedSpec
from codegen.spec import BsrSddmmSpec, BsrSpmmSpec
from runtime.errors import ArgumentError
from runtime.kernels import arguments
from runtime.kernels.bsr_preparation import Parts
from runtime.kernels.bsr_spmm import ACTIVATIONS
from runtime.ops import bsr_calls, bsr_launches
from runtime.prepare.prepared import PreparedBsr
from runtime.prepare.transpose import transposed_index


def dense(values: Any, crow: Any, col: Any, shape: tuple[int, int]) -> Any:
    """Return the dense matrix of stored blocks, in float64, differentiable in the values."""
    rows, cols = values.shape[1:]
    row = torch.repeat_interleave(torch.arange(crow.shape[0] - 1, device=crow.device), crow.diff().long())
    blocks = values.new_zeros((shape[0] // rows, shape[1] // cols, rows, cols), dtype=torch.float64)
    blocks = blocks.index_put((row, col.long()), values.double(), accumulate=True)
    return blocks.transpose(1, 2).reshape(shape)


def by_definition(
    w: Any, b: Any, *, bias: Any = None, c: Any = None, beta: float = 1.0, activation: str | None = None
) -> Any:
    """Return activation(w b + beta c + bias) in the type of w."""
    found = w @ b.to(w.dtype)
    if c is not None and beta != 0:
        found = found + beta * c.to(w.dtype)
    if bias is not None:
        found = found + bias.to(w.dtype)[:, None]
    return ACTIVATIONS[activation or "none"](found)


def assert_near(found: Any, right: Any, share: float = 2e-2) -> None:
    """Assert that no element is off by more than a share of the largest one."""
    assert found.shape == right.shape
    largest, off = (
        float(right.detach().abs().max()),
        float((found.detach().double() - right.detach().double()).abs().max()),
    )
    assert off <= share * largest, f"off by {off}, the largest element is {largest}"


def result_like(t: Any, dtype: Any) -> Any:
    """Return memory of a result as kernels make it: padded rows, the matrices of a batch side by side, no view."""
    *batch, rows, columns = t.shape
    step = -(-columns // 8) * 8
    whole = torch.empty((rows, *batch, step), dtype=dtype, device=t.device)
    strides = (step, batch[0] * step, 1) if batch else (step, 1)
    return whole.as_strided_(t.shape, strides)


class SpmmOracle:
    """Stands for a BsrSpmmKernel: checks what a kernel would be given, and computes by the definition."""

    def __init__(self, spec: BsrSpmmSpec) -> None:
        self.spec = spec
        self.calls: list[Any] = []

    def __call__(
        self, a: Any, b: Any, *, bias: Any = None, c: Any = None, beta: float = 1.0, validate: bool = False
    ) -> Any:
        a = a.assembled() if isinstance(a, Parts) else a
        self.calls.append(a)
        assert not torch.is_grad_enabled()
        spec, matrix = self.spec, a
        if isinstance(a, PreparedBsr):
            matrix = a.matrix
            assert (a.index is not None) == spec.transpose_a and (a.row_order is not None) == spec.is_dynamic
            if a.index is not None:
                assert all(map(torch.equal, a.index, transposed_index(matrix)))
            if a.row_order is not None:
                lengths = matrix.crow_indices().diff()[a.row_order.long()]
                assert bool((lengths.diff() <= 0).all())
        values, crow, col = matrix.values(), matrix.crow_indices(), matrix.col_indices()
        assert tuple(values.shape[1:]) == (spec.block.rows, spec.block.cols) and values.is_contiguous()
        assert col.is_contiguous() and crow.dtype == col.dtype
        assert (c is not None) == spec.accumulate
        epilogue = spec.epilogue
        assert (bias is not None) == (epilogue is not None and epilogue.bias)
        if spec.b_layout != "strided":
            arguments.check_strides("b", b.mT if spec.b_layout == "column_major" else b)
            if c is not None:
                arguments.check_strides("c", c)
        w = dense(values, crow, col, tuple(matrix.shape)).float()
        w = w.mT if spec.transpose_a else w
        activation = epilogue.activation if epilogue is not None else None
        found = by_definition(w, b, bias=bias, c=c, beta=beta, activation=activation)
        return result_like(found, b.dtype).copy_(found)

    _multiply_parts = __call__


class SddmmOracle:
    """Stands for a BsrSddmmKernel."""

    def __init__(self, spec: BsrSddmmSpec) -> None:
        self.spec = spec
        self.calls: list[Any] = []

    def __call__(self, a: Any, b: Any, pattern: Any, *, out: Any, validate: bool = False) -> Any:
        self.calls.append(pattern)
        for name, tensor, layout in (("a", a, self.spec.a_layout), ("b", b, self.spec.b_layout)):
            arguments.check_strides(name, tensor.mT if layout == "column_major" else tensor)
        rows, cols = pattern.values().shape[1:]
        crow, col = pattern.crow_indices(), pattern.col_indices()
        row = torch.repeat_interleave(torch.arange(crow.shape[0] - 1, device=crow.device), crow.diff().long())
        blocks = (a.double() @ b.double().mT).unflatten(0, (-1, rows)).unflatten(2, (-1, cols)).transpose(1, 2)
        out.copy_(blocks[row, col.long()])
        return torch.sparse_bsr_tensor(crow, col, out, size=pattern.shape, check_invariants=False)


class Loaded(dict[str, Any]):
    """The kernels that were asked for, by their spec."""

    def __call__(self, named: NamedSpec, device: torch.device) -> Any:
        kind = SddmmOracle if isinstance(named.spec, BsrSddmmSpec) else SpmmOracle
        return self.setdefault(named.spec.canonical_json(), kind(named.spec))  # type: ignore[arg-type]

    def of(self, **fields: Any) -> list[Any]:
        """Return the kernels whose specs have these fields."""
        return [k for k in self.values() if all(getattr(k.spec, name, None) == v for name, v in fields.items())]


def arguments_of(spec: str) -> dict[str, Any]:
    """Return a spec's JSON, read."""
    return bsr_calls.read_how(spec)


def install(monkeypatch: pytest.MonkeyPatch, arch: str = "sm_90a") -> Loaded:
    """Make products compute by the definition, with the choice of kernels of an H100."""
    loaded = Loaded()
    monkeypatch.setattr(bsr_calls, "_loaded", loaded)
    monkeypatch.setattr(bsr_calls, "_routes", arguments.Signatures())
    monkeypatch.setattr(bsr_calls, "_samplers", arguments.Signatures())
    monkeypatch.setattr(bsr_launches.launches, "_kept", {})
    monkeypatch.setattr(bsr_calls, "arch_of", lambda device: arch)
    monkeypatch.setattr(bsr_calls, "check_place", _check_place)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    return loaded


def _check_place(name: str, tensor: Any) -> None:
    if tensor.device.type != "cpu":
        raise ArgumentError(name, f"is on {tensor.device}")


def drawn(
    blocks: tuple[int, int],
    block: tuple[int, int],
    *,
    dtype: Any = torch.bfloat16,
    device: str = "cpu",
    share: float = 0.4,
) -> Any:
    """Return a matrix of random blocks, torch.sparse_bsr, whose second block row is empty, if it has one."""
    mask = torch.rand(blocks, device=device) < share
    mask[0, 0] = True
    if blocks[0] > 1:
        mask[1] = False
    crow = torch.nn.functional.pad(mask.sum(1).cumsum(0), (1, 0))
    values = torch.randn((int(crow[-1]), *block), device=device).to(dtype)
    size = (blocks[0] * block[0], blocks[1] * block[1])
    return torch.sparse_bsr_tensor(crow, mask.nonzero()[:, 1].contiguous(), values, size=size)
