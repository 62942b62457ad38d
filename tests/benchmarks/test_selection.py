"""benchmarks/selection.py: its problems, and what it makes of choices and candidates."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from scripts import imported

from codegen.library import NamedSpec, find_spec
from codegen.select import choose
from codegen.select.calibration import FEWEST
from codegen.select.table import measurements

pytest.importorskip("runtime.tools.tune.command", exc_type=ImportError)

from runtime.tools.tune.columns import Figures
from runtime.tools.tune.command import read_problems
from runtime.tools.tune.database import Database, Device
from runtime.tools.tune.tuner import tune

DEVICE = Device("a GPU", "580.1")


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    with imported("selection") as module:
        yield module


class Bench:
    """Each candidate takes 10 us, the last one 8."""

    def __init__(self, fastest: str) -> None:
        self.fastest = fastest

    def __call__(self, *_: Any) -> Bench:
        return self

    def verify(self, named: NamedSpec) -> str:
        return "error 1, allowed 0.1" if named.stem == "h100_bsr_spmm_b64_pairs" else ""

    def time(self, named: NamedSpec) -> Figures:
        return Figures(8.0, 4.0) if named.stem == self.fastest else Figures(10.0, 5.0)

    def again(self, named: Sequence[NamedSpec]) -> list[Figures]:
        return [self.time(each) for each in named]

    def lost(self) -> str:
        return ""

    def dense(self) -> tuple[str, Figures | None]:
        return "cuBLAS, dense", Figures(7.0, 6.0)


def test_the_problems_are_what_the_seed_draws(script: ModuleType) -> None:
    assert script.text_of(script.draw()) == script.PROBLEMS.read_text(encoding="utf-8")


def test_what_the_table_is_tuned_on_is_none_of_them(script: ModuleType) -> None:
    tuning = script.draw_tuning()
    assert script.text_of(tuning) == script.TUNING_PROBLEMS.read_text(encoding="utf-8")
    assert len(tuning) == 204 and not set(tuning) & set(script.draw())
    problems = read_problems((), script.PROBLEMS)
    assert len(problems) == 60 and sum(problem.op == "attention" for problem in problems) == 30


def test_the_table_has_none_of_the_problems(script: ModuleType) -> None:
    assert not set(read_problems((), script.PROBLEMS)) & {row.problem for row in measurements()}


def test_the_choice_is_compared_with_the_best(script: ModuleType, tmp_path: Path) -> None:
    problem = next(each for each in read_problems((), script.PROBLEMS) if getattr(each, "n", 0) == 16)
    choice = choose(problem)
    group = script.group_of(problem, choice)
    assert choice.spec in [named.spec for named in group]
    fastest = next(named.stem for named in reversed(group) if named.spec != choice.spec)
    database = Database(tmp_path / "selection.sqlite")
    records = tune(database, problem, group, DEVICE, Bench(fastest), beside=choice.named)
    assert next(record for record in records if record.named.spec == choice.spec).again
    row = script.record_of(problem, choice, records, database.dense(problem, DEVICE))
    assert row["best"]["stem"] == fastest and row["choice"]["stem"] == choice.named.stem
    assert row["ratios"] == pytest.approx({"single": 1.25, "back_to_back": 1.25, "both": 1.25})
    assert row["best_shipped"]["single_us"] == 10.0 and row["candidates"] == len(group)
    assert script.cells(row)[3:] == ["10.0 / 5.0", fastest, "8.0 / 4.0", "1.25 / 1.25", "7.0 / 6.0"]
    report = {"device": "a GPU", "driver": "1", "rows": [row], "not_run": ["another"]}
    told = script.remarks(report)
    assert (
        told[0].startswith("all: 1 problems; 0 within 5%, 0 within 15%; choice / best 1.250")
        and told[-1] == "not run: another"
    )
    assert f"a dense product is faster: {problem}" in told


def test_wrong_candidates_are_told(script: ModuleType, tmp_path: Path) -> None:
    problem = next(each for each in read_problems((), script.PROBLEMS) if getattr(each, "n", 0) == 16)
    pairs = find_spec("h100_bsr_spmm_b64_pairs")
    choice = choose(pairs)
    records = tune(Database(tmp_path / "a.sqlite"), problem, [pairs], DEVICE, Bench(""))
    row = script.record_of(problem, choice, records, None)
    assert row["choice"] is None and row["ratios"] is None and row["dense"] is None
    assert row["failed"] == {"h100_bsr_spmm_b64_pairs": "is wrong: error 1, allowed 0.1"}
    assert any(
        "no time: h100_bsr_spmm_b64_pairs is wrong" in text for text in script.remarks({"rows": [row], "not_run": []})
    )


def test_an_earlier_report_is_shown(script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    problem = next(each for each in read_problems((), script.PROBLEMS) if getattr(each, "n", 0) == 16)
    choice = choose(problem)
    group = script.group_of(problem, choice)[:4]
    records = tune(Database(tmp_path / "a.sqlite"), problem, group, DEVICE, Bench(group[-1].stem))
    row = script.record_of(problem, choice, records, None)
    path = tmp_path / "report.json"
    path.write_text(json.dumps({"device": "a GPU", "driver": "1", "rows": [row], "not_run": []}))
    assert script.main(["--from", str(path), "--markdown"]) == 0
    out = capsys.readouterr().out
    assert "| problem | us | best, us | ratio | dense, us |" in out and str(problem) in out


def test_rows_of_the_table_are_chosen_for_without_themselves(script: ModuleType) -> None:
    rows = [row for row in measurements() if len(row.kernels) >= FEWEST][:3]
    found = script.leave_one_out(rows)
    assert [each["words"] for each in found] == [str(row.problem) for row in rows]
    assert all(each["ratios"] is None or each["ratios"]["both"] >= 1 for each in found)
    assert all(each["rule"] != "measured" for each in found)
