"""The benchmark of a prefill, as far as it goes without a GPU: its rows, errors and table."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from scripts import imported

torch = pytest.importorskip("torch")

import oracle_kernel  # noqa: E402
import selection_oracle  # noqa: E402


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    with imported("transformers_prefill") as module:
        yield module


def test_errors_are_of_the_logits_own_size(script: ModuleType) -> None:
    right = torch.tensor([[3.0, -3.0], [3.0, -3.0]])
    found = torch.tensor([[3.0, -3.0], [-0.0, 0.0]])
    assert script.errors_of(right, right) == {"rms_error": 0.0, "largest_error": 0.0, "same_token": 1.0}
    assert script.errors_of(found, right)["largest_error"] == 1.0
    assert script.errors_of(found, right)["rms_error"] == pytest.approx(0.5**0.5, rel=1e-3)
    assert script.errors_of(-right, right)["same_token"] == 0.0


def record(name: str, milliseconds: float) -> dict[str, Any]:
    times = {"single": milliseconds, "back_to_back": 2 * milliseconds}
    errors = {"rms_error": 0.01, "largest_error": 0.1, "same_token": 0.5}
    return {"name": name, "results": {**errors, "prefill_ms": times, "attention_ms": times}, "failed": None}


def test_the_table_has_ratios_to_sdpa_and_what_failed(script: ModuleType, capsys: Any, tmp_path: Path) -> None:
    failed = {"name": "SDPA by cuDNN", "results": None, "failed": "RuntimeError: no"}
    rows = [record("SDPA", 300.0), failed, record("ours, causal", 100.0)]
    report = {"device": "GPU", "driver": "1", "length": 9, "layers": 2, "dtype": "bfloat16", "rows": rows}
    (tmp_path / "report.json").write_text(json.dumps(report))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["prefill", "--from", str(tmp_path / "report.json")])
        script.main()
    out = capsys.readouterr().out
    assert "100.0 / 200.0" in out and "3.00 / 3.00" in out and "50.0%" in out
    assert "SDPA by cuDNN has no time: RuntimeError: no" in out


def test_each_row_computes_the_model_its_own_way(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers", minversion="5.17")
    from runtime.integrations import choosers

    loaded = oracle_kernel.install(monkeypatch)
    monkeypatch.setattr(choosers, "select_topk_blocks", selection_oracle.select)
    small = {"hidden_size": 256, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    model = script.make_model(1, 2048, "cpu", **small, vocab_size=50)
    ids = torch.randint(0, 50, (1, 1024))
    kinds, logits = {}, {}
    for row in (script.ROWS[0], script.ROWS[2], script.Row("two blocks", script.OURS, topk=2)):
        loaded.clear()
        with torch.no_grad():
            logits[row.name] = script.in_row(row, model, lambda: model(ids, logits_to_keep=64).logits[0])()
            assert script.in_row(row, model, script.attention_of(model, 1024))().shape == (1, 1024, 2, 128)
        kinds[row.name] = [json.loads(spec)["pattern"]["kind"] for spec in loaded]
    assert kinds == {"SDPA": [], "ours, causal": ["causal"], "two blocks": ["block_lists"]}
    right = logits["SDPA"]
    assert script.errors_of(logits["ours, causal"], right)["rms_error"] < 0.02
    assert script.errors_of(logits["two blocks"], right)["rms_error"] > 0.02
