"""The record of compute-sanitizer's runs: a run of another source does not count."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from scripts import SCRIPTS, imported

from codegen.library import find_spec, shipped_specs

SPECS = [find_spec(name) for name in ("h100_topk32", "h100_causal_bf16")]
TOPK, CAUSAL = SPECS


@pytest.fixture(scope="module")
def script() -> Any:
    with imported("sanitizers", SCRIPTS) as module:
        yield module


def run_of(script: Any, named: Any, tool: str, count: int | None = 0, **others: Any) -> Any:
    return {"kernel": named.stem, "tool": tool, "source": script.source_hash(named), "count": count, "rc": 0, **others}


def recorded(*runs: Any) -> Any:
    return {(run["kernel"], run["tool"]): run for run in runs}


def test_the_page_is_what_the_record_says(script: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main(["--check"]) == 0, capsys.readouterr().out


def test_each_line_is_of_a_shipped_kernel(script: Any) -> None:
    names = {named.stem for named in shipped_specs()}
    assert {kernel for kernel, _ in script.recorded()} <= names


def test_a_run_of_another_source_does_not_count(script: Any) -> None:
    good = run_of(script, TOPK, "memcheck")
    runs = recorded(
        good, run_of(script, TOPK, "racecheck", source="0" * 64), run_of(script, CAUSAL, "memcheck", count=None)
    )
    assert script.current(runs, SPECS) == [good]
    waiting = [(named.stem, tool) for named, tool in script.missing(runs, SPECS)]
    assert waiting[0] == (CAUSAL.stem, "racecheck") and sorted(waiting[1:]) == [
        (CAUSAL.stem, "memcheck"),
        (TOPK.stem, "racecheck"),
    ]


def test_reports_are_counted_in_the_table(script: Any) -> None:
    runs = recorded(run_of(script, TOPK, "memcheck"), run_of(script, TOPK, "racecheck", count=3))
    assert script.table(runs, SPECS).splitlines()[2:] == ["| `attention`, sm_90a | 2 | 1 | 1 | 1 by racecheck |"]


@pytest.mark.parametrize(
    ("tool", "said", "count"),
    [
        ("memcheck", "h100_topk32: ran\n========= ERROR SUMMARY: 0 errors\n", 0),
        ("racecheck", "h100_topk32: ran\n========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)\n", 2),
        ("memcheck", "========= ERROR SUMMARY: 0 errors\n", None),
        ("racecheck", "", None),
    ],
)
def test_a_run_counts_what_the_tool_says_of_a_finished_call(
    script: Any, monkeypatch: pytest.MonkeyPatch, tool: str, said: str, count: int | None
) -> None:
    monkeypatch.setattr(script, "output_of", lambda *_: (0, said))
    assert script.sanitized(TOPK, tool, 5.0) == run_of(script, TOPK, tool, count)


def test_a_command_ends_in_time_with_its_children(script: Any) -> None:
    assert script.output_of(["sh", "-c", "echo said; exit 3"], 60) == (3, "said\n")
    assert script.output_of(["sh", "-c", "sleep 60 & sleep 60"], 0.1) is None


def test_what_runs_is_written_and_reported(
    script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "runs.jsonl"
    script.write([run_of(script, TOPK, "memcheck")], path)
    read, write = script.recorded, script.write
    monkeypatch.setattr(script, "recorded", lambda: read(path))
    monkeypatch.setattr(script, "write", lambda runs: write(runs, path))
    monkeypatch.setattr(script.shutil, "which", lambda _: sys.executable)
    monkeypatch.setattr(script, "sanitized", lambda named, tool, _: run_of(script, named, tool, 1))
    assert script.run_missing([TOPK.stem], 2, 60) == 1
    assert "1 of 1 runs ended" in (said := capsys.readouterr().out) and "h100_topk32 racecheck: 1" in said
    assert len(read(path)) == 2
