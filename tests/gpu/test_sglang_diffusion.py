"""The backends of SGLang's diffusion runtime on a GPU, beside the definition."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

import sglang_diffusion_stand_in as stand_in  # noqa: E402

BF16, HALF = torch.bfloat16, torch.float16
HEADS, KV_HEADS = 4, 2


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def rows(batch: int, length: int, heads: int = HEADS, d: int = 128, dtype: Any = BF16) -> Any:
    return torch.randn(batch, length, heads, d, device="cuda").to(dtype)


def layer_of(monkeypatch: pytest.MonkeyPatch, config: Any = None, latents: Any = None, **fields: Any) -> Any:
    """A layer of the backend ``block_sparse``."""
    module = stand_in.install(monkeypatch, stand_in.server_args(config), latents)
    given = {"num_heads": HEADS, "head_size": 128, "softmax_scale": 128**-0.5, "num_kv_heads": KV_HEADS}
    return module.BlockSparseImpl(**{**given, **fields})


def close(out: Any, right: Any) -> None:
    torch.testing.assert_close(out.float(), right, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("dtype", "d"), [(BF16, 128), (HALF, 64), (BF16, 72), (HALF, 256)])
def test_layers_are_right(monkeypatch: pytest.MonkeyPatch, dtype: Any, d: int, causal: bool) -> None:
    layer = layer_of(monkeypatch, head_size=d, softmax_scale=d**-0.5, causal=causal)
    q, k, v = rows(2, 300, HEADS, d, dtype), rows(2, 470, KV_HEADS, d, dtype), rows(2, 470, KV_HEADS, d, dtype)
    mask = torch.ones(300, 470, dtype=torch.bool, device="cuda").tril(170) if causal else None
    close(layer.forward(q, k, v), stand_in.attention(q, k, v, d**-0.5, mask))


def test_packed_sequences_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = layer_of(monkeypatch)
    bounds = torch.tensor([0, 70, 70, 500, 1000], dtype=torch.int32, device="cuda")
    q, k, v = rows(1, 1000)[0], rows(1, 1000, KV_HEADS)[0], rows(1, 1000, KV_HEADS)[0]
    out = layer.forward_varlen(q, k, v, cu_seqlens=bounds, max_seqlen=500)
    own = torch.bucketize(torch.arange(1000, device="cuda"), bounds, right=True)
    close(out, stand_in.attention(q[None], k[None], v[None], 128**-0.5, own[:, None] == own)[0])


def test_chunks_of_a_ring_merge_into_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = layer_of(monkeypatch)
    q, k, v = rows(1, 333)[0], rows(1, 900, KV_HEADS)[0], rows(1, 900, KV_HEADS)[0]
    parts = [layer.forward_ring_kv_chunk(q, k[i : i + 300], v[i : i + 300]) for i in range(0, 900, 300)]
    weights = torch.stack([lse for _, lse in parts]).softmax(0).mT[..., None]
    merged = sum(w * out.float() for w, (out, _) in zip(weights, parts, strict=True))
    close(merged, stand_in.attention(q[None], k[None], v[None], 128**-0.5)[0])


@pytest.mark.parametrize("text", [0, 77])
@pytest.mark.parametrize("tile", [(2, 8, 8), (4, 4, 4)])
def test_windows_of_tiles_are_right(monkeypatch: pytest.MonkeyPatch, tile: tuple[int, int, int], text: int) -> None:
    fields = {"kind": "video_window", "window": [1, 2, 1], "tile": list(tile), "text_first": True}
    layer = layer_of(monkeypatch, {"pattern": fields}, (1, 16, 5, 26, 42))
    grid = (5, 13, 21)
    tokens = 5 * 13 * 21 + text
    q, k, v = rows(1, tokens), rows(1, tokens, KV_HEADS), rows(1, tokens, KV_HEADS)
    mask = stand_in.window_mask(grid, tile, (1, 2, 1), text, text_first=True).cuda()
    close(layer.forward(q, k, v), stand_in.attention(q, k, v, 128**-0.5, mask))


@pytest.mark.parametrize("grid", [(4, 16, 24), (5, 13, 21)], ids=["full tiles", "padding"])
@pytest.mark.parametrize("dtype", [BF16, HALF], ids=str)
def test_video_sparse_attention_is_right(
    monkeypatch: pytest.MonkeyPatch, dtype: Any, grid: tuple[int, int, int]
) -> None:
    """Scores of tiles are far apart, so that rounding does not change which are selected."""
    module = stand_in.install(monkeypatch, stand_in.server_args({"kernels": "block_sparse"}))
    layer = module.VideoSparseImpl(HEADS, 128, False, 128**-0.5)
    tokens = grid[0] * grid[1] * grid[2]
    given = [rows(2, tokens, dtype=dtype) for _ in range(4)]
    tile, sizes = stand_in.tiles_of(grid, "cuda")
    levels = torch.randperm(len(sizes), device="cuda").float()[tile] / len(sizes)
    given[0] = (given[0].float() * 0.1 + 1).to(dtype)
    given[1] = (given[1].float() * 0.1 + levels[:, None, None]).to(dtype)
    about = stand_in.metadata(grid, 0.75, "cuda")
    slots, _ = stand_in.slots_of(grid, "cuda")
    out = layer.forward(*(stand_in.in_slots(x, grid) for x in given), about)[:, slots]
    right = stand_in.video_sparse(*given, grid, module._compute_cur_topk(about), 128**-0.5)
    close(out, right)
