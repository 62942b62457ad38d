"""Copies of strided rows, and of listed blocks."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from runtime.distributed.copies import copy_heads, copy_wide, taken_blocks  # noqa: E402
from runtime.driver.copy_2d import copy_2d  # noqa: E402
from runtime.errors import DeviceError  # noqa: E402


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("head_dim", [64, 72, 100, 1])
@pytest.mark.parametrize("first", [0, 1])
def test_strided_rows_are_copied_to_the_last_bit(dtype: torch.dtype, head_dim: int, first: int) -> None:
    source = torch.randn(2, 3, 20, head_dim).to(dtype)
    whole = torch.full((2, 5, 33, head_dim), torch.nan, dtype=dtype)
    target = whole[:, 1:4, first : first + 20]
    copy_wide(target, source)
    assert torch.equal(target, source)
    assert whole.isnan().sum() == whole.numel() - source.numel()
    back = torch.empty_like(source)
    copy_wide(back, target)
    assert torch.equal(back, source)


def test_rows_that_are_not_contiguous_are_copied() -> None:
    source, target = torch.randn(2, 8, 16).mT, torch.empty(2, 16, 8)
    copy_wide(target, source)
    assert torch.equal(target, source)


def test_statistics_are_copied() -> None:
    source, whole = torch.randn(2, 3, 32), torch.zeros(2, 6, 64)
    copy_wide(whole[:, 3:, 32:], source)
    assert torch.equal(whole[:, 3:, 32:], source)
    assert not whole[:, :3].any()


@pytest.mark.parametrize("shape", [(2, 3), (1, 3), (2, 1), (1, 1)])
@pytest.mark.parametrize("head_dim", [64, 3])
def test_blocks_are_those_that_are_listed(shape: tuple[int, int], head_dim: int) -> None:
    tensor = torch.randn(2, 3, 40, head_dim).bfloat16()
    blocks = torch.randint(0, 5, (*shape, 7))
    found = taken_blocks(tensor, blocks, 8)
    index = blocks.expand(2, 3, 7)[..., None, None].expand(-1, -1, -1, 8, head_dim)
    assert torch.equal(found, tensor.unflatten(2, (5, 8)).gather(2, index).flatten(2, 3))
    strided = tensor.transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(taken_blocks(strided, blocks, 8), found)


@pytest.mark.parametrize("shape", [(2, 3, 20, 64), (1, 1, 5, 8), (2, 3, 20), (1, 4, 0, 8)])
def test_heads_are_copied_where_there_is_no_gpu(shape: tuple[int, ...]) -> None:
    source, whole = torch.randn(shape), torch.zeros(shape[0], shape[1] + 2, shape[2] + 9, *shape[3:])
    target = whole[:, 1 : 1 + shape[1]].narrow(2, 4, shape[2])
    copy_heads(target, source)
    assert torch.equal(target, source)
    assert whole.count_nonzero() == source.count_nonzero()


def test_rows_are_copied_by_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    bindings = pytest.importorskip("cuda.bindings.driver")
    streams = []

    def copy(what: Any, stream: int) -> tuple[int]:
        streams.append(stream)
        for row in range(what.Height):
            places = (int(what.dstDevice) + row * what.dstPitch, int(what.srcDevice) + row * what.srcPitch)
            ctypes.memmove(*places, what.WidthInBytes)
        return (0,)

    names = {name: getattr(bindings, name) for name in ("CUDA_MEMCPY2D", "CUmemorytype")}
    monkeypatch.setattr("runtime.driver.copy_2d.driver", lambda: SimpleNamespace(**names, cuMemcpy2DAsync=copy))
    source, whole = torch.randn(3, 7, 16), torch.zeros(3, 11, 16)
    target, pitches = whole[:, 2:9], (11 * 16 * 4, 7 * 16 * 4)
    copy_2d(target.data_ptr(), source.data_ptr(), pitches=pitches, width=7 * 16 * 4, rows=3, stream=5)
    assert torch.equal(target, source)
    assert streams == [5] and whole.count_nonzero() == source.numel()

    refused = SimpleNamespace(**names, cuMemcpy2DAsync=lambda what, stream: (1,))
    monkeypatch.setattr("runtime.driver.copy_2d.driver", lambda: refused)
    refused.cuMemcpy2DAsync.__name__ = "cuMemcpy2DAsync"
    with pytest.raises(DeviceError, match="cuMemcpy2DAsync failed: 1"):
        copy_2d(target.data_ptr(), source.data_ptr(), pitches=pitches, width=8, rows=3, stream=5)
