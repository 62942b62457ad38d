"""The gallery of masks: its files are what the patterns draw, and a drawing has the visible pairs of its mask."""

from __future__ import annotations

import re

import pytest
from scripts import load_script

torch = pytest.importorskip("torch")
script = load_script("gallery")


def test_page_and_pictures_are_up_to_date(capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main(["--check"]) == 0, capsys.readouterr().out


def test_a_picture_draws_the_visible_pairs() -> None:
    mask = torch.rand(script.LENGTH, script.LENGTH, generator=torch.Generator().manual_seed(1)) < 0.3
    cell, drawn = script.CELL, torch.zeros(script.LENGTH // script.STEP, script.LENGTH // script.STEP, dtype=torch.bool)
    for x, y, width in re.findall(rf"M(\d+) (\d+)h(\d+)v{cell}h-\d+z", script.picture(mask, "random")):
        drawn[int(y) // cell, int(x) // cell : (int(x) + int(width)) // cell] = True
    assert torch.equal(drawn, mask[:: script.STEP, :: script.STEP])


def test_blocks_are_counted() -> None:
    mask = torch.zeros(script.LENGTH, script.LENGTH, dtype=torch.bool)
    mask[: script.BLOCK, : 2 * script.BLOCK] = True
    mask[-1, -1] = True
    assert script.counts(mask) == "3% of the pairs are visible; of 64 blocks 2 are full, 1 partial and 61 empty."


def test_masks_are_those_that_their_texts_describe() -> None:
    """Two of them, by their definitions."""
    query, key = torch.arange(512)[:, None], torch.arange(512)
    codes = {mask.name: mask.code for mask in script.MASKS}
    window = (key <= query) & (key >= query - 127)
    assert torch.equal(script.token_mask(codes["sink-window"]), window | ((key < 16) & (key <= query)))
    document = torch.bucketize(torch.arange(512), torch.tensor([100, 160, 400]), right=True)
    assert torch.equal(script.token_mask(codes["documents"]), (document[:, None] == document) & (key <= query))
