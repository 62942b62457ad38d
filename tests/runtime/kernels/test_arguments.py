"""Argument checks that need no GPU: every message names the argument, what it was and what is allowed."""

from __future__ import annotations

import math
import struct
from typing import Any

import pytest

from runtime.kernels.arguments import check_overlap

torch = pytest.importorskip("torch")

from runtime.errors import ArgumentError  # noqa: E402
from runtime.kernels.arguments import (  # noqa: E402
    check_address,
    check_extent,
    check_output,
    check_scale,
    check_shape,
    check_sink,
    check_sink_values,
    check_size,
    check_strides,
    check_tensor,
)

pytestmark = pytest.mark.nvrtc


def half(*shape: int) -> Any:
    return torch.zeros(shape, dtype=torch.float16)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (3, "q: is int, expected a torch.Tensor"),
        (half(4, 4).to_sparse(), r"q: has layout torch\.sparse_coo, expected a dense tensor"),
        (half(4, 4), "q: is on cpu, expected a CUDA device"),
    ],
)
def test_what_is_no_tensor_on_a_gpu(value: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        check_tensor("q", value, torch.float16, 2)


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (half(8, 16).T, r"k: has stride 16 in its last dimension, which must be contiguous"),
        (half(4, 3, 12)[..., :8], r"k: has stride 36 in dimension 0; strides must be multiples of 8 elements"),
        (half(2, 3, 12)[:1, :, :8], r"k: has stride 12 in dimension 1"),
    ],
)
def test_strides_that_cannot_be_addressed(tensor: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        check_strides("k", tensor)


@pytest.mark.parametrize(
    "tensor",
    [
        half(2, 3, 8),
        half(2, 3, 16)[..., :8],
        half(1, 3, 8).expand(5, 3, 8),
        half(3, 2, 8).transpose(0, 1),
        half(3, 3, 1),
    ],
)
def test_strides_that_can(tensor: Any) -> None:
    if tensor.shape[-1] == 1:
        tensor = tensor[:1, :1]  # strides of dimensions of size 1 do not matter
    check_strides("k", tensor)


def test_a_tensor_may_extend_as_far_as_offsets_reach() -> None:
    far = torch.empty_strided((2, 3, 8), (2**20, 8, 1), dtype=torch.float16, device="meta")
    extent = 2 * (2**20 + 2 * 8 + 8)
    check_extent("k", far, extent)
    with pytest.raises(ArgumentError, match=f"k: extends over {extent} bytes, but this kernel reaches {extent - 1}"):
        check_extent("k", far, extent - 1)
    check_extent("k", half(1, 2, 8).expand(5, 2, 8), 32)


def test_an_output_must_not_share_memory_with_itself() -> None:
    check_output("out", half(2, 8))
    check_output("out", half(1, 8).expand(1, 8))
    check_output("out", half(4, 2, 24)[:, :, :8].transpose(0, 1))
    with pytest.raises(ArgumentError, match="out: is expanded in dimension 0"):
        check_output("out", half(1, 8).expand(2, 8))
    for shape, strides in (((3, 16), (8, 1)), ((2, 3, 8), (16, 8, 1))):
        with pytest.raises(ArgumentError, match=r"out: has shape .* and strides .*: its elements may share memory"):
            check_output("out", half(64).as_strided(shape, strides))


def test_shapes_are_told_whole() -> None:
    expected = [("batch", (1, 4)), ("heads", None), ("k", (32,))]
    check_shape("kv_indices", (4, 7, 32), expected)
    for shape in [(2, 7, 32), (4, 7, 31), (4, 7), (4, 7, 32, 1)]:
        with pytest.raises(ArgumentError, match=r"kv_indices: has shape .*, expected \(batch 1 or 4, heads, k 32\)"):
            check_shape("kv_indices", shape, expected)


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), 0, -0.5, 1e-46, 3e38, -(10**400), True, "1", None])
def test_scales_that_make_no_sense(scale: Any) -> None:
    with pytest.raises(ArgumentError, match=r"scale: is .*, expected a"):
        check_scale(scale)


@pytest.mark.parametrize(
    ("sink", "message"),
    [
        (None, r"sink: is missing: float32 \(heads 4,\)"),
        (4, "sink: is int, expected a torch.Tensor"),
        (torch.zeros(4), "sink: is on cpu, expected a CUDA device"),
    ],
)
def test_what_is_no_sink(sink: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        check_sink(sink, 4, torch.device("cuda", 0))


@pytest.mark.parametrize("wrong", [float("inf"), float("-inf"), float("nan"), 7e29, -7e29])
def test_sinks_are_in_the_range_that_kernels_weigh(wrong: float) -> None:
    check_sink_values(None)
    check_sink_values(torch.tensor([-6e29, -1e4, 0.0, 1e4, 6e29]))
    with pytest.raises(ArgumentError, match=r"sink: has .*, expected numbers from -6e\+29 to 6e\+29"):
        check_sink_values(torch.tensor([0.0, wrong]))


def test_scales_that_do() -> None:
    assert check_scale(2) == 2.0 and check_scale(0.125) == 0.125
    for scale in (1e-37, 1e38):  # kernels get them times log2(e), as float32
        (packed,) = struct.unpack("f", struct.pack("f", check_scale(scale) * math.log2(math.e)))
        assert 0 < packed < math.inf


def test_sizes_that_32_bits_can_number() -> None:
    check_size("k", (2**30, 1))
    with pytest.raises(
        ArgumentError, match=r"k: has shape \(1, 1073741825\), with a dimension above 2\^30 = 1073741824"
    ):
        check_size("k", (1, 2**30 + 1))


def test_alignment() -> None:
    check_address("q", 4096)
    with pytest.raises(ArgumentError, match=r"q: starts at address 0x1008, which is not a multiple of 16 bytes"):
        check_address("q", 0x1008)


def test_two_elements_in_a_row_are_contiguous_too() -> None:
    with pytest.raises(ArgumentError, match="k: has stride 8 in its last dimension"):
        check_strides("k", half(2, 16)[:, ::8])
    with pytest.raises(ArgumentError, match="k: has stride 12 in dimension 0"):  # of two rows
        check_strides("k", half(2, 12)[:, :8])
    check_strides("k", half(64).as_strided((3, 1), (8, 8)))  # how far the next one of a row would be does not matter


def test_an_output_of_one_row_may_have_any_stride() -> None:
    check_output("out", half(8).as_strided((1, 8), (0, 1)))


def test_matrices_of_a_batch_that_overlap_are_found() -> None:
    store, apart = half(2 * 192 * 256), 191 * 256 + 192  # a matrix begins in the last row of the one before
    c, out = (store.as_strided((2, 192, 128), (apart, 256, 1), first) for first in (0, 128))
    with pytest.raises(ArgumentError, match="c: overlaps out"):
        check_overlap("c", c, "out", out)
    c, out = (store.as_strided((2, 96, 128), (96 * 256, 256, 1), first) for first in (0, 128))
    check_overlap("c", c, "out", out)
    check_overlap("c", out, "out", c)
