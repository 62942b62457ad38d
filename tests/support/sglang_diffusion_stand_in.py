"""Small stand-ins for SGLang's diffusion runtime, and definitions of what its layers compute."""

from __future__ import annotations

import enum
import math
from types import SimpleNamespace
from typing import Any

import pytest
import sglang_stand_in
import torch

KEPT = "runtime.integrations.sglang.diffusion_backend"
LAYERS = "sglang.multimodal_gen.runtime.layers.attention"
TILE = (4, 4, 4)


class AttentionBackend:
    """SGLang's base class."""


class AttentionImpl:
    """SGLang's base class of a layer's attention."""


class VideoSparseAttentionBackend(AttentionBackend):
    """SGLang's backend of video sparse attention."""


class VideoSparseAttentionImpl(AttentionImpl):
    """Its attention, without tiles."""

    def __init__(self, *given: Any, **named: Any) -> None:
        pass


def names() -> Any:
    """SGLang's enumeration of backends, as it is before the plug-in."""
    members = ("FA", "TORCH_SDPA", "VIDEO_SPARSE_ATTN")
    return enum.Enum("AttentionBackendEnum", {name: enum.auto() for name in members})


def server_args(config: dict[str, Any] | None = None, **settings: Any) -> Any:
    """SGLang's settings."""
    fields = {"attention_backend_config": config or {}, "ring_degree": 1, "kv_gather_degree": 1}
    transformer = SimpleNamespace(patch_size=settings.pop("patch_size", (1, 2, 2)))
    pipeline = SimpleNamespace(dit_config=transformer)
    return SimpleNamespace(**{**fields, "enable_torch_compile": False, "pipeline_config": pipeline, **settings})


def install(
    monkeypatch: pytest.MonkeyPatch, settings: Any, latents: tuple[int, ...] | None = None, enumeration: Any = None
) -> Any:
    """Put stand-ins in place of SGLang's modules; return the module of the backends, imported with them."""
    request = SimpleNamespace(raw_latent_shape=latents)
    topk = lambda metadata: max(1, math.ceil((1 - metadata.VSA_sparsity) * metadata.variable_block_sizes.numel()))  # noqa: E731
    own = {"AttentionBackend": AttentionBackend, "AttentionImpl": AttentionImpl, "AttentionMetadata": object}
    sparse = {
        "VideoSparseAttentionBackend": VideoSparseAttentionBackend,
        "VideoSparseAttentionImpl": VideoSparseAttentionImpl,
        "_compute_cur_topk": topk,
    }
    runtime = "sglang.multimodal_gen.runtime"
    contents = {
        f"{LAYERS}.backends.attention_backend": own,
        f"{LAYERS}.backends.video_sparse_attn": sparse,
        f"{runtime}.managers.forward_context": {"get_forward_context": lambda: SimpleNamespace(forward_batch=request)},
        f"{runtime}.platforms": {"AttentionBackendEnum": names() if enumeration is None else enumeration},
        f"{runtime}.server_args": {"get_global_server_args": lambda: settings},
    }
    return sglang_stand_in.imported(monkeypatch, KEPT, contents)


def attention(q: Any, k: Any, v: Any, scale: float, mask: Any = None) -> Any:
    """Attention of (batch, length, heads, head_size), float32."""
    q, k, v = (x.transpose(1, 2).float() for x in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=True)
    return out.transpose(1, 2)


def window_mask(grid: Any, tile: Any, window: Any, text: int = 0, *, text_first: bool = False) -> Any:
    """Which tokens see each other in a window of tiles: bool (tokens, tokens). Text sees all, and all see it."""
    places = torch.cartesian_prod(*map(torch.arange, grid))
    seen = torch.ones(len(places), len(places), dtype=torch.bool)
    for axis in range(3):
        own, count = places[:, axis] // tile[axis], -(-grid[axis] // tile[axis])
        first = (own - window[axis] // 2).clamp(0, max(count - window[axis], 0))[:, None]
        seen &= (own >= first) & (own < first + window[axis])
    before, after = (text, 0) if text_first else (0, text)
    return torch.nn.functional.pad(seen, (before, after, before, after), value=True)


def tiles_of(grid: tuple[int, int, int], device: str = "cpu") -> tuple[Any, Any]:
    """The tile of each token in a grid, and how many tokens each tile has."""
    places = torch.cartesian_prod(*map(torch.arange, grid))
    counts = [-(-size // part) for size, part in zip(grid, TILE, strict=True)]
    own = [places[:, axis] // TILE[axis] for axis in range(3)]
    tile = (own[0] * counts[1] + own[1]) * counts[2] + own[2]
    return tile.to(device), torch.bincount(tile, minlength=math.prod(counts)).to(device)


def video_sparse(q: Any, k: Any, v: Any, gate: Any, grid: tuple[int, int, int], topk: int, scale: float) -> Any:
    """Video sparse attention of tokens in the order of the grid: (batch, tokens, heads, head_size), float32."""
    tile, sizes = tiles_of(grid, q.device)
    one_hot = torch.nn.functional.one_hot(tile, len(sizes)).float() / sizes
    means = [torch.einsum("bthd,tn->bhnd", x.float(), one_hot).to(q.dtype) for x in (q, k, v)]
    scores = means[0] @ means[1].mT * scale
    coarse = scores.softmax(-1) @ means[2]
    chosen = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, scores.topk(topk).indices, True)
    fine = attention(q, k, v, scale, chosen[:, :, tile][..., tile])
    return coarse[:, :, tile].transpose(1, 2).float() * gate.float() + fine


def in_slots(x: Any, grid: tuple[int, int, int]) -> Any:
    """Tokens of a grid in the slots of tiles, those of a tile first in it; padding is 0."""
    place, slots = slots_of(grid, x.device)
    out = x.new_zeros(x.shape[0], slots, *x.shape[2:])
    out[:, place] = x
    return out


def slots_of(grid: tuple[int, int, int], device: Any = "cpu") -> tuple[Any, int]:
    """The slot of each token of a grid, and how many slots there are."""
    tile, sizes = tiles_of(grid, device)
    order = tile.argsort(stable=True)
    rank = torch.empty_like(order)
    firsts = sizes.cumsum(0) - sizes
    rank[order] = torch.arange(len(order), device=device) - firsts[tile[order]]
    return tile * math.prod(TILE) + rank, len(sizes) * math.prod(TILE)


def metadata(grid: tuple[int, int, int], sparsity: float, device: str = "cpu") -> Any:
    """SGLang's metadata of video sparse attention, as far as a layer reads it."""
    _, sizes = tiles_of(grid, device)
    return SimpleNamespace(variable_block_sizes=sizes, dit_seq_shape=grid, VSA_sparsity=sparsity)
