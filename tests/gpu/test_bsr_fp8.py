"""BSR products in FP8 on a GPU: scales are read on the device, NaN stays where it belongs, what promotion is for."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from runtime import load_kernel, quantize_matrix  # noqa: E402
from runtime.errors import ArgumentError  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:Sparse")
FIELDS = {"op": "bsr_spmm", "arch": "sm_90a", "b_layout": "column_major", "block": {"rows": 128, "cols": 128}}


def codes(*shape: int, dtype: Any = torch.float8_e4m3fn) -> Any:
    return (torch.randn(shape, device="cuda") * 16).to(dtype)


def matrix(values: Any) -> Any:
    """Four block rows of all 24 block columns."""
    crow, col = torch.arange(5, device="cuda") * 24, torch.arange(24, device="cuda").repeat(4)
    return torch.sparse_bsr_tensor(crow, col, values, size=(512, 3072), check_invariants=False)


def test_scales_may_change_between_calls() -> None:
    kernel: Any = load_kernel("h100_e4m3_bsr_spmm_b128")
    a, b = matrix(codes(96, 128, 128)), codes(264, 3072)
    one, scale = torch.ones((), device="cuda"), torch.ones(4, 1, device="cuda")[1]
    first = kernel(a, b.mT, scale_a=one, scale_b=scale)
    scale.mul_(0.25)  # exact in any type
    assert torch.equal(kernel(a, b.mT, scale_a=one, scale_b=scale), first * 0.25)
    with pytest.raises(ArgumentError, match=r"scale_b: has 0\.0, expected positive finite numbers"):
        kernel(a, b.mT, scale_a=one, scale_b=scale * 0, validate=True)
    with pytest.raises(
        ArgumentError, match=r"b: is torch\.bfloat16, .*: quantize it first \(sparse_kernel_codegen\.quantize_matrix\)"
    ):
        kernel(a, b.mT.to(torch.bfloat16), scale_a=one, scale_b=one)


def test_scales_of_blocks_multiply_their_blocks() -> None:
    kernel: Any = load_kernel("h100_e4m3_bsr_spmm_b128_block_scales")
    a, b = matrix(codes(96, 128, 128)), codes(264, 3072)
    of_blocks, of_columns = torch.rand(96, device="cuda") + 0.5, (torch.rand(24, 264, device="cuda") + 0.5).mT
    c = kernel(a, b.mT, scale_a=of_blocks, scale_b=of_columns, validate=True)
    numbers = matrix(a.values().double() * of_blocks[:, None, None].double()).to_dense()
    exact = numbers @ (b.double() * of_columns.double().repeat_interleave(128, 1)).mT
    assert float((c.double() - exact).abs().max()) <= 2**-7 * float(exact.abs().max())


def test_scales_of_rows_are_those_of_quantized_matrices() -> None:
    kernel: Any = load_kernel("h100_e4m3_bsr_sddmm_b128_row_scales")
    x, y = torch.randn(512, 1152, device="cuda"), torch.randn(3072, 1152, device="cuda")
    y[:, 300] *= 100  # what scales of 128 columns are for
    of_x, of_y = (quantize_matrix(each.to(torch.bfloat16)) for each in (x, y))
    pattern = matrix(torch.zeros(96, 128, 128, device="cuda"))
    c = kernel(of_x.codes, of_y.codes, pattern, scale_a=of_x.scales, scale_b=of_y.scales, validate=True)
    numbers = [each.codes.double() * each.scales.double().repeat_interleave(128, 1) for each in (of_x, of_y)]
    exact = numbers[0] @ numbers[1].mT
    assert float((c.to_dense().double() - exact).abs().max()) <= 2**-7 * float(exact.abs().max())


def test_a_nan_reaches_its_row_and_its_column_alone() -> None:
    kernel: Any = load_kernel("h100_e4m3_bsr_spmm_b128")
    one = torch.ones((), device="cuda")
    values, b = codes(96, 128, 128), codes(264, 3072)
    values.view(torch.uint8)[30, 5, 7] = 0x7F  # in block row 1
    b.view(torch.uint8)[100, 2000] = 0x7F
    wrong = kernel(matrix(values), b.mT, scale_a=one, scale_b=one).isnan()
    expected = torch.zeros_like(wrong)
    expected[128 + 5] = True
    expected[:, 100] = True
    assert torch.equal(wrong, expected)


def test_promotion_keeps_what_the_tensor_core_drops() -> None:
    # Sums that grow: the tensor core drops what is added below about 14 bits of what is there.
    values, b = torch.ones(96, 128, 128, device="cuda"), torch.ones(128, 3072, device="cuda")
    values[:, :, 1:] = 2.0**-9
    errors = []
    one = torch.ones((), device="cuda")
    a, b = matrix(values.to(torch.float8_e4m3fn)), b.to(torch.float8_e4m3fn)
    exact = a.values()[0].double().sum(-1)[0] * 24
    for every in (0, 1):
        kernel: Any = load_kernel({**FIELDS, "dtype": "e4m3", "output": "fp32", "accumulate_every": every})
        c = kernel(a, b.mT, scale_a=one, scale_b=one)
        errors.append(float((c.double() - exact).abs().max() / exact))
    assert errors[1] <= errors[0] and errors[1] < 1e-3, errors
