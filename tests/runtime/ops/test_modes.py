"""The table of modes on a CPU: each cell is right or refused by name, and the page says the same."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import mode_oracles  # noqa: E402
import mode_rows  # noqa: E402
import modes  # noqa: E402
from mode_rows import ROWS, full_name  # noqa: E402

CPU = torch.device("cpu")
SLOW = ("compile", "export")
"""Modes that take most of the time: each run has them for some rows, others each day."""
SLOW_ROWS = 3


@pytest.fixture(scope="module", autouse=True)
def _by_definition() -> Iterator[None]:
    with mode_oracles.installed():
        yield
    torch._dynamo.reset()


@functools.cache
def of_page() -> dict[str, dict[str, str]]:
    return modes.cells_of_page(modes.PAGE.read_text(encoding="utf-8"))


def told(name: str, row: mode_rows.Row) -> str:
    """Return what a cell says, run here, if that is not right, or not what the page says.

    What a GPU refuses may be right here: torch is another one, and what stands for kernels takes fakes.
    """
    outcome = modes.run_cell(row, name, CPU)
    cell, of_gpu = modes.short(outcome), of_page().get(full_name(row), {}).get(name, modes.NOT_RUN)
    agrees = name == "plain" or of_gpu in (modes.NOT_RUN, cell) or (of_gpu, cell) == ("refused", modes.RIGHT)
    return "" if cell != "WRONG" and agrees else f"{full_name(row)} / {name}: {outcome}; the page says {of_gpu}"


def test_every_public_name_has_a_row() -> None:
    without = {f"runtime.{name}" for names in mode_rows.NOT_CALLED.values() for name in names.split()}
    rows = {name for row in ROWS for name in row.covers}
    assert mode_rows.public_names() == rows | without and not rows & without
    names = [full_name(row) for row in ROWS]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("name", [name for name in modes.MODES if name not in (*SLOW, *modes.NEED_GPU)])
def test_each_function_is_right_or_refuses(name: str) -> None:
    wrong = [text for row in ROWS if not row.gpu and (text := told(name, row))]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", SLOW)
def test_so_does_it_where_torch_traces(name: str, request: pytest.FixtureRequest) -> None:
    rows = [row for row in ROWS if not row.gpu]
    first = request.config.getoption("--kernel-seed") * SLOW_ROWS
    wrong = [text for i in range(SLOW_ROWS) if (text := told(name, rows[(first + i) % len(rows)]))]
    assert not wrong, "\n".join(wrong)


def test_the_page_has_these_rows_and_modes() -> None:
    page = of_page()
    assert list(page) == sorted(page, key=list(page).index) and set(page) == {full_name(row) for row in ROWS}
    names = [name for name in modes.MODES if name != "plain"]
    allowed = {modes.RIGHT, "refused", modes.NOT_HERE, modes.NOT_RUN}
    for name, cells in page.items():
        assert list(cells) == names, name
        assert set(cells.values()) <= allowed, name


class Broken:
    """A function that keeps what it made first, with a fault."""

    def __init__(self, fault: str) -> None:
        self.fault, self.kept = fault, None

    def __call__(self, x: Any) -> Any:
        if self.fault == "inference" and self.kept is None:
            self.kept = torch.ones(3)
        if self.fault == "tangent":
            return x.detach() * 2
        if self.fault == "mode":
            torch.set_num_threads(torch.get_num_threads() % 2 + 1)
        if self.fault == "bare":
            return {}["absent"]
        return x * 2 * (1 if self.kept is None else self.kept)


@pytest.mark.parametrize(
    ("fault", "name", "words"),
    [
        ("inference", "inference", "afterwards a plain call: WRONG: RuntimeError"),
        ("inference", "fake", "afterwards"),
        ("tangent", "dual", "the tangent is dropped"),
        ("mode", "no_grad", "leaves another threads"),
        ("bare", "plain", "KeyError"),
        ("", "meta", "right"),
        ("", "vmap", "right"),
    ],
)
def test_a_fault_is_found(fault: str, name: str, words: str) -> None:
    call = Broken(fault)
    learned = () if fault == "tangent" else (0,)
    made = mode_rows.Made((torch.ones(3),), call)
    row = mode_rows.Row("broken", (), lambda _: made, lambda x: x * 2, learned, floats=(0,))
    threads = torch.get_num_threads()
    try:
        outcome = modes.run_cell(row, name, CPU)
    finally:
        torch.set_num_threads(threads)
    assert words in outcome


SCRIPT = """
import json, os, sys, time
import modes
def here(wanted):
    for name, which in wanted:
        print(json.dumps(["START", name, which]), flush=True)
        if which == "hangs":
            time.sleep(60)
        if which == "dies":
            os._exit(9)
        print(json.dumps(["CELL", name, which, "right", 0.1]), flush=True)
here(json.load(sys.stdin))
"""


def test_a_process_that_hangs_or_dies_costs_one_cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "modes.py"
    script.write_text(SCRIPT.replace("import modes\n", ""), encoding="utf-8")
    monkeypatch.setattr(modes, "__file__", str(script))
    monkeypatch.setattr(modes, "CELL_SECONDS", 1.0)
    found: dict[str, dict[str, str]] = {}
    wanted = [("f", name) for name in ("a", "hangs", "b", "dies", "c")]
    modes.run_apart(wanted, found, modes.time.monotonic() + 60)
    assert found["f"] == {
        "a": "right",
        "hangs": "WRONG: hangs (1 s)",
        "b": "right",
        "dies": "WRONG: its process dies with 9",
        "c": "right",
    }


def test_the_table_is_read_as_it_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{modes.BEGIN}\n{modes.END}\nafter\n", encoding="utf-8")
    monkeypatch.setattr(modes, "PAGE", page)
    names = [name for name in modes.MODES if name != "plain"]
    cells = {full_name(row): dict.fromkeys(names, "right") for row in ROWS}
    cells[full_name(ROWS[1])]["vmap"] = "refused: ArgumentError: q: is mapped | or so"
    results = tmp_path / "results.json"
    results.write_text(modes.json.dumps({"device": "a GPU", "torch": "2", "cells": cells}), encoding="utf-8")
    modes.write_table(results)
    text = page.read_text(encoding="utf-8")
    assert (
        text.startswith("before\n") and text.endswith("\nafter\n") and "1. ArgumentError: q: is mapped / or so" in text
    )
    cells[full_name(ROWS[1])]["vmap"] = "refused"
    assert modes.cells_of_page(text) == cells
