"""The benchmark of the host's time, as far as it goes without a GPU: its clocks, what fails, its table."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from scripts import imported

from codegen.library import find_spec

torch = pytest.importorskip("torch")


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    with imported("host") as module:
        yield module


def test_a_call_without_a_graph_keeps_its_other_times(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    def broken() -> None:
        raise ValueError("no such call")

    def captured(held: list[Any]) -> Any:
        call = held[0]
        if call is calls["host only"]:
            raise RuntimeError("it synchronizes")
        return call

    calls = {"ours": lambda: made.append("ours"), "host only": lambda: made.append("host only"), "broken": broken}
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(script, "captured", captured)
    monkeypatch.setattr(script, "graph_microseconds", lambda replay: 3.0)
    results, failed = script.times_of(calls)
    assert set(results["ours"]) == {script.HOST, script.LOOP, script.GRAPH} and results["ours"][script.GRAPH] == 3.0
    assert set(results["host only"]) == {script.HOST, script.LOOP} and "broken" not in results
    assert failed == {"host only": "RuntimeError: it synchronizes", "broken": "ValueError: no such call"}
    assert made.count("ours") == made.count("host only") + 1  # the first replay


def test_the_clock_stops_before_the_gpu_is_waited_for(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: seen.append("wait"))
    monkeypatch.setattr(script.time, "perf_counter", lambda: float(seen.append("clock") or len(seen)))
    assert script.host_microseconds(lambda: seen.append("call")) == 1e6 * (script.AHEAD + 1) / script.AHEAD
    assert seen == ["wait", "clock", *["call"] * script.AHEAD, "clock"]
    seen.clear()
    script.loop_microseconds(lambda: seen.append("call"))
    assert seen == ["wait", "clock", *["call"] * script.LOOP_CALLS, "wait", "clock"]


def test_rows_are_of_shipped_kernels(script: ModuleType) -> None:
    names = [
        cell.cell_contents
        for row in script.ROWS
        for cell in row.make.__closure__ or ()
        if isinstance(cell.cell_contents, str)
    ]
    assert len(names) == 7 and all(find_spec(name).stem == name for name in names)
    assert len({row.name for row in script.ROWS}) == len(script.ROWS)


def test_the_table_compares_with_the_peer_of_the_row(script: ModuleType, tmp_path: Path, capsys: Any) -> None:
    ours, peer = ({"host_us": host, "loop_us": 30.04, "graph_us": 9.5} for host in (12.0, 8.0))
    report = {
        "device": "a device",
        "driver": "580.0",
        "processor": "a processor",
        "date": "2030-01-02",
        "versions": {"torch": "2.9", "python": "3.12"},
        "rows": [{"name": "a row", "peer": "torch.mm", "results": {"ours": ours, "torch.mm": peer}, "failed": {}}],
    }
    page = script.host_page.table(report)
    assert page.splitlines()[0] == "a device, driver 580.0; a processor; python 3.12, torch 2.9; 2030-01-02."
    assert page.splitlines()[-2:] == [
        "| a row | ours | 12.0 | 1.50 | 30.0 | 9.5 |",
        "| a row | torch.mm | 8.0 | - | 30.0 | 9.5 |",
    ]
    del report["rows"][0]["results"]["torch.mm"], ours["graph_us"]  # type: ignore[index]
    report["rows"][0]["failed"] = {"torch.mm": "RuntimeError: no"}  # type: ignore[index]
    assert script.host_page.rows(report) == [["a row", "ours", "12.0", "-", "30.0", "-"]]
    file = tmp_path / "host.json"
    file.write_text(json.dumps(report))
    script.show(json.loads(file.read_text()))
    assert "a row: torch.mm has no time: RuntimeError: no" in capsys.readouterr().out
    assert script.host_page.table(None) == script.host_page.UNMEASURED
