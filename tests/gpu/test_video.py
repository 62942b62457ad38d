"""Attention over the tiles of a video on a GPU beside dense attention with the same mask, and vLLM-Omni's callable."""

from __future__ import annotations

import math
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from runtime.integrations import vllm_omni  # noqa: E402
from runtime.video import VideoTiles, tile_window, tiled_attention  # noqa: E402

CLOSE = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
SIZES = {
    "whole tiles": ((4, 16, 24), (2, 8, 8), 0),
    "whole tiles of 64": ((4, 16, 24), (1, 8, 8), 0),
    "tiles of two blocks": ((8, 16, 16), (4, 8, 8), 0),
    "padding": ((5, 13, 21), (2, 8, 8), 0),
    "padding and text": ((5, 13, 21), (4, 4, 4), 77),
    "text of whole blocks": ((4, 16, 16), (2, 8, 8), 128),
}


def mask_of(tiles: VideoTiles, window: tuple[int, int, int]) -> Any:
    """Return which tokens see each other, text behind the video: bool (tokens, tokens)."""
    video = math.prod(tiles.grid)
    seen = torch.ones(tiles.tokens, tiles.tokens, dtype=torch.bool)
    places = torch.cartesian_prod(*map(torch.arange, tiles.grid))
    for axis, (count, tile, wide) in enumerate(zip(tiles.counts, tiles.tile_size, window, strict=True)):
        own = places[:, axis] // tile
        first = (own - wide // 2).clamp(0, max(count - wide, 0))[:, None]
        seen[:video, :video] &= (own >= first) & (own < first + wide)
    return seen.cuda()


@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize("name", SIZES)
def test_tiles_beside_dense_attention_with_the_mask(name: str, dtype: torch.dtype) -> None:
    grid, tile, text = SIZES[name]
    window = (1, 2, 1)
    tiles = VideoTiles(grid, tile, text=text, device="cuda")
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, tiles.tokens, 128, device="cuda").to(dtype) for heads in (4, 2, 2))
    out, lse = tiled_attention(q, k, v, tiles, tile_window(tiles, window), return_lse=True, validate=True)
    mask = mask_of(tiles, window)
    wide = [x.float().repeat_interleave(4 // x.shape[1], 1) for x in (q, k, v)]
    logits = (wide[0] @ wide[1].mT / math.sqrt(128)).masked_fill(~mask, -math.inf)
    torch.testing.assert_close(out.float(), logits.softmax(-1) @ wide[2], atol=CLOSE[dtype], rtol=CLOSE[dtype])
    torch.testing.assert_close(lse, logits.logsumexp(-1), atol=1e-3, rtol=1e-3)


def test_vllm_omnis_contract() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 4 * 16 * 24, 4, 128, device="cuda").bfloat16() for _ in range(3))
    fields = {"kind": "video_window", "window": [1, 2, 1], "tile": [2, 8, 8]}
    latents = torch.tensor([[4, 32, 48]])
    params = {"pattern": fields, "latent_shape": latents, "patch_size": torch.tensor([[1, 2, 2]]), "return_lse": True}
    out, lse = vllm_omni.attention(q, k, v, params, False, 128**-0.5)
    mask = mask_of(VideoTiles((4, 16, 24), (2, 8, 8)), (1, 2, 1))
    right = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2).float() for x in (q, k, v)), mask)
    torch.testing.assert_close(out.transpose(1, 2).float(), right, atol=1.6e-2, rtol=1.6e-2)
    assert lse.shape == (1, 4, 4 * 16 * 24) and out.shape == q.shape
    dense = {"pattern": {"kind": "dense"}, "attn_mask": torch.rand(1, q.shape[1], device="cuda") < 0.5}
    hidden = dense["attn_mask"][:, None, None]
    right = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), hidden)
    found = vllm_omni.attention(q, k, v, dense, False, None).transpose(1, 2)
    torch.testing.assert_close(found, right, atol=1.6e-2, rtol=1.6e-2)
