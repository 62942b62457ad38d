"""``codegen bench`` on the GPU: beside torch's kernels, saved, compared with itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from runtime.cli import app

KERNELS = {(9, 0): ("h100_causal", "h100_topk32", "h100_bsr_spmm_b128"), (8, 9): ("l4_causal", "l4_topk32")}


def test_a_run_is_compared_with_another_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = KERNELS.get(torch.cuda.get_device_capability())
    if names is None:
        pytest.skip("there are kernels for compute capability 9.0 and 8.9")
    monkeypatch.chdir(tmp_path)
    first = CliRunner().invoke(app, ["bench", *names, "--repeats", "2", "--save-baseline", "before.json", "--json"])
    assert first.exit_code == 0, first.stderr
    rows = json.loads(first.stdout)["rows"]
    assert [row["kernel"] for row in rows] == list(names)
    for row in rows:
        assert row["peers"], row["missing"]
        assert len(row["own"]["single"]) == len(row["own"]["back_to_back"]) == 2
        assert not any("differs" in why for why in row["missing"].values()), row["missing"]
    again = CliRunner().invoke(app, ["bench", *names, "--repeats", "2", "--baseline", "before.json", "--json"])
    compared = [each for row in json.loads(again.stdout)["rows"] for each in row["baseline"]]
    assert len(compared) == 2 * len(names) and all(0.8 < each["ratio"] < 1.25 for each in compared)
