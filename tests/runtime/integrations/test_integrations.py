"""Integrations without the libraries: choosers, masks, vLLM-Omni's contract, and what is said where one is missing."""

from __future__ import annotations

import importlib.metadata
import sys
import tomllib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import oracle_kernel  # noqa: E402
import selection_oracle  # noqa: E402

from runtime.errors import ArgumentError, CodegenError  # noqa: E402
from runtime.integrations import (  # noqa: E402
    TopKSelection,
    chooser_of,
    choosers,
    chosen,
    diffusers_attention,
    register_diffusers,
    register_transformers,
    vllm_omni,
)
from runtime.patterns import BlockLists, Causal, Dense, SinkWindow, SlidingWindow, TopK  # noqa: E402
from runtime.video import VideoTiles, VideoWindow, tile_window  # noqa: E402

PYPROJECT = Path(__file__).resolve().parents[3] / "pyproject.toml"


def bshd(length: int, heads: int = 2) -> Any:
    return torch.randn(2, length, heads, 64).bfloat16()


def dense(q: Any, k: Any, v: Any, mask: Any = None, scale: float | None = None) -> Any:
    """Attention of (batch, length, heads, head_dim), by torch."""
    q, k, v = (x.transpose(1, 2).float() for x in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)
    return out.transpose(1, 2)


def assert_close(out: Any, right: Any) -> None:
    torch.testing.assert_close(out.float(), right, atol=1e-2, rtol=1e-2)


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> Any:
    torch.manual_seed(0)
    return oracle_kernel.install(monkeypatch)


@pytest.fixture
def selection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choosers, "select_topk_blocks", selection_oracle.select)


@pytest.mark.parametrize(
    ("register", "package", "extra"),
    [(register_transformers, "transformers", "transformers"), (register_diffusers, "diffusers", "diffusers")],
)
def test_a_missing_library_is_named_with_its_extra(
    register: Callable[[], None], package: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.setattr(sys, "path_importer_cache", {})
    with pytest.raises(CodegenError, match=rf"{package}, which is not installed: .*\[{extra}\]'"):
        register()
    assert extra in tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]["optional-dependencies"]


@pytest.mark.usefixtures("selection")
@pytest.mark.parametrize("lengths", [(512, 512), (200, 520)])
def test_selected_blocks_under_a_causal_mask(lengths: tuple[int, int]) -> None:
    torch.manual_seed(0)
    q, k = torch.randn(1, 2, lengths[0], 64), torch.randn(1, 1, lengths[1], 64)
    choose = TopKSelection(2, block=(64, 64), from_len=0)
    pattern = choose(None, q, k, Causal())
    assert isinstance(pattern, BlockLists) and pattern.mask == "causal"
    assert (pattern.kv_num_blocks >= 1).all(), "a query block that sees none of its own keys"
    whole = choose(None, q, k, Dense())
    assert isinstance(whole, TopK) and whole.kv_indices.shape[-1] == 2


def test_calls_that_are_left_as_they_are_and_masks_that_are_refused() -> None:
    choose, window = TopKSelection(2, from_len=128), SlidingWindow(9)
    short, long = torch.empty(1, 1, 127, 64), torch.empty(1, 1, 128, 64)
    exact = Causal()
    assert choose(None, short, short, exact) is exact and choose(None, long, long, window) is window
    lists = BlockLists(torch.ones(1, 1, 1).int(), torch.zeros(1, 1, 1, 1).int())
    with pytest.raises(ArgumentError, match=r"attention_mask.*pad on the right"):
        choose(None, long, long, lists)
    with pytest.raises(ArgumentError, match="attention_mask"):
        choose(None, long, torch.empty(1, 1, 200, 64), Causal(align="top_left"))


def test_choosers_of_plain_data() -> None:
    q = torch.empty(1, 1, 8, 64)
    assert chooser_of({"kind": "topk", "topk": 3, "block": [64, 128], "always": [0]}) == TopKSelection(
        3, (64, 128), (0,)
    )
    found = chooser_of({"kind": "sink_window", "sink": 4, "left": 100})(None, q, q, Causal())
    assert isinstance(found, SinkWindow) and (found.sink, found.left, found.right) == (4, 100, 0)


@pytest.mark.parametrize(
    ("named", "fields"),
    [
        ("block_sparse.kind: is 'prefix_lm'", {"kind": "prefix_lm"}),
        ("block_sparse.kind: is None", {"topk": 3}),
        ("block_sparse.kind: is 3", {"kind": 3}),
        ("block_sparse: has fields .*'tpk'", {"kind": "topk", "tpk": 3}),
        ("block_sparse: has fields", {"kind": "sliding_window"}),
        ("left", {"kind": "sliding_window", "left": -1}),
        ("block_sparse: is list", ["topk"]),
    ],
)
def test_plain_data_that_is_refused(named: str, fields: Any) -> None:
    with pytest.raises(ArgumentError, match=named):
        chooser_of(fields)


MASKS = {
    "keys": (torch.arange(90) < 50).expand(2, 90),
    "keys with holes": torch.rand(2, 1, 1, 90) < 0.5,
    "pairs": torch.rand(70, 90) < 0.5,
    "pairs of batches": torch.rand(2, 1, 70, 90) < 0.5,
}


@pytest.mark.usefixtures("loaded")
@pytest.mark.parametrize("name", [None, *MASKS])
def test_diffusers_layout_and_masks(name: str | None) -> None:
    q, k, v = bshd(70), bshd(90), bshd(90)
    mask = None if name is None else MASKS[name]
    out, lse = diffusers_attention(q, k, v, attn_mask=mask, scale=0.2, return_lse=True)
    assert_close(out, dense(q, k, v, mask[:, None, None] if name == "keys" and mask is not None else mask, 0.2))
    assert lse.shape == (2, 70, 2)
    assert torch.equal(diffusers_attention(q, k, v, attn_mask=mask, scale=0.2), out)


@pytest.mark.usefixtures("loaded")
@pytest.mark.parametrize(
    ("argument", "changes"),
    [
        ("dropout_p", {"dropout_p": 0.1}),
        ("attn_mask", {"attn_mask": torch.zeros(2, 90)}),
        ("attn_mask", {"attn_mask": torch.ones(2, 89, dtype=torch.bool)}),
        ("attn_mask", {"attn_mask": torch.ones(90, 90, dtype=torch.bool), "is_causal": True}),
        ("attn_mask", {"attn_mask": torch.ones(2, 90, dtype=torch.bool), "pattern_for": lambda *_: SlidingWindow(9)}),
        ("pattern_for", {"pattern_for": lambda *_: (1, 2)}),
        ("pattern: is int", {"pattern_for": lambda *_: 3}),
        ("is_causal", {"is_causal": True, "key": bshd(80), "value": bshd(80)}),
        ("q: is torch.float32", {"query": bshd(90).float()}),
    ],
)
def test_diffusers_calls_that_are_refused(argument: str, changes: dict[str, Any]) -> None:
    tensors = {"query": bshd(90), "key": bshd(90), "value": bshd(90)}
    with pytest.raises(ArgumentError, match=argument):
        diffusers_attention(**{**tensors, **changes})


def test_vllm_omni_finds_the_callable() -> None:
    group = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]["entry-points"]["vllm_omni.sparse_attn"]
    entry = importlib.metadata.EntryPoint("block_sparse", group["block_sparse"], "vllm_omni.sparse_attn")
    assert entry.load() is vllm_omni.attention
    assert vllm_omni.attention.capabilities == {"supports_attention_mask": True}  # type: ignore[attr-defined]


def test_vllm_omnis_contract(loaded: Any) -> None:
    q, k, v = bshd(192, heads=4), bshd(192), bshd(192)
    out = vllm_omni.attention(q, k, v, {"pattern": {"kind": "dense"}}, False, 0.3)
    assert_close(out, dense(q, k, v, scale=0.3))
    causal = torch.ones(192, 192, dtype=torch.bool).tril()
    out, lse = vllm_omni.attention(q, k, v, {"pattern": {"kind": "dense"}, "return_lse": True}, is_causal=True)
    assert_close(out, dense(q, k, v, causal))
    assert lse.shape == (2, 4, 192) and lse.dtype == torch.float32
    mask = torch.rand(2, 192) < 0.5
    out = vllm_omni.attention(q, k, v, {"pattern": {"kind": "dense"}, "attn_mask": mask})
    assert_close(out, dense(q, k, v, mask[:, None, None]))
    out = vllm_omni.attention(q, k, v, {"pattern": Causal()})
    assert_close(out, dense(q, k, v, causal))
    assert all(kernel.calls for kernel in loaded.values())


@pytest.mark.usefixtures("loaded")
@pytest.mark.parametrize(
    "geometry",
    [
        {"latent_shape": torch.tensor([[3, 16, 16]] * 2), "patch_size": [1, 2, 2]},
        {"latent_shape": (3, 8, 8), "patch_size": (1, 1, 1)},
    ],
)
def test_vllm_omnis_videos(geometry: dict[str, Any]) -> None:
    q, k, v = bshd(192), bshd(192), bshd(192)
    fields = {"kind": "video_window", "window": [1, 1, 1], "tile": [1, 8, 8]}
    out = vllm_omni.attention(q, k, v, {"pattern": fields, **geometry})
    frames = torch.block_diag(*[torch.ones(64, 64)] * 3).bool()
    assert_close(out, dense(q, k, v, frames))
    assert torch.equal(vllm_omni.attention(q, k, v, {"pattern": {**fields, "grid": [3, 8, 8]}}), out)


@pytest.mark.usefixtures("loaded")
@pytest.mark.parametrize(
    ("named", "params"),
    [
        (r"params\['pattern'\]: is missing", {}),
        (r"params\['pattern'\]: is str", {"pattern": "dense"}),
        (r"params\['pattern'\].kind", {"pattern": {"kind": "all"}}),
        (r"params\['latent_shape'\]: is missing", {"pattern": {"kind": "video_window", "window": [1, 1, 1]}}),
        (
            r"params\['latent_shape'\]: .*not a multiple",
            {"pattern": {"kind": "video_window"}, "latent_shape": (3, 9, 8), "patch_size": (1, 2, 2)},
        ),
        (
            r"params\['latent_shape'\].*for all samples",
            {"pattern": {"kind": "video_window"}, "latent_shape": [[3, 8, 8], [2, 8, 8]], "patch_size": (1, 1, 1)},
        ),
        ("has fields", {"pattern": {"kind": "video_window", "grid": [3, 8, 8]}}),
        (
            "attn_mask",
            {"pattern": {"kind": "sliding_window", "left": 5}, "attn_mask": torch.ones(2, 192, dtype=torch.bool)},
        ),
    ],
)
def test_vllm_omni_calls_that_are_refused(named: str, params: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match=named):
        vllm_omni.attention(bshd(192), bshd(192), bshd(192), params)


@pytest.mark.usefixtures("loaded")
def test_a_chooser_may_return_tiles() -> None:
    q, k, v = bshd(128), bshd(128), bshd(128)
    tiles = VideoTiles((2, 8, 8), (1, 8, 8))
    pattern = tile_window(tiles, (1, 1, 1))
    out = diffusers_attention(q, k, v, pattern_for=lambda *_: (tiles, pattern))
    frames = torch.block_diag(*[torch.ones(64, 64)] * 2).bool()
    assert_close(out, dense(q, k, v, frames))
    window = VideoWindow((2, 8, 8), (1, 1, 1), tile=(1, 8, 8))
    assert torch.equal(diffusers_attention(q, k, v, pattern_for=window), out)
    cross = bshd(50)
    assert_close(diffusers_attention(q, cross, cross, pattern_for=window), dense(q, cross, cross))


def test_windows_of_vllm_omni_come_and_go_from_threads() -> None:
    def call(number: int) -> None:
        for step in range(1, 4 * chosen.MOST_WINDOWS):
            size = (step * (number + 1)) % 40 + 1
            window = chosen._window((("grid", (size, 8, 8)), ("window", (1, 1, 1))))
            assert window.grid == (size, 8, 8)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(call, range(8)))
    assert chosen._window.cache_info().currsize <= chosen.MOST_WINDOWS
