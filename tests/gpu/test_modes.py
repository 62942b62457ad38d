"""The table of modes on a GPU: every cell is right, or refused by name."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import modes  # noqa: E402
from mode_rows import ROWS, full_name  # noqa: E402

WORDS = sorted({full_name(row).partition(" ...")[0] for row in ROWS})


@pytest.mark.own_allocator
@pytest.mark.parametrize("name", WORDS)
def test_each_function_is_right_or_refuses_in_each_mode(name: str) -> None:
    told: dict[str, dict[str, str]] = {}
    chosen = [
        (full_name(row), which)
        for row, which in modes.cells([], gpu=True)
        if full_name(row).partition(" ...")[0] == name
    ]
    modes.run_apart(chosen, told, modes.time.monotonic() + 600)
    cells = {f"{row} / {which}": outcome for row, found in told.items() for which, outcome in found.items()}
    assert len(cells) == len(chosen)
    assert not {cell: outcome for cell, outcome in cells.items() if outcome.startswith("WRONG")}
