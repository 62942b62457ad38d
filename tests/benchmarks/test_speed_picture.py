"""The picture of README.md: bars as long as what was measured, and a caption that says what was measured."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any
from xml.etree import ElementTree

import pytest
from scripts import load_script

script = load_script("speed_picture")
results_table = load_script("results_table")
SVG = "{http://www.w3.org/2000/svg}"


def record(**figures: float) -> dict[str, Any]:
    names = {"cudnn": "SDPA cuDNN", "flex": "FlexAttention", "FA3": "FA3 (bf16)"}
    results = {names.get(name, name): {"back_to_back_tflops": figure} for name, figure in figures.items()}
    return {"device": "NVIDIA H200", "dtype": "bf16", "backward": False, "results": results}


def backward(ours: float, theirs: float) -> dict[str, Any]:
    """Gradients whose single calls are as fast as those of FlashAttention 4."""
    found = record(ours=ours, FA4=theirs)
    for result in found["results"].values():
        result["tflops"] = 500.0
    return {**found, "backward": True}


RECORDS = {
    "flux1-dev-4608": record(ours=600, FA4=500, FA3=550, cudnn=300),
    "minicpm4-8b-32768": record(ours=450, FA4=300, flex=150),
}


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_bars_are_as_long_as_their_figures(theme: str) -> None:
    drawing = ElementTree.fromstring(script.picture(RECORDS, theme))
    bars = [rect for rect in drawing.iter(f"{SVG}rect") if float(rect.attrib["y"]) >= script.TOP]
    assert [bar.attrib["class"] for bar in bars] == ["ours", "FA4", "FA3", "cuDNN", "ours", "FA4", "FlexAttention"]
    widths = [float(bar.attrib["width"]) for bar in bars]
    assert [width / widths[0] for width in widths] == pytest.approx(
        [f / 600 for f in (600, 500, 550, 300, 450, 300, 150)], rel=1e-3
    )
    tops = [float(bar.attrib["y"]) for bar in bars]
    assert all(below - above >= script.BAR for above, below in pairwise(tops))
    assert {text.text for text in drawing.iter(f"{SVG}text")} >= {"600", "150", "FlashAttention 4", "FLUX.1 dev"}
    assert all(color in script.picture(RECORDS, theme) for color in script.COLORS[theme].values())


def test_a_result_without_calls_back_to_back_has_no_bar() -> None:
    older = {"results": {"ours": {"back_to_back_tflops": 1.0}, "FA4": {"tflops": 2.0}}}
    assert script.bars(older) == [("ours", 1.0)]


@pytest.mark.parametrize("changed", [True, False])
def test_the_caption_says_what_was_measured(changed: bool) -> None:
    text = script.caption(RECORDS, changed=changed)
    assert " in bf16 on an NVIDIA H200, each row in one run:" in text
    assert "They are 1.20 to 1.50 times those of FlashAttention 4, 1.09 times those of FlashAttention 3, and " in text
    assert "and 3.00 times those of FlexAttention. " in text
    assert ("have changed since they were measured" in text) == changed and "backward passes," not in text


def test_the_caption_says_where_gradients_of_flash_attention_4_are_faster() -> None:
    rows = {"a-backward": backward(450, 500), "b-backward": backward(480, 500), "c-backward": backward(600, 500)}
    text = script.caption({**RECORDS, **rows}, changed=False)
    assert (
        "Of 3 backward passes, FlashAttention 4 takes less time in 2, in single calls or back to back, "
        "at most 10% less. "
    ) in text
    text = script.caption({**RECORDS, "c-backward": rows["c-backward"]}, changed=False)
    assert "Of 1 backward passes, FlashAttention 4 takes less time in none, " in text


def test_the_legend_fits_beside_the_rows() -> None:
    drawing = ElementTree.fromstring(script.picture(RECORDS, "light"))
    legend = [rect for rect in drawing.iter(f"{SVG}rect") if float(rect.attrib["y"]) < script.TOP]
    assert [each.attrib["class"] for each in legend] == list(script.SERIES)
    labels = [text for text in drawing.iter(f"{SVG}text") if float(text.attrib["y"]) < script.TOP]
    assert float(legend[0].attrib["x"]) >= 0
    assert all(float(text.attrib["x"]) + 7 * len(text.text or "") <= script.WIDTH for text in labels)


def test_every_row_of_the_picture_was_measured_beside_a_peer_on_one_device() -> None:
    rows = results_table.model_rows()
    assert set(script.ROWS) <= set(rows)
    assert all({"ours"} < {bar.series for bar in script.bars(rows[name])} for name in script.ROWS)
    assert len({(rows[name]["device"], rows[name]["dtype"]) for name in script.ROWS}) == 1


def test_a_stale_picture_is_found(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "speed-light.svg"
    assert results_table.update_picture(path, "new", check=True) == 1 and not path.exists()
    assert re.search("speed-light.svg: its tables differ", capsys.readouterr().out)
    assert results_table.update_picture(path, "new", check=False) == 0
    assert results_table.update_picture(path, "new", check=True) == 0
