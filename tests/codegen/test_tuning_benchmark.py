"""The tuning of the README's rows, as far as it goes without a GPU: its spaces and its table."""

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
    pytest.importorskip("runtime.tune.command", exc_type=ImportError)
    with imported("tuning") as module:
        yield module


def test_each_space_has_the_shipped_kernel_and_others(script: ModuleType) -> None:
    for row in script.ROWS:
        named = find_spec(row.kernel)
        found = space(named, problem_of(named.spec, problem_fields(row.sizes)), parse_axes(row.over, named.spec))
        assert named.spec in [each.spec for each in found.members.values()], row.kernel
        assert 30 <= len(found.candidates) <= 90, row.kernel


def result(**more: Any) -> dict[str, Any]:
    tuning = {"stages": 2, "tile": {"m": 128, "n": 80}}
    rows = [
        {"kernel": "h100_dense", "tuning": tuning},
        {"kernel": "other", "tuning": tuning | {"stages": 3, "l2_lockstep": True}},
    ]
    over = {"tile": [{"m": 128, "n": 80}], "stages": [2, 3]}
    base = {"kernel": "h100_dense", "current": "h100_dense", "sizes": "heads=16,q_len=8", "over": over, "rows": rows}
    return base | {"timed": 2, "combinations": 4, "legal": 2, "ranking": {"spearman": 0.5}} | more


def times(low: float) -> dict[str, float]:
    return {"low": low, "middle": low + 1, "high": low + 2}


@pytest.mark.parametrize(
    ("more", "line"),
    [
        (
            {"verdict": "faster", "best": "other", "best_us": times(10), "current_us": times(20), "ratio": 21 / 11},
            "| `h100_dense` | 2 of 4 | stages 3, l2_lockstep true | 11.0 (10.0 to 12.0) | 21.0 (20.0 to 22.0) "
            "| 1.909 | 0.50 |",
        ),
        (
            {"verdict": "within noise", "best": "other", "best_us": times(10), "current_us": times(10), "ratio": 1.0},
            "| `h100_dense` | 2 of 4 | stages 3, l2_lockstep true: within noise | 11.0 (10.0 to 12.0) "
            "| 11.0 (10.0 to 12.0) | 1.000 | 0.50 |",
        ),
        (
            {"verdict": "the current spec is the fastest", "best": "h100_dense", "ranking": {"spearman": None}},
            "| `h100_dense` | 2 of 4 | the shipped one itself | - | - | - | - |",
        ),
    ],
)
def test_lines_of_the_table(more: dict[str, Any], line: str) -> None:
    text = page.table({"device": "H100", "driver": "580", "date": "2026-01-01", "rows": [result(**more)]})
    assert line in text.splitlines()
    assert "- `h100_dense` (heads=16, q_len=8): tile 128 x 80; stages 2, 3" in text
    assert text.startswith("H100, driver 580; 2026-01-01. Microseconds: geometric")
    assert page.table(None) == "No row has been tuned over a space of its own."
