"""A small video transformer of diffusers with this package's attention, on the CPU."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers", minversion="0.42")

import oracle_kernel  # noqa: E402
import small_video  # noqa: E402
from diffusers.models import attention_dispatch  # noqa: E402

from runtime.errors import ArgumentError, ToolchainError  # noqa: E402
from runtime.integrations import register_diffusers  # noqa: E402
from runtime.integrations.diffusers_attention import _member  # noqa: E402
from runtime.video import VideoWindow  # noqa: E402

NAME = "block_sparse"


@pytest.fixture(autouse=True)
def loaded(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    kernels = oracle_kernel.install(monkeypatch)
    yield kernels
    attention_dispatch._AttentionBackendRegistry.set_active_backend(attention_dispatch.AttentionBackendName.NATIVE)


def test_the_model_is_the_same_without_a_pattern(loaded: Any) -> None:
    model = small_video.model()
    right = small_video.output(model)
    register_diffusers(NAME)
    model.set_attention_backend(NAME)
    small_video.assert_same(small_video.output(model), right)
    assert {json.loads(spec)["pattern"]["kind"] for spec in loaded} == {"dense"}


def test_a_window_of_tiles_is_a_mask_of_tokens(loaded: Any) -> None:
    model, grid = small_video.model(), small_video.GRID
    window = (3, 1, 2)
    register_diffusers(NAME, pattern_for=VideoWindow(grid, window, tile=small_video.TILE))
    model.set_attention_backend(NAME)
    ours = small_video.output(model)
    kinds = {json.loads(spec)["pattern"]["kind"] for spec in loaded}
    assert kinds == {"dense", "block_lists"}, "cross-attention, and lists with padding"
    model.set_attention_backend("native")
    with small_video.masked(small_video.mask_of(window)):
        right = small_video.output(model)
    small_video.assert_same(ours, right)
    assert not torch.allclose(right, small_video.output(model)), "the window hides nothing"


def test_a_window_over_everything_is_the_model(loaded: Any) -> None:
    model = small_video.model()
    right = small_video.output(model)
    register_diffusers(NAME, pattern_for=VideoWindow(small_video.GRID, (99, 99, 99), tile=small_video.TILE))
    with attention_dispatch.attention_backend(NAME):
        small_video.assert_same(small_video.output(model), right)


def test_registering_again_replaces_it_in_a_model() -> None:
    model = small_video.model()
    register_diffusers(NAME, pattern_for=VideoWindow((9, 9, 9), (1, 1, 1)))
    model.set_attention_backend(NAME)
    with pytest.raises(ArgumentError, match="grid: is 9 x 9 x 9"):
        small_video.output(model)
    register_diffusers(NAME)
    small_video.output(model)


@pytest.mark.parametrize(
    ("argument", "options"),
    [("name", {"name": "native"}), ("name", {"name": "Mine"}), ("pattern_for", {"pattern_for": 3})],
)
def test_registrations_that_are_refused(argument: str, options: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match=argument):
        register_diffusers(**options)


def test_calls_that_are_refused() -> None:
    register_diffusers(NAME)
    call = attention_dispatch._AttentionBackendRegistry._backends[NAME]
    q, k = torch.zeros(1, 8, 4, 64).bfloat16(), torch.zeros(1, 8, 2, 64).bfloat16()
    with pytest.raises(ArgumentError, match="enable_gqa"):
        call(q, k, k)
    with pytest.raises(ArgumentError, match="_parallel_config"):
        call(q, q, q, _parallel_config=object())
    assert call(q, k, k, enable_gqa=True).shape == q.shape


def test_an_enumeration_of_another_kind_is_refused() -> None:
    class Names:
        _value2member_map_: dict[str, Any] = {}  # noqa: RUF012

    with pytest.raises(ToolchainError, match="diffusers"):
        _member(Names, NAME)
