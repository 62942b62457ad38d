"""The benchmark of expressions, as far as it goes without a GPU: its functions as kernels have them, its table."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from scripts import imported

torch = pytest.importorskip("torch")

from runtime.expressions.evaluate import evaluate  # noqa: E402
from runtime.expressions.trace import trace_mask, trace_score  # noqa: E402


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    with imported("expressions") as module:
        yield module


def places(script: ModuleType, row: Any) -> dict[str, Any]:
    picked = torch.linspace(0, row.length - 1, 50).long()
    sizes = {"q_len": torch.tensor(row.length), "kv_len": torch.tensor(row.length)}
    return {"batch": torch.tensor(0), "head": torch.tensor(3), "q_idx": picked[:, None], "kv_idx": picked, **sizes}


def test_kernels_compute_the_functions_of_the_rows(script: ModuleType) -> None:
    for row in script.rows("cpu"):
        where = places(script, row)
        given = [where[name] for name in ("batch", "head", "q_idx", "kv_idx")]
        if row.sees:
            traced = trace_mask(row.sees)
            found = torch.as_tensor(evaluate(traced.node, where, traced.tensors))
            assert torch.equal(found.expand(50, 50), row.sees(*given)), row.name
            assert bool(found.any()) and not bool(found.all())
        if row.score:
            traced, score = trace_score(row.score), torch.randn(50, 50)
            found = evaluate(traced.node, {**where, "score": score}, traced.tensors)
            torch.testing.assert_close(found, row.score(score, *given).float(), msg=row.name)


def test_documents_are_uneven_and_the_same_each_time(script: ModuleType) -> None:
    row = next(row for row in script.rows("cpu") if "doc" in row.tensors)
    lengths = row.tensors["doc"].bincount()
    assert len(lengths) == 8 and int(lengths.sum()) == row.length and int(lengths.min()) > 0
    assert lengths.max() > 4 * lengths.min()


def test_inputs_of_a_data_set(script: ModuleType) -> None:
    row = next(row for row in script.rows("cpu") if row.length < 8192)
    inputs = script.Inputs.of(row, "cpu")
    inputs.fill("std1")
    plain = [tensor.clone() for tensor in inputs.own]
    inputs.fill("sink")
    assert all(torch.equal(copy.transpose(1, 2), own) for copy, own in zip(inputs.transposed, inputs.own, strict=True))
    assert not torch.equal(inputs.own[1], plain[1]) and torch.equal(inputs.own[2], plain[2])
    inputs.fill("std1")
    assert all(map(torch.equal, inputs.own, plain))


def result(milliseconds: float) -> dict[str, float]:
    return {
        "milliseconds": milliseconds,
        "tflops": 100.0,
        "back_to_back_milliseconds": 2 * milliseconds,
        "back_to_back_tflops": 50.0,
    }


def test_the_worst_over_the_data(script: ModuleType) -> None:
    page = script.expressions_page
    results = {script.OURS: result(1.0), script.FLEX: result(3.0), script.FA4: result(1.2)}
    sets = {"std4": {**results, script.FA4: result(1.1)}, "sink": {script.OURS: result(1.0), script.FLEX: result(1.6)}}
    row = {"name": "documents", "results": results, "failed": {}, "data": sets}
    report = {"device": "a GPU", "driver": "1", "date": "2026-01-01", "rows": [row, {**row, "data": {}}]}
    told, _, headings, _, first, second = page.table(report).splitlines()
    assert told.endswith("Worst: the least over FlexAttention and FA4, of std1, std4, sink.")
    assert headings.endswith("| worst over the data |")
    assert first.endswith("| 1.10 / 1.10 |") and second.endswith("| - |")
    sets["sink"] = {script.FLEX: result(1.6)}  # what is wrong on one data set is no number
    assert page.worst(row) == "-"
    del row["data"]
    assert "worst" not in page.table({**report, "rows": [row]})


def test_an_earlier_run_is_shown(script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = {script.OURS: result(1.0), script.FLEX: result(3.0), script.BUILT_IN: result(0.9)}
    row = {"name": "documents", "results": results, "failed": {script.FA4: "not installed"}}
    report = {"device": "a GPU", "driver": "1", "date": "2026-01-01", "versions": {}, "rows": [row]}
    path = tmp_path / "expressions.json"
    path.write_text(json.dumps(report), encoding="utf-8")
    script.main(["--from", str(path)])
    told = capsys.readouterr().out
    assert "3.00 / 3.00" in told and "0.90 / 0.90" in told and "documents: FA4 has no time: not installed" in told
    with pytest.raises(SystemExit, match="error: "):
        script.main(["--row", "no such row"])
