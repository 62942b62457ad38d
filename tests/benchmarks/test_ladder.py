"""The ladder's benchmark, as far as it goes without a GPU: steps, the exact reference, tables, page."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from scripts import imported

from codegen.library import find_spec, shipped_specs
from codegen.receipts import source_sha256
from codegen.render import render

torch = pytest.importorskip("torch")


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    with imported("ladder") as module:
        yield module


@pytest.fixture
def report(script: ModuleType) -> dict[str, Any]:
    """Made-up numbers: 100, 200, ... TFLOPS; 1000, 2000, 3000 GB/s."""

    def record(name: str, **speed: float) -> dict[str, Any]:
        sha = source_sha256(render(find_spec(name)))
        return {"name": name, "source_sha256": sha, "milliseconds": 1.0, "error": 1e-4, **speed}

    return {
        "device": "a device",
        "driver": "580",
        "cublas": {"milliseconds": 1.0, "tflops": 1000.0},
        "steps": [record(step.name, tflops=100.0 * i) for i, step in enumerate(script.STEPS, 1)],
        "failed": {},
        "torch_copy": {"milliseconds": 1.0, "gigabytes_per_second": 4000},
        "copies": [record(name, gigabytes_per_second=1000 * i) for i, name in enumerate(script.COPIES, 1)],
        "copies_failed": {},
    }


def cells(table: str, name: str) -> list[str]:
    (row,) = [row for row in table.splitlines() if f"`{name}` |" in row]
    return [cell.strip() for cell in row.strip("|").split("|")]


def test_every_kernel_of_the_ladder_is_measured(script: ModuleType) -> None:
    names = [step.name for step in script.STEPS] + [*script.COPIES]
    assert len(set(names)) == len(names)
    shipped = {named.stem for named in shipped_specs() if named.subfolder == Path("ladder")}
    assert set(names) - {"h100_bsr_spmm_b128"} == shipped
    assert [step.name for step in script.STEPS[:-1]] == sorted(name for name in shipped if "_ladder_" in name)
    assert all(
        find_spec(step.name).spec.arch == "sm_90a" for step in script.STEPS
    )  # timed as what it is, not through PTX


def test_the_page_has_every_step_and_no_number_that_was_not_measured(script: ModuleType) -> None:
    page = script.PAGE.read_text(encoding="utf-8")
    report = (
        json.loads(script.JSON.read_text(encoding="utf-8")) if script.JSON.exists() else {"steps": [], "copies": []}
    )
    measured = {record["name"] for record in report["steps"] + report["copies"]}
    for step in script.STEPS:
        row = cells(page, step.name)
        assert (row[3], row[7]) == (step.claimed, step.why)
        assert (row[4] != script.DASH) == (step.name in measured)
    assert all((cells(page, name)[2] != script.DASH) == (name in measured) for name in script.COPIES)
    assert (script.NOT_MEASURED in page) == (not measured)


def test_tables(script: ModuleType, report: dict[str, Any]) -> None:
    first, second = (step.name for step in script.STEPS[:2])
    table = script.step_table(report)
    assert "cuBLAS, dense A: 1000" in table and script.NOT_MEASURED not in table
    assert cells(table, first)[3:7] == ["111", "100", "-", "0.10"]
    assert cells(table, second)[3:7] == ["127.5", "200", "2.00", "0.20"]
    assert cells(script.copy_table(report), script.COPIES[2])[1:] == ["64 x 128, 3", "3000", "0.75"]


def test_what_failed_or_changed_is_told(script: ModuleType, report: dict[str, Any]) -> None:
    first, second, third = (step.name for step in script.STEPS[:3])
    report["steps"][2]["source_sha256"] = "0" * 64
    del report["steps"][1]
    report["failed"][second] = "wrong result: off by 1.0e+00 of the largest element"
    table = script.step_table(report)
    assert f"- `{second}` has no time: wrong result" in table
    assert cells(table, second)[4:7] == ["-", "-", "-"]
    assert cells(table, third)[4:6] == ["300†", "-"]
    assert cells(table, first)[4] == "100" and "†: measured with an earlier source" in table


def test_from_rewrites_a_page_without_a_gpu(
    script: ModuleType, report: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page, source, drawn = tmp_path / "page.md", tmp_path / "ladder.json", []
    page.write_text("a\n<!-- steps:begin -->\n<!-- steps:end -->\nb\n<!-- copies:begin -->\n<!-- copies:end -->\nc\n")
    source.write_text(json.dumps(report))
    monkeypatch.setattr(script, "plot", lambda *arguments: drawn.append(arguments[1]))
    monkeypatch.setattr(sys, "argv", ["ladder.py", "--from", str(source), "--page", str(page)])
    script.main()
    text = page.read_text()
    assert text.startswith("a\n") and text.endswith("c\n")
    assert script.step_table(report) in text and script.copy_table(report) in text
    assert drawn == [tmp_path / "page"]


def test_without_a_gpu_nothing_is_measured(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["ladder.py"])
    with pytest.raises(SystemExit, match="torch sees no GPU"):
        script.main()


def test_claims_as_numbers(script: ModuleType) -> None:
    claims = {step.name: script.lowest_claim(step) for step in script.STEPS}
    assert claims["h100_ladder_02_tall"] == 127.5
    assert claims["h100_ladder_05_k112"] == 607
    assert claims["h100_ladder_08_wgmma"] == 400
    assert claims["h100_bsr_spmm_b128"] is None


@pytest.mark.parametrize(("fault", "limit"), [(0.0, 1e-3), (0.5, None)])
def test_the_exact_reference_sees_a_wrong_block_row(script: ModuleType, fault: float, limit: float | None) -> None:
    torch.manual_seed(0)
    dense = torch.randn(12, 20, dtype=torch.float16)
    dense[4:8, 5:15] = 0
    dense[8:, :10] = 0
    a, b = dense.to_sparse_bsr((4, 5)), torch.randn(20, 16, dtype=torch.float16)
    out = (dense.float() @ b.float()).half()
    out[5, 3] += fault
    error = script.largest_error(a, b, out)
    assert error < limit if limit else error > 1e-2


def test_plot(script: ModuleType, report: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    script.plot(report, tmp_path / "ladder")
    assert "<svg" in (tmp_path / "ladder.svg").read_text()
