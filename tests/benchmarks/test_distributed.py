"""The benchmark of attention over ranks, as far as it goes without GPUs: its model, its lists, its table."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import pytest
from scripts import imported

torch = pytest.importorskip("torch")


@pytest.fixture(scope="module")
def model() -> Iterator[ModuleType]:
    with imported("scale_out_model") as module:
        yield module


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    with imported("distributed") as module:
        yield module


def test_without_overlap_times_add_up(model: Any) -> None:
    found = model.predict(model.Machine(10.0, 5.0), [model.Run(20.0, 10.0, 5.0)])
    assert found.alone == 2 and found.moving == 3
    assert found.seconds == 2 + 2 + 1, "arrives, is computed, and goes back"
    assert found.efficiency == 2 / 5


def test_own_keys_are_worked_on_while_others_arrive(model: Any) -> None:
    machine = model.Machine(10.0, 5.0)
    assert model.predict(machine, [model.Run(20.0, 10.0)], own_flops=20.0).seconds == 4
    assert model.predict(machine, [model.Run(20.0, 10.0)], own_flops=10.0).seconds == 4


def test_what_follows_arrives_meanwhile(model: Any) -> None:
    machine = model.Machine(10.0, 5.0)
    runs = model.runs_of(80.0, 20.0, (1, 1, 1, 1))
    assert model.predict(machine, runs).seconds == 8 + 1, "but the first"
    slow = model.predict(machine, model.runs_of(80.0, 80.0, (1, 1, 1, 1)))
    assert slow.seconds == 16 + 2, "data comes last: the last run is computed behind it"


def test_a_kernel_that_is_slowed_takes_longer_while_data_moves(model: Any) -> None:
    runs = model.runs_of(80.0, 20.0, (1, 1, 1, 1))
    slowed = model.predict(model.Machine(10.0, 5.0, slowed=0.5), runs)
    assert 9 < slowed.seconds <= 9 + 3


def test_what_is_predicted_of_more_ranks(model: Any) -> None:
    random, window = "topk32, random lists", "window 2K"
    assert model.scaled(random, 1 << 20, 2).efficiency > 0.9 > 0.3 > model.scaled(random, 1 << 20, 8).efficiency
    assert model.scaled(window, 1 << 20, 64).efficiency > 0.9


@pytest.mark.parametrize(("local", "least", "most"), [(None, 0.4, 0.6), (0.5, 0.5, 0.5), (0.95, 0.93, 0.97)])
def test_lists_have_as_many_local_blocks_as_told(script: Any, local: Any, least: float, most: float) -> None:
    row = script.Row("a", "topk", 128 * 256, 1.0, local)
    problem = script.Problem.__new__(script.Problem)
    problem.row, problem.rank, problem.ranks, problem.layout = row, 1, 2, script.Layout.contiguous(2)
    lists = problem._pattern(torch.Generator().manual_seed(0)).kv_indices
    assert lists.shape == (1, 16, 128, 32)
    assert bool((lists.diff() > 0).all()), "each block once, ascending"
    assert least <= float((lists >= 128).float().mean()) <= most


def test_a_report_is_shown(script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures = {"milliseconds": 2.0, "tflops": 500.0, "back_to_back_milliseconds": 4.0, "back_to_back_tflops": 250.0}
    record = {
        "name": "dense",
        "dtype": "bf16",
        "target": 0.97,
        "results": {"ours": {**figures, "share": 0.5, "back_to_back_share": 0.25}},
        "failed": {"torch CP": "RuntimeError: no"},
        "bytes": {"moved": 1, "needed": 1},
        "predicted_share": 0.9,
    }
    file = tmp_path / "run.json"
    file.write_text(json.dumps({"rows": [record]}), encoding="utf-8")
    with patch.object(sys, "argv", ["distributed.py", "--from", str(file)]):
        script.main()
    told = capsys.readouterr().out
    assert "500 /   250 TFLOPS" in told and "RuntimeError: no" in told and "0.9" in told
