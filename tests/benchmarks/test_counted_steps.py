"""The counts of docs/notebook/ada.md are those of today's kernels."""

from __future__ import annotations

import pytest
from scripts import load_script

from codegen.library import GENERATED
from runtime.compile import toolchain

pytestmark = pytest.mark.nvrtc

script = load_script("step_counts")
PAGE = script.PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize("stem", script.KERNELS)
def test_counts_are_those_of_the_page(stem: str) -> None:
    source = GENERATED / f"{stem}.cu"
    (first, calm), *_, (last, raised) = script.counted(source).items()  # held to the arithmetic of a step
    text = source.read_text(encoding="utf-8")
    tiles = script.constant(text, "kRowTiles")
    assert (calm.raises, raised.raises) == ((False,) * tiles, (True,) * tiles)
    more = {name: raised.count(name) - calm.count(name) for name in ("MUFU.EX2", "SHFL.BFLY", "FMUL", "LDSM", "F2FP")}
    of_o = script.constant(text, "kHeadDim") // 2  # elements of O of a thread and row tile
    assert more == {"MUFU.EX2": 2 * tiles, "SHFL.BFLY": 4 * tiles, "FMUL": (of_o + 2) * tiles, "LDSM": 0, "F2FP": 0}

    _, package = toolchain.compiler_version()
    if package not in PAGE:
        pytest.skip(f"the page counts what another compiler made, not {package}")
    told = [line.removeprefix("| now ") for line in PAGE.splitlines() if line.startswith(f"| now | {stem} |")]
    assert told == [first, last], "run: python benchmarks/step_counts.py --page"
