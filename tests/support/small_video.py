"""A small video transformer of diffusers (Wan's layers) with random weights, and the mask that a window of tiles is."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import diffusers
import torch
from diffusers.models import attention_dispatch

GRID = (5, 10, 12)
"""Tokens along frames, rows and columns: more than whole tiles, so that some have padding."""
TILE = (2, 8, 8)
CLOSE = 0.04  # of outputs of about 2.5, in bf16 through two layers; those without the window are off by more


def model(device: str = "cpu") -> Any:
    """Return the model: 2 layers, 2 heads of 64."""
    torch.manual_seed(0)
    made = diffusers.WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=64,
        in_channels=4,
        out_channels=4,
        text_dim=32,
        freq_dim=32,
        ffn_dim=64,
        num_layers=2,
    )
    with torch.no_grad():
        for name, weight in made.named_parameters():
            if "norm_q" in name or "norm_k" in name:
                weight.fill_(2.0)  # so that the softmax is far from uniform, and a wrong mask shows
            elif "attn1.to_out" in name:
                weight.mul_(8)
    return made.to(device, torch.bfloat16).eval()


@torch.no_grad()
def output(made: Any) -> Any:
    """Return the output for a random video and text."""
    torch.manual_seed(1)
    frames, rows, columns = GRID
    device = next(made.parameters()).device
    latents = torch.randn(1, 4, frames, 2 * rows, 2 * columns).to(device, torch.bfloat16)
    text = torch.randn(1, 7, 32).to(device, torch.bfloat16)
    return made(latents, torch.tensor([10], device=device), text, return_dict=False)[0]


def assert_same(found: Any, right: Any) -> None:
    torch.testing.assert_close(found.float(), right.float(), atol=CLOSE, rtol=0)


def mask_of(window: tuple[int, int, int], device: str = "cpu") -> Any:
    """Return which tokens see each other if tiles see a window of tiles: bool (tokens, tokens)."""
    seen = torch.ones(math.prod(GRID), math.prod(GRID), dtype=torch.bool)
    places = torch.cartesian_prod(*map(torch.arange, GRID))
    for axis, (size, tile, wide) in enumerate(zip(GRID, TILE, window, strict=True)):
        own = places[:, axis] // tile
        first = (own - wide // 2).clamp(0, max(-(-size // tile) - wide, 0))[:, None]
        seen &= (own >= first) & (own < first + wide)
    return seen.to(device)


@contextmanager
def masked(mask: Any) -> Iterator[None]:
    """Make diffusers' own attention take a mask of tokens where queries and keys are the video's."""
    name = attention_dispatch.AttentionBackendName.NATIVE
    backends = attention_dispatch._AttentionBackendRegistry._backends
    native = backends[name]

    def call(query: Any, key: Any, value: Any, attn_mask: Any = None, **options: Any) -> Any:
        mine = mask if query.shape[1] == key.shape[1] == len(mask) else attn_mask
        return native(query, key, value, mine, **options)

    backends[name] = call
    try:
        yield
    finally:
        backends[name] = native
