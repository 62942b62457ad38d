"""Tensors that torch.vmap maps, that have tangents or that are fake, and integers of thousands of digits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.autograd import forward_ad  # noqa: E402

from runtime.convert import bits  # noqa: E402
from runtime.errors import ArgumentError  # noqa: E402
from runtime.kernels import select_topk  # noqa: E402
from runtime.nn import blocks  # noqa: E402
from runtime.ops import bsr_checks, static_scales  # noqa: E402
from runtime.ops.block_mask import create_block_mask  # noqa: E402
from runtime.ops.quantize import check_floats, check_rotary  # noqa: E402
from runtime.video.tiles import VideoTiles, check_sizes  # noqa: E402

HUGE = 10**5000


def test_bits_of_mapped_masks_are_those_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bits, "PAIRS_AT_ONCE", 64 * 64)  # several runs of rows and of entries
    masks = torch.rand(3, 1, 1, 128, 192) < 0.5
    indices = torch.tensor([[0, 1, 2], [2, 0, -1]], dtype=torch.int32).reshape(1, 1, 2, 3)

    def of(mask: torch.Tensor) -> torch.Tensor:
        batch, head = bits.numbers_of(mask)
        return bits.bits_of(indices, (64, 64), 128, 192, lambda q, k: mask[batch, head, q, k])

    alone = torch.stack([of(mask) for mask in masks])
    assert torch.equal(torch.vmap(of)(masks), alone)
    pairs = bits.unpack(alone[0], (64, 64))
    assert torch.equal(pairs[0, 0, 1, 0], masks[0, 0, 0, 64:, 128:])
    assert not pairs[0, 0, 1, 2].any()


def test_mapped_tensors_are_refused_by_name() -> None:
    x = torch.zeros(2, 1, 1, 64, 64, dtype=torch.float16, device="meta")
    with pytest.raises(ArgumentError, match=r"^x: is mapped by torch\.vmap"):
        torch.vmap(lambda each: check_floats("x", each))(x)
    with pytest.raises(ArgumentError, match=r"^aux: has tensors that are mapped by torch\.vmap"):
        torch.vmap(
            lambda ids: create_block_mask(
                "ids[batch, q_idx] == ids[batch, kv_idx]",
                B=1,
                H=1,
                Q_LEN=64,
                KV_LEN=64,
                BLOCK_SIZE=(64, 64),
                aux={"ids": ids},
            )
        )(torch.zeros(2, 1, 64, dtype=torch.int32))


def test_tangents_are_refused_by_name() -> None:
    with forward_ad.dual_level():
        x = forward_ad.make_dual(*torch.zeros(2, 1, 1, 64, 64, dtype=torch.float16, device="meta"))
        angles = forward_ad.make_dual(*torch.zeros(2, 64, 32))
        scale = forward_ad.make_dual(*torch.ones(2))
        for name, call in {
            "x": lambda: check_floats("x", x),
            "rotary": lambda: check_rotary((angles, angles.detach()), torch.zeros(1, 1, 64, 64)),
            "q_scale": lambda: static_scales.spread("q_scale", scale, (1, 1, 1), scale.device, last=False),
        }.items():
            with pytest.raises(ArgumentError, match=rf"^{name}: has a tangent"):
                call()


def test_integers_that_python_does_not_print_are_refused_by_name() -> None:
    calls: dict[str, Callable[[], Any]] = {
        "q_scale": lambda: static_scales.spread("q_scale", HUGE, (1, 1, 1), torch.device("cpu"), last=False),
        "topk": lambda: select_topk.checked_selection((64, 64), HUGE, ()),
        "always": lambda: select_topk.checked_selection((64, 64), 1, (HUGE,)),
        "block": lambda: select_topk.checked_selection((HUGE, 64), 1, ()),
        "density": lambda: blocks.largest_blocks(torch.ones(64, 64), (64, 64), HUGE),
        "grid": lambda: check_sizes("grid", [HUGE]),
        "beta": lambda: bsr_checks.check_options(None, HUGE, None),
    }
    for name, call in calls.items():
        with pytest.raises(ArgumentError, match=rf"^{name}: "):
            call()


def test_tiles_under_modes_have_the_shapes_and_values_of_others() -> None:
    sizes: Any = ((3, 9, 10), (2, 8, 8))
    for text, text_first in ((0, False), (5, False), (5, True)):
        tiles = VideoTiles(*sizes, text=text, text_first=text_first)
        x = torch.arange(tiles.tokens).reshape(1, -1)
        assert torch.equal(tiles.untile(tiles.tile(x, 1), 1), x)
        assert torch.equal(tiles.to_tiles[tiles.from_tiles], x[0])
        assert tiles.is_token[tiles.from_tiles].all()
        with FakeTensorMode():
            fake = VideoTiles(*sizes, text=text, text_first=text_first)
        assert fake.from_tiles.shape == tiles.from_tiles.shape
        assert fake.to_tiles.shape == tiles.to_tiles.shape
