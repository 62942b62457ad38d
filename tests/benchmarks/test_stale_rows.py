"""Rows of results that were measured with an earlier source, and those that README.md may quote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from scripts import load_script

from codegen.library import find_spec
from codegen.receipts import source_sha256
from codegen.render import render

script = load_script("stale_rows")
results_table = load_script("results_table")
models_page = load_script("models_page")
FORWARD, BACKWARD = "llama3-8b-packed-{}", "llama3-8b-packed-{}-backward"
NOTES = "notebook/ladder/notes-attention.md"
QUOTED = (
    *(("guide/packed-sequences.md", FORWARD.format(tokens), "FA3 (bf16)") for tokens in (8192, 65536)),
    *(
        (page, BACKWARD.format(tokens), peer)
        for page in ("guide/packed-sequences.md", NOTES)
        for tokens in (8192, 16384)
        for peer in ("FA4", "FA4 deterministic")
    ),
    *((NOTES, name, "SDPA cuDNN") for name in ("dit-xl-2-1024-b16-backward", "phi2-2048-b4-backward")),
    *(("guide/documents.md", BACKWARD.format(tokens), "") for tokens in (8192, 16384)),
    ("guide/documents.md", "llama3-8b-documents-8192-backward", ""),
)
"""Pages that quote a row in a sentence, and the peer of the ratio; without one, they quote TFLOPS."""
MOST_LEFT_OUT = 2
"""Rows of a table that may wait for a measurement of today's sources."""


def row(name: str, stem: str, **changes: Any) -> dict[str, Any]:
    """A row of a benchmark that ran a spec without a file, or whose name is that of a shipped kernel."""
    named = find_spec(stem)
    named = named if name == stem else find_spec(named.spec)
    fields = {"spec": json.loads(named.spec.canonical_json()), "source_sha256": source_sha256(render(named))}
    return {"name": name, **fields, "code_sha256": "0" * 64, "results": {}, **changes}


def test_stale_rows_are_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other, gone = "1" * 64, {"op": "attention", "no_such_field": 1}
    refused = json.loads(find_spec("h100_dense_d80_dq_dkdv").spec.canonical_json()) | {"tile": {"m": 112, "n": 128}}
    rows = [
        row("fresh", "h100_topk32"),
        row("changed", "h100_topk32", source_sha256=other, data="std2"),
        row("no spec of today", "h100_topk32", spec=gone),
        row("no plan of today", "h100_topk32", spec=refused),
        row("failed", "h100_topk32", source_sha256=None, code_sha256=None),
    ]
    report = tmp_path / "report.json"
    report.write_text(json.dumps({"device": "a GPU", "rows": rows}))
    assert script.stale(report) == (["changed, std2", "no spec of today", "no plan of today"], 4)
    lines = tmp_path / "lines.jsonl"  # a row with several kernels
    kernels = [row("h100_dense", "h100_dense"), row("h100_causal", "h100_causal", source_sha256=other)]
    lines.write_text(json.dumps({"name": "models", "kernels": kernels, "results": {}}) + "\n")
    assert script.stale(lines) == (["h100_causal"], 2)
    assert script.main([str(report), str(lines), "--check"]) == 1
    assert "report.json: 3 of 4 rows are stale" in capsys.readouterr().out
    without, text = tmp_path / "without.json", tmp_path / "table.txt"
    without.write_text(json.dumps({"device": "a GPU", "rows": [{"name": "older", "results": {}}]}))
    text.write_text("a table\n")
    assert script.main([str(without), str(text), "--check"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said == [f"{name}: {script.UNCHECKED}" for name in ("without.json", "table.txt")]
    report.write_text(json.dumps({"rows": rows[:1]}))
    assert script.main([str(report), "--check"]) == 0


def test_the_readme_the_first_table_of_results_and_training_have_no_stale_row() -> None:
    rows = results_table.model_rows()
    stale = {name for name, row in rows.items() if not all(map(script.is_current, row["kernels"]))}
    assert not stale & set(results_table.speed_picture.ROWS), "measure these rows again, or take them out"
    for names in (results_table.OVERVIEW, results_table.gradients_of_models(rows)):
        text = results_table.overview(rows, names)
        assert results_table.OLDER not in text
        left_out = stale & set(names)
        assert all(f"`{name}`" in text for name in left_out)
        assert len(left_out) <= MOST_LEFT_OUT, "measure these rows again"


@pytest.mark.parametrize(("page", "name", "peer"), QUOTED)
def test_sentences_quote_the_last_measurement(page: str, name: str, peer: str) -> None:
    results = results_table.model_rows()[name]["results"]
    ours, theirs = results["ours"], results.get(peer)
    figures = ("milliseconds", "back_to_back_milliseconds")
    shown = [f"{ours[rate]:.0f}" for rate in ("tflops", "back_to_back_tflops")]
    if peer:
        shown = [models_page.written(theirs[figure] / ours[figure]) for figure in figures]
    text = (Path(script.__file__).parents[1] / "docs" / page).read_text(encoding="utf-8")
    assert " / ".join(shown) in " ".join(text.split()), f"measured again: {' / '.join(shown)}"
