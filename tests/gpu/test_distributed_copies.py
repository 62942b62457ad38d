"""Copies of heads by copy engines, on one GPU."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from runtime.distributed.copies import copy_heads, copy_wide, taken_blocks  # noqa: E402

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(2, 3, 200, 64), (1, 16, 1000, 128), (1, 1, 5, 8), (2, 3, 20), (1, 4, 0, 8)])
@pytest.mark.parametrize("copy", [copy_heads, copy_wide])
def test_heads_are_copied_to_the_last_bit(copy: object, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    assert callable(copy)
    source = torch.randn(shape, device="cuda").to(dtype)
    whole = torch.full((shape[0], shape[1] + 2, shape[2] + 9, *shape[3:]), torch.nan, dtype=dtype, device="cuda")
    target = whole[:, 1 : 1 + shape[1]].narrow(2, 4, shape[2])
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
        copy(target, source)
        copy(back := torch.empty_like(source), target)
    torch.cuda.synchronize()
    assert torch.equal(target, source) and torch.equal(back, source)
    assert whole.isnan().sum() == whole.numel() - source.numel()


def test_copies_of_heads_are_captured() -> None:
    source, target = torch.randn(1, 4, 64, 64, device="cuda"), torch.zeros(1, 4, 80, 64, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        copy_heads(target[:, :, 8:72], source)
    source.normal_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(target[:, :, 8:72], source)


def test_listed_blocks_are_taken() -> None:
    tensor = torch.randn(2, 3, 4096, 128, device="cuda").bfloat16()
    blocks = torch.randint(0, 32, (2, 3, 9), device="cuda")
    index = blocks[..., None, None].expand(-1, -1, -1, 128, 128)
    assert torch.equal(taken_blocks(tensor, blocks, 128), tensor.unflatten(2, (32, 128)).gather(2, index).flatten(2, 3))
