"""A small video transformer of diffusers with this package's attention on a GPU, beside dense attention with a mask."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers", minversion="0.42")

import small_video  # noqa: E402
from diffusers.models import attention_dispatch  # noqa: E402

from runtime.integrations import register_diffusers  # noqa: E402
from runtime.video import VideoWindow  # noqa: E402

NAME = "block_sparse"


@pytest.fixture(autouse=True)
def native() -> Iterator[None]:
    yield
    attention_dispatch._AttentionBackendRegistry.set_active_backend(attention_dispatch.AttentionBackendName.NATIVE)


def test_the_model_is_the_same_without_a_pattern() -> None:
    model = small_video.model("cuda")
    right = small_video.output(model)
    register_diffusers(NAME)
    model.set_attention_backend(NAME)
    small_video.assert_same(small_video.output(model), right)


@pytest.mark.parametrize("window", [(3, 1, 2), (1, 1, 1), (2, 2, 1)])
def test_a_window_of_tiles_is_a_mask_of_tokens(window: tuple[int, int, int]) -> None:
    model = small_video.model("cuda")
    register_diffusers(NAME, pattern_for=VideoWindow(small_video.GRID, window, tile=small_video.TILE))
    model.set_attention_backend(NAME)
    ours = small_video.output(model)
    model.set_attention_backend("native")
    with small_video.masked(small_video.mask_of(window, "cuda")):
        right = small_video.output(model)
    small_video.assert_same(ours, right)
    assert not torch.allclose(right.float(), small_video.output(model).float(), atol=small_video.CLOSE)
