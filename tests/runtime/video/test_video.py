"""Tiles of a video: a permutation and its inverse, and lists that let the tokens of a 3-D window see each other."""

from __future__ import annotations

import copy
import itertools
import math
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

import oracle_kernel  # noqa: E402

from runtime import convert  # noqa: E402
from runtime.errors import ArgumentError  # noqa: E402
from runtime.patterns import BlockLists, Dense, TopK  # noqa: E402
from runtime.video import VideoTiles, VideoWindow, tile_window, tiled_attention  # noqa: E402

few = settings(max_examples=20)
TILES = [(1, 8, 8), (4, 4, 4), (2, 8, 4), (2, 8, 8), (1, 1, 64), (3, 8, 8)]


@st.composite
def videos(draw: st.DrawFn) -> VideoTiles:
    """Grids of few tiles, most of which do not fill them."""
    tile = draw(st.sampled_from(TILES))
    grid = tuple(draw(st.integers(1, 2 * size + 1)) for size in tile)
    text = draw(st.sampled_from([0, 0, 5, 64, 130]))
    return VideoTiles(grid, tile, text=text, text_first=draw(st.booleans()))  # type: ignore[arg-type]


def place_of(tiles: VideoTiles, token: int) -> tuple[int, ...] | None:
    """Return the tile of a token, None for text."""
    number = token - (tiles.text if tiles.text_first else 0)
    if not 0 <= number < math.prod(tiles.grid):
        return None
    rows, columns = tiles.grid[1:]
    place = number // (rows * columns), number // columns % rows, number % columns
    return tuple(at // size for at, size in zip(place, tiles.tile_size, strict=True))


def in_window(tiles: VideoTiles, window: tuple[int, ...], q: Any, k: Any) -> bool:
    """Whether the tokens of a tile see those of another; None stands for text."""
    if q is None or k is None:
        return True
    for own, other, count, size in zip(q, k, tiles.counts, window, strict=True):
        first = min(max(own - size // 2, 0), max(count - size, 0))
        if not first <= other < first + size:
            return False
    return True


@given(videos())
@few
def test_a_permutation_and_its_inverse(tiles: VideoTiles) -> None:
    tokens = torch.arange(tiles.tokens)
    ordered = tiles.tile(tokens, 0)
    assert torch.equal(tiles.untile(ordered, 0), tokens)
    assert tiles.length % tiles.block == 0 and len(ordered) == tiles.length
    assert sorted(ordered[tiles.is_token].tolist()) == tokens.tolist()


@given(videos())
@few
def test_a_tile_is_a_run_of_slots_in_the_videos_order(tiles: VideoTiles) -> None:
    volume = math.prod(tiles.tile_size)
    ordered = torch.where(tiles.is_token, tiles.to_tiles, -1)
    for number, place in enumerate(itertools.product(*map(range, tiles.counts))):
        run = [token for token in ordered[number * volume : (number + 1) * volume].tolist() if token >= 0]
        assert run == sorted(run) and {place_of(tiles, token) for token in run} == {place}
    text = ordered[math.prod(tiles.counts) * volume :][: tiles.text].tolist()
    assert len(text) == tiles.text and all(place_of(tiles, token) is None for token in text)


@given(videos(), st.tuples(*(st.integers(1, 3),) * 3))
@few
def test_tokens_see_those_of_the_window(tiles: VideoTiles, window: tuple[int, int, int]) -> None:
    pattern = tile_window(tiles, window)
    pairs = convert.to_token_mask(pattern, q_len=tiles.length, kv_len=tiles.length)[0, 0]
    seen = pairs[tiles.from_tiles][:, tiles.from_tiles]
    places = [place_of(tiles, token) for token in range(tiles.tokens)]
    kinds = sorted(set(places), key=str)
    number = torch.tensor([kinds.index(place) for place in places])
    expected = torch.tensor([[in_window(tiles, window, q, k) for k in kinds] for q in kinds])
    assert torch.equal(seen, expected[number][:, number])
    assert not pairs[tiles.from_tiles][:, ~tiles.is_token].any(), "padding is seen"


def test_whole_tiles_make_lists_of_one_length() -> None:
    pattern = tile_window(VideoTiles((4, 32, 32), (2, 8, 8)), (1, 3, 3))
    assert isinstance(pattern, TopK) and pattern.kv_indices.shape == (1, 1, 32, 9) and pattern.block == (128, 128)
    with_text = tile_window(VideoTiles((4, 32, 32), (2, 8, 8), text=128), (1, 3, 3))
    assert isinstance(with_text, BlockLists) and with_text.mask == "none"
    assert with_text.kv_num_blocks[0, 0].tolist() == [10] * 32 + [33]


@pytest.mark.parametrize("text", [0, 20])
def test_attention_of_tokens_in_their_own_order(text: int, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = oracle_kernel.install(monkeypatch)
    tiles = VideoTiles((3, 10, 8), (1, 8, 8), text=text)
    q, k, v = (torch.randn(1, 2, tiles.tokens, 64).bfloat16() for _ in range(3))
    pattern = tile_window(tiles, (1, 2, 1))
    out, lse = tiled_attention(q, k, v, tiles, pattern, return_lse=True)
    places = [place_of(tiles, token) for token in range(tiles.tokens)]
    mask = torch.tensor([[in_window(tiles, (1, 2, 1), a, b) for b in places] for a in places])
    right = torch.nn.functional.scaled_dot_product_attention(q.float(), k.float(), v.float(), attn_mask=mask)
    torch.testing.assert_close(out.float(), right, atol=1e-2, rtol=1e-2)
    logits = (q.float() @ k.float().mT / 8).masked_fill(~mask, -math.inf)
    torch.testing.assert_close(lse, logits.logsumexp(-1), atol=1e-3, rtol=1e-3)
    assert torch.equal(tiled_attention(q, k, v, tiles, pattern), out) and len(loaded) == 1


def test_a_window_is_of_one_size_of_videos() -> None:
    window = VideoWindow((2, 8, 8), (1, 1, 1), tile=(1, 8, 8))
    exact, made = Dense(), lambda length: torch.empty(1, 1, length, 64)
    tiles, _ = window(None, made(128), made(128), exact)
    assert window(None, made(128), made(128), exact)[0] is tiles, "made twice"
    assert window(None, made(128), made(77), exact) is exact
    with pytest.raises(ArgumentError, match=r"grid: is 2 x 8 x 8 and text is 0: 128 tokens, the call has 256"):
        window(None, made(256), made(256), exact)


@pytest.mark.parametrize(
    ("argument", "changes"),
    [
        ("grid", {"grid": (2, 8)}),
        ("grid", {"grid": (2, 8, 0)}),
        ("tile", {"tile": (2, 3, 5)}),
        ("tile", {"tile": 128}),
        ("text", {"text": -1}),
    ],
)
def test_what_is_refused(argument: str, changes: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match=argument):
        VideoTiles(**{"grid": (2, 8, 8), "tile": (2, 8, 8), **changes})


def test_other_lengths_and_maps_are_refused() -> None:
    tiles = VideoTiles((2, 8, 8), (1, 8, 8))
    with pytest.raises(ArgumentError, match=r"x: has 127 tokens, expected 128: a grid of 2 x 8 x 8"):
        tiles.tile(torch.zeros(1, 1, 127, 8))
    with pytest.raises(ArgumentError, match=r"x: has 127 slots"):
        tiles.untile(torch.zeros(1, 1, 127, 8))
    with pytest.raises(ArgumentError, match=r"visible: has shape \(3, 3\)"):
        tiles.pattern(torch.ones(3, 3, dtype=torch.bool))
    with pytest.raises(ArgumentError, match=r"visible: is on meta, expected the CPU"):
        tiles.pattern(torch.ones(2, 2, dtype=torch.bool, device="meta"))
    with pytest.raises(ArgumentError, match="window"):
        tile_window(tiles, (1, 1))  # type: ignore[arg-type]


def tensors_of(made: Any) -> list[Any]:
    tiles, pattern = made
    return [tiles.to_tiles, tiles.from_tiles, *(x for x in pattern.index_tensors() if x is not None)]


def test_the_mode_of_the_first_call_is_not_that_of_later_ones() -> None:
    from torch._subclasses.fake_tensor import FakeTensor

    cpu = torch.device("cpu")
    right = tensors_of(VideoWindow((3, 10, 8), (1, 2, 1), tile=(1, 8, 8), text=20).made(cpu))
    modes = [torch.inference_mode, torch.no_grad, lambda: torch.device("meta")]
    for mode in modes:
        window = VideoWindow((3, 10, 8), (1, 2, 1), tile=(1, 8, 8), text=20)
        with mode():
            window.made(cpu)
        found = tensors_of(window.made(cpu))
        for x, wanted in zip(found, right, strict=True):
            assert not isinstance(x, FakeTensor) and not x.is_inference() and torch.equal(x, wanted), mode
        assert window.made(cpu)[0] is window.made(cpu)[0]
    inside: list[Any] = []
    window = VideoWindow((2, 8, 8), (1, 1, 1), tile=(1, 8, 8))
    torch.func.grad(lambda x: (inside.append(window.made(cpu)), x.sum())[1])(torch.ones(2))
    assert all(not torch._C._functorch.is_functorch_wrapped_tensor(x) for x in tensors_of(window.made(cpu)))
    copied = pickle.loads(pickle.dumps(copy.deepcopy(window)))
    assert copied == window and not copied._made
    assert torch.equal(copied.made(cpu)[0].to_tiles, window.made(cpu)[0].to_tiles)


def test_threads_make_a_window_once() -> None:
    window = VideoWindow((4, 32, 32), (1, 3, 3))
    start = threading.Barrier(8)

    def call(_: int) -> Any:
        start.wait(30)
        return window.made(torch.device("cpu"))[0]

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(call, range(8)))
    assert all(tiles is found[0] for tiles in found)
