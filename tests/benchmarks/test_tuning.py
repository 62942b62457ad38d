"""The tuning of the overview's rows, as far as it goes without a GPU: its spaces and its table."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
from scripts import imported, load_script

from codegen.library import find_spec
from codegen.select.problem import problem_fields, problem_of
from codegen.select.space import parse_axes, space

page = load_script("tuning_page")


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    pytest.importorskip("runtime.tools.tune.command", exc_type=ImportError)
    with imported("tuning") as module:
        yield module


def test_each_space_has_the_shipped_kernel_and_others(script: ModuleType) -> None:
    for row in script.ROWS:
        named = find_spec(row.kernel)
        found = space(named, problem_of(named.spec, problem_fields(row.sizes)), parse_axes(row.over, named.spec))
        assert named.spec in [each.spec for each in found.members.values()], row.kernel
        assert 30 <= len(found.candidates) <= 90, row.kernel


def timing(kernel: str, microseconds: float, **more: Any) -> dict[str, Any]:
    tuning = {"stages": 2, "tile": {"m": 128, "n": 80}} | more
    return {"kernel": kernel, "single_us": microseconds, "back_to_back_us": 4 * microseconds, "tuning": tuning}


SHIPPED, OTHER = timing("h100_dense", 100), timing("other", 90, stages=3, l2_lockstep=True)
SLOWER = timing("slower", 110, tile={"m": 128, "n": 64})


@pytest.mark.parametrize(
    ("more", "line"),
    [
        (
            {"verdict": "faster", "rows": [OTHER, SHIPPED], "ratio": 1.1},
            "stages 3, l2_lockstep true | 90 / 360 | the shipped one | 100 / 400 | 1.100 | 0.50 |",
        ),
        (
            {"verdict": "within noise", "rows": [OTHER, SHIPPED], "ratio": 1.01},
            "stages 3, l2_lockstep true | 90 / 360 | the shipped one | 100 / 400 | 1.010, within noise | 0.50 |",
        ),
        (
            {"verdict": page.ITSELF, "rows": [SHIPPED, SLOWER, {"kernel": "x", "failure": "is wrong"}]}
            | {"ranking": {"spearman": None}},
            "the shipped one | 100 / 400 | tile.n 64 | 110 / 440 | 1.100 | - |",
        ),
    ],
)
def test_lines_of_the_table(more: dict[str, Any], line: str) -> None:
    over = {"tile": [{"m": 128, "n": 80}], "stages": [2, 3]}
    row = {"kernel": "h100_dense", "current": "h100_dense", "sizes": "heads=16,q_len=8", "over": over}
    row |= {"timed": 2, "combinations": 4, "seconds": 1.5, "ranking": {"spearman": 0.5}} | more
    text = page.table({"device": "H100", "driver": "580", "date": "2026-01-01", "rows": [row]})
    assert f"| `h100_dense` | 2 of 4 | {line}" in text.splitlines()
    assert "- `h100_dense` (heads=16, q_len=8): tile 128 x 80; stages 2, 3" in text
    assert text.startswith("H100, driver 580; 2026-01-01: 2 candidates in 2 s, ")
    assert page.table(None) == "No row has been tuned over a space of its own."
