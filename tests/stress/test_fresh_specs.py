"""What runs drawn specs on a GPU, with processes that only pretend: nothing is lost, and no failure ends the run."""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from likely_specs import accepted_specs, fp8_fields

from codegen.library import NamedSpec, find_spec
from codegen.receipts import source_sha256
from codegen.render import render

pytest.importorskip("torch")

from stress import fresh_specs
from stress.workers import Answer, answers

HOPPER = fresh_specs.archs_of((9, 0))


def act(task: str) -> str:
    """What a task does by its name."""
    if task == "hang":
        time.sleep(60)
    if task == "die":
        os._exit(3)
    if task == "raise":
        raise ValueError("wrong result")
    return f"{task} by {os.getpid()}"


def test_tasks_that_fail_hang_and_kill_leave_the_others() -> None:
    tasks = ["hang", "one", "die", "two", "raise", "three"]
    found = {answer.task: answer for answer in answers(tasks, act, jobs=2, patience=3.0, start_method="fork")}
    assert set(found) == set(tasks)
    assert found["hang"].failure == "hung: no answer within 3 s"
    assert found["die"].failure == "died: the process ended with exit code 3"
    assert "ValueError: wrong result" in found["raise"].failure
    assert all(found[task].found.startswith(task) and not found[task].failure for task in ("one", "two", "three"))


def test_a_process_does_several_tasks() -> None:
    found = list(answers("abcde", act, jobs=1, patience=60.0, start_method="fork"))
    assert [answer.task for answer in found] == list("abcde")
    assert len({answer.found.split()[-1] for answer in found}) == 1


def test_kernels_that_run_on_a_device_are_of_it_or_of_older_ones_by_ptx() -> None:
    assert set(HOPPER) == {"sm_80", "sm_86", "sm_89", "sm_90a"}
    assert set(fresh_specs.archs_of((8, 9))) == {"sm_80", "sm_86", "sm_89"}


def test_drawn_specs_are_of_every_operator_and_have_what_is_unusual() -> None:
    specs = [named.spec for seed in (1, 4) for named in accepted_specs(300, seed, HOPPER)]
    options = {name for spec in specs for name in fresh_specs.options_of(spec)}
    assert {spec.arch for spec in specs} == set(HOPPER)
    assert {spec.op for spec in specs} == {
        "attention",
        "attention_backward",
        "bsr_spmm",
        "bsr_sddmm",
        "bsr_spgemm",
        "paged_attention",
        "quantize",
        "select_topk",
        "tile_copy",
    }
    assert options >= {"softcap", "sink", "pack_gqa", "kv_splits", "share_kv_loads", "query_grouping", "lse", "dtype"}
    assert options >= {"epilogue", "accumulate", "scheduler", "transpose_a", "b_layout", "output"}


def test_drawn_specs_of_fp8_have_its_options() -> None:
    specs = [named.spec for named in accepted_specs(200, 1, HOPPER, fp8_fields)]
    assert {(spec.op, spec.arch) for spec in specs} == {
        (op, arch) for op in ("attention", "bsr_spmm", "bsr_sddmm") for arch in ("sm_89", "sm_90a")
    }
    assert {spec.dtype for spec in specs} == {"e4m3", "e5m2"}
    options = {name for spec in specs for name in fresh_specs.options_of(spec)}
    assert options >= {
        "output",
        "accumulate_every",
        "scales",
        "scale_rows",
        "kv_lengths",
        "pack_gqa",
        "sink",
        "softcap",
    }


def test_a_spec_is_printed_as_yaml_that_gives_it_again(tmp_path: Path) -> None:
    for named in accepted_specs(40, 2, HOPPER):
        path = tmp_path / f"{named.stem}.yaml"
        path.write_text(fresh_specs.yaml(json.loads(named.spec.canonical_json())))
        assert find_spec(path).spec == named.spec


def found_of(named: NamedSpec) -> dict[str, Any]:
    return {"outcome": "passed", "told": "", "cases": 27, "seconds": 1.5, "source_sha256": source_sha256(render(named))}


def run(
    monkeypatch: pytest.MonkeyPatch, path: Path, specs: list[NamedSpec], failures: dict[str, str]
) -> tuple[dict[str, Any], list[str]]:
    """Run specs of which some fail; return what is kept, and the names of those that were run."""
    by_json = {named.spec.canonical_json(): named for named in specs}
    ran = []

    def pretend(tasks: list[str], *rest: Any) -> Any:
        for task in tasks:
            named = by_json[task]
            ran.append(named.stem)
            why = failures.get(named.stem, "")
            yield Answer(task, None if why else found_of(named), why)

    monkeypatch.setattr(fresh_specs, "answers", pretend)
    monkeypatch.setattr(fresh_specs, "compile_spec", lambda *_: None)
    options = argparse.Namespace(
        json=path, count=len(specs), seed=3, jobs=1, gpu_jobs=1, patience=1.0, compile_only=False, fp8=False
    )
    fresh_specs.run(specs, options)
    return json.loads(path.read_text()), ran


def test_a_second_run_does_what_has_not_passed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    specs, path = accepted_specs(5, 3, HOPPER), tmp_path / "found.json"
    names = [named.stem for named in specs]
    failures = {names[1]: "hung: no answer within 300 s", names[3]: "Traceback\nCUDA error"}
    kept, ran = run(monkeypatch, path, specs, failures)
    assert ran == names
    assert kept["outcomes"] == {"passed": 3, "hung": 1, "error": 1} and kept["cases"] == 3 * 27
    told = capsys.readouterr().out
    assert f"HUNG {names[1]}" in told and fresh_specs.yaml(json.loads(specs[1].spec.canonical_json())) in told
    assert f"repeat: python tests/stress/fresh_specs.py --count 5 --seed 3 --only {names[3]}" in told
    kept, ran = run(monkeypatch, path, specs, {})
    assert ran == [names[1], names[3]] and kept["outcomes"] == {"passed": 5}
    rows = kept["specs"]
    rows[0]["source_sha256"] = "of another source"
    path.write_text(json.dumps(kept))
    _, ran = run(monkeypatch, path, specs, {})
    assert ran == [rows[0]["name"]]
