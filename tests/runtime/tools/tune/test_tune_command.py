"""``codegen tune`` from options to what it prints, with a compiler and a GPU of the test's own."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from codegen.installation import install_command
from codegen.library import NamedSpec, find_spec, read_spec, spec_text
from codegen.select.problem import Problem, problem_of
from codegen.select.space import parse_axes, space

pytest.importorskip("runtime.tools.tune.gpu", exc_type=ImportError)

import runtime.tools.tune.command
import runtime.tools.tune.gpu
from runtime.cli import app
from runtime.tools.tune import search
from runtime.tools.tune.columns import Figures
from runtime.tools.tune.database import Device
from runtime.tools.tune.sampler import Sampler

SIZES = "batch=2,heads=16,q_len=8192,kv_len=8192"
OVER = ("--over", "tile.m=128,192", "--over", "tile.n=64,80", "--over", "stages=2,3")
DENSE = find_spec("h100_dense")
PROBLEM = problem_of(DENSE.spec, {"batch": 2, "heads": 16, "q_len": 8192, "kv_len": 8192})


class Machine:
    """A GPU on which a larger tile and more stages are faster, with noise of 1%; it may stop."""

    def __init__(self) -> None:
        self.name = "H100"
        self.timed: list[str] = []
        self.compared: list[tuple[str, ...]] = []
        self.stop_after: int | None = None
        self.gain = 0.1  # of a third stage
        self.compiled: list[str] = []

    def __call__(self, problem: Problem, reference: NamedSpec) -> Machine:
        return self

    def takes(self, named: NamedSpec) -> float:
        spec: Any = named.spec
        return 1e6 / (spec.tile.m + spec.tile.n) * (1 - self.gain * (spec.stages - 2))

    def verify(self, named: NamedSpec) -> str:
        return ""

    def time(self, named: NamedSpec) -> Figures:
        if len(self.timed) == self.stop_after:
            raise KeyboardInterrupt
        self.timed.append(named.stem)
        return Figures(self.takes(named), self.takes(named))

    def again(self, named: Sequence[NamedSpec]) -> list[Figures]:
        return [Figures(self.takes(each), self.takes(each)) for each in named]

    def rounds(self, named: Sequence[NamedSpec]) -> list[list[Figures]]:
        self.compared.append(tuple(each.stem for each in named))
        return [
            [
                Figures(
                    self.takes(each) * (1 + i / 400),
                )
                for i in range(5)
            ]
            for each in named
        ]

    def lost(self) -> str:
        return ""

    def dense(self) -> tuple[str, Figures | None]:
        return "", None


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    made = Machine()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(runtime.tools.tune.gpu, "GpuBench", made)
    monkeypatch.setattr(runtime.tools.tune.gpu, "device", lambda problems: Device(made.name, "580.1"))
    monkeypatch.setattr(runtime.tools.tune.command, "compile_spec", lambda named: made.compiled.append(named.stem))
    monkeypatch.setattr(runtime.tools.tune.command.toolchain, "compiler_version", lambda: ("NVRTC 13.0", "test"))
    monkeypatch.setattr("runtime.tools.tune.cli.require_gpu", lambda *told: None)
    return made


def tune(*options: str) -> Result:
    return CliRunner().invoke(app, ["tune", *options])


def document(*options: str) -> dict[str, Any]:
    result = tune(*options, "--json")
    assert result.exit_code == 0, result.stderr
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_a_space_is_tried_and_a_faster_spec_proposed(machine: Machine) -> None:
    result = tune(SIZES, "--spec", "h100_dense", *OVER)
    assert result.exit_code == 0, result.stderr
    assert "beside\n  h100_dense 8 of 8 combinations are legal" in result.stdout
    assert "model: rank correlation (Spearman) " in result.stdout
    assert "proposed: 1.111 x as fast as h100_dense, beyond noise" in result.stdout
    assert "    -stages: 2\n    +stages: 3\n" in result.stdout and "--write writes it" in result.stdout
    assert len(machine.timed) == 8 and machine.timed[0] == "h100_dense"


def test_what_is_found_is_in_the_document(machine: Machine) -> None:
    found = document(SIZES, "--spec", "h100_dense", *OVER)
    (summary,), (told,) = found["problems"], found["spaces"]
    assert summary["current"] == "h100_dense" and summary["verdict"] == "faster" and summary["timed"] == 8
    assert summary["best_us"]["high"] < summary["current_us"]["low"]
    assert summary["ratio"] == pytest.approx(1 / 0.9) and "+stages: 3" in summary["diff"] and not summary["written"]
    assert set(summary["ranking"]) == {"kernels", "spearman", "first", "loss"}
    assert told["over"] == {"tile.m": [128, 192], "tile.n": [64, 80], "stages": [2, 3]} and told["legal"] == 8
    assert len(found["rows"]) == 8 and found["rows"][0]["tuning"]["stages"] == 3


def test_what_is_within_noise_is_not_proposed(machine: Machine) -> None:
    machine.gain = 0.002  # repeats differ by up to 0.01
    found = document(SIZES, "--spec", "h100_dense", *OVER)
    assert found["problems"][0]["verdict"] == "within noise" and "diff" not in found["problems"][0]
    assert "h100_dense is not beaten" in tune(SIZES, "--spec", "h100_dense", *OVER).stdout
    assert len(machine.compared) == 1, "the repeats are kept"


def test_the_current_spec_may_be_the_fastest(machine: Machine) -> None:
    machine.gain = -0.1
    result = tune(SIZES, "--spec", "h100_dense", *OVER)
    assert "h100_dense is the fastest of 8 that were timed" in result.stdout and machine.compared == []


def test_a_proposal_is_written_where_that_is_asked_for(machine: Machine, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(spec_text(DENSE.path))  # type: ignore[arg-type]
    result = tune(SIZES, "--spec", "mine.yaml", *OVER, "--write")
    assert result.exit_code == 0, result.stderr
    assert "wrote mine.yaml" in result.stdout and read_spec(path).spec.stages == 3
    assert "mine is the fastest of 8" in tune(SIZES, "--spec", "mine.yaml", *OVER, "--write").stdout


def test_without_a_spec_the_chosen_one_is_the_current_one(machine: Machine) -> None:
    found = document(f"op=attention,head_dim=128,pattern=dense,{SIZES}", "--over", "stages=2,3")
    assert found["spaces"][0]["current"] == found["problems"][0]["current"] == "h100_dense"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            (SIZES, "--spec", "h100_dense", "--over", "stages=7,8"),
            "none of 2 combinations is legal: stages rules out 2",
        ),
        ((SIZES, "--spec", "h100_dense", "--trials", "3"), "--trials is a budget for a space: name one with --over"),
        ((SIZES, "--spec", "h100_dense", *OVER, "--trials", "3", "--compile-only"), "follows from timings"),
        ((SIZES, "--spec", "h100_dense", *OVER, "--write", "--compile-only"), "nothing is proposed"),
        (
            (SIZES, f"{SIZES},kv_heads=4", "--spec", "h100_dense", "--write"),
            "--write takes one problem, not 2",
        ),
        ((f"{SIZES},head_dim=64", "--spec", "h100_dense"), "problem.head_dim: is 64, but the spec's is 128"),
        ((f"op=attention,head_dim=128,pattern=dense,{SIZES},pack_gqa=2", *OVER, "--write"), "has no file"),
        ((SIZES, "--spec", "h100_tile_copy_tma"), "op: is tile_copy; only attention and the bsr_ operators"),
    ],
)
def test_what_does_not_go_together_is_refused_before_anything_runs(
    machine: Machine, options: tuple[str, ...], message: str
) -> None:
    result = tune(*options)
    assert result.exit_code == 2 and message in " ".join(result.stderr.split()), result.stderr
    assert machine.compiled == machine.timed == [] and not Path("tune.sqlite").exists()


def test_an_interrupted_run_says_what_is_kept_and_goes_on(machine: Machine) -> None:
    machine.stop_after = 3
    result = tune(SIZES, "--spec", "h100_dense", *OVER)
    assert result.exit_code == 130 and "interrupted; tune.sqlite keeps the results: run the same" in result.stderr
    machine.stop_after = None
    tune(SIZES, "--spec", "h100_dense", *OVER)
    assert len(machine.timed) == len(set(machine.timed)) == 8


def test_timings_of_another_device_are_told_and_not_used(machine: Machine) -> None:
    tune(SIZES, "--spec", "h100_dense", *OVER)
    machine.name, machine.timed = "H200", []
    result = tune(SIZES, "--spec", "h100_dense", *OVER)
    told = " ".join(result.stdout.split())
    assert "tune.sqlite has timings of other devices or drivers (8 of H100, driver 580.1)" in told
    assert len(machine.timed) == 8
    assert document(SIZES, "--spec", "h100_dense", *OVER)["other_devices"][0]["candidates"] == 8


# A budget

WIDE = ("--over", "tile.m=64,128,192", "--over", "tile.n=64,80,96,112,128", "--over", "stages=1,2,3,4")


@pytest.mark.parametrize("sampler", ["tpe", "random"])
def test_a_budget_is_kept_and_a_second_run_has_all_of_it(machine: Machine, sampler: str) -> None:
    pytest.importorskip("optuna")
    options = (SIZES, "--spec", "h100_dense", *WIDE, "--trials", "12", "--sampler", sampler)
    found = document(*options)
    assert found["problems"][0]["timed"] == len(machine.timed) == len(set(machine.timed)) == 12
    assert machine.timed[0] == "h100_dense"
    assert document(*options)["problems"] == found["problems"] and len(machine.timed) == 12


def test_an_interrupted_search_goes_on_where_it_ended(machine: Machine) -> None:
    pytest.importorskip("optuna")
    options = (SIZES, "--spec", "h100_dense", *WIDE, "--trials", "12")
    machine.stop_after = 7
    assert tune(*options).exit_code == 130
    machine.stop_after = None
    assert tune(*options).exit_code == 0 and len(machine.timed) == len(set(machine.timed)) == 12


def test_a_budget_as_large_as_the_space_needs_no_library(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    assert document(SIZES, "--spec", "h100_dense", *OVER, "--trials", "8")["problems"][0]["timed"] == 8


def test_without_the_library_a_budget_is_refused(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    result = tune(SIZES, "--spec", "h100_dense", *OVER, "--trials", "3")
    assert result.exit_code == 2 and machine.compiled == machine.timed == []
    assert f"--trials needs optuna: {install_command('tune')}; without --trials" in result.stderr


def test_a_search_tries_legal_candidates_once_and_finds_the_best_of_a_smooth_space() -> None:
    pytest.importorskip("optuna")
    axes = parse_axes(["tile.m=64,128,192", "tile.n=64,80,96,112,128,144,160,176", "stages=1,2,3,4"], DENSE.spec)
    whole = space(DENSE, PROBLEM, axes)
    groups: list[list[str]] = []

    def attempt(group: Sequence[NamedSpec]) -> list[float | None]:
        groups.append([named.stem for named in group])
        return [None if named.spec.stages == 1 else Machine().takes(named) for named in group]

    tried = search.search(whole, 20, Sampler.TPE, attempt, 4)
    assert len(tried) == 20 == len({named.spec.hash for named in tried}) and tried[0] is DENSE
    assert {named.spec.hash for named in tried} <= {named.spec.hash for named in whole.candidates}
    assert [stem for group in groups for stem in group] == [named.stem for named in tried]
    assert max(map(len, groups)) == 4
    everything = search.search(whole, 10_000, Sampler.RANDOM, attempt)
    assert len(everything) == len(whole.candidates), "what is proposed twice does not count"
