"""The comparison of variants, as far as it goes without a GPU."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from scripts import imported

torch = pytest.importorskip("torch")

from codegen.library import TEMPLATES, find_spec  # noqa: E402
from codegen.render import render  # noqa: E402
from codegen.spec import Spec  # noqa: E402


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    with imported("compare") as module:
        yield module


def test_a_variant_is_fields_and_templates(script: ModuleType, tmp_path: Path) -> None:
    variant = script.Variant.parse(f"tile.n=64,stages=4,schedule=cooperative,stream_k_tail=false,templates={tmp_path}")
    assert variant.fields == {"tile.n": 64, "stages": 4, "schedule": "cooperative", "stream_k_tail": False}
    assert variant.templates == tmp_path
    before = {"tile": {"m": 128, "n": 128}, "stages": 2, "lse": True}
    assert variant.applied(before) == {
        "tile": {"m": 128, "n": 64},
        "stages": 4,
        "lse": True,
        "schedule": "cooperative",
        "stream_k_tail": False,
    }
    assert before["tile"] == {"m": 128, "n": 128}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("stages", "'stages': a variant is"),
        ("=4", "a variant is"),
        ("stages=", "a variant is"),
        ("templates=/no/where", "no folder"),
    ],
)
def test_what_is_no_variant_is_refused(script: ModuleType, text: str, message: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=message):
        script.Variant.parse(text)


def test_rows_of_both_benchmarks(script: ModuleType) -> None:
    assert script.parse_arguments(["topk32", "stages=3"]).variants == [script.Variant("stages=3", {"stages": 3})]
    assert {"topk32", "ada_dense", "spmm_b64", "spgemm_b128_balanced"} <= set(script.ROWS)
    with pytest.raises(SystemExit):
        script.parse_arguments(["nothing"])


def test_other_templates_are_used_for_a_while(script: ModuleType, tmp_path: Path) -> None:
    shutil.copytree(TEMPLATES, tmp_path / "templates")
    changed = tmp_path / "templates" / "attention" / "mma_sync.cu.j2"
    changed.write_text(changed.read_text(encoding="utf-8") + "// another\n", encoding="utf-8")
    named = find_spec("l4_dense")
    before = render(named)
    with script.rendered_from(tmp_path / "templates"):
        assert render(named).endswith("// another\n")
    assert render(named) == before
    with script.rendered_from(None):
        assert render(named) == before


@dataclass(frozen=True)
class Problem:
    spec: Spec


def test_variants_are_checked_and_timed_in_turns(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "single_calls", lambda calls: dict.fromkeys(calls, 2.0))
    monkeypatch.setattr(script, "back_to_back", lambda calls: {label: call() for label, call in calls.items()})

    def ours(problem: Problem) -> dict[str, Any]:
        stages = problem.spec.stages
        if stages == 5:
            raise ValueError("does not fit\nat all")

        return {"ours": lambda: stages}

    module = SimpleNamespace(ours=ours)
    monkeypatch.setitem(script.ROWS, "a_row", (module, None))
    spec = find_spec("h100_topk32_d64").spec
    error_of = lambda problem, out: 1.0 if problem.spec.stages == 6 else 1e-4  # noqa: E731
    monkeypatch.setattr(script, "problem_of", lambda name, data: (Problem(spec), 4e12, error_of))
    variants = [
        script.Variant("as it is", {}),
        *map(script.Variant.parse, ("stages=2", "stages=5", "stages=6", "lse=3")),
    ]
    lines = script.compare("a_row", variants)
    own = spec.stages
    assert lines[:2] == [f"as it is: {4000 / own:.0f} (2000)", "stages=2: 2000 (2000)"]
    assert lines[2] == "stages=5: no time: ValueError: does not fit"
    assert lines[3] == "stages=6: no time: wrong result: off by 1.0e+00 of the largest element"
    assert lines[4].startswith("lse=3: no time: SpecError: lse")


def test_data_is_that_of_the_row(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    monkeypatch.setattr(
        script.attention, "make_problem", lambda row, spec: made.append(row) or SimpleNamespace(lists=())
    )
    monkeypatch.setattr(script.attention, "flops", lambda row, spec, lists: 1.0)
    script.problem_of("topk32", "std4")
    assert [(row.name, row.data) for row in made] == [("topk32", "std4")]
    assert script.parse_arguments(["topk32"]).data == "std1"
    assert script.parse_arguments(["topk32", "stages=3", "--data", "rising"]).data == "rising"


@pytest.mark.parametrize("arguments", [["topk32", "--data", "nothing"], ["spmm_b64", "--data", "std4"]])
def test_data_that_a_row_does_not_have(
    script: ModuleType, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        script.parse_arguments(arguments)
    assert arguments[-1] in capsys.readouterr().err
