"""The picture of cache layouts: its file is what the script draws, and strips are the tensors' memory."""

from __future__ import annotations

from typing import Any
from xml.etree import ElementTree

import pytest
from scripts import load_script

torch = pytest.importorskip("torch")

from runtime import convert  # noqa: E402

script = load_script("cache_layouts")


def test_the_picture_is_up_to_date(capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main(["--check"]) == 0, capsys.readouterr().out


def views() -> list[tuple[Any, Any, bool]]:
    """K, V and whether heads come first, of one page with head_dim 1 by layout; elements are numbers of places."""
    tokens, heads = script.TOKENS, script.HEADS
    number = torch.arange(2 * tokens * heads, dtype=torch.float16)
    half = number[: tokens * heads]
    nhd, hnd = half.view(1, tokens, heads, 1), half.view(1, heads, tokens, 1)
    stacked = convert.from_stacked_cache(number.view(1, 2, tokens, heads, 1))
    joined = convert.from_joined_cache(number.view(1, heads, tokens, 2))
    return [(nhd, nhd, False), (hnd, hnd, True), (*stacked, False), (*joined, True)]


def test_strips_are_in_the_order_of_memory() -> None:
    for layout, (k, v, heads_first) in zip(script.LAYOUTS, views(), strict=True):
        strips = layout.strips()
        assert len(strips) == layout.tensors
        for strip in strips:
            for place, cell in enumerate(strip):
                cache = {"K": k, "V": v}[cell.what]
                at = (0, cell.head, cell.token) if heads_first else (0, cell.token, cell.head)
                assert int(cache[at]) == place


def test_the_table_names_pages_that_there_are() -> None:
    for pages, length in zip(script.TABLE, script.LENGTHS, strict=True):
        used = [page for page in pages if page >= 0]
        assert -(-length // script.TOKENS) == len(used) and max(used) < script.POOL
    assert [script.owner(page) for page in (6, 2, 4, 1, -1)] == ["ab", "a", "b", "none", "none"]
    assert ElementTree.fromstring(script.picture()).tag.endswith("svg")
