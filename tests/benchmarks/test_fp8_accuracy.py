"""The accuracy script: what needs no GPU of it, and that its needles are what it says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from scripts import imported  # noqa: E402

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    with imported("fp8_accuracy") as module:
        yield module


def test_errors_of_operands(script: ModuleType) -> None:
    q, k, v = script.data_sets("cpu", 768)["outliers"]
    reference = script.exact(q, k, v)

    def error(way: str, dtype: str = "e4m3") -> float:
        found: dict[str, float] = script.error(script.exact(*script.operands(way, dtype, q, k, v)), reference)
        return found["relative"]

    assert error("and rotated") < 0.8 * error("blocks") < 0.8 * error("blocks", "e5m2")
    assert error("blocks") <= 1.1 * error("one scale")
    assert script.error(reference, reference) == {"rmse": 0.0, "relative": 0.0}


def test_needles_have_the_weight_that_they_should(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"NEEDLE_KEYS": 2048, "NEEDLE_QUERIES": 20, "NEEDLE_HEADS": 2}.items():
        monkeypatch.setattr(script, name, value)
    (q, k, v), codes, wanted = script.needle("cpu")
    weights = torch.softmax(q[0].double() @ k[0].double().mT * script.HEAD_DIM**-0.5, -1)
    largest = weights.amax(-1)
    assert bool(((largest > 0.2) & (largest < 0.7)).all())
    found = (script.exact(q, k, v)[0].float() @ codes.T).argmax(-1)
    assert torch.equal(found, wanted)


def test_the_page_has_the_table_of_the_run(script: ModuleType) -> None:
    report: Any = json.loads((ROOT / "benchmarks" / "results" / "fp8_operands.json").read_text(encoding="utf-8"))
    page = (ROOT / "docs" / "notebook" / "fp8.md").read_text(encoding="utf-8")
    assert script.table(report) in page
    hits = {"rows": [{"data": "needle", "hits": {"fp16": 1.0, "e4m3, default": 0.995}}]}
    assert script.table(hits).splitlines()[-1] == "| needle | 100.0% found | 99.5% found |"


def test_cudnn_has_a_column_where_it_computes(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = script.data_sets("cpu", 256)["normal"]
    ours = {"fp16": lambda operands, quantized: script.exact(*operands)}

    def failing(*operands: Any) -> Any:
        raise RuntimeError("no engine\nsecond line")

    monkeypatch.setattr(script, "cudnn_sdpa", failing)
    assert set(script.with_cudnn(ours, given, None)) == {"fp16"}
    assert capsys.readouterr().out == "cuDNN, e4m3 RuntimeError: no engine\n"

    class Made:
        call = staticmethod(lambda: 2 * script.exact(*given))
        numbers = staticmethod(lambda out: out / 2)

    monkeypatch.setattr(script, "cudnn_sdpa", lambda *operands: Made())
    found = script.with_cudnn(ours, given, None)
    assert script.error(found[script.CUDNN], found["fp16"])["rmse"] == 0.0
