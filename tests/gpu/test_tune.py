"""``codegen tune`` over a space, on the GPU: timed, resumed, compared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from runtime.cli import app

SPECS = {(9, 0): ("h100_causal", "tile=128x128,192x80"), (8, 9): ("l4_causal", "tile.n=32,48")}


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    spec, over = SPECS.get(torch.cuda.get_device_capability(), ("", ""))
    if not spec:
        pytest.skip("there are spaces for compute capability 9.0 and 8.9")
    monkeypatch.chdir(tmp_path)
    return "heads=8,q_len=2048,kv_len=2048", "--spec", spec, "--over", over


def tuned(*options: str) -> dict[str, Any]:
    result = CliRunner().invoke(app, ["tune", *options, "--json"])
    assert result.exit_code == 0, result.stderr
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_a_space_is_timed_once(options: tuple[str, ...]) -> None:
    first = tuned(*options)
    assert [row for row in first["rows"] if "failure" in row] == []
    assert {row["tuning"]["tile"]["m"] for row in first["rows"]} and all(row["single_us"] > 0 for row in first["rows"])
    (summary,) = first["problems"]
    assert summary["timed"] == len(first["rows"]) >= 2 and summary["verdict"] in (
        "faster",
        "within noise",
        "the current spec is the fastest",
    )
    again = tuned(*options)
    assert again["rows"] == first["rows"] and again["problems"] == first["problems"], "all of it was kept"


def test_a_space_of_fp8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the space is one of sm_90a")
    monkeypatch.chdir(tmp_path)
    sizes = "heads=4,q_len=2048,kv_len=2048"
    found = tuned(sizes, "--spec", "h100_e4m3_topk32_b64", "--over", "schedule=ping_pong,cooperative")
    assert len(found["rows"]) == 2 and all(row["single_us"] > 0 for row in found["rows"]), found["rows"]


def test_a_budget_on_the_gpu(options: tuple[str, ...]) -> None:
    pytest.importorskip("optuna")
    assert tuned(*options, "--trials", "1")["problems"][0]["timed"] == 1
