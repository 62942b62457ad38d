"""``codegen profile`` with Nsight Compute, where it is and may count."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from runtime.cli import app
from runtime.tools.analysis import profile


@pytest.mark.parametrize("stem", ["h100_topk32", "h100_bsr_spmm_b128"])
def test_counters_of_a_launch(stem: str) -> None:
    if why := profile.missing():
        pytest.skip(why)
    result = CliRunner().invoke(app, ["profile", stem, "--json"])
    if "ERR_NVGPUCTRPERM" in result.stderr:
        pytest.skip(result.stderr.strip())
    assert result.exit_code == 0, result.stderr
    document = json.loads(result.stdout)
    counted = {row["about"]: row["text"] for row in document["rows"] if row["counted"]}
    assert {"time", "clock", "tensor pipe", "special functions", "L2", "DRAM"} <= counted.keys(), counted
    assert document["metrics"]["gpu__time_duration.sum"] > 1000
    assert any(about.startswith("stall ") for about in counted)
